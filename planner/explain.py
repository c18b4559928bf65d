"""`explain PLAN UNIT`: why a unit is what it is: what binds, and the price of each alternative, all else equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.table import Table

from hilore.planner.budget import mib
from hilore.planner.build import UNLIMITED_RISK, risk_limit
from hilore.planner.configure import NEVER_LOSSY_KINDS, replayed_units
from hilore.planner.problem import RISK_SCALE, Verified
from hilore.planner.spec_rules import close_match
from hilore.planner.trace import Bucket, RegionClass, Trace, UnitTrace
from hilore.planner.verify import verify_modes
from hilore.planner.view import milliseconds
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan, RegionPlan, UnitPlan

Mode = Literal["H", "L", "R"]


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
    """One unit of one plan. ``run_ns``, ``output_bytes``: what R costs and what H keeps, of this unit alone."""

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


def explain_unit(plan: Plan, trace: Trace, unit_name: str) -> Explanation:
    """Raises HiloreError where the plan has no such unit or the trace is not the plan's."""
    bucket = _bucket(plan, trace)
    at, index = _find(plan, unit_name)
    region = plan.regions[at]
    unit = region.units[index]
    region_class = bucket.classes[bucket.regions[at].class_index]
    traced = region_class.units[index]
    now = _verified(plan, trace, bucket, plan.regions)
    limit = risk_limit(trace.calibration, delta=plan.delta, psi_high=plan.regime.exposure_high)
    alternatives = []
    for change, changed in _changes(trace, region, index, region_class):
        if isinstance(changed, str):
            alternatives.append(Alternative(change, 0, 0, 0.0, changed))
            continue
        then = _verified(plan, trace, bucket, (*plan.regions[:at], changed, *plan.regions[at + 1 :]))
        alternatives.append(_price(change, now, then, plan.budget_bytes, limit))
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
        risk=_error(now.risk),
        risk_limit=None if limit == UNLIMITED_RISK else _error(limit),
        alternatives=tuple(alternatives),
    )


def explanation_lines(found: Explanation) -> list[str]:
    limit = "no limit (exposure 0)" if found.risk_limit is None else f"limit {found.risk_limit:.3%}"
    mode = "held with its region" if found.held else found.mode + (", dead: no replay runs it" if found.dead else "")
    return [
        f"{found.unit} ({found.kind}): {mode}",
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
    """Every other mode of one unit as the region would then be, or why it is not offered; then the whole region."""
    unit, traced = region.units[index], region_class.units[index]
    if not region.hold:
        offers: list[tuple[Mode, str | None]] = [("H", None), ("R", None)]
        offers += [("L", cost.codec) for cost in traced.codecs]
        for mode, codec in offers:
            if (mode, codec) != (unit.mode, unit.codec):
                label = f"unit at {mode}" + (f" ({codec})" if codec else "")
                yield label, _with_mode(trace, region, index, region_class, mode, codec)
        yield "region held", _whole(region, region_class, hold=True)
    if region.hold or any(other.mode != "R" for other in region.units):
        yield "region replayed, all units at R", _whole(region, region_class, hold=False)


def _with_mode(
    trace: Trace, region: RegionPlan, index: int, region_class: RegionClass, mode: Mode, codec: str | None
) -> RegionPlan | str:
    traced = region_class.units[index]
    refused = _not_offered(trace, region, traced, mode, codec)
    if refused:
        return refused
    at: dict[str, Mode] = {unit.name: plan.mode for unit, plan in zip(region_class.units, region.units, strict=True)}
    at[traced.name] = mode
    stored = {name for name, chosen in at.items() if chosen != "R"}
    exact = {name for name, chosen in at.items() if chosen == "H"}
    measured = [set(keep_set.kept) for keep_set in region_class.keep_sets]
    if stored not in measured or exact not in measured:
        return "such a set of kept units can never be worth it; not measured"
    units = list(region.units)
    units[index] = replace(units[index], mode=mode, codec=codec)
    return _with_dead(replace(region, units=tuple(units)), region_class, stored, exact)


def _not_offered(trace: Trace, region: RegionPlan, traced: UnitTrace, mode: str, codec: str | None) -> str:
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


def _whole(region: RegionPlan, region_class: RegionClass, *, hold: bool) -> RegionPlan:
    mode: Mode = "H" if hold else "R"
    units = tuple(replace(unit, mode=mode, codec=None, dead=False, dead_if_demoted=False) for unit in region.units)
    changed = replace(region, hold=hold, units=units)
    return changed if hold else _with_dead(changed, region_class, set(), set())


def _with_dead(region: RegionPlan, region_class: RegionClass, stored: set[str], exact: set[str]) -> RegionPlan:
    running = replayed_units(region_class.units, stored)
    running_demoted = replayed_units(region_class.units, exact)
    return replace(
        region,
        units=tuple(
            replace(
                unit,
                dead=traced.name not in stored and traced.name not in running,
                dead_if_demoted=traced.name not in exact and traced.name not in running_demoted,
            )
            for unit, traced in zip(region.units, region_class.units, strict=True)
        ),
    )


def _verified(plan: Plan, trace: Trace, bucket: Bucket, regions: Sequence[RegionPlan]) -> Verified:
    return verify_modes(trace, bucket, regions, risk_free=plan.regime.exposure_high == 0)


def _price(change: str, now: Verified, then: Verified, budget_bytes: int, limit: int) -> Alternative:
    refused = []
    if then.peak_bytes > budget_bytes:
        refused.append(f"{mib(then.peak_bytes - budget_bytes)} over the budget in the {then.peak_event}")
    if then.risk > limit:
        refused.append(f"risk over its limit of {_error(limit):.3%}")
    return Alternative(
        change=change,
        step_ns=then.step_ns - now.step_ns,
        peak_bytes=then.peak_bytes - now.peak_bytes,
        risk=_error(then.risk),
        refused="; ".join(refused),
    )


def _error(risk: int) -> float:
    """Relative error from the integer square that the solver works with."""
    return math.sqrt(risk / RISK_SCALE)


def _mode(unit: UnitPlan) -> str:
    return f"L ({unit.codec})" if unit.codec else unit.mode
