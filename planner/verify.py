"""Recomputes peak, time and risk of any choice or plan in plain integers, event by event.

Nothing here is shared with the solver or with configure.py: a wrong row or a wrong closure shows as a disagreement,
and then no plan is written. Every printed number comes from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from hilore.planner.problem import RISK_SCALE, Problem, Verified
from hilore.planner.trace import Bucket, CodecCost, KeepSet, RegionClass, Trace, UnitTrace
from hilore.runtime.errors import InternalError
from hilore.runtime.plan import RegionPlan, UnitPlan


@dataclass(frozen=True, slots=True)
class RegionCost:
    """What one region costs under its modes: ``demoted_*`` when its L units run as R."""

    name: str
    retained_bytes: int
    forward_bytes: int
    backward_bytes: int
    demoted_backward_bytes: int
    gradient_bytes: int
    extra_ns: int
    demoted_extra_ns: int
    risk: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is the same for every choice."""

    base_bytes: int
    head_bytes: int
    head_left_bytes: int
    tail_bytes: int
    optimizer_bytes: int
    constant_ns: int


@dataclass(frozen=True, slots=True)
class Event:
    """Live bytes at one moment of an update: ``name`` like "head" or "backward of model.layers.35"."""

    name: str
    live_bytes: int


def verify(problem: Problem, choice: Sequence[int]) -> Verified:
    """Peak, time and risk of one configuration per region. Raises InternalError unless there is exactly one."""
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
            )
        )
    around = Surroundings(
        problem.base_bytes,
        problem.head_bytes,
        problem.head_left_bytes,
        problem.tail_bytes,
        problem.optimizer_bytes,
        problem.constant_ns,
    )
    return _verified(around, costs)


def verify_modes(trace: Trace, bucket: Bucket, regions: Sequence[RegionPlan], *, risk_free: bool = False) -> Verified:
    """The same from the modes of a plan alone and the trace; also checks which units the plan calls dead.

    ``risk_free``: exposure 0, where any error is multiplied by nothing. Raises InternalError where regions, units or
    dead calls are not those of the trace, or where the trace knows nothing of what the plan keeps.
    """
    if [region.name for region in regions] != [region.name for region in bucket.regions]:
        raise InternalError(f"the plan has {len(regions)} regions, not the {len(bucket.regions)} of the trace in order")
    costs = []
    for region, known in zip(regions, bucket.regions, strict=True):
        risk = 0 if risk_free else _risk(trace, region)
        costs.append(_region_cost(region, bucket.classes[known.class_index], risk))
    return _verified(surroundings(trace, bucket), costs)


def surroundings(trace: Trace, bucket: Bucket) -> Surroundings:
    """What no plan changes, of one length bucket."""
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
    )


def events(around: Surroundings, costs: Sequence[RegionCost], *, demoted: bool = False) -> tuple[Event, ...]:
    """One update in order, as a ledger of live bytes: each event's highest moment."""
    live = around.base_bytes
    result = []
    for cost in costs:
        result.append(Event(f"forward of {cost.name}", live + cost.forward_bytes))
        live += cost.retained_bytes
    result.append(Event("head", live + around.head_bytes))
    for cost in reversed(costs):
        working = cost.demoted_backward_bytes if demoted else cost.backward_bytes
        result.append(Event(f"backward of {cost.name}", live + around.head_left_bytes + working))
        live += cost.gradient_bytes - cost.retained_bytes
    result.append(Event("tail", live + around.tail_bytes))
    result.append(Event("optimizer", live + around.optimizer_bytes))
    return tuple(result)


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
        used = region_class.gc if gc else region_class.hold
        replay_ns = region_class.gc_replay_ns if gc else 0
        costs.append(_exact_cost(region.name, region_class, used, replay_ns))
    return costs


def _exact_cost(name: str, region_class: RegionClass, used: KeepSet, replay_ns: int) -> RegionCost:
    return RegionCost(
        name,
        used.retained_bytes,
        used.forward_bytes,
        used.backward_bytes,
        used.backward_bytes,
        region_class.gradient_bytes,
        replay_ns,
        replay_ns,
        0,
    )


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


def _region_cost(region: RegionPlan, region_class: RegionClass, risk: int) -> RegionCost:
    planned = [unit.name.removeprefix(region.name + ".") for unit in region.units]
    if planned != [unit.name for unit in region_class.units]:
        raise InternalError(f"{region.name}: the plan's units are not those of class {region_class.name}")
    if region.hold:
        return _exact_cost(region.name, region_class, region_class.hold, 0)
    at = {unit.name: plan for unit, plan in zip(region_class.units, region.units, strict=True)}
    encoded = {unit: _cost(region, unit, at[unit.name]) for unit in region_class.units if at[unit.name].mode == "L"}
    stored = {name for name, plan in at.items() if plan.mode in ("H", "L")}
    kept = {name for name, plan in at.items() if plan.mode == "H"}
    _check_dead(region, region_class, at, stored, kept)
    with_lossy, exact = _measured(region, region_class, stored), _measured(region, region_class, kept)
    payload = sum(cost.payload_bytes for cost in encoded.values())
    output = sum(unit.output_bytes for unit in encoded)
    beside = sum(unit.rest_bytes for unit in encoded) + payload
    retained = with_lossy.retained_bytes + payload - output
    encode_ns = sum(cost.encode_ns for cost in encoded.values())
    decode_ns = sum(cost.decode_ns for cost in encoded.values())
    return RegionCost(
        name=region.name,
        retained_bytes=retained,
        forward_bytes=with_lossy.forward_bytes + payload,
        backward_bytes=with_lossy.backward_bytes + output,
        demoted_backward_bytes=exact.backward_bytes + max(0, exact.retained_bytes + beside - retained),
        gradient_bytes=region_class.gradient_bytes,
        extra_ns=_replay_ns(region_class, stored) + encode_ns + decode_ns,
        demoted_extra_ns=_replay_ns(region_class, kept) + encode_ns,
        risk=risk,
    )


def _cost(region: RegionPlan, unit: UnitTrace, plan: UnitPlan) -> CodecCost:
    for cost in unit.codecs:
        if cost.codec == plan.codec:
            return cost
    raise InternalError(f"{region.name}.{unit.name}: the trace offers no codec {plan.codec}")


def _measured(region: RegionPlan, region_class: RegionClass, kept: set[str]) -> KeepSet:
    for keep_set in region_class.keep_sets:
        if set(keep_set.kept) == kept:
            return keep_set
    raise InternalError(f"{region.name}: the trace measured no keep set {sorted(kept)}")


def _needed(region_class: RegionClass, stored: set[str]) -> set[str]:
    """Units whose output a replay needs and does not have, by following needs upstream from their ends."""
    fed_by: dict[str, list[str]] = {unit.name: [] for unit in region_class.units}
    for unit in region_class.units:
        for name in unit.feeds:
            fed_by[name].append(unit.name)
    wanted = [unit.name for unit in region_class.units if unit.feeds_saved or unit.saves_own]
    wanted += [source for unit in region_class.units if unit.saves_inputs for source in fed_by[unit.name]]
    running: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in stored and name not in running:
            running.add(name)
            wanted += fed_by[name]
    return running


def _replay_ns(region_class: RegionClass, stored: set[str]) -> int:
    running = _needed(region_class, stored)
    return region_class.replay_fixed_ns + sum(unit.run_ns for unit in region_class.units if unit.name in running)


def _check_dead(
    region: RegionPlan, region_class: RegionClass, at: dict[str, UnitPlan], stored: set[str], kept: set[str]
) -> None:
    names = {unit.name for unit in region_class.units}
    dead, dead_if_demoted = names - stored - _needed(region_class, stored), names - kept - _needed(region_class, kept)
    for name, plan in at.items():
        if plan.dead != (name in dead) or plan.dead_if_demoted != (name in dead_if_demoted):
            raise InternalError(
                f"{plan.name}: planned dead={plan.dead}, dead_if_demoted={plan.dead_if_demoted}; "
                f"recomputed {name in dead}, {name in dead_if_demoted}"
            )


def _risk(trace: Trace, region: RegionPlan) -> int:
    calibration = trace.calibration
    known = {(risk.region, risk.unit, risk.codec): risk.kappa2 for risk in calibration.risks}
    total = Fraction(0)
    for unit in region.units:
        if unit.mode == "L":
            key = (region.name, unit.name.removeprefix(region.name + "."), unit.codec or "")
            if key not in known:
                raise InternalError(f"{unit.name}: at L with {unit.codec}, for which there is no calibrated risk")
            total += Fraction(known[key])
    return math.ceil(Fraction(calibration.interaction) ** 2 * total * RISK_SCALE)
