"""The document and the README of plans that bench/planning.py writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.table import versions
from hilore.planner.budget import MIB
from hilore.planner.tracefile import load_trace
from hilore.planner.verify import reference_peaks
from hilore.runtime.planfile import load_plans


@dataclass(frozen=True, slots=True)
class Command:
    """One command of ``hilore-plan``. ``what``: trace, solve or verify; ``plans``: their folder under plans/."""

    example: str
    what: str
    plans: str
    typed: str
    exit_code: int
    wall_s: float
    cpu_s: float
    ram_bytes: int
    last_line: str


def markdown(commands: Sequence[Command], folder: Path, typed: str) -> str:
    """What each command took, what it predicts, and the plans it made; ``folder`` holds traces and plans."""
    lines = [
        "# What planning costs without a GPU",
        "",
        f"`{typed}`",
        f"({versions()}). Every command ran in a process of its own; RAM is its highest resident memory. Wall seconds",
        "include what else ran beside it, CPU seconds (user and system) do not. No weights are read or allocated.",
        "",
        "| command | exit | CPU s | wall s | RAM MiB |",
        "|---|--:|--:|--:|--:|",
    ]
    for one in commands:
        lines.append(
            f"| `{one.typed}` | {one.exit_code} | {one.cpu_s:.1f} | {one.wall_s:.1f} | {one.ram_bytes / MIB:,.0f} |"
        )
    lines += ["", "## Traces", "Predicted, allocated MiB on one rank at the longest row.", ""]
    lines += ["| trace | device | regions | tokens per row | GC peak | No-GC peak |", "|---|---|--:|---|--:|--:|"]
    for path in sorted(folder.glob("*.trace.json")):
        trace = load_trace(path)
        gc_peak, no_gc_peak = reference_peaks(trace)
        tokens = ", ".join(str(bucket.tokens) for bucket in trace.buckets)
        lines.append(
            f"| {trace.name} | {trace.device} | {len(trace.buckets[0].regions)} | {tokens} | {gc_peak / MIB:,.1f} | "
            f"{no_gc_peak / MIB:,.1f} |"
        )
    lines += [
        "",
        "## Plans",
        "Gap: the largest of the set, as a share of the step. Peak and gain over GC: predicted for the longest row and",
        "the highest exposures; where times are estimated from a data sheet, so is the gain.",
        "",
        "| plans | budget MiB | files | optimal | largest gap | peak MiB | gain over GC |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for one in commands:
        if one.what == "solve" and one.exit_code in (0, 3):
            lines.append(_plans_line(one, folder))
    return "\n".join(lines) + "\n"


def _plans_line(one: Command, folder: Path) -> str:
    plans = load_plans(str(folder / "plans" / one.plans / "*.json")).plans
    longest = max(plan.length_bucket for plan in plans)
    high = next(plan for plan in plans if plan.length_bucket == longest and plan.regime.label == "high")
    optimal = sum(plan.solver.status == "optimal" for plan in plans)
    gain = high.predicted.gc_step_ns / high.predicted.step_ns - 1
    return (
        f"| {one.plans} | {high.budget_bytes / MIB:,.0f} | {len(plans)} | {optimal} | "
        f"{max(plan.solver.gap for plan in plans):.3%} | {high.predicted.peak_bytes / MIB:,.1f} | {gain:+.1%}"
        f"{' (estimated)' if high.predicted.estimated else ''} |"
    )


def plans_readme(commands: Sequence[Command]) -> str:
    """What made each set."""
    lines = [
        "# Shipped plans",
        "Every set was made by the two commands beside it; plans of your own land beside this file. A set binds to the",
        "actor of its example. `-tight`: at 1.05 times GC's predicted peak; the others at the paper's 30,318 MiB.",
        "",
        "| folder | trace | solve |",
        "|---|---|---|",
    ]
    traces = {one.example: one.typed for one in commands if one.what == "trace"}
    for one in commands:
        if one.what == "solve" and one.exit_code in (0, 3):
            lines.append(f"| `{one.plans}/` | `{traces[one.example]}` | `{one.typed}` |")
    return "\n".join(lines) + "\n"
