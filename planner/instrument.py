"""Measure a region's memory with the runtime itself under fake tensors: exact live storages, no memory taken."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hilore.planner.regionrun import RegionRunner, Split
from hilore.planner.trace import KeepSet
from hilore.runtime.ambient import tensors_in
from hilore.runtime.meter import StorageMeter
from hilore.runtime.region import Action
from hilore.runtime.stats import Stats

# The context that a forward runs in, and a backward does not.
Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class RegionBytes:
    """See planner/trace.py, KeepSet. ``gradient_bytes``: what the region's parameters' gradients take in the end."""

    retained_bytes: int
    forward_bytes: int
    backward_bytes: int
    gradient_bytes: int
    cast_bytes: int
    keeps_boundary: bool
    handed_bytes: int | None

    def as_keep_set(self, kept: Sequence[str], *, split: bool = False) -> KeepSet:
        return KeepSet(
            tuple(kept),
            self.retained_bytes,
            self.forward_bytes,
            self.backward_bytes,
            split,
            self.cast_bytes,
            self.keeps_boundary,
            self.handed_bytes,
        )


def measure_keep_set(
    runner: RegionRunner,
    kept: Sequence[str],
    dead: Sequence[str],
    *,
    gradients_exist: bool,
    split: Split | None = None,
    autocast: Autocast = nullcontext,
) -> RegionBytes:
    """Memory of the region with ``kept`` exactly kept and ``dead`` left out of the replay, in two stages or in one."""
    handed = _HandedOut()

    def forward(boundary: torch.Tensor) -> torch.Tensor:
        return runner.with_frame(kept, dead, boundary, split, handed)

    return _measure(runner, forward, gradients_exist, autocast, handed)


def measure_held(runner: RegionRunner, *, gradients_exist: bool, autocast: Autocast = nullcontext) -> RegionBytes:
    """Memory of the region when a plan holds it."""
    return _measure(runner, runner.held, gradients_exist, autocast)


def measure_plain(runner: RegionRunner, *, gradients_exist: bool, autocast: Autocast = nullcontext) -> RegionBytes:
    """Memory of the region without a plan or checkpointing."""
    return _measure(runner, runner.call, gradients_exist, autocast)


def measure_checkpointed(
    runner: RegionRunner, *, gradients_exist: bool, autocast: Autocast = nullcontext
) -> RegionBytes:
    """Memory of the region under plain gradient checkpointing."""
    return _measure(runner, runner.checkpointed, gradients_exist, autocast)


@dataclass(slots=True)
class _HandedOut(Stats):
    """Counters of a frame that also note how much was live when it handed out a kept output, at the highest."""

    meter: StorageMeter | None = None
    highest_bytes: int = 0

    def call_left_out(self, unit_name: str, action: Action) -> None:
        Stats.call_left_out(self, unit_name, action)
        if self.meter is not None and action.kept:
            self.highest_bytes = max(self.highest_bytes, self.meter.live_bytes)


def _measure(
    runner: RegionRunner,
    forward: Callable[[torch.Tensor], torch.Tensor],
    gradients_exist: bool,
    autocast: Autocast,
    handed: _HandedOut | None = None,
) -> RegionBytes:
    parameters = [p for p in runner.binding.module.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if gradients_exist else None
    state = [*runner.binding.module.parameters(), *runner.binding.module.buffers()]
    grads = [p.grad for p in parameters if p.grad is not None]
    gc.collect()
    try:
        with StorageMeter() as meter:
            meter.track([*state, *grads, *tensors_in(runner.inputs.args, runner.inputs.kwargs)])
            if handed is not None:
                handed.meter = meter
            return _run(meter, runner, forward, autocast, handed)
    finally:
        for parameter in parameters:
            parameter.grad = None


def _run(
    meter: StorageMeter,
    runner: RegionRunner,
    forward: Callable[[torch.Tensor], torch.Tensor],
    autocast: Autocast,
    handed: _HandedOut | None,
) -> RegionBytes:
    base = meter.live_bytes
    # A boundary inside a model is no leaf: nothing but who uses it keeps it, and its gradient is handed on.
    anchor = torch.empty(0, requires_grad=runner.inputs.requires_grad)
    boundary: torch.Tensor = _Boundary.apply(anchor, runner.inputs.boundary)  # type: ignore[no-untyped-call]
    with autocast():
        output = forward(boundary)
        storage = weakref.ref(boundary.untyped_storage())
        del boundary
        forward_bytes = meter.peak_bytes - base
        with_casts = meter.live_bytes
    # Autocast has let go of the casts that it remembered; backward runs outside of it, as in a training loop.
    cast_bytes = with_casts - meter.live_bytes
    keeps_boundary = storage() is not None
    output_bytes = output.untyped_storage().nbytes()
    # The root's own backward hands the region an incoming gradient that only the engine holds, as in a model.
    root = output.mul(1.0).sum()
    del output
    root_bytes = root.untyped_storage().nbytes()
    retained = meter.live_bytes - base - root_bytes
    meter.reset_peak()
    root.backward()  # type: ignore[no-untyped-call]
    # The root and its own gradient exist only here.
    begun = base + retained + output_bytes + 2 * root_bytes
    backward = max(meter.peak_bytes - begun, 0)
    del root
    return RegionBytes(
        retained,
        forward_bytes,
        backward,
        gradient_bytes=meter.live_bytes - base,
        cast_bytes=cast_bytes,
        keeps_boundary=keeps_boundary,
        handed_bytes=None if handed is None else max(handed.highest_bytes - begun, 0),
    )


class _Boundary(torch.autograd.Function):
    """A fresh tensor like the recorded boundary, made by a node that holds nothing and takes any gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return like.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None
