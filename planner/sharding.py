"""FSDP2 as arithmetic: what one rank holds and gathers, on top of what was measured of the unsharded model.

The layout is that of accelerate: each region is a group of its own; embeddings, final norm and lm_head are one group
where embeddings and lm_head share their weight, else embeddings are one and the rest another; that last group is not
resharded after forward. Order and lifetimes are those of PyTorch 2.13 (``torch.distributed.fsdp.fully_shard``):

- a gather writes one flat buffer, then copies out into one tensor per parameter. In forward the flat buffer stays
  until the next group's gather is done, so a region's forward holds two gathered copies of it. In backward it goes at
  once, but the next region's flat buffer is there already (prefetch from pre-backward). No explicit forward prefetch.
- parameters that persist in another dtype than they are gathered in are first cast into a buffer of the shard's size.
- unsharded gradients of a region come in the gathered dtype. After its backward its parameters go, the reduce-scatter
  input of the region before it goes, then its gradients are copied into one input buffer in the reduce dtype, which
  stays until the next region's backward is over; of the result stays the shard, in the persistent dtype.
- every microbatch reduces its gradients.

Bytes are those of a rank that holds a full shard; every shard is padded to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hilore.planner.sources import torch_dtype
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import KeepSet, RegionClass, ShardedBytes
from hilore.runtime.errors import UnsupportedModelError

# An end region has a class of its own where what it does not carry is more than this share of its working set.
_OWN_CLASS_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """One group of parameters on one rank.

    ``gathered``: all its parameters in the dtype of the forward, padded; also the size of the flat buffer. ``cast``:
    the shards that a gather casts first. ``gradients``: unsharded, as autograd makes them. ``reduce_input``: the same
    in the reduce dtype, padded; ``reduce_output``: the rank's part of it; ``reduced``: that part in the persistent
    dtype, ``recast`` the same where it is another tensor than the output, else 0. ``reduce_copy``: what the collective
    itself takes: gloo, on the CPU, reduces a copy of its input. ``kept_gradient``: of the last parameter, which a loop
    variable of PyTorch's ``foreach_reduce`` holds until the reduction is over.
    """

    gathered: int
    cast: int
    gradients: int
    reduce_input: int
    reduce_output: int
    reduced: int
    recast: int
    reduce_copy: int
    kept_gradient: int

    @property
    def reducing(self) -> int:
        """Highest bytes of a gradient reduction: gradients and input, then input, output and what is made of it."""
        beside = max(self.reduce_copy, self.recast)
        later = self.reduce_input + self.reduce_output + beside + self.kept_gradient
        return max(self.gradients + self.reduce_input, later)


@dataclass(frozen=True, slots=True)
class Sharding:
    """The groups of one actor. ``regions`` in forward order by name; ``first`` is gathered where the forward begins,
    ``last`` where its regions end. ``tied``: they are one group (then ``last`` is ``first``), which stays gathered from
    the begin of the forward to the end of the backward.
    """

    world_size: int
    reshard: bool
    tied: bool
    regions: dict[str, GroupBytes]
    first: GroupBytes
    last: GroupBytes

    @property
    def through_bytes(self) -> int:
        """Gathered from before the first region's forward until after its backward."""
        return self.first.gathered if self.tied else 0

    def flat(self, group: GroupBytes) -> int:
        """The flat buffer of a gather; one rank alone needs none."""
        return group.gathered if self.world_size > 1 else 0


@dataclass(frozen=True, slots=True)
class Around:
    """What neighbours leave to a region: the flat buffer of the gather before it in forward, the flat buffer that is
    prefetched during its backward, the reduce-scatter input that is still held when its backward begins."""

    flat_before: int
    flat_next: int
    reduce_held: int


def sharding_of(spec: ModelSpec, model: nn.Module, regions: Mapping[str, nn.Module]) -> Sharding | None:
    """The sharding that ``parallel`` asks for, None where it asks for none.

    ``model``: parameters in the dtype of the forward (planner/sources.py, module_dtype). ``regions`` by name in
    forward order. Raises UnsupportedModelError for regions that are parts of decoder layers.
    """
    if spec.parallel.kind != "fsdp2":
        return None
    if spec.region_grain != "layer":
        raise UnsupportedModelError(
            f"region_grain is {spec.region_grain}, but FSDP2 gathers whole decoder layers; set region_grain: layer",
            field="region_grain",
            found=spec.region_grain,
        )
    inside = {id(p) for module in regions.values() for p in module.parameters()}
    outside = [p for p in _distinct(model.parameters()) if id(p) not in inside]
    embeddings = untied_embeddings(model)
    # accelerate lists final norm, embeddings, lm_head in this order.
    outside.sort(key=lambda p: p.dim() > 1)
    first = [p for p in outside if id(p) in embeddings] if embeddings else outside
    last = [p for p in outside if id(p) not in embeddings] if embeddings else outside
    adapters = _adapter_parameters(model)
    return Sharding(
        world_size=spec.parallel.world_size,
        reshard=spec.parallel.reshard_after_forward,
        tied=not embeddings,
        regions={name: _group(spec, module.parameters(), adapters) for name, module in regions.items()},
        first=_group(spec, first, adapters),
        last=_group(spec, last, adapters),
    )


def persistent_dtype(spec: ModelSpec, *, adapter: bool) -> torch.dtype:
    """The dtype in which a parameter persists (its shard and its gradient's), unlike the one it is gathered in."""
    return torch_dtype(str(spec.adapter.dtype) if adapter else spec.precision.params)


def shard_parameters(spec: ModelSpec, model: nn.Module) -> nn.ParameterList:
    """One rank's shards of all parameters, padded, empty, on the model's device: for measuring state and optimizer."""
    adapters = _adapter_parameters(model)
    shards = nn.ParameterList()
    for parameter in _distinct(model.parameters()):
        rows = -(-parameter.shape[0] // spec.parallel.world_size)
        dtype = persistent_dtype(spec, adapter=id(parameter) in adapters)
        data = torch.empty((rows, *parameter.shape[1:]), dtype=dtype, device=parameter.device)
        shards.append(nn.Parameter(data, requires_grad=parameter.requires_grad))
    return shards


def _around(sharding: Sharding, name: str) -> Around:
    """What the neighbours of region ``name`` leave to it."""
    names = list(sharding.regions)
    place = names.index(name)
    after = sharding.regions[names[min(place + 1, len(names) - 1)]]
    before = sharding.regions[names[place - 1]] if place else sharding.first
    # Tied embeddings are there already when the first region's backward would gather what comes before it.
    prefetched = 0 if sharding.tied and not place else sharding.flat(before)
    left_by_head = 0 if sharding.tied else sharding.last.reduce_input
    held = after.reduce_input if place < len(names) - 1 else left_by_head
    return Around(sharding.flat(before), prefetched if sharding.reshard else 0, held)


def shard_classes(
    sharding: Sharding,
    classes: tuple[RegionClass, ...],
    regions: Iterable[tuple[str, int]],
    *,
    accumulates: bool,
    head_bytes: int,
) -> tuple[tuple[RegionClass, ...], tuple[int, ...]]:
    """Classes with what FSDP2 adds to each region, and each region's class among them.

    ``regions``: name and class index in forward order. ``accumulates``: gradients exist before the microbatch, so that
    a reduced one is added and does not stay. ``head_bytes`` as in trace.Outside. What neighbours leave differs at both
    ends; an end has a class of its own only where that matters.
    """
    listed = list(regions)
    middle = {index: _around(sharding, name) for name, index in reversed(listed[1:-1])}
    least = head_bytes + sum(min(s.retained_bytes for s in classes[index].keep_sets) for _, index in listed)
    made: dict[tuple[int, Around], int] = {}
    found: list[RegionClass] = []
    indices = []
    for name, index in listed:
        around = _around(sharding, name)
        usual = middle.get(index, around)
        gathering = around.flat_before + sharding.regions[name].cast + sharding.flat(sharding.regions[name])
        if gathering + sharding.through_bytes <= least:
            # The first gather, beside the embeddings' buffer, then stays under the head's event in every plan.
            around = replace(around, flat_before=min(around.flat_before, usual.flat_before))
        keep_sets = classes[index].keep_sets
        boundary = min(keep_set.retained_bytes for keep_set in keep_sets)
        grows = not accumulates and sharding.regions[name].reduced > boundary
        if name == listed[0][0] and not grows:
            # Backward falls from region to region then, so that the last one of it, the first region, never binds.
            around = replace(around, flat_next=max(around.flat_next, usual.flat_next))
        largest = max(keep_set.backward_bytes for keep_set in keep_sets)
        if not _differs(around, usual, _OWN_CLASS_SHARE * largest):
            around = usual
        if (index, around) not in made:
            made[index, around] = len(found)
            found.append(_shard_class(sharding, classes[index], name, around, accumulates))
        indices.append(made[index, around])
    return tuple(found), tuple(indices)


def _differs(around: Around, usual: Around, least: float) -> bool:
    """Whether ``usual`` would understate ``around``, or overstate it by more than ``least`` bytes."""
    pairs = (
        (around.flat_before, usual.flat_before),
        (around.flat_next, usual.flat_next),
        (around.reduce_held, usual.reduce_held),
    )
    return any(own > shared or shared - own > least for own, shared in pairs)


def _shard_class(
    sharding: Sharding, region_class: RegionClass, name: str, around: Around, accumulates: bool
) -> RegionClass:
    group = sharding.regions[name]

    def shard(keep_set: KeepSet) -> KeepSet:
        return shard_keep_set(sharding, group, around, keep_set)

    return replace(
        region_class,
        name=name,
        keep_sets=tuple(map(shard, region_class.keep_sets)),
        hold=shard(region_class.hold),
        gc=shard(region_class.gc),
        gradient_bytes=0 if accumulates else group.reduced,
        sharded=_sharded_bytes(sharding, group, around),
    )


def _sharded_bytes(sharding: Sharding, group: GroupBytes, around: Around) -> ShardedBytes:
    """The terms of `shard_keep_set` that are FSDP2's."""
    flat, gathered = sharding.flat(group), group.gathered
    opening = max(flat + gathered, gathered + around.flat_next + group.cast)
    return ShardedBytes(
        retained_bytes=0 if sharding.reshard else gathered,
        forward_bytes=flat + gathered + sharding.through_bytes,
        gathering_bytes=around.flat_before + group.cast + flat + sharding.through_bytes,
        backward_bytes=gathered + around.flat_next if sharding.reshard else 0,
        opening_bytes=opening if sharding.reshard else 0,
        held_bytes=around.reduce_held,
        reducing_bytes=group.reducing if group.gradients else 0,
        prefetched_bytes=around.flat_next,
    )


def shard_keep_set(sharding: Sharding, group: GroupBytes, around: Around, keep_set: KeepSet) -> KeepSet:
    """One keep set of a region with its gathered parameters, its neighbours' buffers and its gradient reduction.

    ``keep_set`` was measured unsharded, without gradient buffers before it: its backward holds the region's unsharded
    gradients.
    """
    flat, gathered = sharding.flat(group), group.gathered
    stays = 0 if sharding.reshard else gathered
    gathering = around.flat_before + group.cast + flat
    forward = max(gathering, flat + gathered + keep_set.forward_bytes)
    if sharding.reshard:
        # flat_next stands for the next region's cast as well: both are there before any of the region's own work.
        opening = max(flat + gathered, gathered + around.flat_next + group.cast)
        backward = max(opening, gathered + around.flat_next + keep_set.backward_bytes)
    else:
        backward = keep_set.backward_bytes
    backward += around.reduce_held
    # What the region retained is gone when its gradients are reduced.
    reducing = around.flat_next + group.reducing - keep_set.retained_bytes - stays if group.gradients else 0
    return replace(
        keep_set,
        retained_bytes=keep_set.retained_bytes + stays,
        forward_bytes=forward + sharding.through_bytes,
        backward_bytes=max(backward, reducing),
    )


def _group(spec: ModelSpec, parameters: Iterable[Tensor], adapters: set[int]) -> GroupBytes:
    ranks = spec.parallel.world_size
    reduce_dtype = torch_dtype(spec.precision.grads)
    gathered = cast = gradients = reduce_input = reduced = recast = last = 0
    for parameter in _distinct(parameters):
        persists = persistent_dtype(spec, adapter=id(parameter) in adapters)
        padded = -(-parameter.shape[0] // ranks) * ranks * (parameter.numel() // max(parameter.shape[0], 1))
        gathered += padded * parameter.element_size()
        if persists != parameter.dtype:
            cast += padded // ranks * parameter.element_size()
        if parameter.requires_grad:
            last = parameter.numel() * parameter.element_size()
            gradients += last
            reduce_input += padded * reduce_dtype.itemsize
            reduced += padded // ranks * persists.itemsize
            if persists != reduce_dtype:
                recast += padded // ranks * persists.itemsize
    copy = reduce_input if spec.device.kind == "cpu" and ranks > 1 else 0
    return GroupBytes(gathered, cast, gradients, reduce_input, reduce_input // ranks, reduced, recast, copy, last)


def _distinct(parameters: Iterable[Tensor]) -> list[Tensor]:
    return list({id(parameter): parameter for parameter in parameters}.values())


def _adapter_parameters(model: nn.Module) -> set[int]:
    return {id(p) for name, p in model.named_parameters() if any(part.startswith("lora_") for part in name.split("."))}


def untied_embeddings(model: nn.Module) -> set[int]:
    """Ids of the input embedding's parameters where they are not the output layer's too; empty otherwise."""
    embedding, output = (getattr(model, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output"))
    if not isinstance(embedding, nn.Module) or not isinstance(output, nn.Module):
        return set()
    inputs, outputs = ({id(p) for p in module.parameters()} for module in (embedding, output))
    return set() if inputs & outputs else inputs
