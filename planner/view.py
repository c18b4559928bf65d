"""Tables and lines of what `trace` and `solve` found; planner/plan_view.py shows plans. Nothing is decided here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hilore.planner.budget import MIB, mib
from hilore.planner.configure import replayed_units
from hilore.planner.trace import Bucket, RegionClass, Trace
from hilore.planner.verify import largest_bucket, reference_peaks

if TYPE_CHECKING:
    from hilore.planner.emit import SolveResult


def trace_tables(trace: Trace) -> list[Table]:
    """One table per region class of the largest length bucket."""
    bucket = largest_bucket(trace)
    return [_class_table(trace, bucket, index) for index in range(len(bucket.classes))]


def trace_lines(trace: Trace) -> list[str]:
    """What stands beside the tables: fixed memory, head, other buckets, defaults taken, notes, warnings."""
    bucket = largest_bucket(trace)
    fixed, outside = trace.fixed, bucket.outside
    lines = [
        f"fixed {mib(fixed.total_bytes)}: parameters {mib(fixed.parameter_bytes)}, gradients "
        f"{mib(fixed.gradient_bytes)}, optimizer {mib(fixed.optimizer_state_bytes)}, other {mib(fixed.other_bytes)}",
        f"outside regions: head and loss {mib(outside.head_bytes)} at their highest, inputs and masks "
        f"{mib(outside.before_bytes)}",
    ]
    others = [f"{other.tokens}" for other in trace.buckets if other is not bucket]
    if others:
        lines.append(f"shown for {bucket.tokens} tokens per row; other length buckets: {', '.join(others)}")
    defaults = trace.spec.get("defaults_taken", {})
    if defaults:
        lines.append("defaults taken: " + ", ".join(f"{key}: {_yaml(value)}" for key, value in defaults.items()))
    if trace.estimated:
        lines.append(f"times are estimated for {trace.device}, not measured")
    lines.extend(f"note: {note}" for note in trace.notes)
    return lines


def trace_last_line(trace: Trace) -> str:
    """``GC peak X, No-GC peak Y, card Z: try --budget N``."""
    gc_bytes, no_gc_bytes = reference_peaks(trace)
    card = mib(trace.card_bytes) if trace.card_bytes else f"none ({trace.device})"
    advice = f"try --budget {suggested_budget_mib(trace)}"
    return f"GC peak {mib(gc_bytes)}, No-GC peak {mib(no_gc_bytes)}, card {card}: {advice}"


def suggested_budget_mib(trace: Trace) -> int:
    """A budget between the two peaks, a third of the way up, in whole MiB; just above GC's where none lies between.

    Where the card is smaller than that, the largest whole number of MiB on the card.
    """
    gc_bytes, no_gc_bytes = reference_peaks(trace)
    lowest = -(-gc_bytes // MIB)
    budget = max(lowest, (gc_bytes + max(0, no_gc_bytes - gc_bytes) // 3) // MIB)
    if trace.card_bytes and budget * MIB > trace.card_bytes:
        budget = trace.card_bytes // MIB
    return budget


def trace_json(trace: Trace, path: str) -> dict[str, Any]:
    """What `trace --json` prints."""
    gc_bytes, no_gc_bytes = reference_peaks(trace)
    bucket = largest_bucket(trace)
    return {
        "trace": path,
        "name": trace.name,
        "device": trace.device,
        "estimated": trace.estimated,
        "gc_peak_bytes": gc_bytes,
        "no_gc_peak_bytes": no_gc_bytes,
        "card_bytes": trace.card_bytes,
        "try_budget_mib": suggested_budget_mib(trace),
        "buckets": [other.tokens for other in trace.buckets],
        "regions": len(bucket.regions),
        "units": sum(len(bucket.classes[region.class_index].units) for region in bucket.regions),
        "calibrated": trace.calibration.calibrated,
        "time_spread": trace.time_spread,
        "defaults_taken": trace.spec.get("defaults_taken", {}),
        "notes": list(trace.notes),
    }


def solve_table(result: SolveResult, tokens: int) -> Table:
    """The regimes of one length bucket, greedy's step time beside the optimum's."""
    mark = "\n(estimated)" if result.estimated else ""
    table = Table(title=f"{tokens} tokens per row", title_justify="left")
    for column in ("regime", "status"):
        table.add_column(column)
    for column in ("H", "L", "R", "held", "peak MiB"):
        table.add_column(column, justify="right")
    for column in (f"step ms{mark}", f"gain over GC{mark}", "risk %", f"greedy ms{mark}", "gap %"):
        table.add_column(column, justify="right")
    for row in result.rows:
        if row.tokens == tokens:
            table.add_row(
                row.regime,
                row.status,
                *(str(count) for count in (row.kept, row.lossy, row.replayed, row.held)),
                f"{row.peak_bytes / MIB:,.1f}",
                milliseconds(row.step_ns),
                f"{row.gain:+.1%}",
                f"{row.risk:.3%}".removesuffix("%"),
                milliseconds(row.greedy_step_ns),
                f"{row.gap:.3%}".removesuffix("%"),
            )
    return table


def solve_tables(result: SolveResult) -> list[Table]:
    """One table per length bucket, longest first."""
    return [solve_table(result, tokens) for tokens in sorted({row.tokens for row in result.rows}, reverse=True)]


def solve_lines(
    result: SolveResult, trace_path: str, written: Sequence[Path], *, gap: float, limit_s: float
) -> list[str]:
    """What was solved, under which limits, and what came out as files."""
    first = result.plans[0]
    budgets = f"budget {mib(first.budget_bytes)}, margin {mib(first.margin_bytes)}"
    if first.margin_bytes:
        budgets += f" (allocations up to {mib(first.ceiling_bytes)})"
    budgets += f", delta {first.delta:g}"
    return [
        f"{result.name} out of {trace_path}: {budgets}, gap {gap:g} %, time limit {limit_s:g} s",
        *(f"note: {note}" for note in result.notes),
        f"written: {', '.join(str(path) for path in written)}",
    ]


def solve_json(
    result: SolveResult, trace_path: str, written: Sequence[Path], *, gap: float, limit_s: float
) -> dict[str, Any]:
    """What `solve --json` prints."""
    first = result.plans[0]
    return {
        "trace": trace_path,
        "name": result.name,
        "set_id": result.set_id,
        "budget_bytes": first.budget_bytes,
        "margin_bytes": first.margin_bytes,
        "ceiling_bytes": first.ceiling_bytes,
        "delta": first.delta,
        "gap_percent": gap,
        "time_limit_s": limit_s,
        "calibrated": first.calibrated,
        "estimated": result.estimated,
        "notes": list(result.notes),
        "plans": [str(path) for path in written],
        "rows": [asdict(row) for row in result.rows],
    }


def fold(names: Sequence[str]) -> str:
    """Region names in short: ``model.layers.0-27`` where one number alone counts up, else first, last and count."""
    if len(names) == 1:
        return names[0]
    parts = [name.split(".") for name in names]
    if len({len(part) for part in parts}) == 1:
        moving = [at for at in range(len(parts[0])) if len({part[at] for part in parts}) > 1]
        numbers = [part[moving[0]] for part in parts] if len(moving) == 1 else []
        if numbers and all(number.isdigit() for number in numbers):
            start = int(numbers[0])
            if [int(number) for number in numbers] == list(range(start, start + len(names))):
                shown = list(parts[0])
                shown[moving[0]] = f"{numbers[0]}-{numbers[-1]}"
                return ".".join(shown)
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def milliseconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:,.3f}" if nanoseconds < 10_000_000 else f"{nanoseconds / 1e6:,.2f}"


def _class_table(trace: Trace, bucket: Bucket, index: int) -> Table:
    region_class = bucket.classes[index]
    names = [region.name for region in bucket.regions if region.class_index == index]
    title = (
        f"{fold(names)}: {len(names)} regions of class {region_class.name}, "
        f"{bucket.tokens} tokens x {bucket.rows} rows\n"
        f"boundary {mib(_boundary_bytes(region_class))}, held {mib(region_class.hold.retained_bytes)}; "
        f"forward {milliseconds(region_class.forward_ns)} ms, backward {milliseconds(region_class.backward_ns)} ms, "
        f"GC replay {milliseconds(region_class.gc_replay_ns)} ms{' (estimated)' if trace.estimated else ''}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("unit")
    table.add_column("kind")
    table.add_column("output MiB", justify="right")
    table.add_column("rest MiB", justify="right")
    table.add_column("run ms", justify="right")
    table.add_column("in a replay")
    table.add_column("keepable")
    table.add_column("codecs (MiB)")
    running = replayed_units(region_class.units, ())
    for unit in region_class.units:
        codecs = ", ".join(f"{cost.codec} {cost.payload_bytes / MIB:.2f}" for cost in unit.codecs)
        table.add_row(
            unit.name,
            unit.kind,
            f"{unit.output_bytes / MIB:,.2f}",
            f"{unit.rest_bytes / MIB:,.2f}",
            milliseconds(unit.run_ns),
            "runs" if unit.name in running else "dead",
            "yes" if unit.keepable else f"no: {unit.reason}",
            codecs or "-",
        )
    return table


def _boundary_bytes(region_class: RegionClass) -> int:
    return next(keep_set.retained_bytes for keep_set in region_class.keep_sets if not keep_set.kept)


def _yaml(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
