"""What lies outside of regions: fixed state, head and loss, what comes before the first region, the optimizer.

One whole update of the fake actor with every region replayed, read off at the regions' edges.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hilore.planner.actor import Actor, policy_loss
from hilore.planner.microbatch import Microbatch
from hilore.planner.optimizer import make_optimizer
from hilore.planner.regionrun import choice_for
from hilore.planner.trace import Fixed
from hilore.runtime.ambient import tensors_in
from hilore.runtime.frame import Frame
from hilore.runtime.meter import StorageMeter
from hilore.runtime.region import RegionBinding


@dataclass(frozen=True, slots=True)
class OutsideBytes:
    """See planner/trace.py, Outside."""

    before_bytes: int
    head_bytes: int
    head_left_bytes: int
    tail_bytes: int


class _Edges:
    """Live and peak bytes at the edges of the regions during one forward and backward."""

    def __init__(self, meter: StorageMeter, first: str, last: str) -> None:
        self.meter = meter
        self.first = first
        self.last = last
        self.entered = self.first_boundary = self.left = self.last_output = 0
        self.head_peak = self.after_head = 0

    def run(self, region: RegionBinding, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if region.name == self.first:
            self.entered = self.meter.live_bytes
            self.first_boundary = args[0].untyped_storage().nbytes()
            if args[0].requires_grad:
                args[0].register_hook(lambda _grad: self.meter.reset_peak())
        choice = choice_for(region.name, {}, frozenset(), frozenset())
        result = Frame(region, choice, call, args, kwargs).run()
        if region.name == self.last:
            output = result[0] if isinstance(result, tuple) else result
            self.left = self.meter.live_bytes
            self.last_output = output.untyped_storage().nbytes()
            self.meter.reset_peak()
            output.register_hook(self._head_done)
        return result

    def _head_done(self, _grad: torch.Tensor) -> None:
        self.head_peak = self.meter.peak_bytes
        self.after_head = self.meter.live_bytes


def measure_outside(
    actor: Actor, microbatch: Microbatch, regions: Mapping[str, nn.Module], *, gradients_exist: bool
) -> OutsideBytes:
    """Bytes outside of the regions for one microbatch of a fake (or real) actor."""
    bindings = [RegionBinding(name, module, {}) for name, module in regions.items()]
    trainable = [p for p in actor.model.parameters() if p.requires_grad]
    with actor.faked():
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter) if gradients_exist else None
        gc.collect()
        with StorageMeter() as meter:
            state = _state(actor.model)
            meter.track(state)
            fixed = meter.live_bytes
            meter.track(tensors_in([getattr(microbatch, name) for name in microbatch.__slots__]))
            edges = _Edges(meter, bindings[0].name, bindings[-1].name)
            with _replayed(bindings, edges):
                loss = policy_loss(actor, microbatch)
                loss.backward()  # type: ignore[no-untyped-call]
            tail_peak = meter.peak_bytes
        region_gradients = 0 if gradients_exist else _gradient_bytes(regions.values())
        for parameter in trainable:
            parameter.grad = None
    before = edges.entered - edges.first_boundary - fixed
    all_retained = edges.left - edges.last_output
    return OutsideBytes(
        before,
        edges.head_peak - all_retained,
        edges.after_head - all_retained,
        max(tail_peak - fixed - before - region_gradients, 0),
    )


def measure_fixed(actor: Actor, *, gradients_exist: bool, other_bytes: int) -> tuple[Fixed, int]:
    """What is live during the whole update, and the optimizer step's working set on top of it and of gradients."""
    trainable = [p for p in actor.model.parameters() if p.requires_grad]
    with actor.faked():
        gc.collect()
        with StorageMeter() as meter:
            meter.track(_parameters_and_buffers(actor.model))
            parameters = meter.live_bytes
            for parameter in trainable:
                parameter.grad = torch.zeros_like(parameter)
            gradients = meter.live_bytes - parameters
            optimizer = make_optimizer(actor.model, actor.spec)
            optimizer.step()
            state = meter.live_bytes - parameters - gradients
            meter.reset_peak()
            optimizer.step()
            working = meter.peak_bytes - parameters - gradients - state
        for parameter in trainable:
            parameter.grad = None
    return Fixed(parameters, gradients if gradients_exist else 0, state, other_bytes), working


@contextmanager
def _replayed(bindings: list[RegionBinding], edges: _Edges) -> Iterator[None]:
    """Every region's forward goes through ``edges`` inside the block."""
    try:
        for binding in bindings:
            forward = binding.module.forward

            def run(*args: Any, binding: RegionBinding = binding, forward: Any = forward, **kwargs: Any) -> Any:
                return edges.run(binding, forward, args, kwargs)

            binding.module.__dict__["forward"] = run
        yield
    finally:
        for binding in bindings:
            binding.module.__dict__.pop("forward", None)


def _parameters_and_buffers(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _state(model: nn.Module) -> list[torch.Tensor]:
    return [*_parameters_and_buffers(model), *(p.grad for p in model.parameters() if p.grad is not None)]


def _gradient_bytes(modules: Any) -> int:
    return sum(
        p.numel() * p.element_size() for module in modules for p in module.parameters() if p.requires_grad
    )
