"""What FSDP makes of a model, as far as a plan depends on it: kind, whole shapes, groups, reductions.

FSDP1 is ``torch.distributed.fsdp.FullyShardedDataParallel`` (flat parameters), FSDP2 ``fully_shard`` (DTensors). With
the regions of Hugging Face's checkpointing (transformers 5.23 and later) both gather a region's parameters in hooks
outside of what a replay runs, so that a replay issues no collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.naming import canonical_names
from hilore.runtime.notice import notice
from hilore.runtime.plan import Plan
from hilore.runtime.region import RegionBinding

FSDP1, FSDP2 = "fsdp1", "fsdp2"
_USE_FSDP2 = (
    "Shard with fully_shard (accelerate: fsdp_version 2, verl: strategy fsdp2) and set parallel.kind: fsdp2 in "
    "model.yaml"
)


@dataclass(frozen=True, slots=True)
class WholeParameter:
    """A parameter as it was before sharding. ``name``: its full name in the model, wrappers included."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def sharding_kind(module: nn.Module) -> str:
    """``"fsdp1"`` or ``"fsdp2"`` where this very module is a unit of it, else the empty string."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith("torch.distributed.fsdp"):
            if cls.__name__ == "FullyShardedDataParallel":
                return FSDP1
            if cls.__name__ == "FSDPModule":
                return FSDP2
    return ""


def model_sharding(model: nn.Module) -> str:
    """The kind of FSDP that the model is under, empty for none."""
    return next((kind for kind in map(sharding_kind, model.modules()) if kind), "")


def unsharded_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, without the subclass that FSDP2 makes of it."""
    cls: type[nn.Module] = type(module)
    return cls.__bases__[-1] if sharding_kind(module) == FSDP2 else cls


def unwrapped(module: nn.Module) -> nn.Module:
    """What FSDP1 has wrapped, or ``module`` itself."""
    inner: nn.Module = module._fsdp_wrapped_module if sharding_kind(module) == FSDP1 else module  # type: ignore[assignment]
    return inner


def whole_parameters(model: nn.Module) -> Iterator[WholeParameter]:
    """Every parameter once with its unsharded shape; FSDP1's flat ones taken apart."""
    flat = [(name, module) for name, module in model.named_modules() if sharding_kind(module) == FSDP1]
    taken_apart: set[int] = set()
    for prefix, module in flat:
        handle: Any = getattr(module, "_handle", None)
        if handle is None:
            continue
        own = handle.flat_param
        originals = own._params or [None] * len(own._fqns)
        taken_apart |= {id(own), *(id(parameter) for parameter in originals if parameter is not None)}
        for fqn, shape, original in zip(own._fqns, own._shapes, originals, strict=True):
            name = ".".join(part for part in (prefix, "_fsdp_wrapped_module", fqn) if part)
            trained = own.requires_grad if original is None else original.requires_grad
            yield WholeParameter(name, tuple(shape), handle._orig_param_dtype, bool(trained))
    for name, parameter in model.named_parameters():
        if id(parameter) not in taken_apart:
            yield WholeParameter(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)


def refuse_mixtures(model: nn.Module) -> None:
    """Raise UnsupportedModelError for an FSDP1 unit whose flat parameter holds frozen and trained parameters."""
    for name, module in model.named_modules():
        if sharding_kind(module) == FSDP1 and _mixes(module):
            where = canonical_names(model)[name] or type(model).__name__
            raise UnsupportedModelError(
                f"{where}: its flat parameter (FSDP1) holds frozen and trained parameters, so that gradients are made "
                f"of all of them and other tensors are saved than were traced. {_USE_FSDP2}",
                unit=where,
            )


def refuse_nested(regions: tuple[RegionBinding, ...]) -> None:
    """Raise UnsupportedModelError for an FSDP1 unit inside of a region."""
    for region in regions:
        for name, module in region.module.named_modules():
            if name and sharding_kind(module) == FSDP1:
                raise UnsupportedModelError(
                    f"{region.name}.{name}: an FSDP1 unit inside of a region, which every replay would gather again. "
                    "Wrap whole decoder layers (accelerate: fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP). For LoRA: "
                    f"{_USE_FSDP2[0].lower()}{_USE_FSDP2[1:]}",
                    unit=region.name,
                )


class ShardingWatch:
    """Says once where FSDP does not run as a plan's peak takes it to run."""

    def __init__(self, model: nn.Module, regions: tuple[RegionBinding, ...]) -> None:
        self._model = model
        self._regions = regions
        self._looked_at_groups = False
        self._sharded = False

    def forward_begins(self, plan: Plan | None) -> None:
        """``plan``: the one that this forward runs under. A model may be sharded after ``attach``, not after this."""
        if not self._looked_at_groups:
            self._looked_at_groups = True
            self._sharded = model_sharding(self._model) != ""
            self._note_groups()
        planned = plan.fingerprint.get("gradient_sync") if plan is not None else None
        if self._sharded and planned == "every_microbatch" and not reduces_gradients(self._model):
            self._sharded = False
            notice(
                "gradients of this microbatch are not reduced (no_sync, set_requires_gradient_sync(False)), so they "
                "stay unsharded, but the plan was made for parallel.gradient_sync: every_microbatch; its predicted "
                "peak does not hold. Set gradient_sync: last_microbatch in model.yaml, trace and solve again, or "
                "reduce in every microbatch (accelerate: sync_each_batch)"
            )

    def _note_groups(self) -> None:
        lone = shared_groups(self._model, self._regions)
        if lone:
            notice(
                f"{lone} is no FSDP unit of its own, but the plan's peak takes every decoder layer for one; the "
                "predicted peak does not hold. Shard every decoder layer (accelerate: TRANSFORMER_BASED_WRAP)"
            )


def shared_groups(model: nn.Module, regions: tuple[RegionBinding, ...]) -> str:
    """The first region that is no FSDP unit of its own in a model under FSDP, so that its peak is another; or ''."""
    if not model_sharding(model):
        return ""
    wrapped = {id(module._fsdp_wrapped_module) for module in model.modules() if sharding_kind(module) == FSDP1}
    own = (r.name for r in regions if id(r.module) not in wrapped and sharding_kind(r.module) != FSDP2)
    return next(own, "")


def reduces_gradients(model: nn.Module) -> bool:
    """Whether the next backward reduces its gradients: not under ``no_sync``, ``set_requires_gradient_sync(False)``."""
    for module in model.modules():
        kind = sharding_kind(module)
        if kind == FSDP1:
            return bool(module._sync_gradients)
        if kind == FSDP2:
            group = _group_of(module)
            if group is not None:
                return bool(group.reduce_grads)
    return True


def ranks_of(model: nn.Module) -> list[int] | None:
    """Global ranks that train this model together, as FSDP or DistributedDataParallel has them; None if neither."""
    from torch import distributed

    for module in model.modules():
        group: Any = None
        if sharding_kind(module) == FSDP1 or type(module).__name__ == "DistributedDataParallel":
            group = module.process_group
        elif sharding_kind(module) == FSDP2:
            own = _group_of(module)
            group = None if own is None else own._reduce_scatter_process_group
        if group is not None:
            return list(distributed.get_process_group_ranks(group))
    return None


def _group_of(module: nn.Module) -> Any:
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    return state._fsdp_param_group


def _mixes(module: nn.Module) -> bool:
    handle: Any = getattr(module, "_handle", None)
    originals = () if handle is None else handle.flat_param._params or ()
    return len({parameter.requires_grad for parameter in originals}) > 1
