"""`explain PLAN UNIT`: why a unit is what it is: what binds, and the price of each alternative, all else equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table

from hilore.planner.budget import mib
from hilore.planner.build import risk_limit
from hilore.planner.configure import NEVER_LOSSY_KINDS
from hilore.planner.emit import update_error
from hilore.planner.liveness import dead_in_late_stage, running_units
from hilore.planner.problem import Verified
from hilore.planner.regimes import plan_limit
from hilore.planner.spec_rules import close_match
from hilore.planner.trace import Bucket, RegionClass, Trace, UnitTrace
from hilore.planner.verify import verify_modes
from hilore.planner.view import milliseconds
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan, RegionPlan, UnitPlan

Mode = Literal["H", "L", "R"]
ModeAndCodec = tuple[Mode, str | None]


@dataclass(frozen=True, slots=True)
class Alternative:
    """The whole plan with one thing changed: ``change``, and by how much more (or less) it then takes.

    ``refused`` is empty where the plan stays within budget and risk. ``risk``: predicted error, not a difference.
    """

    change: str
    step_ns: int
    peak_bytes: int
    risk: float
    refused: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """One unit of one plan. ``run_ns``, ``output_bytes``: what R costs and what H keeps, of this unit alone.

    ``risk``: predicted error of an update under this plan; ``risk_limit`` None: no limit. ``hold_only``: why the
    region can only be held.
    """

    unit: str
    kind: str
    mode: str
    dead: bool
    held: bool
    run_ns: int
    output_bytes: int
    peak_event: str
    spare_bytes: int
    risk: float
    risk_limit: float | None
    alternatives: tuple[Alternative, ...]
    hold_only: str = ""


def explain_unit(plan: Plan, trace: Trace, unit_name: str) -> Explanation:
    """Raises HiloreError where the plan has no such unit or the trace is not the plan's."""
    bucket = _bucket(plan, trace)
    at, index = _find(plan, unit_name)
    region = plan.regions[at]
    unit = region.units[index]
    region_class = bucket.classes[bucket.regions[at].class_index]
    traced = region_class.units[index]
    now = _verified(plan, trace, bucket, plan.regions)
    alternatives = []
    hold_only = bucket.regions[at].hold_only
    for change, changed in () if hold_only else _changes(trace, region, index, region_class):
        if isinstance(changed, str):
            alternatives.append(Alternative(change, 0, 0, 0.0, changed))
            continue
        then = _verified(plan, trace, bucket, (*plan.regions[:at], changed, *plan.regions[at + 1 :]))
        alternatives.append(_price(change, plan, trace, now, then))
    return Explanation(
        unit=unit.name,
        kind=traced.kind,
        mode=_mode(unit),
        dead=unit.dead,
        held=region.hold,
        run_ns=traced.run_ns,
        output_bytes=traced.output_bytes,
        peak_event=now.peak_event,
        spare_bytes=plan.budget_bytes - now.peak_bytes,
        risk=update_error(now.risk),
        risk_limit=plan_limit(plan),
        alternatives=tuple(alternatives),
        hold_only=hold_only,
    )


def explanation_lines(found: Explanation) -> list[str]:
    limit = "no limit (exposure 0)" if found.risk_limit is None else f"limit {found.risk_limit:.3%}"
    mode = "held with its region" if found.held else found.mode + (", dead: no replay runs it" if found.dead else "")
    only = [f"its region can only be held: {found.hold_only}"] if found.hold_only else []
    return [
        f"{found.unit} ({found.kind}): {mode}",
        *only,
        f"running it again takes {milliseconds(found.run_ns)} ms, keeping its output {mib(found.output_bytes)}",
        f"memory: the peak is in the {found.peak_event}, {mib(found.spare_bytes)} under the budget",
        f"risk: {found.risk:.3%}, {limit}",
    ]


def explanation_table(found: Explanation) -> Table:
    table = Table(title="the same plan with one change", title_justify="left")
    table.add_column("change")
    for column in ("step ms", "peak MiB", "risk %"):
        table.add_column(column, justify="right")
    table.add_column("allowed")
    for other in found.alternatives:
        priced = other.refused == "" or other.step_ns or other.peak_bytes or other.risk
        table.add_row(
            other.change,
            f"{other.step_ns / 1e6:+.3f}" if priced else "-",
            f"{other.peak_bytes / 2**20:+.2f}" if priced else "-",
            f"{other.risk:.3%}".removesuffix("%") if priced else "-",
            f"no: {other.refused}" if other.refused else "yes",
        )
    return table


def explanation_json(found: Explanation) -> dict[str, Any]:
    return asdict(found)


def _bucket(plan: Plan, trace: Trace) -> Bucket:
    for bucket in trace.buckets:
        if bucket.tokens == plan.length_bucket:
            names = [region.name for region in bucket.regions]
            if trace.name == plan.name and names == [region.name for region in plan.regions]:
                return bucket
    raise HiloreError(
        f"{plan.path}: plan of {plan.name}, {plan.length_bucket} tokens, is not of the trace of {trace.name}; "
        "name its trace with --trace"
    )


def _find(plan: Plan, name: str) -> tuple[int, int]:
    for at, region in enumerate(plan.regions):
        for index, unit in enumerate(region.units):
            if unit.name == name:
                return at, index
    guess = close_match(name, plan.unit_names)
    hint = f"did you mean '{guess}'?" if guess else f"its first unit is '{plan.unit_names[0]}'"
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
    if mode == "H":
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


def _verified(plan: Plan, trace: Trace, bucket: Bucket, regions: Sequence[RegionPlan]) -> Verified:
    return verify_modes(trace, bucket, regions, risk_free=plan.regime.exposure_high == 0)


def _price(change: str, plan: Plan, trace: Trace, now: Verified, then: Verified) -> Alternative:
    refused = []
    peak_bytes = max(then.peak_bytes, then.demoted_peak_bytes)
    if peak_bytes > plan.budget_bytes:
        where = f"in the {then.peak_event}" if peak_bytes == then.peak_bytes else "once its L units run as R"
        refused.append(f"{mib(peak_bytes - plan.budget_bytes)} over the budget {where}")
    limit = plan_limit(plan)
    if limit is not None and then.risk > _risk_limit(plan, trace):
        refused.append(f"risk over its limit of {limit:.3%}")
    return Alternative(
        change=change,
        step_ns=then.step_ns - now.step_ns,
        peak_bytes=then.peak_bytes - now.peak_bytes,
        risk=update_error(then.risk),
        refused="; ".join(refused),
    )


def _risk_limit(plan: Plan, trace: Trace) -> int:
    regime = plan.regime
    return risk_limit(trace.calibration, delta=plan.delta, psi_high=regime.exposure_high, allowance=regime.allowance)


def _mode(unit: UnitPlan) -> str:
    return f"L ({unit.codec})" if unit.codec else unit.mode
