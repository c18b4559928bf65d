"""``python -m bench.solver TRACE...``: what solving takes, and how far it proves its plans.

The first trace is solved at every budget of ``--budgets`` and every delta of ``--deltas``, each further one at 1.05
times GC's predicted peak and halfway from GC to No-GC (or to the card, where that is less). One solve is all regimes of
all length buckets. Exit code 6 where a gap stays open or a solve takes longer than ``--seconds`` (first trace) or
``--further-seconds`` of the processor: its seconds do not depend on what else runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.table import environment, versions, write_json
from hilore.planner.budget import AUTO_MARGIN_BYTES, MIB
from hilore.planner.emit import solve_trace
from hilore.planner.files import replace_file
from hilore.planner.solved import InfeasibleError
from hilore.planner.trace import Trace
from hilore.planner.tracefile import load_trace
from hilore.planner.verify import reference_peaks

BREACH = 6
BUDGETS = "7000,7800,10000,16000,30318"
DELTAS = "0,0.5,1,2"
TIGHT = 1.05
TIME_LIMIT_S = 60.0
GAP_PERCENT = 0.1


@dataclass(frozen=True, slots=True)
class SolveTime:
    """One solve of all regimes and buckets. ``gap``: the largest of its plans, as a share of the step.

    ``peak_bytes`` and ``gain`` over GC: predicted, of the longest bucket's plan for the highest exposures. Infeasible:
    ``plans`` 0 and ``peak_bytes`` the smallest budget that is feasible. ``limit_s``: seconds it may take.
    """

    trace: str
    budget_mib: int
    delta: float
    status: str
    plans: int
    wall_s: float
    cpu_s: float
    gap: float
    peak_bytes: int
    gain: float
    limit_s: float

    @property
    def holds(self) -> bool:
        return self.status in ("optimal", "infeasible") and self.cpu_s <= self.limit_s


def solve_times(
    trace: Trace, budgets_mib: Sequence[int], deltas: Sequence[float], limit_s: float
) -> Iterator[SolveTime]:
    """One row per budget and delta."""
    for budget in budgets_mib:
        for delta in deltas:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                result = solve_trace(
                    trace, budget_bytes=budget * MIB, delta=delta, time_limit_s=TIME_LIMIT_S, gap_percent=GAP_PERCENT
                )
            except InfeasibleError as error:
                status, plans, gap, gain = "infeasible", 0, 0.0, 0.0
                peak: int = error.smallest_budget_bytes
            else:
                status = "optimal" if result.exit_code == 0 else "feasible"
                high = next(r for r in result.rows if r.regime == "high" and r.tokens == result.largest_bucket)
                plans, gap = len(result.plans), max(row.gap for row in result.rows)
                peak, gain = high.peak_bytes, high.gain
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            yield SolveTime(
                trace.name, budget, delta, status, plans, round(wall, 3), round(cpu, 3), gap, peak, gain, limit_s
            )


def further_budgets(trace: Trace) -> tuple[int, int]:
    """MiB: 1.05 times GC's peak; halfway from GC's to No-GC's or to the card, whichever is less."""
    gc_peak, no_gc_peak = reference_peaks(trace)
    most = min(no_gc_peak, trace.card_bytes - AUTO_MARGIN_BYTES) if trace.card_bytes else no_gc_peak
    return -(-int(TIGHT * gc_peak) // MIB), (gc_peak + max(most, gc_peak)) // 2 // MIB


def markdown(rows: Sequence[SolveTime], command: str) -> str:
    """The document with its table."""
    slowest, widest = max(rows, key=lambda row: row.cpu_s), max(rows, key=lambda row: row.gap)
    optimal = sum(row.status == "optimal" for row in rows)
    infeasible = sum(row.status == "infeasible" for row in rows)
    lines = [
        "# What solving takes",
        "",
        f"`{command}`",
        f"({versions()}). One row is one solve: all regimes of all length buckets, to a proven gap of",
        f"{GAP_PERCENT:g} % of the step. CPU seconds are of the process, wall seconds include what else ran. Peak and",
        "gain over GC are those of the longest bucket's plan for the highest exposures; times are estimated where the",
        "trace's are.",
        "",
        f"{len(rows)} solves: {optimal} optimal, {infeasible} infeasible; slowest {slowest.cpu_s:.1f} CPU s "
        f"({slowest.trace}, {slowest.budget_mib:,} MiB, delta {slowest.delta:g}); widest proven gap {widest.gap:.3%}.",
        "",
        "| trace | budget MiB | delta | status | plans | CPU s | wall s | largest gap | peak MiB | gain over GC |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row.status == "infeasible":
            figures = f"- | smallest feasible {row.peak_bytes / MIB:,.1f} | -"
        else:
            figures = f"{row.gap:.3%} | {row.peak_bytes / MIB:,.1f} | {row.gain:+.1%}"
        lines.append(
            f"| {row.trace} | {row.budget_mib:,} | {row.delta:g} | {row.status} | {row.plans} | {row.cpu_s:.1f} | "
            f"{row.wall_s:.1f} | {figures} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.solver", description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="TRACE.JSON")
    parser.add_argument("--budgets", default=BUDGETS, metavar="MIB,...", help=f"of the first trace; {BUDGETS}")
    parser.add_argument("--deltas", default=DELTAS, metavar="D,...", help=DELTAS)
    parser.add_argument("--seconds", type=float, default=10.0, help="a solve of the first trace takes at most; 10")
    parser.add_argument("--further-seconds", type=float, default=30.0, help="a solve of another; 30")
    parser.add_argument("--out", metavar="FILE", help="JSON with all figures")
    parser.add_argument("--markdown", metavar="FILE", help="the document with its table")
    given = parser.parse_args(arguments)
    deltas = [float(delta) for delta in given.deltas.split(",")]
    rows: list[SolveTime] = []
    for place, path in enumerate(given.traces):
        trace = load_trace(path)
        budgets = further_budgets(trace) if place else tuple(int(budget) for budget in given.budgets.split(","))
        for row in solve_times(trace, budgets, deltas, given.further_seconds if place else given.seconds):
            rows.append(row)
            sys.stdout.write(
                f"{row.trace}, {row.budget_mib} MiB, delta {row.delta:g}: {row.status}, {row.cpu_s:.1f} CPU s, gap "
                f"{row.gap:.3%}{'' if row.holds else ' MISSED'}\n"
            )
            sys.stdout.flush()
    names = " ".join(Path(path).name for path in given.traces)
    command = f"python -m bench.solver {names} --out JSON --markdown FILE"
    if given.out:
        write_json({"environment": environment(1, command), "rows": [asdict(row) for row in rows]}, given.out)
    if given.markdown:
        replace_file(given.markdown, markdown(rows, command))
    return 0 if all(row.holds for row in rows) else BREACH


if __name__ == "__main__":
    sys.exit(main())
