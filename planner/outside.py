"""What lies outside of regions: head and loss, and what comes before the first region.

One whole update of the fake actor in which a stand-in takes the place of every region, read off at the regions' edges.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from hilore.planner.actor import Actor
from hilore.planner.gathers import OutsideGathers
from hilore.planner.head import base_model, policy_logps
from hilore.planner.loss import grpo_loss
from hilore.planner.microbatch import Microbatch
from hilore.planner.sharding import Sharding
from hilore.planner.shardparameters import untied_embeddings
from hilore.planner.standins import Arguments, Form, StandIn, storage_bytes
from hilore.planner.trace import LargestTensors, OutsideParts
from hilore.runtime.ambient import tensors_in
from hilore.runtime.meter import StorageMeter


@dataclass(frozen=True, slots=True)
class OutsideCosts:
    """Bytes: see planner/trace.py, Outside. ``released_bytes``: of ``before_bytes``, gone when backward is over.

    ``forward_ns``, ``backward_ns``: what a clock saw outside of regions.
    """

    before_bytes: int
    leaf_boundary_bytes: int
    head_bytes: int
    head_left_bytes: int
    tail_bytes: int
    forward_ns: int
    backward_ns: int
    head_forward_bytes: int
    released_bytes: int
    frame_bytes: int
    parts: OutsideParts


@dataclass(frozen=True, slots=True)
class OuterRegion:
    """A region seen from outside: only the form of what it returns matters, which is that of its class."""

    name: str
    module: nn.Module
    class_index: int


def measure_outside(
    actor: Actor,
    microbatch: Microbatch,
    regions: tuple[OuterRegion, ...],
    *,
    gradients_exist: bool,
    sharding: Sharding | None = None,
    clock: Callable[[], int] | None = None,
) -> OutsideCosts:
    """Bytes (and time on ``clock``, where given) outside of the regions for one microbatch of a fake or real actor.

    ``gradients_exist``: accumulation has filled the gradient buffers. Under a sharding these are the reduced ones, and
    unsharded gradients come and go.
    """
    trainable = [p for p in actor.model.parameters() if p.requires_grad]
    buffered = gradients_exist and (sharding is None or sharding.buffers)
    with actor.faked():
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter) if buffered else None
        gc.collect()
        with StorageMeter() as meter:
            meter.track(_state(actor.model))
            fixed = meter.live_bytes
            inputs = tensors_in([getattr(microbatch, name) for name in microbatch.__slots__])
            meter.track(inputs)
            begun = meter.live_bytes
            # All microbatches of an update are there from its begin: trainers cut them from one batch on the device.
            waiting = (actor.spec.batch.accumulation - 1) * (begun - fixed)
            gathers = OutsideGathers(sharding, actor.device, accumulates=gradients_exist)
            edges = _Edges(meter, gathers, regions, _head_parameters(actor.model, regions, sharding), clock)
            with _standing_in(regions, edges):
                forward_ns, backward_ns = _step(actor, microbatch, edges, gathers)
            if not edges.tail_begun:
                edges.begin_tail()
            gathers.step_done(trainable)
            tail_peak = meter.peak_bytes
        for parameter in trainable:
            parameter.grad = None
    return OutsideCosts(
        edges.entered - fixed + waiting,
        edges.leaf_boundary,
        edges.head_peak - edges.all_retained,
        edges.after_head - edges.all_retained,
        max(tail_peak - edges.entered, 0),
        forward_ns,
        backward_ns,
        edges.head_forward_peak - edges.all_retained,
        edges.entered - begun,
        # Arguments of regions that no frame holds are there until the decoder's own forward is over.
        min(edges.arguments.frame_bytes(inputs), edges.head_peak - edges.decoder_peak),
        OutsideParts(edges.head_fsdp, edges.head_left_fsdp, edges.fsdp_at_peak, edges.head_largest),
    )


class _Edges:
    """Live and peak bytes at the edges of the regions during one forward and backward."""

    def __init__(
        self,
        meter: StorageMeter,
        gathers: OutsideGathers,
        regions: tuple[OuterRegion, ...],
        head_parameters: list[nn.Parameter],
        clock: Callable[[], int] | None,
    ) -> None:
        self.meter = meter
        self.gathers = gathers
        self.clock = clock or (lambda: 0)
        self.first, self.last = regions[0].name, regions[-1].name
        self.entered = self.all_retained = self.head_peak = self.after_head = self.skipped_ns = 0
        self.leaf_boundary = self.head_forward_peak = self.decoder_peak = 0
        self.arguments = Arguments()
        self.tail_begun = False
        self.fsdp_at_peak = self.head_fsdp = self.head_left_fsdp = 0
        self.head_largest: tuple[LargestTensors, ...] = ()
        self._before_head, self._sizes_at_peak = Counter[int](), Counter[int]()
        meter.on_peak = self._note_peak
        self._head_parameters = head_parameters
        self._forms: dict[int, tuple[list[Any], Any]] = {}

    def run(self, region: OuterRegion, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        boundary: Tensor = args[0]
        if region.name == self.first:
            self.gathers.enter_regions()
            self.entered = self.meter.live_bytes - self.gathers.held_bytes
            # Of frozen embeddings it is a leaf (``enable_input_require_grads``), which the graph itself keeps.
            if boundary.is_leaf and boundary.requires_grad:
                self.leaf_boundary = storage_bytes(boundary)
            else:
                self.entered -= storage_bytes(boundary)
            if boundary.requires_grad:
                boundary.register_hook(lambda _gradient: self.begin_tail())  # type: ignore[no-untyped-call]
        result = self._stand_in(region, forward, args, kwargs)
        if region.name == self.last:
            output = _first(result)
            self.all_retained = self.meter.live_bytes - storage_bytes(output) - self.gathers.held_bytes
            self._before_head = self.meter.sizes()
            self.meter.reset_peak()
            self.gathers.leave_regions()
            output.register_hook(self._head_done)  # type: ignore[no-untyped-call]
        return result

    def _stand_in(self, region: OuterRegion, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """A result of the form of the region's own, its first tensor tied to the boundary in the autograd graph."""
        if region.class_index not in self._forms:
            began = self.clock()
            with self.arguments.noted(args, kwargs):
                found, tree = tree_flatten(forward(*args, **kwargs))
            # What autocast remembers of the region's weights is counted with the region.
            torch.clear_autocast_cache()
            self._forms[region.class_index] = [Form.of(leaf) for leaf in found], tree
            self.skipped_ns += self.clock() - began
            del found
        leaves, form = self._forms[region.class_index]
        anchor = torch.empty(0, requires_grad=any(p.requires_grad for p in region.module.parameters()))
        held = tensors_in(args, kwargs)
        made: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, Form):
                made.append(leaf)
            elif any(isinstance(before, Tensor) for before in made):
                made.append(leaf.empty())
            else:
                made.append(StandIn.apply(args[0], anchor, leaf, *held))  # type: ignore[no-untyped-call]
        return tree_unflatten(made, form)

    def decoder_done(self) -> None:
        """The decoder's forward (final norm, not the output layer) is over."""
        self.decoder_peak = self.meter.peak_bytes

    def loss_made(self) -> None:
        """Forward and loss are over, and so is autocast."""
        self.head_forward_peak = self.meter.peak_bytes

    def _head_done(self, _gradient: Tensor) -> None:
        own = self.gathers.head_done(self._head_parameters)
        self.head_peak, self.head_fsdp = self.meter.peak_bytes, self.fsdp_at_peak
        self.head_largest = _largest(self._sizes_at_peak)
        self.after_head = self.meter.live_bytes - own
        self.head_left_fsdp = self.gathers.held_bytes - own

    def _note_peak(self) -> None:
        """What is live at the highest moment so far beside what the regions left: only the last call's stays."""
        self.fsdp_at_peak = self.gathers.held_bytes
        if self._before_head and not self.tail_begun:
            self._sizes_at_peak = self.meter.sizes() - self._before_head - Counter(self.gathers.sizes)

    def begin_tail(self) -> None:
        self.tail_begun = True
        self.meter.reset_peak()
        self.gathers.tail_begins()


def _largest(sizes: Counter[int]) -> tuple[LargestTensors, ...]:
    """The sizes that make up at least a tenth each of a multiset of bytes, largest first."""
    total = sum(size * count for size, count in sizes.items())
    found = [LargestTensors(count, size) for size, count in sizes.items() if 10 * size * count >= total]
    return tuple(sorted(found, key=lambda tensors: -tensors.each_bytes))


def _step(actor: Actor, microbatch: Microbatch, edges: _Edges, gathers: OutsideGathers) -> tuple[int, int]:
    """Forward, loss and backward, with the gathers' moments; nanoseconds of forward and backward outside of regions."""
    began = edges.clock()

    def output_made(output: Any) -> None:
        gathers.forward_done()
        for tensor in (t for t in tensors_in([output], {}) if t.requires_grad):
            tensor.register_hook(lambda _gradient: gathers.loss_done())  # type: ignore[no-untyped-call]
            break

    handle = actor.model.register_forward_hook(lambda _module, _args, output: output_made(_leading(output)))
    causal = base_model(actor.model)
    decoder: nn.Module = getattr(causal, "base_model", causal)
    inner = decoder.register_forward_hook(lambda *_: edges.decoder_done())
    with actor.autocast():
        gathers.begin()
        try:
            logps = policy_logps(actor.model, microbatch, actor.spec.loss.head)
        finally:
            handle.remove()
            inner.remove()
        if actor.spec.loss.head != "naive":
            # Its output layer runs within the model's forward where parameters are sharded.
            output_made(logps)
        loss = grpo_loss(logps, microbatch, actor.spec.loss, actor.spec.batch.accumulation)
        del logps
    edges.loss_made()
    middle = edges.clock()
    loss.backward()  # type: ignore[no-untyped-call]
    return middle - began - edges.skipped_ns, edges.clock() - middle


def _leading(output: Any) -> Any:
    return output if isinstance(output, Tensor) else getattr(output, "logits", None)


@contextmanager
def _standing_in(regions: tuple[OuterRegion, ...], edges: _Edges) -> Iterator[None]:
    """Every region's forward goes through ``edges`` inside the block."""
    try:
        for region in regions:
            forward = region.module.forward

            def run(*args: Any, region: OuterRegion = region, forward: Any = forward, **kwargs: Any) -> Any:
                return edges.run(region, forward, args, kwargs)

            region.module.__dict__["forward"] = run
        yield
    finally:
        for region in regions:
            region.module.__dict__.pop("forward", None)


def _head_parameters(
    model: nn.Module, regions: tuple[OuterRegion, ...], sharding: Sharding | None
) -> list[nn.Parameter]:
    """Trainable parameters whose gradients are reduced once the head's backward is over."""
    if sharding is None or sharding.tied:
        return []
    inside = {id(p) for region in regions for p in region.module.parameters()}
    inside |= untied_embeddings(model)
    return [p for p in model.parameters() if p.requires_grad and id(p) not in inside]


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _first(result: Any) -> Tensor:
    tensor = next(leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor))
    assert isinstance(tensor, Tensor)
    return tensor
