"""What peaks are made of: every event of any plan adds up to the verifier's ledger, part by part."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hilore.planner import composition
from hilore.planner.budget import MIB
from hilore.planner.composition import (
    Composition,
    composition_text,
    highest,
    plan_compositions,
    reference_compositions,
)
from hilore.planner.composition_view import part_names
from hilore.planner.regionparts import GATHERED, REDUCED, RegionParts, exact_parts
from hilore.planner.regiontimes import region_times
from hilore.planner.sharding import GroupBytes, Sharding
from hilore.planner.shardtrace import shard_bucket
from hilore.planner.trace import Bucket, Fixed, LargestTensors, OutsideParts, RegionClass, Trace
from hilore.planner.verify import reference_peaks, verify_modes
from hilore.runtime.errors import InternalError
from hilore.runtime.plan import RegionPlan, UnitPlan
from tests.solver_fixtures import assignments, qwen_trace, region_plan


def held(region_class: RegionClass, name: str) -> RegionPlan:
    units = tuple(UnitPlan(f"{name}.{unit.name}", "H", None, False, False) for unit in region_class.units)
    return RegionPlan(name, True, units)


def any_plan(bucket: Bucket, seed: int) -> tuple[RegionPlan, ...]:
    """A random assignment for each region, some regions held."""
    rng = random.Random(seed)
    offers = [assignments(region_class) for region_class in bucket.classes]
    made = []
    for region in bucket.regions:
        region_class = bucket.classes[region.class_index]
        modes, split = rng.choice(offers[region.class_index])
        if rng.random() < 0.2:
            made.append(held(region_class, region.name))
        else:
            made.append(region_plan(region_class, modes, split=split, name=region.name))
    return tuple(made)


def check_sums(found: tuple[Composition, ...]) -> None:
    for event in found:
        assert sum(size for _, size in event.parts) == event.live_bytes
        assert all(size for _, size in event.parts)


@pytest.mark.parametrize("seed", range(6))
def test_every_event_of_any_plan_adds_up(seed: int) -> None:
    trace = qwen_trace(layers=5, codecs=("int8-g128",), split=seed % 2 == 0)
    bucket = trace.buckets[0]
    if seed % 3 == 0:
        outside = replace(bucket.outside, leaf_boundary_bytes=2048 * 2048 * 2, before_bytes=12 * MIB)
        classes = tuple(replace(region_class, gradient_bytes=3 * MIB) for region_class in bucket.classes)
        bucket = replace(bucket, outside=outside, classes=classes)
    regions = any_plan(bucket, seed)
    verified = verify_modes(trace, bucket, regions)
    normal, demoted = (plan_compositions(trace, bucket, regions, demoted=demoted) for demoted in (False, True))
    check_sums(normal)
    check_sums(demoted)
    assert (highest(normal).event, highest(normal).live_bytes) == (verified.peak_event, verified.peak_bytes)
    assert highest(demoted).live_bytes == verified.demoted_peak_bytes
    assert [event.event for event in normal] == [event.event for event in demoted]
    assert len(normal) == 2 * len(regions) + 3
    for region, known in zip(regions, bucket.regions, strict=True):
        assert min([0, *region_times(region, bucket.classes[known.class_index]).values()]) == 0


def test_the_parts_are_the_bytes_that_the_modes_say() -> None:
    trace = replace(qwen_trace(layers=4), spec={"loss": {"kind": "grpo", "head": "naive"}})
    bucket = trace.buckets[0]
    logits = 2048 * 151_936 * 2
    parts = OutsideParts(0, 0, 0, (LargestTensors(3, logits),))
    bucket = replace(bucket, outside=replace(bucket.outside, parts=parts))
    region_class = bucket.classes[0]
    size = {unit.name: unit.output_bytes for unit in region_class.units}
    modes = dict.fromkeys(size, "R") | {"self_attn:attention": "H", "self_attn.v_proj": "H", "mlp.up_proj": "int8-g128"}
    rest = region_class.units[3].rest_bytes
    regions = tuple(region_plan(region_class, modes, name=region.name) for region in bucket.regions[:3])
    regions = (*regions, held(region_class, bucket.regions[3].name))
    head = next(event for event in plan_compositions(trace, bucket, regions) if event.event == "head")
    d = 2048 * 2048 * 2
    assert head.parts == (
        ("parameters", 6000 * MIB),
        ("gradient buffers", 120 * MIB),
        ("optimizer state", 240 * MIB),
        ("inputs, masks, rotary tables", 3 * MIB),
        ("boundaries", 3 * d),
        ("kept outputs (H)", 3 * (size["self_attn:attention"] + rest + size["self_attn.v_proj"])),
        ("payloads (L)", 3 * (size["mlp.up_proj"] * 33 // 64)),
        ("saved tensors of held regions", region_class.hold.retained_bytes),
        (f"head: logits and their copies (3 x {logits / MIB:,.1f} MiB)", 3 * logits),
        ("head: rest", d),
    )
    backward = next(
        event for event in plan_compositions(trace, bucket, regions) if event.event == f"backward of {regions[2].name}"
    )
    assert dict(backward.parts)["decoded outputs"] == size["mlp.up_proj"]
    assert dict(backward.parts)["left by the head"] == d
    assert composition_text(head).startswith(
        f"parameters 6,000.0 MiB + head: logits and their copies (3 x {593.5} MiB)"
    )


def test_references_add_up_to_their_peaks() -> None:
    trace = qwen_trace(layers=3)
    for gc, peak in zip((True, False), reference_peaks(trace), strict=True):
        found = reference_compositions(trace, trace.buckets[0], gc=gc)
        check_sums(found)
        assert highest(found).live_bytes == peak


def test_a_part_that_is_missing_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = qwen_trace(layers=2)

    def short(*arguments: Any, **options: Any) -> RegionParts:
        found = exact_parts(*arguments, **options)
        return replace(found, forward={name: size - 1 for name, size in found.forward.items()})

    monkeypatch.setattr(composition, "exact_parts", short)
    with pytest.raises(InternalError, match=r"forward of model\.layers\.0: its parts add up to \d+ bytes, the ledger"):
        reference_compositions(trace, trace.buckets[0], gc=True)


def sharded(*, reshard: bool = True, accumulates: bool = False) -> Trace:
    """Three layers on four ranks, with a reference model, memory of others and cuBLAS's workspace."""
    trace = qwen_trace(layers=3, codecs=("int8-g128",))
    group = GroupBytes(40 * MIB, 5 * MIB, 20 * MIB, 80 * MIB, 20 * MIB, 20 * MIB, 0, 0, MIB)
    ends = replace(group, gathered=600 * MIB)
    names = {region.name: group for region in trace.buckets[0].regions}
    ranks = Sharding(4, reshard, True, names, ends, ends)
    bucket = shard_bucket(ranks, trace.buckets[0], gpu=None, accumulates=accumulates)
    parts = OutsideParts(600 * MIB, 600 * MIB, 700 * MIB, (LargestTensors(2, MIB),))
    outside = bucket.outside
    outside = replace(
        outside,
        head_bytes=outside.head_bytes + 600 * MIB,
        head_left_bytes=outside.head_left_bytes + 600 * MIB,
        tail_bytes=outside.tail_bytes + 700 * MIB,
        parts=parts,
    )
    fixed = Fixed(1000, 200, 300, 16 * MIB + 50 * MIB + 3 * MIB, workspace_bytes=16 * MIB, reference_bytes=50 * MIB)
    return replace(trace, fixed=fixed, buckets=(replace(bucket, outside=outside),))


def test_fsdp2_workspace_and_others_have_lines_of_their_own() -> None:
    trace = sharded(reshard=False)
    for gc in (True, False):
        found = {event.event: event for event in reference_compositions(trace, trace.buckets[0], gc=gc)}
        check_sums(tuple(found.values()))
        head, first = dict(found["head"].parts), dict(found["forward of model.layers.0"].parts)
        assert (head["cuBLAS workspace"], head["reference model"]) == (16 * MIB, 50 * MIB)
        assert head["others (resident.other_mib)"] == 3 * MIB
        assert (head[GATHERED], head["head: largest tensors (2 x 1.0 MiB)"]) == (600 * MIB, 2 * MIB)
        assert head["parameters left gathered"] == 3 * 40 * MIB
        # Two copies of the region while it computes, and the embeddings' group through to the end of backward.
        assert first[GATHERED] == 80 * MIB + 600 * MIB
        assert "parameters left gathered" not in first
        backward = dict(found["backward of model.layers.1"].parts)
        assert (backward[GATHERED], backward[REDUCED]) == (600 * MIB, 80 * MIB)
        assert dict(found["tail"].parts)[GATHERED] == 700 * MIB
    resharded = sharded()
    found = {event.event: event for event in reference_compositions(resharded, resharded.buckets[0], gc=True)}
    # Its own parameters and the prefetched flat buffer of the next one, beside the embeddings.
    assert dict(found["backward of model.layers.1"].parts)[GATHERED] == 80 * MIB + 600 * MIB
    assert dict(found["optimizer"].parts)["gradients so far"] == 3 * 20 * MIB
    assert part_names(found.values())[:2] == ["parameters", "gradient buffers"]


@pytest.mark.parametrize("seed", range(4))
def test_any_plan_adds_up_on_a_rank(seed: int) -> None:
    trace = sharded(reshard=seed % 2 == 0, accumulates=seed > 1)
    regions = any_plan(trace.buckets[0], seed)
    for demoted in (False, True):
        check_sums(plan_compositions(trace, trace.buckets[0], regions, demoted=demoted))


def test_a_reduction_that_is_the_highest_moment_stands_beside_what_is_left() -> None:
    trace = sharded()
    bucket = trace.buckets[0]
    region_class = bucket.classes[-1]
    assert region_class.sharded is not None
    big = replace(region_class.sharded, reducing_bytes=1 << 30)
    top = big.reducing_bytes + big.prefetched_bytes - region_class.gc.retained_bytes
    changed = replace(region_class, sharded=big, gc=replace(region_class.gc, backward_bytes=top))
    found = reference_compositions(trace, replace(bucket, classes=(*bucket.classes[:-1], changed)), gc=True)
    check_sums(found)
    event = next(event for event in found if event.event.startswith("backward of"))
    assert dict(event.parts)[REDUCED] == 1 << 30
    assert "replay and backward of the region" not in dict(event.parts)
