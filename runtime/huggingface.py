"""Installation on Hugging Face models: their own checkpointing switch, their attention interface.

A plan takes the place of the function that Hugging Face's gradient checkpointing calls per decoder layer. TRL turns
checkpointing off and on around every generation, which wipes per-layer functions: so the switch itself,
``_set_gradient_checkpointing``, is shadowed on the instance and puts ours back each time it is turned on.

Objects installed here reduce to plain equivalents: a deep copy or a pickle of an attached model is a plain model, and
needs nothing of this package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from hilore.runtime.ambient import running
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.notice import notice

if TYPE_CHECKING:
    from hilore.runtime.region import RegionBinding
    from hilore.runtime.runtime import Runtime

SWITCH = "_set_gradient_checkpointing"
FUNCTION = "_gradient_checkpointing_func"
ENABLED = "gradient_checkpointing"
_KEEPS_CACHE = "_can_checkpoint_with_cache"
WRITTEN = (FUNCTION, ENABLED, _KEEPS_CACHE)  # what installing and switching write into modules
_CACHES = ("past_key_values", "past_key_value", "cache", "layer_past")


def is_switchable(module: nn.Module) -> bool:
    """Whether ``module`` is a Hugging Face model with the switch that a plan is installed by."""
    return callable(getattr(type(module), SWITCH, None))


def is_checkpointable_layer(module: nn.Module) -> bool:
    """Whether ``module`` is a layer that Hugging Face checkpoints as a whole."""
    return any(cls.__name__ == "GradientCheckpointingLayer" for cls in type(module).__mro__)


def uses_reentrant(function: Any) -> bool:
    """Whether a checkpointing function of Hugging Face is the reentrant kind."""
    return isinstance(function, functools.partial) and bool(function.keywords.get("use_reentrant"))


def plain_checkpoint() -> Callable[..., Any]:
    return functools.partial(checkpoint, use_reentrant=False)


def refuse_function(function: Any, where: str) -> None:
    """Raise UnsupportedModelError where a checkpointing function is not one that a plan can replace."""
    if uses_reentrant(function):
        raise UnsupportedModelError(
            f"{where}: reentrant gradient checkpointing is on (use_reentrant=True); a plan replaces the "
            'non-reentrant kind only. Set gradient_checkpointing_kwargs={"use_reentrant": False}',
            unit=where,
        )
    if isinstance(function, functools.partial) and getattr(function.func, "__name__", "") == "checkpoint_func":
        raise UnsupportedModelError(
            f"{where}: activation offload is on (offload=True); a plan decides what stays on the device. "
            "Call activation_checkpointing_enable() without offload",
            unit=where,
        )


class Flag:
    """A truth value while a plan is attached; a deep copy or a pickle of its holder gets ``plain`` instead."""

    __slots__ = ("_now", "_plain")

    def __init__(self, now: bool, plain: bool) -> None:
        self._now = now
        self._plain = plain

    def __bool__(self) -> bool:
        return self._now

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (self._plain,)


def let_caches_through(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Transformers drops a cache in silence where it checkpoints; let it reach the layers, which refuse it by name."""
    if ENABLED in vars(model):
        vars(model)[ENABLED] = Flag(False, plain=True)
    for layer in layers:
        if not getattr(layer, _KEEPS_CACHE, True):
            vars(layer)[_KEEPS_CACHE] = Flag(True, plain=False)


class RegionCheckpoint:
    """What a decoder layer calls instead of ``torch.utils.checkpoint.checkpoint``."""

    def __init__(self, runtime: Runtime, region: RegionBinding) -> None:
        self._runtime = runtime
        self._region = region

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A layer binds itself and its keyword arguments into a partial; the frame must see those tensors too.
        if isinstance(function, functools.partial):
            kwargs = function.keywords | kwargs
            function = functools.partial(function.func, *function.args)
        for name in _CACHES:
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(
                    f"{self._region.name}: a training forward got a key-value cache, which a replay would write a "
                    "second time. Call the model without use_cache=True and without past_key_values",
                    unit=self._region.name,
                )
        return self._runtime.run_region(self._region, function, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return plain_checkpoint().__reduce__()  # type: ignore[return-value]


class CheckpointingSwitch:
    """Shadows ``_set_gradient_checkpointing`` of one model instance."""

    def __init__(self, runtime: Runtime, model: nn.Module) -> None:
        self._runtime = runtime
        self.model = model

    def __call__(self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1) -> None:
        if enable:
            refuse_function(gradient_checkpointing_func, type(self.model).__name__)
            if every_n_layers != 1:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__}: every_n_layers={every_n_layers} was asked for while a plan decides "
                    "which layers are held. Call activation_checkpointing_enable() without it",
                    unit=type(self.model).__name__,
                )
        self.set_plain(enable)
        if enable:
            self._runtime.place_checkpoints()
        self._runtime.switched(enable)

    def set_plain(self, enable: bool) -> None:
        """The model's own switch, with plain non-reentrant checkpointing."""
        method = getattr(type(self.model), SWITCH)
        method(self.model, enable=enable, gradient_checkpointing_func=plain_checkpoint())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        model = memo.get(id(self.model), self.model)
        return getattr(type(model), SWITCH).__get__(model)

    def __reduce__(self) -> tuple[Any, ...]:
        # When a copy is unpickled it has no attributes yet, so this finds its class's own.
        return getattr, (self.model, SWITCH)


class AttentionCall:
    """Wraps the attention function registered under one name; passes through where no frame is running."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.users = 0

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        frame = running.frame
        name = frame.region.attention_units.get(id(module)) if frame is not None else None
        if frame is None or name is None:
            return self.original(module, *args, **kwargs)
        return frame.unit_call(name, self.original, (module, *args), kwargs)


def attention_implementations(modules: Iterable[nn.Module]) -> list[str]:
    """Names of the attention implementations that these attention modules' configs ask for."""
    configs = (getattr(module, "config", None) for module in modules)
    return sorted({str(config._attn_implementation) for config in configs if config is not None})


def wrap_attention(implementation: str) -> AttentionCall | None:
    """Wrap the function registered as ``implementation``; None where there is none (``eager``)."""
    from transformers import AttentionInterface

    mapping: Any = AttentionInterface._global_mapping
    registered = mapping.get(implementation)
    if registered is None:
        return None
    if not isinstance(registered, AttentionCall):
        registered = AttentionCall(registered)
        AttentionInterface.register(implementation, registered)
    registered.users += 1
    return registered


def unwrap_attention(implementation: str, wrapped: AttentionCall) -> None:
    """Undo one ``wrap_attention``; the registered function returns with the last."""
    from transformers import AttentionInterface

    mapping: Any = AttentionInterface._global_mapping
    wrapped.users -= 1
    if wrapped.users == 0 and mapping.get(implementation) is wrapped:
        AttentionInterface.register(implementation, wrapped.original)


def attention_wrapped(implementation: str) -> AbstractContextManager[object]:
    """Wrap the function for a block if it is not wrapped: the model may be detached while a frame is in flight."""
    from transformers import AttentionInterface

    mapping: Any = AttentionInterface._global_mapping
    return (
        nullcontext()
        if isinstance(mapping.get(implementation), AttentionCall)
        else _wrapped_for_a_while(implementation)
    )


@contextmanager
def _wrapped_for_a_while(implementation: str) -> Iterator[None]:
    wrapped = wrap_attention(implementation)
    try:
        yield
    finally:
        if wrapped is not None:
            unwrap_attention(implementation, wrapped)


def set_cache_off(model: nn.Module) -> list[Any]:
    """Set every config default ``use_cache=True`` off, saying so once. Returns the configs that had it on."""
    configs = {id(config): config for config in (getattr(module, "config", None) for module in model.modules())}
    changed: list[Any] = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in changed:
        config.use_cache = False
    if changed:
        notice(
            f"{type(model).__name__}: config.use_cache was on and is set off while a plan is attached: a training "
            "forward has no use for a key-value cache"
        )
    return changed
