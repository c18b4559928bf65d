"""A traced bucket -> the same bucket on one rank of FSDP2 (the arithmetic is planner/sharding.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from hilore.planner.actor import Actor
from hilore.planner.gpu import Gpu
from hilore.planner.roofline import collective_ns
from hilore.planner.sharding import GroupBytes, Sharding, persistent_dtype, shard_classes, shard_parameters
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Bucket, Outside, RegionClass, RegionTrace
from hilore.runtime.fingerprint import model_fingerprint


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


def shard_module(fake: Actor) -> nn.Module:
    """One rank's shards of the actor's parameters, as a module to hand to an optimizer."""
    with fake.faked():
        return shard_parameters(fake.spec, fake.model)


def fingerprint_model(fake: Actor) -> dict[str, Any]:
    """The model's fingerprint; under FSDP2 with the dtypes in which parameters persist, as a trainer's model shows."""
    if fake.spec.parallel.kind != "fsdp2":
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
    """What the user should know of how FSDP2 is taken to run."""
    ends = (
        "embeddings and head are one group, gathered from begin to end"
        if sharding.tied
        else ("embeddings are one group, final norm and head another")
    )
    notes = [
        f"FSDP2 on {sharding.world_size} ranks: each region is a group, {ends}; a region's forward holds two gathered "
        "copies of it, its backward one and the flat buffer of the next (prefetch)"
    ]
    if spec.batch.accumulation > 1:
        regions = sum(group.gradients for group in sharding.regions.values())
        ends_bytes = sharding.first.gradients + (0 if sharding.tied else sharding.last.gradients)
        notes.append(
            "gradients are taken to be reduced in every microbatch; a trainer that skips the reduction until the last "
            "(accelerate without sync_each_batch) holds them unsharded, at least "
            f"{(regions + ends_bytes) / 2**20:,.0f} MiB more"
        )
    if gpu is None:
        notes.append("time of collectives is not in the times: the card's links are not in the table of GPUs")
    else:
        rate = gpu.link_bandwidth * gpu.link_fraction.value / 1e9
        notes.append(
            f"collectives at {rate:.0f} GB/s per rank ({gpu.link_fraction.source}); those of a region overlap its "
            "compute and count where they take longer, those of embeddings and head overlap nothing"
        )
    return notes


def _with_communication(sharding: Sharding, region_class: RegionClass, gpu: Gpu) -> RegionClass:
    group = sharding.regions[region_class.name]
    gather = _gather_ns(sharding, group, gpu)
    reduce = collective_ns(gpu, group.reduce_input, sharding.world_size)
    backward = reduce + (gather if sharding.reshard else 0)
    return replace(
        region_class,
        forward_ns=max(region_class.forward_ns, gather),
        backward_ns=max(region_class.backward_ns, backward),
    )


def _outside_with_communication(sharding: Sharding, outside: Outside, gpu: Gpu) -> Outside:
    groups = [sharding.first] if sharding.tied else [sharding.first, sharding.last]
    return replace(
        outside,
        forward_ns=outside.forward_ns + sum(_gather_ns(sharding, group, gpu) for group in groups),
        backward_ns=outside.backward_ns
        + sum(collective_ns(gpu, group.reduce_input, sharding.world_size) for group in groups),
    )


def _gather_ns(sharding: Sharding, group: GroupBytes, gpu: Gpu) -> int:
    return collective_ns(gpu, group.gathered, sharding.world_size)
