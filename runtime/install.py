"""Putting a bound runtime into a model, and taking it out again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from hilore.runtime.bind import checkpointable_names, switchable_models
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.fingerprint import base_model
from hilore.runtime.huggingface import (
    ENABLED,
    WRITTEN,
    attention_implementations,
    set_cache_off,
    unwrap_attention,
    wrap_attention,
)
from hilore.runtime.modules import RegionForward
from hilore.runtime.notice import notice
from hilore.runtime.region import ATTENTION, RegionBinding

if TYPE_CHECKING:
    from hilore.runtime.runtime import Runtime


def install(runtime: Runtime) -> None:
    """Install on a Hugging Face model's own checkpointing switch, elsewhere on the regions' modules; turn it on.

    Each step leaves its undoing with the runtime, so that ``detach`` restores the model however far it came.
    """
    switchable = switchable_models(runtime.model, runtime.regions)
    if checkpointable_names(runtime.model) and switchable:
        _install_on_hugging_face(runtime, switchable)
    else:
        for region in runtime.regions:
            _install_on_module(runtime, region)
        runtime.enabled = True


def _install_on_hugging_face(runtime: Runtime, switchable: list[nn.Module]) -> None:
    outermost = switchable[0]
    if getattr(runtime.regions[0].module, ENABLED, False):
        notice(f"{type(outermost).__name__}: its own gradient checkpointing was on; the plan takes its place")
    runtime.on_detach(_restoring_checkpointing(outermost))
    for config in set_cache_off(base_model(runtime.model)):
        runtime.on_detach(functools.partial(setattr, config, "use_cache", True))
    units = [unit for region in runtime.regions for unit in region.units.values()]
    for implementation in attention_implementations(unit.module for unit in units if unit.kind == ATTENTION):
        _wrap_attention(runtime, implementation)
    for module in switchable:
        runtime.install_switch(module)
    runtime.enable()


def _restoring_checkpointing(outermost: nn.Module) -> Callable[[], None]:
    """Remember, for every module with a checkpointing flag, what its switch writes; gives the undoing."""
    before = [
        (module, {name: vars(module)[name] for name in WRITTEN if name in vars(module)})
        for module in outermost.modules()
        if hasattr(module, ENABLED)
    ]

    def restore() -> None:
        for module, attributes in before:
            for name in WRITTEN:
                vars(module).pop(name, None)
            vars(module).update(attributes)

    return restore


def _wrap_attention(runtime: Runtime, implementation: str) -> None:
    wrapped = wrap_attention(implementation)
    if wrapped is None:
        raise UnsupportedModelError(
            f"attention implementation {implementation!r} has no function in transformers' attention interface, "
            'so attention cannot be a unit. Load the model with attn_implementation="sdpa", or trace it as it is',
            unit=f"{runtime.regions[0].name}.self_attn:{ATTENTION}",
        )
    runtime.on_detach(lambda: unwrap_attention(implementation, wrapped))


def _install_on_module(runtime: Runtime, region: RegionBinding) -> None:
    module = region.module
    previous: Callable[..., Any] | None = vars(module).get("forward")
    vars(module)["forward"] = RegionForward(runtime, region, module.forward)

    def restore() -> None:
        if previous is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = previous

    runtime.on_detach(restore)
