"""Canonical module names: what a module is called once every wrapper's own path part is taken away.

A part is stripped only where the module that holds it is known to be a wrapper, never because of its text alone: a
module that is truly called ``module`` keeps its name.
"""

from __future__ import annotations

from torch import nn

_ALWAYS_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PARTS_BY_WRAPPER_CLASS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
    "BaseTunerLayer": "base_layer",
}


def wrapper_parts(module: nn.Module) -> frozenset[str]:
    """Child names of ``module`` that are not part of a canonical name."""
    parts = {
        _PARTS_BY_WRAPPER_CLASS[cls.__name__]
        for cls in type(module).__mro__
        if cls.__name__ in _PARTS_BY_WRAPPER_CLASS and cls.__module__.split(".")[0] in ("torch", "peft")
    }
    return _ALWAYS_WRAPPER_PARTS | parts


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every full module name of ``model`` to its canonical name ('' for the root and its wrappers)."""
    names = {"": ""}
    modules = dict(model.named_modules(remove_duplicate=False))
    for full in modules:
        if not full:
            continue
        parent, _, part = full.rpartition(".")
        inherited = names[parent]
        if part in wrapper_parts(modules[parent]):
            names[full] = inherited
        else:
            names[full] = f"{inherited}.{part}" if inherited else part
    return names


def canonical_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Map every canonical name to the innermost module of that name.

    Under PEFT ``model.layers.0.mlp.gate_proj`` is the frozen linear, not the adapter layer around it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    return {canonical: modules[full] for full, canonical in canonical_names(model).items()}
