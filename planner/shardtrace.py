"""A traced bucket -> the same bucket on one rank of FSDP (the arithmetic is planner/sharding.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from hilore.planner.actor import Actor
from hilore.planner.gpu import Gpu
from hilore.planner.roofline import collective_ns
from hilore.planner.shardgroup import GroupBytes, persistent_dtype, syncs_last
from hilore.planner.sharding import Sharding, shard_classes
from hilore.planner.shardparameters import shard_parameters
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Bucket, Fixed, Outside, RegionClass, RegionTrace
from hilore.runtime.fingerprint import model_fingerprint

MIB = 2**20


def shard_bucket(sharding: Sharding, bucket: Bucket, *, gpu: Gpu | None, accumulates: bool) -> Bucket:
    """Regions with their gathers and reductions, in bytes and, where ``gpu`` is known, in time.

    What lies outside has FSDP2's bytes already: they were acted out while it was measured.
    """
    listed = [(region.name, region.class_index) for region in bucket.regions]
    classes, indices = shard_classes(
        sharding, bucket.classes, listed, accumulates=accumulates, head_bytes=bucket.outside.head_bytes
    )
    regions = tuple(RegionTrace(name, index) for (name, _), index in zip(listed, indices, strict=True))
    if gpu is not None:
        classes = tuple(_with_communication(sharding, region_class, gpu) for region_class in classes)
    outside = bucket.outside if gpu is None else _outside_with_communication(sharding, bucket.outside, gpu)
    return replace(bucket, classes=classes, regions=regions, outside=outside)


def shard_module(fake: Actor, regions: Iterable[nn.Module] = ()) -> nn.Module:
    """One rank's shards of the actor's parameters, as a module to hand to an optimizer."""
    with fake.faked():
        return shard_parameters(fake.spec, fake.model, regions)


def unsharded_gradients(sharding: Sharding, fixed: Fixed, optimizer_bytes: int) -> tuple[Fixed, int]:
    """The same with gradients that stay unsharded until the last microbatch's backward, which leaves shards of them."""
    accumulated = sum(group.accumulated for group in sharding.groups)
    if not accumulated:
        return fixed, optimizer_bytes
    left = fixed.gradient_bytes - accumulated
    return replace(fixed, gradient_bytes=accumulated), optimizer_bytes + left


def fingerprint_model(fake: Actor) -> dict[str, Any]:
    """The model's fingerprint; under FSDP with the dtypes in which parameters persist, as a trainer's model shows."""
    if fake.spec.parallel.kind == "none":
        return model_fingerprint(fake.model)
    with fake.faked():
        gathered = {name: parameter.data for name, parameter in fake.model.named_parameters()}
        try:
            for name, parameter in fake.model.named_parameters():
                adapter = any(part.startswith("lora_") for part in name.split("."))
                parameter.data = parameter.data.to(persistent_dtype(fake.spec, adapter=adapter))
            return model_fingerprint(fake.model)
        finally:
            for name, parameter in fake.model.named_parameters():
                parameter.data = gathered[name]


def sharding_notes(sharding: Sharding, spec: ModelSpec, gpu: Gpu | None) -> list[str]:
    """What the user should know of how FSDP is taken to run."""
    notes = [_layout_note(sharding)]
    if spec.batch.accumulation > 1:
        notes.append(_gradients_note(sharding, spec))
    if gpu is None:
        notes.append("time of collectives is not in the times: the card's links are not in the table of GPUs")
    else:
        rate = gpu.link_bandwidth * gpu.link_fraction.value / 1e9
        notes.append(
            f"collectives at {rate:.0f} GB/s per rank ({gpu.link_fraction.source}); those of a region overlap its "
            "compute and count where they take longer, those of embeddings and head overlap nothing"
        )
    return notes


def _layout_note(sharding: Sharding) -> str:
    if sharding.in_place:
        return (
            f"FSDP1 on {sharding.world_size} ranks: each region is a flat parameter, all else the root's, gathered "
            "from begin to end; a region's backward holds it and the next one gathered (BACKWARD_PRE)"
        )
    ends = (
        "embeddings and head are one group, gathered from begin to end"
        if sharding.tied
        else "embeddings are one group, final norm and head another"
    )
    return (
        f"FSDP2 on {sharding.world_size} ranks: each region is a group, {ends}; a region's forward holds two gathered "
        "copies of it, its backward one and the flat buffer of the next (prefetch)"
    )


def _gradients_note(sharding: Sharding, spec: ModelSpec) -> str:
    if syncs_last(spec):
        held = sum(group.accumulated for group in sharding.groups) / MIB
        return (
            f"gradients are reduced in the last microbatch of an update alone: {held:,.0f} MiB of them stay unsharded "
            "until then (parallel.gradient_sync: every_microbatch would hold shards)"
        )
    more = sum(group.gradients for group in sharding.groups) / MIB
    return (
        "gradients are taken to be reduced in every microbatch (accelerate: sync_each_batch); a trainer that skips "
        f"the reduction until the last one holds them unsharded, at least {more:,.0f} MiB more: for it set "
        "parallel.gradient_sync: last_microbatch"
    )


def _with_communication(sharding: Sharding, region_class: RegionClass, gpu: Gpu) -> RegionClass:
    group = sharding.regions[region_class.name]
    gather = _gather_ns(sharding, group, gpu)
    reduce = _reduce_ns(sharding, group, gpu)
    backward = reduce + (gather if sharding.reshard else 0)
    return replace(
        region_class,
        forward_ns=max(region_class.forward_ns, gather),
        backward_ns=max(region_class.backward_ns, backward),
    )


def _outside_with_communication(sharding: Sharding, outside: Outside, gpu: Gpu) -> Outside:
    ends = (sharding.first,) if sharding.tied else (sharding.first, sharding.last)
    return replace(
        outside,
        forward_ns=outside.forward_ns + sum(_gather_ns(sharding, group, gpu) for group in ends),
        backward_ns=outside.backward_ns + sum(_reduce_ns(sharding, group, gpu) for group in ends),
    )


def _gather_ns(sharding: Sharding, group: GroupBytes, gpu: Gpu) -> int:
    return collective_ns(gpu, group.gathered, sharding.world_size)


def _reduce_ns(sharding: Sharding, group: GroupBytes, gpu: Gpu) -> int:
    """Of one microbatch: a share of it where only the last one of an update reduces."""
    moved = group.reduce_output * sharding.world_size
    return collective_ns(gpu, moved, sharding.world_size) // sharding.reduces_every
