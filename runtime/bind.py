"""Find a plan's regions and units in a model: all of them or none, and nothing that a plan cannot work with."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from types import MethodType

import torch
from torch import nn

from hilore.runtime.adapter import GRAIN_FIELD, unit_modules
from hilore.runtime.errors import BindError, UnsupportedModelError
from hilore.runtime.huggingface import (
    ENABLED,
    FUNCTION,
    SWITCH,
    CheckpointingSwitch,
    is_checkpointable_layer,
    is_switchable,
    refuse_function,
)
from hilore.runtime.modules import RegionForward
from hilore.runtime.naming import canonical_modules, canonical_names
from hilore.runtime.plan import Plan, RegionPlan
from hilore.runtime.region import ATTENTION, RegionBinding
from hilore.runtime.unitbinding import UnitBinding

_REFUSED_CLASSES = {
    "CheckpointWrapper": "it checkpoints itself; leave out apply_activation_checkpointing (or FSDP's "
    "activation_checkpointing=True) and let the plan decide",
    "OffloadWrapper": "it offloads its activations; leave out offload_wrapper and let the plan decide",
    "OptimizedModule": "it is compiled (torch.compile), which hides its calls; attach the plan to the model as it "
    "was before torch.compile",
}


@dataclass(frozen=True, slots=True)
class BindReport:
    """What ``attach(dry_run=True)`` found: names that bind, and a line for each refusal."""

    regions: tuple[str, ...]
    units: tuple[str, ...]
    refused: tuple[str, ...]


def bind_regions(model: nn.Module, plan: Plan) -> tuple[RegionBinding, ...]:
    """Bind every region and unit of ``plan``, in the order of the plan.

    Raises BindError with the counts, the first missing, the first extra and the closest name.
    """
    modules = canonical_modules(model)
    runs = unit_modules(model, plan.fingerprint.get(GRAIN_FIELD, ""))
    planned = [region.name for region in plan.regions]
    layers = checkpointable_names(model) or [name for name in planned if name in modules]
    _compare("regions", planned, layers, modules)
    return tuple(
        RegionBinding(region.name, modules[region.name], _bind_units(region, runs, len(plan.unit_names)))
        for region in plan.regions
    )


def _bind_units(region: RegionPlan, modules: dict[str, nn.Module], unit_count: int) -> dict[str, UnitBinding]:
    units: dict[str, UnitBinding] = {}
    for unit in region.units:
        path, colon, function = unit.name.partition(":")
        inside = path == region.name or _is_inside(path, region.name)
        if path not in modules or not inside or (colon and function != ATTENTION):
            units_of_path = [f"{path}:{ATTENTION}"] if colon and path in modules and inside else list(modules)
            raise _missing("units", unit.name, units_of_path, unit_count)
        units[unit.name] = UnitBinding.of(unit.name, ATTENTION if colon else "module", modules[path])
    paths = [unit.name for unit in units.values() if unit.kind != ATTENTION]
    for outer in paths:
        inner = next((path for path in paths if _is_inside(path, outer)), None)
        if inner is not None:
            raise BindError(f"unit {inner} lies inside unit {outer}; a call can belong to one unit only", unit=inner)
    return units


def _is_inside(path: str, outer: str) -> bool:
    return outer == "" or path.startswith(f"{outer}.")


def checkpointable_names(model: nn.Module) -> list[str]:
    """Canonical names of the outermost layers that Hugging Face checkpoints, in order; empty for other models."""
    names = canonical_names(model)
    found: dict[str, None] = {}
    for full, module in model.named_modules():
        if is_checkpointable_layer(module) and not any(_is_inside(names[full], outer) for outer in found):
            found[names[full]] = None
    return list(found)


def switchable_models(model: nn.Module, regions: tuple[RegionBinding, ...]) -> list[nn.Module]:
    """Every Hugging Face model inside ``model`` that contains the regions, outermost first."""
    wanted = {id(region.module) for region in regions}
    return [
        module
        for module in model.modules()
        if is_switchable(module) and wanted <= {id(inner) for inner in module.modules()}
    ]


def same_units(left: Plan, right: Plan) -> None:
    """Raise BindError unless both plans speak of the same regions and units in the same order."""
    if [r.name for r in left.regions] != [r.name for r in right.regions] or left.unit_names != right.unit_names:
        raise BindError(
            f"plans {left.path or left.name} and {right.path or right.name} name other regions or units "
            f"({len(left.unit_names)} and {len(right.unit_names)} units); solve them from one trace",
        )


def refuse_attached(model: nn.Module) -> None:
    """Raise BindError where a plan is attached to the model, or to a part of it, already."""
    for module in model.modules():
        own = vars(module)
        if isinstance(own.get(SWITCH), CheckpointingSwitch) or isinstance(own.get("forward"), RegionForward):
            raise BindError("a plan is attached to this model already; call runtime.detach() first")


def refuse_foreign_hooks(where: str) -> None:
    """Raise UnsupportedModelError inside somebody else's saved-tensor hooks (offload, compression)."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise UnsupportedModelError(
            f"{where}: saved_tensors_hooks of something else (save_on_cpu, a compression context) are active around "
            "the model; two mechanisms would treat the same tensors. Leave that context",
            unit=where,
        )


def refuse_unsupported(model: nn.Module) -> None:
    """Raise UnsupportedModelError for the first thing in the model that a plan cannot work with, by name."""
    names = canonical_names(model)
    for full, module in model.named_modules():
        where = names[full] or type(module).__name__
        for cls in type(module).__mro__:
            if cls.__name__ in _REFUSED_CLASSES and cls.__module__.startswith("torch."):
                raise UnsupportedModelError(f"{where}: {_REFUSED_CLASSES[cls.__name__]}", unit=where)
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedModelError(f"{where}: {_REFUSED_CLASSES['OptimizedModule']}", unit=where)
        if getattr(module.forward, "__module__", "").startswith("liger_kernel"):
            raise UnsupportedModelError(
                f"{where}: its forward is a Liger kernel, which hides what it saves. Load the model without Liger "
                "(use_liger_kernel=False)",
                unit=where,
            )
        kernel = _hub_kernel(module)
        if kernel:
            raise UnsupportedModelError(
                f"{where}: its forward is the hub kernel {kernel}, which hides what it saves. Load the model "
                "without hub kernels (use_kernels=False)",
                unit=where,
            )
        if is_checkpointable_layer(module) and getattr(module, ENABLED, False):
            refuse_function(getattr(module, FUNCTION, None), where)
    _refuse_adapters(model)


def _hub_kernel(module: nn.Module) -> str:
    """The hub's name of the kernel layer whose forward replaced the module's own; empty where none did."""
    forward = vars(module).get("forward")
    if not isinstance(forward, MethodType) or forward.__func__ is type(module).forward:
        return ""
    return str(getattr(type(module), "kernel_layer_name", ""))


def _refuse_adapters(model: nn.Module) -> None:
    configs = [item for m in model.modules() for item in dict(getattr(m, "peft_config", None) or {}).items()]
    for name, config in configs:
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModelError(
                f"adapter {name}: aLoRA decides per token what runs, which a plan cannot follow. Use plain LoRA",
                unit=f"adapter {name}",
            )


def _compare(what: str, planned: list[str], found: list[str], modules: dict[str, nn.Module]) -> None:
    if planned == found:
        return
    missing = [name for name in planned if name not in found]
    extra = [name for name in found if name not in planned]
    if not missing and not extra:
        raise BindError(f"the plan's {what} are those of the model in another order: {planned[0]}.. and {found[0]}..")
    raise _missing(what, missing[0] if missing else "", found or list(modules), len(planned), len(found), extra)


def _missing(
    what: str, missing: str, candidates: list[str], planned: int, found: int = -1, extra: list[str] | None = None
) -> BindError:
    counts = f"the plan has {planned} {what}" + (f", the model {found}" if found >= 0 else "")
    first = f"; first missing: {missing}" if missing else ""
    more = f"; first extra: {extra[0]}" if extra else ""
    close = difflib.get_close_matches(missing, candidates, n=1, cutoff=0.0) if missing and candidates else []
    closest = f"; closest name in the model: {close[0]}" if close else ""
    return BindError(
        f"{counts}{first}{more}{closest}. Nothing was installed. Make plans for this model with `hilore-plan trace` "
        "and `hilore-plan solve`",
        missing=missing,
        extra=(extra or [""])[0],
        closest=(close or [""])[0],
    )
