"""`show` and `diff`: what one plan does, folded over equal regions, and what changed between two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hilore.planner.allocator import APART
from hilore.planner.budget import MIB, mib
from hilore.planner.composition_view import composition_json, composition_table
from hilore.planner.peaks import PlanPeaks
from hilore.planner.view import fold, milliseconds
from hilore.runtime.plan import Plan, RegionPlan, UnitPlan

if TYPE_CHECKING:
    from hilore.planner.check import Verification


def plan_table(plan: Plan) -> Table:
    """One row per run of regions that do the same."""
    table = Table()
    table.add_column("regions")
    table.add_column("count", justify="right")
    table.add_column("replay")
    for column in ("H", "L", "R", "dead"):
        table.add_column(column)
    for _, group in groupby(plan.regions, key=_signature):
        regions = list(group)
        table.add_row(fold([region.name for region in regions]), str(len(regions)), *_cells(regions[0]))
    return table


def plan_lines(plan: Plan) -> list[str]:
    """The head of `show`: regime, budget, what is predicted, how it was found."""
    regime, predicted, solver = plan.regime, plan.predicted, plan.solver
    exposures = (
        "exposure 0" if regime.label == "null" else f"exposure {regime.exposure_low:g} to {regime.exposure_high:g}"
    )
    calibration = "uncalibrated: not measured on rollouts"
    if plan.calibrated:
        calibration = f"calibrated, with a confidence of {plan.confidence:g}"
    if plan.measured is not None:
        calibration += (
            f"; measured on {plan.measured.microbatches} microbatches: updates within {plan.measured.error:.3%} in "
            f"float32 compute with a confidence of {plan.measured.confidence:g}"
        )
    held = sum(region.hold for region in plan.regions)
    counts = ", ".join(f"{mode} {plan.count(mode)}" for mode in ("H", "L", "R"))
    return [
        f"{plan.name}, regime {regime.label} ({exposures}), {plan.length_bucket} tokens per row, set {plan.set_id}",
        f"budget {mib(plan.budget_bytes)} (margin {mib(plan.margin_bytes)}{_ceiling(plan)}), delta {plan.delta:g} "
        f"of a reference error of {plan.delta_star:.3g} ({calibration})",
        f"predicted peak {mib(predicted.peak_bytes)} in the {predicted.peak_event}, "
        f"GC {mib(predicted.gc_peak_bytes)}, No-GC {mib(predicted.no_gc_peak_bytes)}",
        f"predicted step{estimated(plan)} {milliseconds(predicted.step_ns)} ms, "
        f"GC {milliseconds(predicted.gc_step_ns)}, No-GC {milliseconds(predicted.no_gc_step_ns)}: "
        f"gain over GC {gain_over_gc(plan):+.1%}; risk {predicted.risk:.3%}, linear sum {predicted.linear_risk:.3%}",
        f"{len(plan.regions)} regions, {held} held; units {counts}",
        f"solver {solver.name}: {solver.status}, gap {solver.gap:.3%}, {solver.wall_s:.2f} s",
    ]


def peak_parts(peaks: PlanPeaks | str) -> list[str | Table]:
    """What the peak is made of, beside GC's and No-GC's; or why that is not known."""
    if isinstance(peaks, str):
        return [f"what the peak is made of is in the trace: {peaks}"]
    columns = {"plan": peaks.plan, "GC": peaks.gc, "No-GC": peaks.no_gc}
    if peaks.demoted is not None:
        columns["L units run as R"] = peaks.demoted
    return [composition_table(columns), APART]


def plan_json(plan: Plan, peaks: PlanPeaks | str) -> dict[str, Any]:
    """What `show --json` prints of one plan; ``peak_parts`` is null where no trace says what the peak is made of."""
    made_of = {"peak_parts": None, "peak_parts_unknown": peaks} if isinstance(peaks, str) else _peaks_json(peaks)
    return {
        "path": plan.path,
        "name": plan.name,
        "set_id": plan.set_id,
        "regime": plan.regime.label,
        "length_bucket": plan.length_bucket,
        "budget_bytes": plan.budget_bytes,
        "margin_bytes": plan.margin_bytes,
        "delta": plan.delta,
        "calibrated": plan.calibrated,
        "peak_bytes": plan.predicted.peak_bytes,
        "peak_event": plan.predicted.peak_event,
        "step_ns": plan.predicted.step_ns,
        "estimated": plan.predicted.estimated,
        "gain_over_gc": gain_over_gc(plan),
        "risk": plan.predicted.risk,
        "counts": {mode: plan.count(mode) for mode in ("H", "L", "R")},
        "held": sum(region.hold for region in plan.regions),
        "status": plan.solver.status,
        "gap": plan.solver.gap,
        "regions": [
            {"regions": fold([region.name for region in regions]), "count": len(regions), **_modes(regions[0])}
            for regions in (list(group) for _, group in groupby(plan.regions, key=_signature))
        ],
        **made_of,
    }


def check_table(found: Verification) -> Table:
    """`verify`: each plan's promises beside what was measured."""
    table = Table(title="predicted -> measured", title_justify="left")
    table.add_column("plan")
    table.add_column("regime")
    for column in ("tokens", "budget MiB", "peak MiB", "bytes under", "gain over GC", "gradient error", "allowed"):
        table.add_column(column, justify="right")
    for check in found.checks:
        limit = check.error_limit
        table.add_row(
            check.plan,
            check.regime,
            str(check.tokens),
            f"{check.budget_bytes / MIB:,.2f}",
            f"{check.predicted_peak_bytes / MIB:,.2f} -> {check.measured_peak_bytes / MIB:,.2f}",
            f"{check.predicted_peak_bytes - check.measured_peak_bytes:,}",
            f"{check.predicted_gain:+.1%}{' (estimated)' if check.estimated else ''}"
            + ("" if check.measured_gain is None else f" -> {check.measured_gain:+.1%}"),
            "-" if check.error is None else "0 (bitwise)" if check.exact else f"{check.error:.3%}",
            "-" if limit is None else f"{limit:.3%}",
        )
    return table


def check_lines(found: Verification) -> list[str]:
    """What was run, and every promise that was broken."""
    how = "under fake tensors: peaks alone" if found.fake else "real updates; gains are of this machine now"
    if any(check.exact is False and check.error_limit is None and check.regime != "null" for check in found.checks):
        how += "; without --trace no limit of a gradient error is known"
    broken = [f"BROKEN: {breach}" for breach in found.breaches]
    return [how, *_rounding(found), *(broken or ["every plan keeps its promises"])]


def _rounding(found: Verification) -> Iterator[str]:
    blocks = [check.rounding_bytes for check in found.checks if check.rounding_bytes is not None]
    segments = [check.segment_bytes for check in found.checks if check.segment_bytes is not None]
    if blocks and segments:
        yield (
            "apart from peaks and budgets: beyond the storages at a peak CUDA's allocator shows up to "
            f"{mib(max(blocks))} more as allocated (blocks of 512 B) and {mib(max(segments))} more as reserved "
            "(segments of 2 MiB and more), before fragmentation and cached blocks"
        )


def check_json(found: Verification) -> dict[str, Any]:
    """What `verify --json` prints."""
    return {"fake": found.fake, "checks": [asdict(check) for check in found.checks], "breaches": list(found.breaches)}


def _peaks_json(peaks: PlanPeaks) -> dict[str, Any]:
    return {
        "peak_parts": composition_json(peaks.plan),
        "gc_peak_parts": composition_json(peaks.gc),
        "no_gc_peak_parts": composition_json(peaks.no_gc),
        "demoted_peak_parts": None if peaks.demoted is None else composition_json(peaks.demoted),
    }


def gain_over_gc(plan: Plan) -> float:
    """Share by which the plan trains more tokens in a second than gradient checkpointing does."""
    return plan.predicted.gc_step_ns / plan.predicted.step_ns - 1


def estimated(plan: Plan) -> str:
    """Said beside every time that comes from a card's data sheet."""
    return " (estimated)" if plan.predicted.estimated else ""


def _ceiling(plan: Plan) -> str:
    return f", allocations up to {mib(plan.ceiling_bytes)}" if plan.margin_bytes else ""


def plan_differences(first: Plan, second: Plan) -> list[str]:
    """What changed from ``first`` to ``second``, folded over regions that changed in the same way."""
    lines = [
        f"{name}: {a} -> {b}" for (name, a), (_, b) in zip(_figures(first), _figures(second), strict=True) if a != b
    ]
    before = {region.name: region for region in first.regions}
    after = {region.name: region for region in second.regions}
    gone = [name for name in before if name not in after]
    new = [name for name in after if name not in before]
    lines += [f"only in the first: {fold(gone)}"] if gone else []
    lines += [f"only in the second: {fold(new)}"] if new else []
    shared = [name for name in before if name in after]
    changes = [(name, _region_changes(before[name], after[name])) for name in shared]
    for changed, group in groupby(changes, key=lambda item: item[1]):
        if changed:
            lines.append(f"{fold([name for name, _ in group])}: {'; '.join(changed)}")
    return lines


def _figures(plan: Plan) -> Iterator[tuple[str, str]]:
    predicted = plan.predicted
    yield "name", plan.name
    yield "regime", plan.regime.label
    yield "tokens per row", str(plan.length_bucket)
    yield "budget", mib(plan.budget_bytes)
    yield "margin", mib(plan.margin_bytes)
    yield "delta", f"{plan.delta:g}"
    yield "predicted peak", f"{mib(predicted.peak_bytes)} in the {predicted.peak_event}"
    yield "predicted step", f"{milliseconds(predicted.step_ns)} ms{estimated(plan)}"
    yield "gain over GC", f"{gain_over_gc(plan):+.1%}"
    yield "risk", f"{predicted.risk:.3%}"
    for mode in ("H", "L", "R"):
        yield f"units at {mode}", str(plan.count(mode))
    yield "held regions", str(sum(region.hold for region in plan.regions))


def _region_changes(before: RegionPlan, after: RegionPlan) -> tuple[str, ...]:
    changes = []
    if _replay(before) != _replay(after):
        changes.append(f"replay {_replay(before)} -> {_replay(after)}")
    old = {_relative(before, unit): _mode(unit) for unit in before.units}
    new = {_relative(after, unit): _mode(unit) for unit in after.units}
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            changes.append(f"{name} {old.get(name, 'absent')} -> {new.get(name, 'absent')}")
    return tuple(changes)


def _signature(region: RegionPlan) -> tuple[object, ...]:
    return (_replay(region), *((_relative(region, unit), _mode(unit), unit.dead) for unit in region.units))


def _replay(region: RegionPlan) -> str:
    """``none`` (held), ``whole``, or the unit before which it is split."""
    if region.split_at is not None:
        return f"split at {region.split_at.removeprefix(region.name + '.')}"
    return "none" if region.hold else "whole"


def _relative(region: RegionPlan, unit: UnitPlan) -> str:
    return unit.name.removeprefix(region.name + ".")


def _mode(unit: UnitPlan) -> str:
    return f"L({unit.codec})" if unit.mode == "L" else unit.mode


def _modes(region: RegionPlan) -> dict[str, Any]:
    named = {mode: [_relative(region, u) for u in region.units if u.mode == mode] for mode in ("H", "R")}
    return {
        "hold": region.hold,
        "replay": _replay(region),
        "H": named["H"],
        "L": {_relative(region, u): u.codec for u in region.units if u.mode == "L"},
        "R": named["R"],
        "dead": [_relative(region, u) for u in region.units if u.dead],
    }


def _cells(region: RegionPlan) -> tuple[str, ...]:
    """Replay, H, L, R and dead as text; a dead unit is named under dead alone, since a replay leaves it out."""
    if region.hold:
        return _replay(region), "all", "-", "-", "-"
    lossy = (f"{_relative(region, u)} ({u.codec})" for u in region.units if u.mode == "L")
    return (
        _replay(region),
        ", ".join(_relative(region, u) for u in region.units if u.mode == "H") or "-",
        ", ".join(lossy) or "-",
        ", ".join(_relative(region, u) for u in region.units if u.mode == "R" and not u.dead) or "-",
        ", ".join(_relative(region, u) for u in region.units if u.dead) or "-",
    )
