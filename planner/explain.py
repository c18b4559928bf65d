"""`explain PLAN UNIT`: why a unit is what it is: what binds, and the price of each alternative, all else equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hilore.planner.budget import mib
from hilore.planner.build import risk_limit
from hilore.planner.composition import Composition, highest, plan_compositions
from hilore.planner.configure import NEVER_LOSSY_KINDS
from hilore.planner.emit import update_error
from hilore.planner.liveness import dead_in_late_stage, running_units
from hilore.planner.plantrace import bucket_of_plan
from hilore.planner.problem import Verified
from hilore.planner.regimes import plan_limit
from hilore.planner.regionparts import planned_parts
from hilore.planner.regiontimes import region_times
from hilore.planner.spec_rules import close_match
from hilore.planner.trace import Bucket, CodecCost, RegionClass, Trace, UnitTrace
from hilore.planner.verify import verify_modes
from hilore.runtime.codecs import loses
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan, RegionPlan, UnitPlan

Mode = Literal["H", "L", "R"]
ModeAndCodec = tuple[Mode, str | None]
Differences = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Alternative:
    """The whole plan with one thing changed: ``change``, and by how much more (or less) it then takes.

    ``step_ns`` is the sum of ``times`` (nanoseconds by what takes them); ``event`` the event that would set the peak
    (``demoted``: with the L units run as R), ``event_bytes`` what it would have more than now, the sum of ``parts``
    (bytes by part); ``over_bytes`` by how much it would pass the budget less its margin (negative: room left).
    ``peak_bytes``: the new peak less the present one, wherever they are. ``retained_bytes``: what the region keeps more
    from forward to backward. ``refused`` is empty where the plan stays within budget and risk. ``risk``: predicted
    error, not a difference. ``priced`` False: the trace cannot say what it costs, or it is not offered; figures are 0.
    """

    change: str
    refused: str
    priced: bool = False
    step_ns: int = 0
    times: Differences = ()
    retained_bytes: int = 0
    peak_bytes: int = 0
    event: str = ""
    demoted: bool = False
    event_bytes: int = 0
    parts: Differences = ()
    over_bytes: int = 0
    risk: float = 0.0
    over_risk: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """One unit of one plan. ``run_ns``, ``output_bytes``, ``rest_bytes``, ``codecs``: what R costs, what H keeps and
    what L would keep and take, of this unit alone.

    ``risk``: predicted error of an update under this plan; ``risk_limit`` None: no limit. ``spare_bytes``: what the
    budget leaves at the highest event, demoted or not. ``binds``: what keeps the faster alternatives out.
    ``hold_only``: why the region can only be held.
    """

    unit: str
    kind: str
    mode: str
    dead: bool
    held: bool
    run_ns: int
    output_bytes: int
    rest_bytes: int
    codecs: tuple[CodecCost, ...]
    peak_event: str
    spare_bytes: int
    risk: float
    risk_limit: float | None
    binds: str
    alternatives: tuple[Alternative, ...]
    hold_only: str = ""
    estimated: bool = False
    time_spread: float = 0.0


@dataclass(frozen=True, slots=True)
class _State:
    """A plan's regions with everything that was computed of them."""

    regions: tuple[RegionPlan, ...]
    verified: Verified
    normal: tuple[Composition, ...]
    demoted: tuple[Composition, ...]

    @property
    def at_demotion(self) -> bool:
        """Whether the highest event is one with the L units run as R."""
        return self.verified.demoted_peak_bytes > self.verified.peak_bytes

    @property
    def peak(self) -> Composition:
        return highest(self.demoted if self.at_demotion else self.normal)


def explain_unit(plan: Plan, trace: Trace, unit_name: str, *, trace_path: str = "the trace") -> Explanation:
    """Raises HiloreError where the plan has no such unit or the trace is not the plan's."""
    bucket = bucket_of_plan(plan, trace, trace_path)
    at, index = _find(plan, unit_name)
    region = plan.regions[at]
    unit = region.units[index]
    unit_name = unit.name
    region_class = bucket.classes[bucket.regions[at].class_index]
    traced = region_class.units[index]
    now = _state(plan, trace, bucket, plan.regions)
    hold_only = bucket.regions[at].hold_only
    alternatives = []
    for change, changed in () if hold_only else _changes(trace, region, index, region_class):
        if isinstance(changed, str):
            alternatives.append(Alternative(change, changed))
            continue
        then = _state(plan, trace, bucket, (*plan.regions[:at], changed, *plan.regions[at + 1 :]))
        alternatives.append(_price(change, plan, trace, region_class, at, now, then))
    return Explanation(
        unit=unit.name,
        kind=traced.kind,
        mode=_mode(unit),
        dead=unit.dead,
        held=region.hold,
        run_ns=traced.run_ns,
        output_bytes=traced.output_bytes,
        rest_bytes=traced.rest_bytes,
        codecs=traced.codecs,
        peak_event=now.peak.event,
        spare_bytes=plan.ceiling_bytes - now.peak.live_bytes,
        risk=update_error(now.verified.risk),
        risk_limit=plan_limit(plan),
        binds=_binds(alternatives),
        alternatives=tuple(alternatives),
        hold_only=hold_only,
        estimated=trace.estimated,
        time_spread=trace.time_spread,
    )


def _find(plan: Plan, name: str) -> tuple[int, int]:
    ending = [known for known in plan.unit_names if known.endswith(f".{name}")]
    whole = ending[0] if len(ending) == 1 and name not in plan.unit_names else name
    for at, region in enumerate(plan.regions):
        for index, unit in enumerate(region.units):
            if unit.name == whole:
                return at, index
    guess = close_match(name, plan.unit_names)
    hint = f"did you mean '{guess}'?" if guess else f"its first unit is '{plan.unit_names[0]}'"
    if ending:
        hint = f"{len(ending)} end in it, from '{ending[0]}' to '{ending[-1]}': name one of them whole"
    raise HiloreError(f"{plan.path}: no unit '{name}'; {hint}")


def _changes(
    trace: Trace, region: RegionPlan, index: int, region_class: RegionClass
) -> Iterator[tuple[str, RegionPlan | str]]:
    """Every other mode of one unit as the region would then be, or why it is not offered; then the region's own."""
    unit, traced = region.units[index], region_class.units[index]
    modes: list[ModeAndCodec] = [(one.mode, one.codec) for one in region.units]
    split = region.split_at is not None
    if not region.hold:
        offers: list[ModeAndCodec] = [("H", None), ("R", None), *(("L", cost.codec) for cost in traced.codecs)]
        for mode, codec in offers:
            if (mode, codec) != (unit.mode, unit.codec):
                label = f"unit at {mode}" + (f" ({codec})" if codec else "")
                refused = _not_offered(trace, region, traced, mode, codec)
                changed = [*modes[:index], (mode, codec), *modes[index + 1 :]]
                yield label, refused or _replayed(region, region_class, changed, split)
        if region_class.split_at:
            yield f"replay {'whole' if split else 'split'}", _replayed(region, region_class, modes, not split)
        yield "region held", _held(region)
    if region.hold or split or any(mode != "R" for mode, _ in modes):
        yield "region replayed, all units at R", _replayed(region, region_class, [("R", None)] * len(modes), False)


def _not_offered(trace: Trace, region: RegionPlan, traced: UnitTrace, mode: Mode, codec: str | None) -> str:
    if mode == "R":
        return ""
    if not traced.keepable:
        return traced.reason
    if mode == "H" or not loses(codec):
        return ""
    if traced.kind in NEVER_LOSSY_KINDS:
        return f"{traced.kind} is never lossy: attention keeps what belongs to its exact value"
    risks = {(risk.region, risk.unit, risk.codec) for risk in trace.calibration.risks}
    return "" if (region.name, traced.name, codec) in risks else f"no risk is known for {codec} here; calibrate"


def _held(region: RegionPlan) -> RegionPlan:
    units = tuple(UnitPlan(unit.name, "H", None, dead=False, dead_if_demoted=False) for unit in region.units)
    return RegionPlan(region.name, hold=True, units=units)


def _replayed(
    region: RegionPlan, region_class: RegionClass, modes: Sequence[ModeAndCodec], split: bool
) -> RegionPlan | str:
    """The region with these modes, one per unit, or why the trace cannot say what that costs."""
    units = region_class.units
    at = {unit.name: mode for unit, (mode, _) in zip(units, modes, strict=True)}
    stored = {name for name, mode in at.items() if mode != "R"}
    exact = {name for name, mode in at.items() if mode == "H"}
    if not any(set(found.kept) == stored and found.split == split for found in region_class.keep_sets):
        return "not measured: a plan that keeps just these units is never worth it"
    dead, dead_demoted = running_units(units, stored)[1], running_units(units, exact)[1]
    late = dead_in_late_stage(units, stored, region_class.split_at) if split else ()
    late_demoted = dead_in_late_stage(units, exact, region_class.split_at) if split else ()
    made = tuple(
        UnitPlan(
            f"{region.name}.{unit.name}",
            mode,
            codec,
            dead=unit.name in dead,
            dead_if_demoted=unit.name in dead_demoted,
            dead_late=unit.name in late,
            dead_late_if_demoted=unit.name in late_demoted,
        )
        for unit, (mode, codec) in zip(units, modes, strict=True)
    )
    return RegionPlan(region.name, False, made, f"{region.name}.{region_class.split_at}" if split else None)


def _state(plan: Plan, trace: Trace, bucket: Bucket, regions: tuple[RegionPlan, ...]) -> _State:
    return _State(
        regions,
        verify_modes(trace, bucket, regions, risk_free=plan.regime.exposure_high == 0),
        plan_compositions(trace, bucket, regions),
        plan_compositions(trace, bucket, regions, demoted=True),
    )


def _price(
    change: str, plan: Plan, trace: Trace, region_class: RegionClass, at: int, now: _State, then: _State
) -> Alternative:
    event, demoted = then.peak.event, then.at_demotion
    before = next(found for found in (now.demoted if demoted else now.normal) if found.event == event)
    over = then.peak.live_bytes - plan.ceiling_bytes
    refused = []
    if over > 0:
        where = " once its L units run as R" if demoted else ""
        refused.append(f"{mib(over)} over the budget in the {event}{where}")
    psi_high, allowance = plan.regime.exposure_high, plan.regime.allowance
    limit = risk_limit(trace.calibration, delta=plan.delta, psi_high=psi_high, allowance=allowance)
    if then.verified.risk > limit:
        refused.append(f"risk over its limit of {plan_limit(plan):.3%}")
    times = [region_times(state.regions[at], region_class) for state in (now, then)]
    retained = [sum(planned_parts(state.regions[at], region_class).retained.values()) for state in (now, then)]
    return Alternative(
        change=change,
        refused="; ".join(refused),
        priced=True,
        step_ns=then.verified.step_ns - now.verified.step_ns,
        times=_differences(times[0], times[1]),
        retained_bytes=retained[1] - retained[0],
        peak_bytes=then.verified.peak_bytes - now.verified.peak_bytes,
        event=event,
        demoted=demoted,
        event_bytes=then.peak.live_bytes - before.live_bytes,
        parts=_differences(dict(before.parts), dict(then.peak.parts)),
        over_bytes=over,
        risk=update_error(then.verified.risk),
        over_risk=then.verified.risk > limit,
    )


def _differences(before: dict[str, int], after: dict[str, int]) -> Differences:
    names = dict.fromkeys((*before, *after))
    found = ((name, after.get(name, 0) - before.get(name, 0)) for name in names)
    return tuple((name, size) for name, size in found if size)


def _binds(alternatives: Sequence[Alternative]) -> str:
    """What keeps the faster alternatives out, in one sentence."""
    faster = [other for other in alternatives if other.priced and other.step_ns < 0]
    if not faster:
        return "nothing: no change here would be faster"
    allowed = [other for other in faster if not other.refused]
    if allowed:
        best = min(allowed, key=lambda other: other.step_ns)
        return f"nothing here: {best.change} fits and would be {-best.step_ns:,} ns faster, within the solver's gap"
    rows: dict[str, list[str]] = {}
    for other in faster:
        if other.over_bytes > 0:
            row = f"memory in the {other.event}" + (" once L units run as R" if other.demoted else "")
            rows.setdefault(row, []).append(f"{other.change} ({mib(other.over_bytes)} more)")
        if other.over_risk:
            rows.setdefault("risk", []).append(other.change)
    return "; ".join(f"{row} keeps out {', '.join(changes)}" for row, changes in rows.items())


def _mode(unit: UnitPlan) -> str:
    return f"L ({unit.codec})" if unit.codec else unit.mode
