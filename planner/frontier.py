"""Peak against predicted step time, budget by budget, for our plans and for the policies of others.

Every point's figures come from the verifier. Curves are monotone by construction: at each budget a policy takes the
fastest of what it found there and under smaller budgets (and, for our plans, smaller deltas), all of which fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hilore.planner.build import build_problem
from hilore.planner.emit import solve_trace
from hilore.planner.frontier_curves import (
    LAYER_GRAIN,
    UNIT_GRAIN,
    Progress,
    Setting,
    exact_curves,
    solved_curves,
    uniform_curves,
)
from hilore.planner.frontier_points import Curve, Frontier, Point
from hilore.planner.leastpeak import least_peak
from hilore.planner.regimes import regimes
from hilore.planner.trace import Trace
from hilore.planner.verify import largest_bucket, reference_peaks, reference_times
from hilore.runtime.errors import InternalError

__all__ = ["Curve", "Frontier", "Point", "default_budgets", "frontier", "smallest_feasible"]

MIB = 2**20
POINTS = 12


def smallest_feasible(trace: Trace, *, delta: float = 0.0) -> int:
    """The smallest budget in bytes that has plans for every regime of the largest length bucket. Exact."""
    highest = regimes(trace.calibration)[-1].high
    problem = build_problem(trace, largest_bucket(trace), budget_bytes=0, delta=delta, psi_high=highest)
    return least_peak(problem).peak_bytes


def default_budgets(trace: Trace, *, delta: float = 0.0, points: int = POINTS) -> tuple[int, ...]:
    """Whole MiB from the smallest feasible budget to No-GC's peak, closer together at the low end."""
    lowest = -(-smallest_feasible(trace, delta=delta) // MIB)
    highest = max(-(-reference_peaks(trace)[1] // MIB), lowest)
    steps = max(points - 1, 1)
    found = {lowest + (highest - lowest) * step**2 // steps**2 for step in range(steps)} | {highest}
    return tuple(MIB * budget for budget in sorted(found))


def frontier(
    trace: Trace,
    *,
    budgets: Sequence[int],
    deltas: Sequence[float] = (0.0, 1.0),
    time_limit_s: float = 20.0,
    gap_percent: float = 0.1,
    rivals: bool = True,
    progress: Progress | None = None,
) -> Frontier:
    """The frontier of the largest length bucket at ``budgets`` (bytes) and ``deltas``.

    ``time_limit_s`` is for each solve of four regimes; where nothing is found in it, a smaller budget's plan stands,
    or no point. ``rivals`` False: our plans at unit grain and greedy alone. Raises InfeasibleError where no budget is
    feasible, and what else solving raises.
    """
    bucket = largest_bucket(trace)
    alone = replace(trace, buckets=(bucket,))
    ordered, wanted = tuple(sorted(set(budgets))), tuple(sorted(set(deltas)))
    smallest = smallest_feasible(trace, delta=wanted[-1])
    if ordered[-1] < smallest:
        # Solving says what the smallest feasible budget is made of.
        solve_trace(alone, budget_bytes=ordered[-1], delta=wanted[-1], time_limit_s=time_limit_s)
        raise InternalError(f"{ordered[-1]} bytes have plans, but the smallest feasible budget is {smallest} bytes")
    tell = progress or (lambda _label, _done, _total: None)
    setting = Setting(alone, bucket, ordered, regimes(trace.calibration), time_limit_s, gap_percent, tell)
    curves = solved_curves(setting, wanted, UNIT_GRAIN)
    if rivals:
        curves += solved_curves(setting, wanted, LAYER_GRAIN)
        curves += uniform_curves(setting, wanted)
        curves += exact_curves(setting)
    gc_peak, no_gc_peak = reference_peaks(trace)
    gc_ns, no_gc_ns = reference_times(trace)
    return Frontier(
        name=trace.name,
        tokens=bucket.tokens,
        estimated=trace.estimated,
        time_spread=trace.time_spread,
        calibrated=trace.calibration.calibrated,
        budgets=ordered,
        deltas=wanted,
        smallest_bytes=smallest,
        gc_peak_bytes=gc_peak,
        gc_step_ns=gc_ns,
        no_gc_peak_bytes=no_gc_peak,
        no_gc_step_ns=no_gc_ns,
        curves=tuple(curves),
    )
