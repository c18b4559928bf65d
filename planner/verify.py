"""Recomputes peak, time and risk of any choice or plan in plain integers, event by event.

Nothing here is shared with the solver or with configure.py: a wrong row or a wrong closure shows as a disagreement,
and then no plan is written. Every printed number comes from here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from hilore.planner.events import Event, RegionCost, Surroundings, events, without_boundary
from hilore.planner.modecost import exact_cost, region_cost
from hilore.planner.problem import RISK_SCALE, Problem, Verified
from hilore.planner.trace import Bucket, RegionClass, Trace
from hilore.runtime.codecs import loses
from hilore.runtime.errors import InternalError
from hilore.runtime.plan import RegionPlan


def verify(problem: Problem, choice: Sequence[int]) -> Verified:
    """Peak, time and risk of one configuration per region. Raises InternalError unless there is exactly one."""
    return _verified(_around(problem), _chosen(problem, choice))


def binding_event(problem: Problem, choice: Sequence[int]) -> Event:
    """The event that needs most, demoted or not."""
    around, costs = _around(problem), _chosen(problem, choice)
    highest = max(events(around, costs), key=lambda event: event.live_bytes)
    demoted = max(events(around, costs, demoted=True), key=lambda event: event.live_bytes)
    if demoted.live_bytes > highest.live_bytes:
        return Event(f"{demoted.name} with its L units recomputed", demoted.live_bytes)
    return highest


def _chosen(problem: Problem, choice: Sequence[int]) -> list[RegionCost]:
    if len(choice) != len(problem.regions):
        raise InternalError(f"{len(choice)} choices for {len(problem.regions)} regions")
    costs = []
    for region, index in zip(problem.regions, choice, strict=True):
        if not 0 <= index < len(region.configurations):
            raise InternalError(f"{region.name}: no configuration {index}, there are {len(region.configurations)}")
        chosen = region.configurations[index]
        costs.append(
            RegionCost(
                region.name,
                chosen.retained_bytes,
                chosen.forward_bytes,
                chosen.backward_bytes,
                chosen.demoted_backward_bytes,
                region.gradient_bytes,
                chosen.extra_ns,
                chosen.demoted_extra_ns,
                region.risk[index],
                chosen.cast_bytes,
                chosen.hold,
            )
        )
    return costs


def _around(problem: Problem) -> Surroundings:
    return Surroundings(
        problem.base_bytes,
        problem.head_bytes,
        problem.head_left_bytes,
        problem.tail_bytes,
        problem.optimizer_bytes,
        problem.constant_ns,
        problem.head_forward_bytes,
        problem.frame_bytes,
    )


def verify_modes(trace: Trace, bucket: Bucket, regions: Sequence[RegionPlan], *, risk_free: bool = False) -> Verified:
    """The same from the modes of a plan alone and the trace; also checks which units the plan calls dead.

    ``risk_free``: exposure 0, where any error is multiplied by nothing. Raises InternalError where regions, units or
    dead calls are not those of the trace, or where the trace knows nothing of what the plan keeps.
    """
    if [region.name for region in regions] != [region.name for region in bucket.regions]:
        raise InternalError(f"the plan has {len(regions)} regions, not the {len(bucket.regions)} of the trace in order")
    costs = []
    for region, known in zip(regions, bucket.regions, strict=True):
        if known.hold_only and not region.hold:
            raise InternalError(f"{region.name}: is replayed, but {known.hold_only}")
        risk = 0 if risk_free else _risk(trace, region, bucket.classes[known.class_index])
        costs.append(region_cost(region, bucket.classes[known.class_index], risk))
    held_without = regions[0].hold and not bucket.classes[bucket.regions[0].class_index].hold.keeps_boundary
    costs[0] = without_boundary(costs[0], bucket.outside.leaf_boundary_bytes, held=held_without)
    around = surroundings(trace, bucket)
    planned_ns = sum(bucket.classes[known.class_index].plan_extra_ns for known in bucket.regions)
    return _verified(replace(around, constant_ns=around.constant_ns + planned_ns), costs)


def linear_risk(trace: Trace, bucket: Bucket, regions: Sequence[RegionPlan]) -> float:
    """The sum of the relative errors that each L unit causes alone: what errors that all pointed one way would do."""
    total = 0.0
    for region, known in zip(regions, bucket.regions, strict=True):
        total += sum(math.sqrt(kappa2) for kappa2 in _kappa2s(trace, region, bucket.classes[known.class_index]))
    return total


def surroundings(trace: Trace, bucket: Bucket) -> Surroundings:
    """What no plan changes, of one length bucket, without what a plan's forward and backward take more."""
    outside = bucket.outside
    constant_ns = outside.forward_ns + outside.backward_ns + outside.optimizer_ns
    for region in bucket.regions:
        region_class = bucket.classes[region.class_index]
        constant_ns += region_class.forward_ns + region_class.backward_ns
    return Surroundings(
        trace.fixed.total_bytes + outside.before_bytes,
        outside.head_bytes,
        outside.head_left_bytes,
        outside.tail_bytes,
        outside.optimizer_bytes,
        constant_ns,
        outside.head_forward_bytes,
        outside.frame_bytes,
    )


def reference_peaks(trace: Trace, bucket: Bucket | None = None) -> tuple[int, int]:
    """Peak bytes of plain checkpointing (GC) and of none (No-GC); of the largest bucket unless one is given."""
    bucket = bucket or largest_bucket(trace)
    around = surroundings(trace, bucket)
    gc = max(event.live_bytes for event in events(around, _references(bucket, gc=True)))
    return gc, max(event.live_bytes for event in events(around, _references(bucket, gc=False)))


def reference_times(trace: Trace, bucket: Bucket | None = None) -> tuple[int, int]:
    """Step nanoseconds of GC and of No-GC; of the largest bucket unless one is given."""
    bucket = bucket or largest_bucket(trace)
    constant = surroundings(trace, bucket).constant_ns
    return constant + sum(cost.extra_ns for cost in _references(bucket, gc=True)), constant


def largest_bucket(trace: Trace) -> Bucket:
    """The bucket with most tokens per row. Raises InternalError if there is none."""
    if not trace.buckets:
        raise InternalError(f"trace {trace.name} has no length bucket")
    return max(trace.buckets, key=lambda bucket: bucket.tokens)


def _references(bucket: Bucket, *, gc: bool) -> list[RegionCost]:
    costs = []
    for region in bucket.regions:
        region_class = bucket.classes[region.class_index]
        used = region_class.gc if gc else region_class.without_checkpointing
        replay_ns = region_class.gc_replay_ns if gc else 0
        costs.append(exact_cost(region.name, region_class, used, replay_ns))
    first = bucket.classes[bucket.regions[0].class_index]
    held_without = not gc and not first.without_checkpointing.keeps_boundary
    costs[0] = without_boundary(costs[0], bucket.outside.leaf_boundary_bytes, held=held_without)
    return costs


def verify_costs(trace: Trace, bucket: Bucket, costs: Sequence[RegionCost]) -> Verified:
    """Peak and time of a policy that no plan describes, from what each region costs under it."""
    priced = list(costs)
    first = bucket.classes[bucket.regions[0].class_index]
    held_without = priced[0].held and not first.without_checkpointing.keeps_boundary
    priced[0] = without_boundary(priced[0], bucket.outside.leaf_boundary_bytes, held=held_without)
    return _verified(surroundings(trace, bucket), priced)


def _verified(around: Surroundings, costs: Sequence[RegionCost]) -> Verified:
    peak = max(events(around, costs), key=lambda event: event.live_bytes)
    demoted = max(event.live_bytes for event in events(around, costs, demoted=True))
    extra = sum(cost.extra_ns for cost in costs)
    return Verified(
        peak_bytes=peak.live_bytes,
        peak_event=peak.name,
        extra_ns=extra,
        step_ns=around.constant_ns + extra,
        risk=sum(cost.risk for cost in costs),
        demoted_peak_bytes=demoted,
        demoted_step_ns=around.constant_ns + sum(cost.demoted_extra_ns for cost in costs),
    )


def _risk(trace: Trace, region: RegionPlan, region_class: RegionClass) -> int:
    total = sum((Fraction(kappa2) for kappa2 in _kappa2s(trace, region, region_class)), Fraction(0))
    return math.ceil(Fraction(trace.calibration.interaction) ** 2 * total * RISK_SCALE)


def _kappa2s(trace: Trace, region: RegionPlan, region_class: RegionClass) -> Iterator[float]:
    """kappa2 of each L unit of the region whose codec changes values."""
    if not any(loses(unit.codec) for unit in region.units):
        return
    known = {(risk.unit, risk.codec, risk.tainted): risk.kappa2 for risk in trace.calibration.risks_of(region.name)}
    for unit in region.units:
        if loses(unit.codec):
            name, codec = unit.name.removeprefix(region.name + "."), unit.codec or ""
            found = known.get((name, codec, _tainted(region, region_class, name)), known.get((name, codec, None)))
            if found is None:
                raise InternalError(f"{unit.name}: at L with {unit.codec}, for which there is no calibrated risk")
            yield found


def _tainted(region: RegionPlan, region_class: RegionClass, lossy: str) -> tuple[str, ...]:
    """The units that run on what comes from ``lossy``, in one pass forward over who is fed by whom."""
    running = {u.name.removeprefix(region.name + ".") for u in region.units if u.mode == "R" and not u.dead}
    reached = {lossy}
    for unit in region_class.units:
        if unit.name in reached:
            reached.update(name for name in unit.feeds if name in running)
    return tuple(unit.name for unit in region_class.units if unit.name in reached and unit.name != lossy)
