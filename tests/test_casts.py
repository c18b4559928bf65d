"""Autocast's casts live until the loss is there; what only frames hold is gone where every region is held."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from hilore.planner.composition import highest, plan_compositions, reference_compositions
from hilore.planner.events import RegionCost, Surroundings, events
from hilore.planner.leastpeak import least_peak
from hilore.planner.problem import Problem
from hilore.planner.tables import make_tables
from hilore.planner.trace import Bucket, KeepSet
from hilore.planner.verify import reference_peaks, verify, verify_modes
from tests.solver_fixtures import qwen_trace, random_problem
from tests.test_composition import any_plan, check_sums

MIB = 2**20


def test_casts_stand_beside_forwards_and_the_head_until_the_loss_is_there() -> None:
    around = Surroundings(100, 30, 3, 5, 11, 0, head_forward_bytes=20)
    costs = [
        RegionCost("a", 10, 40, 20, 60, 1, 0, 0, 0, cast_bytes=6),
        RegionCost("b", 20, 30, 50, 2, 2, 0, 0, 0, cast_bytes=7),
    ]
    assert [(e.name, e.live_bytes) for e in events(around, costs)] == [
        ("forward of a", 140),
        ("forward of b", 100 + 10 + 6 + 30),
        ("head", 130 + 6 + 7 + 20),
        ("backward of b", 183),
        ("backward of a", 135),
        ("tail", 108),
        ("optimizer", 114),
    ]
    assert events(replace(around, head_bytes=34), costs)[2].live_bytes == 130 + 34


def test_arguments_that_only_frames_hold_are_gone_where_every_region_is_held() -> None:
    around = Surroundings(100, 7, 3, 5, 11, 0, frame_bytes=50)
    held = [RegionCost(name, 10, 40, 20, 20, 1, 0, 0, 0, held=True) for name in "ab"]
    one_framed = [replace(held[0], held=False), held[1]]
    # In forward the model itself has them; the optimizer's bytes are counted from the inputs alone.
    assert [e.live_bytes for e in events(around, held)] == [140, 150, 77, 93, 84, 57, 113]
    assert [e.live_bytes for e in events(around, one_framed)] == [140, 150, 127, 143, 134, 107, 113]


def with_casts(rng: random.Random) -> Problem:
    """Casts are the same for every replayed configuration of a region, none where it is held."""
    found = random_problem(rng, rng.randint(1, 6), rng.randint(1, 4))
    regions = []
    for region in found.regions:
        cast = rng.randint(0, 40)
        made = (replace(c, cast_bytes=0 if c.hold else cast) for c in region.configurations)
        regions.append(replace(region, configurations=tuple(made)))
    forward = rng.randint(0, found.head_bytes)
    return replace(found, regions=tuple(regions), head_forward_bytes=forward, frame_bytes=rng.randint(0, 20))


@pytest.mark.parametrize("block", range(4))
def test_solver_rows_never_ask_for_too_little_and_are_exact_for_all_r(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        rng = random.Random(seed)
        p = with_casts(rng)
        choice = [rng.randrange(len(region.configurations)) for region in p.regions]
        tables = make_tables(p)
        for picked in (choice, [0] * len(p.regions)):
            found = verify(p, picked)
            peak = max(found.peak_bytes, found.demoted_peak_bytes)
            ends = max(int(np.max(tables.excess(picked))), -tables.constant_room)
            assert ends + p.budget_bytes >= peak, seed
        if not any(region.configurations[0].hold for region in p.regions):
            assert ends + p.budget_bytes == peak, seed
        least = least_peak(p)
        found = verify(p, least.choice)
        assert least.peak_bytes == max(found.peak_bytes, found.demoted_peak_bytes), seed


def with_everything(bucket: Bucket) -> Bucket:
    """Casts that make the head's forward its highest moment, arguments of frames, a leaf boundary that is kept."""

    def cast(found: KeepSet) -> KeepSet:
        return replace(found, cast_bytes=9 * MIB)

    classes = tuple(
        replace(
            known,
            keep_sets=tuple(map(cast, known.keep_sets)),
            gc=cast(known.gc),
            hold=replace(known.hold, keeps_boundary=True),
        )
        for known in bucket.classes
    )
    outside = replace(
        bucket.outside,
        before_bytes=20 * MIB,
        leaf_boundary_bytes=2048 * 2048 * 2,
        head_forward_bytes=bucket.outside.head_bytes - 10 * MIB,
        frame_bytes=2 * MIB,
        optimizer_bytes=-MIB,
    )
    return replace(bucket, classes=classes, outside=outside)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_peak_is_made_of_has_the_casts(seed: int) -> None:
    trace = qwen_trace(layers=4, codecs=("int8-g128",))
    bucket = with_everything(trace.buckets[0])
    regions = any_plan(bucket, seed)
    verified = verify_modes(trace, bucket, regions)
    found = plan_compositions(trace, bucket, regions)
    for event in found:
        assert sum(size for _, size in event.parts) == event.live_bytes
    assert highest(found).live_bytes == verified.peak_bytes
    framed = sum(not region.hold for region in regions)
    head = next(event for event in found if event.event == "head")
    assert dict(head.parts).get("weights cast by autocast", 0) == (9 * framed * MIB if framed > 1 else 0)


def test_references_with_casts_add_up() -> None:
    trace = qwen_trace(layers=3)
    bucket = with_everything(trace.buckets[0])
    for gc, peak in zip((True, False), reference_peaks(trace, bucket), strict=True):
        assert highest(reference_compositions(trace, bucket, gc=gc)).live_bytes == peak
    check_sums(reference_compositions(trace, trace.buckets[0], gc=False))
