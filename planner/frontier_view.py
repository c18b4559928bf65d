"""A frontier as tables, lines, CSV and JSON. Nothing is decided here."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hilore.planner.budget import MIB, mib
from hilore.planner.frontier_curves import CHAIN, GREEDY, LAYER, PLAN, UNIFORM
from hilore.planner.frontier_points import Curve, Frontier
from hilore.planner.frontier_rivals import BLOCK, EVERY_N, GC, NO_GC, SAC
from hilore.planner.profile import spread_notes
from hilore.planner.view import milliseconds

REGIMES = ("null", "low", "mid", "high")
ABOUT = {
    PLAN: "solved plans",
    GREEDY: "the solver's own start, a density heuristic on the same problem",
    LAYER: "each layer held, encoded whole or replayed whole (solve --granularity layer; dead calls left out)",
    UNIFORM: "one codec and one configuration for all regions, the best of them",
    GC: "Hugging Face's checkpointing of every layer",
    NO_GC: "autograd keeps all",
    EVERY_N: "Hugging Face's every_n_layers, the best n",
    BLOCK: "the most layers held at one end of the model (Megatron's block method)",
    SAC: "PyTorch's selective checkpointing: attention, GEMMs or both saved, in all or even layers",
    CHAIN: "dynamic programming over layers with their exact options, in slots of memory (after Rockmate)",
}
COLUMNS = (
    "policy",
    "delta",
    "budget_bytes",
    "peak_bytes",
    "peak_event",
    "step_ns",
    *(f"step_ns_{regime}" for regime in REGIMES),
    "gain_over_gc",
    "share_of_no_gc_gain",
    "predicted_error",
    "status",
    "gap",
    "detail",
    "carried",
)


def gains_table(found: Frontier) -> Table:
    """Gain over GC of every curve under every budget."""
    table = Table(
        title=f"{found.name}, {found.tokens} tokens per row: predicted gain over GC",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("budget MiB", justify="right")
    for curve in found.curves:
        table.add_column(curve.label, justify="right", overflow="fold")
    for place, budget in enumerate(found.budgets):
        cells = []
        for curve in found.curves:
            point = curve.points[place]
            cells.append("-" if point is None else f"{found.gain(point):+.1%}")
        table.add_row(f"{budget / MIB:,.0f}", *cells)
    return table


def plans_table(found: Frontier) -> Table:
    """Our plans in full: what they take, what binds, how far they get."""
    table = Table(title="plans", title_justify="left")
    for column in ("delta", "budget MiB", "peak MiB", "step ms", "gain over GC", "share of No-GC", "error %"):
        table.add_column(column, justify="right")
    for column in ("peak in the", "status", "taken from"):
        table.add_column(column)
    for curve in (curve for curve in found.curves if curve.policy == PLAN):
        for budget, point in zip(found.budgets, curve.points, strict=True):
            if point is None:
                table.add_row(f"{curve.delta:g}", f"{budget / MIB:,.0f}", *["-"] * 6, "no plan", "")
                continue
            share = found.share(point)
            table.add_row(
                f"{curve.delta:g}",
                f"{budget / MIB:,.0f}",
                f"{point.peak_bytes / MIB:,.1f}",
                milliseconds(point.step_ns),
                f"{found.gain(point):+.1%}",
                "-" if share is None else f"{share:.2f}",
                "-" if point.error is None else f"{point.error:.3%}".removesuffix("%"),
                point.peak_event,
                point.status,
                point.carried,
            )
    return table


def frontier_lines(found: Frontier, trace_path: str) -> list[str]:
    """The reference points, what the curves are, and how far the figures go."""
    smallest = found.smallest_bytes
    lines = [
        f"{trace_path}: smallest feasible budget {-(-smallest // MIB):,} MiB ({smallest:,} bytes); GC "
        f"{mib(found.gc_peak_bytes)}, {milliseconds(found.gc_step_ns)} ms; No-GC {mib(found.no_gc_peak_bytes)}, "
        f"{milliseconds(found.no_gc_step_ns)} ms",
        *(f"{name}: {text}" for name, text in ABOUT.items() if any(curve.policy == name for curve in found.curves)),
        "steps are expected ones over exposure regimes, by how often calibration saw each; rivals are charged for what "
        "they keep and run, not for overheads of their implementations",
    ]
    if found.estimated:
        lines.append("times are estimated, not measured")
    lines += [f"note: {note}" for note in spread_notes(found.time_spread)]
    if not found.calibrated and any(found.deltas):
        lines.append("errors come from the prior table: uncalibrated")
    return lines


def frontier_csv(found: Frontier) -> str:
    """One row per point; nothing for a policy under a budget that it does not fit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for curve in found.curves:
        for row in _rows(found, curve):
            writer.writerow(["" if row[column] is None else row[column] for column in COLUMNS])
    return text.getvalue()


def frontier_json(found: Frontier, trace_path: str, written: list[str]) -> dict[str, Any]:
    """All figures: ``points`` as in the CSV."""
    data = asdict(found)
    del data["curves"]
    points = [row for curve in found.curves for row in _rows(found, curve)]
    return {"trace": trace_path, **data, "points": points, "written": written}


def _rows(found: Frontier, curve: Curve) -> list[dict[str, Any]]:
    rows = []
    for point in curve.points:
        if point is None:
            continue
        row = {
            "policy": curve.policy,
            "delta": curve.delta,
            "budget_bytes": point.budget_bytes,
            "peak_bytes": point.peak_bytes,
            "peak_event": point.peak_event,
            "step_ns": point.step_ns,
            **{f"step_ns_{regime}": ns for regime, ns in zip(REGIMES, point.regime_ns, strict=True)},
            "gain_over_gc": found.gain(point),
            "share_of_no_gc_gain": found.share(point),
            "predicted_error": point.error,
            "status": point.status,
            "gap": point.gap,
            "detail": point.detail,
            "carried": point.carried,
        }
        rows.append({column: row[column] for column in COLUMNS})
    return rows
