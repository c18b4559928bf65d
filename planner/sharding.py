"""FSDP as arithmetic: what one rank holds and gathers, on top of what was measured of the unsharded model.

FSDP1's sizes are in planner/flatparams.py. FSDP2's layout is that of accelerate: each region is a group of its own;
embeddings, final norm and lm_head are one group where embeddings and lm_head share their weight, else embeddings are
one and the rest another; that last group is not resharded after forward. Order and lifetimes are those of PyTorch 2.13
(``torch.distributed.fsdp.fully_shard``):

- a gather writes one flat buffer, then copies out into one tensor per parameter. In forward the flat buffer stays until
  the next group's gather is done and copied out (a local variable of ``wait_for_unshard`` holds it), so a region's
  forward holds two gathered copies of it, and its gather three. In backward it goes at once, but the next region's flat
  buffer is there already (prefetch from pre-backward). No explicit forward prefetch.
- parameters that persist in another dtype than they are gathered in are first cast into a buffer of the shard's size.
- unsharded gradients of a region come in the gathered dtype. After its backward its parameters go, the reduce-scatter
  input of the region before it goes, then its gradients are copied into one input buffer in the reduce dtype, which
  stays until the next region's backward is over; of the result stays the shard, in the persistent dtype.
- every microbatch reduces its gradients, or (``gradient_sync: last_microbatch``) only the last of an update: then
  unsharded gradients of all groups, in the reduce dtype, stay from the first to it.

Bytes are those of a rank that holds a full shard; every shard is padded to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from hilore.planner.flatparams import flat_group
from hilore.planner.shardgroup import GroupBytes, distinct, sharded_group, syncs_last
from hilore.planner.shardparameters import adapter_parameters, untied_embeddings
from hilore.planner.sources import torch_dtype
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import KeepSet, RegionClass, ShardedBytes
from hilore.runtime.errors import UnsupportedModelError

# An end region has a class of its own where what it does not carry is more than this share of its working set.
_OWN_CLASS_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Sharding:
    """The groups of one actor. ``regions`` in forward order by name; ``first`` is gathered where the forward begins,
    ``last`` where its regions end. ``tied``: they are one group (then ``last`` is ``first``), which stays gathered from
    the begin of the forward to the end of the backward. ``in_place``: a gather writes into its place at once, and a
    reduction's input goes with it (FSDP1). ``reduces_every``: microbatches from one reduction to the next. ``buffers``:
    autograd itself adds up unsharded gradients in between.
    """

    world_size: int
    reshard: bool
    tied: bool
    regions: dict[str, GroupBytes]
    first: GroupBytes
    last: GroupBytes
    in_place: bool = False
    reduces_every: int = 1
    buffers: bool = False

    @property
    def groups(self) -> tuple[GroupBytes, ...]:
        ends = (self.first,) if self.tied else (self.first, self.last)
        return (*self.regions.values(), *ends)

    @property
    def through_bytes(self) -> int:
        """Gathered from before the first region's forward until after its backward."""
        return self.first.gathered if self.tied else 0

    def flat(self, group: GroupBytes) -> int:
        """The flat buffer beside the parameters that a gather copies out of it; one rank alone needs none."""
        return group.gathered if self.world_size > 1 and not self.in_place else 0

    def prefetched(self, group: GroupBytes) -> int:
        """What a prefetch in backward takes: the flat buffer, or the parameters themselves."""
        return group.gathered if self.world_size > 1 else 0

    def gathering(self, group: GroupBytes, flat_before: int) -> int:
        """The highest point of a gather in forward, beside the flat buffer of the one before."""
        return flat_before + self.prefetched(group) + max(group.cast, self.flat(group))

    def lingering(self, group: GroupBytes) -> int:
        """What a reduction leaves until the next one: its input."""
        return 0 if self.in_place else group.reduce_input


@dataclass(frozen=True, slots=True)
class Around:
    """What neighbours leave to a region: the flat buffer of the gather before it in forward, what is prefetched during
    its backward, the reduce-scatter input that is still held when its backward begins. ``freed``: at least so much of
    the gradients that earlier microbatches left is gone when its own are reduced."""

    flat_before: int
    flat_next: int
    reduce_held: int
    freed: int = 0


def sharding_of(spec: ModelSpec, model: nn.Module, regions: Mapping[str, nn.Module]) -> Sharding | None:
    """The sharding that ``parallel`` asks for, None where it asks for none.

    ``model``: parameters in the dtype of the forward (planner/sources.py, module_dtype). ``regions`` by name in
    forward order. Raises UnsupportedModelError for regions that are parts of decoder layers.
    """
    if spec.parallel.kind == "none":
        return None
    if spec.region_grain != "layer":
        raise UnsupportedModelError(
            f"region_grain is {spec.region_grain}, but FSDP gathers whole decoder layers; set region_grain: layer",
            field="region_grain",
            found=spec.region_grain,
        )
    inside = {id(p) for module in regions.values() for p in module.parameters()}
    outside = [p for p in distinct(model.parameters()) if id(p) not in inside]
    every = spec.batch.accumulation if syncs_last(spec) else 1
    if spec.parallel.kind == "fsdp1":
        root = flat_group(spec, outside)
        flat_groups = {name: flat_group(spec, distinct(module.parameters())) for name, module in regions.items()}
        ranks, reshard = spec.parallel.world_size, spec.parallel.reshard_after_forward
        return Sharding(ranks, reshard, True, flat_groups, root, root, in_place=True, reduces_every=every)
    embeddings = untied_embeddings(model)
    # accelerate lists final norm, embeddings, lm_head in this order.
    outside.sort(key=lambda p: p.dim() > 1)
    first = [p for p in outside if id(p) in embeddings] if embeddings else outside
    last = [p for p in outside if id(p) not in embeddings] if embeddings else outside
    adapters = adapter_parameters(model)
    return Sharding(
        world_size=spec.parallel.world_size,
        reshard=spec.parallel.reshard_after_forward,
        tied=not embeddings,
        regions={name: sharded_group(spec, module.parameters(), adapters) for name, module in regions.items()},
        first=sharded_group(spec, first, adapters),
        last=sharded_group(spec, last, adapters),
        reduces_every=every,
        buffers=every > 1 and _trained_in(model) == {torch_dtype(spec.precision.grads)},
    )


def _trained_in(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}


def _around(sharding: Sharding, name: str) -> Around:
    """What the neighbours of region ``name`` leave to it."""
    names = list(sharding.regions)
    place = names.index(name)
    after = sharding.regions[names[min(place + 1, len(names) - 1)]]
    before = sharding.regions[names[place - 1]] if place else sharding.first
    # Tied embeddings are there already when the first region's backward would gather what comes before it.
    prefetched = 0 if sharding.tied and not place else sharding.prefetched(before)
    left_by_head = 0 if sharding.tied else sharding.lingering(sharding.last)
    held = sharding.lingering(after) if place < len(names) - 1 else left_by_head
    freed = 0 if sharding.tied else _given_back(sharding, sharding.last)
    if place < len(names) - 1:
        freed += _given_back(sharding, after)
    if freed:
        # Not so in earlier microbatches, which reduce nothing.
        held = max(held - freed, 0)
    return Around(sharding.flat(before), prefetched if sharding.reshard else 0, held, freed)


def _given_back(sharding: Sharding, group: GroupBytes) -> int:
    """What a reduction leaves less of the gradients that earlier microbatches had left."""
    return 0 if sharding.in_place or not group.accumulated else group.accumulated - group.reduced


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
        boundary = min(keep_set.retained_bytes for keep_set in classes[index].keep_sets)
        gathering = boundary + sharding.gathering(sharding.regions[name], around.flat_before)
        if gathering + sharding.through_bytes <= least:
            # The first gather, beside the embeddings' buffer, then stays under the head's event in every plan.
            around = replace(around, flat_before=min(around.flat_before, usual.flat_before))
        grows = not accumulates and sharding.regions[name].reduced > boundary
        if name == listed[0][0] and not grows:
            # Backward falls from region to region then, so that the last one of it, the first region, never binds.
            around = replace(around, flat_next=max(around.flat_next, usual.flat_next))
        largest = max(keep_set.backward_bytes for keep_set in classes[index].keep_sets)
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
        (usual.freed, around.freed),
    )
    return any(own > shared or shared - own > least for own, shared in pairs)


def _shard_class(
    sharding: Sharding, region_class: RegionClass, name: str, around: Around, accumulates: bool
) -> RegionClass:
    group = sharding.regions[name]
    # The region's input is there while its parameters are gathered.
    boundary = min(keep_set.retained_bytes for keep_set in region_class.keep_sets)

    def shard(keep_set: KeepSet) -> KeepSet:
        return shard_keep_set(sharding, group, around, keep_set, boundary)

    return replace(
        region_class,
        name=name,
        keep_sets=tuple(map(shard, region_class.keep_sets)),
        hold=shard(region_class.hold),
        no_gc=shard(region_class.no_gc) if region_class.no_gc is not None else None,
        gc=shard(region_class.gc),
        gradient_bytes=0 if accumulates else group.reduced,
        sharded=_sharded_bytes(sharding, group, around, boundary),
    )


def _sharded_bytes(sharding: Sharding, group: GroupBytes, around: Around, boundary: int) -> ShardedBytes:
    """The terms of `shard_keep_set` that are FSDP2's."""
    flat, gathered = sharding.flat(group), group.gathered
    opening = max(flat + gathered, gathered + around.flat_next + group.cast)
    return ShardedBytes(
        retained_bytes=0 if sharding.reshard else gathered,
        forward_bytes=flat + gathered + sharding.through_bytes,
        gathering_bytes=boundary + sharding.gathering(group, around.flat_before) + sharding.through_bytes,
        backward_bytes=gathered + around.flat_next if sharding.reshard else 0,
        opening_bytes=opening if sharding.reshard else 0,
        held_bytes=around.reduce_held,
        reducing_bytes=group.reducing - around.freed if group.gradients else 0,
        prefetched_bytes=around.flat_next,
    )


def shard_keep_set(sharding: Sharding, group: GroupBytes, around: Around, keep_set: KeepSet, boundary: int) -> KeepSet:
    """One keep set of a region with its gathered parameters, its neighbours' buffers and its gradient reduction.

    ``keep_set`` was measured unsharded, without gradient buffers before it: its backward holds the region's unsharded
    gradients. ``boundary``: bytes of the region's input.
    """
    flat, gathered = sharding.flat(group), group.gathered
    stays = 0 if sharding.reshard else gathered
    forward = max(boundary + sharding.gathering(group, around.flat_before), flat + gathered + keep_set.forward_bytes)
    if sharding.reshard:
        # The region's cast stands for the next one's as well: both are there before any of the region's own work.
        opening = max(flat + gathered, gathered + around.flat_next + group.cast)
        backward = max(opening, gathered + around.flat_next + keep_set.backward_bytes)
    else:
        backward = keep_set.backward_bytes
    backward += around.reduce_held
    handed = keep_set.handed_bytes
    if handed is not None:
        handed += around.reduce_held + (gathered + around.flat_next if sharding.reshard else 0)
    # What the region retained is gone when its gradients are reduced.
    reducing = 0
    if group.gradients:
        reducing = around.flat_next + group.reducing - around.freed - keep_set.retained_bytes - stays
    return replace(
        keep_set,
        retained_bytes=keep_set.retained_bytes + stays,
        forward_bytes=forward + sharding.through_bytes,
        backward_bytes=max(backward, reducing),
        handed_bytes=handed,
    )
