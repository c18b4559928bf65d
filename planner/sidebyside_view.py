"""Tables, lines and JSON of a side-by-side measurement. Nothing is decided here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from hilore.planner.budget import MIB
from hilore.planner.paired import CONFIDENCE, Interval
from hilore.planner.sidebyside import Measured, SideBySide
from hilore.planner.view import milliseconds


def result_table(result: SideBySide, title: str = "") -> Table:
    """Peak, speed, gain, share and gradient error of every row: what the measurement is for."""
    table = Table(title=title or None, title_justify="left")
    table.add_column("policy")
    table.add_column("ceiling")
    with_held = any(row.share_of_held is not None for row in result.rows)
    for column in ("peak MiB", "over GC", "step ms", "tokens/s", "gain over GC", "share of No-GC"):
        table.add_column(column, justify="right")
    for column in (*(["of all held"] if with_held else []), "gradient error"):
        table.add_column(column, justify="right")
    gc_peak = result.rows[0].peak_bytes
    for row in result.rows:
        table.add_row(
            row.policy,
            row.ceiling or "-",
            f"{row.peak_bytes / MIB:,.2f}",
            f"{(row.peak_bytes - gc_peak) / MIB:+,.2f}",
            milliseconds(row.step_ns),
            f"{result.tokens_per_step * 1e9 / row.step_ns:,.0f}",
            percent_interval(row.gain),
            _share(row.share),
            *([_share(row.share_of_held)] if with_held else []),
            "0 (bitwise)" if row.exact else f"{row.error:.3%}",
        )
    return table


def plan_table(result: SideBySide) -> Table:
    """Of the rows with a budget or a prediction: how far under both they lie, what binds, what the plan does."""
    table = Table(title="measured peak against budget and prediction", title_justify="left")
    table.add_column("policy")
    table.add_column("ceiling")
    for column in ("budget MiB", "predicted MiB", "measured MiB", "under budget", "under predicted"):
        table.add_column(column, justify="right")
    for column in ("binds", "H/L/R", "dead", "held", "regime", "measured as"):
        table.add_column(column)
    for row in result.rows:
        if row.budget_bytes is None and row.predicted_peak_bytes is None:
            continue
        modes = row.modes
        table.add_row(
            row.policy,
            row.ceiling or "-",
            _mib(row.budget_bytes),
            _mib(row.predicted_peak_bytes),
            _mib(row.peak_bytes),
            _under(row.budget_bytes, row.peak_bytes),
            _under(row.predicted_peak_bytes, row.peak_bytes),
            row.peak_event or "-",
            f"{modes['H']}/{modes['L']}/{modes['R']}" if modes else "-",
            str(modes["dead"]) if modes else "-",
            str(modes["held"]) if modes else "-",
            ", ".join(row.regimes) or "-",
            row.same_as or "itself",
        )
    return table


def result_lines(result: SideBySide) -> list[str]:
    """How it was measured, what the noise is, and every promise that was broken."""
    gradients = "zeroed buffers" if result.gradients_exist else "none"
    lines = [
        f"{result.rounds} rounds of interleaved steps (forward, loss and backward of one of {result.microbatches} "
        f"microbatches in turn; no optimizer step; each after one untimed), {result.threads} threads, gradients before "
        f"a step: {gradients}",
        f"gain: median of GC time / policy time within a round, less 1; share: part of No-GC's gain (of all held: of "
        f"that of a plan without replays, which runs adapters and glue in fewer passes too); intervals: "
        f"{CONFIDENCE:.0%} bootstrap over rounds, {result.resamples} resamples; peak: live storages, optimizer step "
        "included",
    ]
    if result.control_float32 is not None:
        lines.append(
            f"gradient error: relative L2 of the update's gradient in float32; plain eager in another layout (rows "
            f"reversed, padded) differs by {result.control_float32:.2g} there"
        )
    lossy = [row for row in result.rows if not row.exact]
    if lossy and result.control_error is not None:
        errors = ", ".join(f"{label_of(row)} {row.native_error:.2%}" for row in lossy)
        lines.append(f"in the actor's own dtypes: {errors}; plain eager in another layout {result.control_error:.2%}")
    lines.extend(f"BROKEN: {breach}" for breach in result.breaches)
    return lines


def result_json(result: SideBySide) -> dict[str, Any]:
    """All figures; intervals as {value, low, high}."""
    return asdict(result)


def label_of(row: Measured) -> str:
    return " ".join(filter(None, (row.policy, row.ceiling)))


def percent_interval(interval: Interval) -> str:
    """``+17.3 % (16.1 to 18.0)``"""
    return f"{100 * interval.value:+.1f} % ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def share_interval(interval: Interval) -> str:
    """``0.41 (0.38 to 0.43)``"""
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def _share(interval: Interval | None) -> str:
    return "-" if interval is None else share_interval(interval)


def _mib(count_bytes: int | None) -> str:
    return "-" if count_bytes is None else f"{count_bytes / MIB:,.2f}"


def _under(promised: int | None, measured: int) -> str:
    return "-" if promised is None else f"{(promised - measured) / promised:.2%}"
