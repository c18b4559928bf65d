"""attach: bind a plan set to a model, all or nothing, and install the runtime."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

from torch import nn

from hilore.runtime.bind import BindReport, bind_regions, checkpointable_names, refuse_unsupported, switchable_models
from hilore.runtime.errors import BindError, HiloreError, UnsupportedModelError
from hilore.runtime.fingerprint import base_model, check_fingerprint, model_fingerprint
from hilore.runtime.huggingface import (
    FUNCTION,
    set_cache_off,
    unwrap_attention,
    wrap_attention,
)
from hilore.runtime.plan import Plan
from hilore.runtime.planfile import PlanSet
from hilore.runtime.region import ATTENTION, RegionBinding
from hilore.runtime.runtime import Runtime, refuse_foreign_hooks


@overload
def attach(
    model: nn.Module, plans: PlanSet | Iterable[Plan], *, dry_run: Literal[True], accept: tuple[str, ...] = ()
) -> BindReport: ...


@overload
def attach(
    model: nn.Module, plans: PlanSet | Iterable[Plan], *, dry_run: Literal[False] = False, accept: tuple[str, ...] = ()
) -> Runtime: ...


def attach(
    model: nn.Module, plans: PlanSet | Iterable[Plan], *, dry_run: bool = False, accept: tuple[str, ...] = ()
) -> Runtime | BindReport:
    """Install ``plans`` on ``model`` and turn them on; the model keeps its module names and its state_dict.

    accept: fingerprint fields whose difference is only noted in ``stats.accepted``.
    dry_run: report what would bind and what would be refused; the model stays untouched.
    Raises BindError, FingerprintError, UnsupportedModelError; then nothing was installed.
    """
    plan_set = plans if isinstance(plans, PlanSet) else PlanSet(tuple(plans))
    if dry_run:
        return _report(model, plan_set, accept)
    regions, accepted = _bind(model, plan_set, accept)
    runtime = Runtime(model, plan_set, regions)
    runtime.stats.accepted = accepted
    for line in accepted:
        warnings.warn(line, stacklevel=2)
    try:
        _install(runtime)
    except BaseException:
        runtime.detach()
        raise
    return runtime


def same_units(left: Plan, right: Plan) -> None:
    """Raise BindError unless both plans speak of the same regions and units in the same order."""
    if [r.name for r in left.regions] != [r.name for r in right.regions] or left.unit_names != right.unit_names:
        raise BindError(
            f"plans {left.path or left.name} and {right.path or right.name} name other regions or units "
            f"({len(left.unit_names)} and {len(right.unit_names)} units); solve them from one trace",
        )


def _bind(
    model: nn.Module, plans: PlanSet, accept: tuple[str, ...]
) -> tuple[tuple[RegionBinding, ...], tuple[str, ...]]:
    first = plans.plans[0]
    for plan in plans.plans[1:]:
        same_units(first, plan)
    refuse_foreign_hooks(type(model).__name__)
    refuse_unsupported(model)
    if any(isinstance(vars(m).get("_set_gradient_checkpointing"), _switch_class()) for m in model.modules()):
        raise BindError("a plan is attached to this model already; call runtime.detach() first")
    found = model_fingerprint(model)
    accepted: list[str] = []
    regions_first = accept if "architecture" in accept else ()
    del regions_first
    for plan in plans.plans:
        for line in check_fingerprint(plan.fingerprint, found, accept):
            if line not in accepted:
                accepted.append(line)
    return bind_regions(model, first), tuple(accepted)


def _switch_class() -> type:
    from hilore.runtime.huggingface import CheckpointingSwitch

    return CheckpointingSwitch


def _report(model: nn.Module, plans: PlanSet, accept: tuple[str, ...]) -> BindReport:
    try:
        regions, accepted = _bind(model, plans, accept)
    except HiloreError as error:
        return BindReport((), (), (error.message,))
    names = tuple(region.name for region in regions)
    units = tuple(name for region in regions for name in region.units)
    return BindReport(names, units, accepted)


def _install(runtime: Runtime) -> None:
    switchable = switchable_models(runtime.model, runtime.regions)
    if checkpointable_names(runtime.model) and switchable:
        _install_on_hugging_face(runtime, switchable)
    else:
        for region in runtime.regions:
            _install_on_module(runtime, region)
        runtime.enabled = True


def _install_on_hugging_face(runtime: Runtime, switchable: list[nn.Module]) -> None:
    model = switchable[0]
    was_on = bool(getattr(runtime.regions[0].module, "gradient_checkpointing", False))
    before = [(r.module, dict(vars(r.module))) for r in runtime.regions]
    if was_on:
        warnings.warn(
            f"{type(model).__name__}: its own gradient checkpointing was on; the plan takes its place", stacklevel=4
        )
    runtime.on_detach(lambda: _restore_checkpointing(model, was_on, before))
    if set_cache_off(base_model(model)):
        config: Any = base_model(model).config
        runtime.on_detach(lambda: setattr(config, "use_cache", True))
    implementations = {
        unit.module.config._attn_implementation
        for region in runtime.regions
        for unit in region.units.values()
        if unit.kind == ATTENTION
    }
    for implementation in sorted(implementations):
        wrapped = wrap_attention(implementation)
        if wrapped is None:
            raise UnsupportedModelError(
                f"attention implementation {implementation!r} has no function in transformers' attention interface, "
                'so attention cannot be a unit. Load the model with attn_implementation="sdpa", or trace it as it is',
                unit=f"{runtime.regions[0].name}.self_attn:{ATTENTION}",
            )
        runtime.on_detach(lambda name=implementation, wrap=wrapped: unwrap_attention(name, wrap))  # type: ignore[misc]
    for module in switchable:
        runtime.install_switch(module)
    runtime.enable()


def _restore_checkpointing(
    model: nn.Module, was_on: bool, before: list[tuple[nn.Module, dict[str, Any]]]
) -> None:
    from hilore.runtime.huggingface import plain_switch

    plain_switch(model)(enable=was_on)
    for module, attributes in before:
        for name in (FUNCTION, "gradient_checkpointing"):
            if name in attributes:
                setattr(module, name, attributes[name])
            else:
                module.__dict__.pop(name, None)


def _install_on_module(runtime: Runtime, region: RegionBinding) -> None:
    module = region.module
    previous: Callable[..., Any] | None = module.__dict__.get("forward")
    module.__dict__["forward"] = RegionForward(runtime, region, module, module.forward)

    def restore() -> None:
        if previous is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = previous

    runtime.on_detach(restore)


class RegionForward:
    """Stands in for a region module's ``forward`` on models that are not Hugging Face's."""

    def __init__(
        self, runtime: Runtime, region: RegionBinding, module: nn.Module, forward: Callable[..., Any]
    ) -> None:
        self._runtime = runtime
        self._region = region
        self._module = module
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runtime.run_region(self._region, self._forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return plain_forward(memo.get(id(self._module), self._module))

    def __reduce__(self) -> tuple[Any, ...]:
        return plain_forward, (self._module,)


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that a copy of an attached module gets: its class's own."""
    method: Callable[..., Any] = type(module).forward.__get__(module)
    return method
