"""State around a forward that its replay must find again: random generators, autocast, modes, and the running frame."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

if TYPE_CHECKING:
    from hilore.runtime.frame import Frame
    from hilore.runtime.heldframe import HeldFrame


class _Running(threading.local):
    """``frame``: the one that unit calls belong to. ``fused``: whether glue may run in fewer passes (runtime/glue/)."""

    frame: Frame | HeldFrame | None = None
    fused: bool = True


running = _Running()


class RunningAs:
    """Make ``frame`` the one that unit calls belong to; with None they belong to none."""

    __slots__ = ("_before", "_frame")

    def __init__(self, frame: Frame | HeldFrame | None) -> None:
        self._frame = frame

    def __enter__(self) -> None:
        self._before = running.frame
        running.frame = self._frame

    def __exit__(self, *_: object) -> None:
        running.frame = self._before


@contextlib.contextmanager
def without_fused_glue() -> Iterator[None]:
    """Glue runs as its modules' own code inside, also on tensors of a device that only stands in for another."""
    before = running.fused
    running.fused = False
    try:
        yield
    finally:
        running.fused = before


@dataclass(frozen=True, slots=True)
class RandomState:
    """CPU generator state and those of the accelerators that the arguments live on."""

    cpu: torch.Tensor
    device_type: str
    devices: tuple[int, ...]
    device_states: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls, device_type: str, arguments: list[torch.Tensor]) -> RandomState:
        devices: list[int] = []
        states: list[torch.Tensor] = []
        if device_type != "cpu":
            devices, states = get_device_states(*arguments)
        return cls(torch.get_rng_state(), device_type, tuple(devices), tuple(states))

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(list(self.devices), list(self.device_states), device_type=self.device_type)

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Run a block from this state; afterwards the generators are as they were before the block."""
        with torch.random.fork_rng(devices=list(self.devices), device_type=self._fork_type()):
            self.restore()
            yield

    def _fork_type(self) -> str:
        return self.device_type if self.device_type != "cpu" else "cuda"


@dataclass(frozen=True, slots=True)
class AutocastState:
    """Autocast of the CPU and of the accelerator in use."""

    states: tuple[tuple[str, bool, torch.dtype, bool], ...]

    @classmethod
    def now(cls, device_type: str) -> AutocastState:
        kinds = ("cpu",) if device_type in ("cpu", "meta") else ("cpu", device_type)
        cached = torch.is_autocast_cache_enabled()
        return cls(tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k), cached) for k in kinds))

    def compute_dtype(self, device_type: str) -> torch.dtype | None:
        """The dtype that autocast computes in on this device, None where it is off."""
        return next((dtype for kind, enabled, dtype, _ in self.states if enabled and kind == device_type), None)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype, cached in self.states:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            yield


@dataclass(frozen=True, slots=True)
class ModuleModes:
    """Train or eval mode of a region's modules: dropout and its like ask for it, and it may change before backward."""

    modules: Sequence[nn.Module]
    training: tuple[bool, ...]

    @classmethod
    def now(cls, modules: Sequence[nn.Module]) -> ModuleModes:
        return cls(modules, tuple([module.training for module in modules]))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        changed = [(m, m.training) for m, then in zip(self.modules, self.training, strict=True) if m.training != then]
        try:
            for module, now in changed:
                module.training = not now
            yield
        finally:
            for module, now in changed:
                module.training = now


def device_type_of(tensors: list[torch.Tensor]) -> str:
    """Device type of the first accelerator tensor, else ``cpu``."""
    return next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), "cpu")


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    found: list[torch.Tensor] = []
    stack = list(reversed(trees))
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list)):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            stack.extend(reversed(list(item.values())))
    return found


def takes_mask(inputs: list[torch.Tensor]) -> bool:
    """Whether a region's inputs hold an attention mask beside its boundary, which comes first: [B, 1 or H, T, T] of
    sdpa and eager attention, bool [B, T] of flash attention."""
    return any(
        (tensor.dim() == 4 and tensor.shape[-1] == tensor.shape[-2])
        or (tensor.dim() == 2 and tensor.dtype == torch.bool)
        for tensor in inputs[1:]
    )
