"""torch.export of a model in train mode, with everything set aside that would hide what a plain forward saves.

The model's own checkpointing and key-value cache are off while it is exported and on again afterwards, and the
attention interface is marked, so that the fx nodes of an attention call are known by more than their operator.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate, preserve_node_meta

from hilore.planner.calls import ATTENTION_MARK
from hilore.planner.regions import Region, is_inside
from hilore.planner.storages import tensors_of
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.huggingface import FUNCTION, refuse_function

_WRAPPERS = {
    "CheckpointWrapper": "remove apply_activation_checkpointing: a plan decides what is replayed",
    "OffloadWrapper": "remove the offload wrapper: a plan decides what stays on the device",
}


@dataclass(slots=True)
class Exported:
    """``program``: the exported graph. ``grad_results``: paths of modules outside regions whose one result requires
    grad (forward hooks such as PEFT's and transformers' input gradients leave no node in the graph).
    ``grad_regions``: paths of regions with an input that requires grad."""

    program: torch.export.ExportedProgram
    grad_results: set[str] = field(default_factory=set)
    grad_regions: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def export_model(model: nn.Module, inputs: dict[str, Tensor], regions: tuple[Region, ...]) -> Exported:
    """Export ``model(**inputs)``. Runs no kernel; weights, modes, random state and settings stay as they were.

    Raises UnsupportedModelError for eval mode, checkpoint and offload wrappers, reentrant checkpointing and
    checkpointing inside a module's own forward.
    """
    _refuse_eval(model, regions)
    _refuse_wrappers(model)
    grad_results: set[str] = set()
    grad_regions: set[str] = set()
    notes: list[str] = []
    with ExitStack() as stack:
        notes.extend(stack.enter_context(_checkpointing_off(model)))
        notes.extend(stack.enter_context(_cache_off(model)))
        stack.enter_context(_attention_marked(model))
        stack.enter_context(_gradients_watched(model, regions, grad_results, grad_regions))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(preserve_node_meta())
        program = torch.export.export(model, (), inputs, strict=False)
    return Exported(program, grad_results, grad_regions, notes)


def _refuse_eval(model: nn.Module, regions: tuple[Region, ...]) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    inside = [path for region in regions for path in modules if path == region.path or is_inside(path, region.path)]
    for path in ("", *inside):
        if not modules[path].training:
            raise UnsupportedModelError(
                f"{path or type(model).__name__} is in eval mode, where dropout is lost and nothing is checkpointed. "
                "Call model.train() first",
                unit=path,
            )


def _refuse_wrappers(model: nn.Module) -> None:
    for path, module in model.named_modules():
        name = type(module).__name__
        if name in _WRAPPERS and type(module).__module__.startswith("torch.distributed"):
            raise UnsupportedModelError(f"{path or 'the model'} is a {name}; {_WRAPPERS[name]}", unit=path)


@contextmanager
def _checkpointing_off(model: nn.Module) -> Iterator[list[str]]:
    """Hugging Face's own gradient checkpointing off: traced with it on, most saved storages would be missing."""
    active = [(path, m) for path, m in model.named_modules() if getattr(m, "gradient_checkpointing", False)]
    for path, module in active:
        refuse_function(getattr(module, FUNCTION, None), path or type(module).__name__)
    try:
        for _, module in active:
            module.gradient_checkpointing = False
        yield ["the model's own gradient checkpointing was off while it was traced"] if active else []
    finally:
        for _, module in active:
            module.gradient_checkpointing = True


@contextmanager
def _cache_off(model: nn.Module) -> Iterator[list[str]]:
    found = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if getattr(config, "use_cache", False)}
    try:
        for config in configs.values():
            config.use_cache = False  # type: ignore[union-attr]
        yield ["config.use_cache was off while the model was traced: training has no use for it"] if configs else []
    finally:
        for config in configs.values():
            config.use_cache = True  # type: ignore[union-attr]


def attention_implementations(model: nn.Module) -> frozenset[str]:
    """Names of the attention implementations that the model's configs ask for."""
    configs = (getattr(module, "config", None) for module in model.modules())
    names = (getattr(config, "_attn_implementation", None) for config in configs)
    return frozenset(name for name in names if isinstance(name, str))


@contextmanager
def _attention_marked(model: nn.Module) -> Iterator[None]:
    """Annotate every fx node made inside transformers' attention interface with (module path, call number)."""
    modeling_utils = sys.modules.get("transformers.modeling_utils")
    if modeling_utils is None:
        yield
        return
    interface = modeling_utils.ALL_ATTENTION_FUNCTIONS
    own = dict(interface._local_mapping)
    paths = {id(module): path for path, module in model.named_modules()}
    used = attention_implementations(model) & set(interface.valid_keys())
    try:
        for name in used:
            interface[name] = _marking(interface[name], paths)
        yield
    finally:
        for name in used:
            interface._local_mapping.pop(name, None)
        interface._local_mapping.update(own)


def _marking(function: Callable[..., Any], paths: dict[int, str]) -> Callable[..., Any]:
    calls = itertools.count()

    def marked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in paths:
            return function(module, *args, **kwargs)
        with annotate({ATTENTION_MARK: (paths[id(module)], next(calls))}):
            return function(module, *args, **kwargs)

    return marked


@contextmanager
def _gradients_watched(
    model: nn.Module, regions: tuple[Region, ...], grad_results: set[str], grad_regions: set[str]
) -> Iterator[None]:
    """See what the traced forward itself knows of requires_grad, and refuse checkpointing inside regions."""
    handles = []
    region_paths = {region.path for region in regions}

    def region_entered(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if any(tensor.requires_grad for tensor in tensors_of((args, kwargs))):
                grad_regions.add(path)

        return hook

    def result_made(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, result: Any) -> None:
            if isinstance(result, Tensor) and result.requires_grad:
                grad_results.add(path)

        return hook

    try:
        for path, module in model.named_modules():
            if path in region_paths:
                handles.append(module.register_forward_pre_hook(region_entered(path), with_kwargs=True))
            elif not any(is_inside(path, region) for region in region_paths):
                handles.append(module.register_forward_hook(result_made(path)))
            elif isinstance(module, nn.Linear):
                handles.append(module.register_forward_pre_hook(_refuse_hidden_checkpoint(path)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_hidden_checkpoint(path: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: Any) -> None:
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise UnsupportedModelError(
                f"{path} runs under saved-tensor hooks (checkpointing or offload inside the model's forward). "
                "Take the checkpoint call out: a plan decides what is replayed",
                unit=path,
            )
        if not torch.is_grad_enabled():
            raise UnsupportedModelError(
                f"{path} runs without gradients inside a region: reentrant checkpointing or no_grad in the model's "
                "forward. Take it out, or choose regions without it",
                unit=path,
            )

    return hook
