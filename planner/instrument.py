"""Measure a region's memory with the runtime itself under fake tensors: exact live storages, no memory taken."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hilore.planner.regionrun import RegionRunner, Split
from hilore.planner.trace import KeepSet
from hilore.runtime.ambient import tensors_in
from hilore.runtime.meter import StorageMeter


@dataclass(frozen=True, slots=True)
class RegionBytes:
    """See planner/trace.py, KeepSet. ``gradient_bytes``: what the region's parameters' gradients take in the end."""

    retained_bytes: int
    forward_bytes: int
    backward_bytes: int
    gradient_bytes: int

    def as_keep_set(self, kept: Sequence[str], *, split: bool = False) -> KeepSet:
        return KeepSet(tuple(kept), self.retained_bytes, self.forward_bytes, self.backward_bytes, split)


def measure_keep_set(
    runner: RegionRunner,
    kept: Sequence[str],
    dead: Sequence[str],
    *,
    gradients_exist: bool,
    split: Split | None = None,
) -> RegionBytes:
    """Memory of the region with ``kept`` exactly kept and ``dead`` left out of the replay, in two stages or in one."""
    return _measure(runner, lambda boundary: runner.with_frame(kept, dead, boundary, split), gradients_exist)


def measure_held(runner: RegionRunner, *, gradients_exist: bool) -> RegionBytes:
    """Memory of the region when autograd keeps all."""
    return _measure(runner, runner.call, gradients_exist)


def measure_checkpointed(runner: RegionRunner, *, gradients_exist: bool) -> RegionBytes:
    """Memory of the region under plain gradient checkpointing."""
    return _measure(runner, runner.checkpointed, gradients_exist)


def _measure(
    runner: RegionRunner, forward: Callable[[torch.Tensor], torch.Tensor], gradients_exist: bool
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
            return _run(meter, runner, forward)
    finally:
        for parameter in parameters:
            parameter.grad = None


def _run(meter: StorageMeter, runner: RegionRunner, forward: Callable[[torch.Tensor], torch.Tensor]) -> RegionBytes:
    base = meter.live_bytes
    # A boundary inside a model is no leaf: nothing but who uses it keeps it, and its gradient is handed on.
    anchor = torch.empty(0, requires_grad=runner.inputs.requires_grad)
    boundary: torch.Tensor = _Boundary.apply(anchor, runner.inputs.boundary)  # type: ignore[no-untyped-call]
    output = forward(boundary)
    del boundary
    forward_bytes = meter.peak_bytes - base
    output_bytes = output.untyped_storage().nbytes()
    # The root's own backward hands the region an incoming gradient that only the engine holds, as in a model.
    root = output.mul(1.0).sum()
    del output
    root_bytes = root.untyped_storage().nbytes()
    retained = meter.live_bytes - base - root_bytes
    meter.reset_peak()
    root.backward()  # type: ignore[no-untyped-call]
    # The root and its own gradient exist only here.
    backward = meter.peak_bytes - base - retained - output_bytes - 2 * root_bytes
    del root
    return RegionBytes(retained, forward_bytes, max(backward, 0), meter.live_bytes - base)


class _Boundary(torch.autograd.Function):
    """A fresh tensor like the recorded boundary, made by a node that holds nothing and takes any gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return like.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None
