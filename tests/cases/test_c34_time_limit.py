"""C-34: a plan found in time is called optimal only when that is proven; otherwise gap, bound and exit code 3."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from hilore.planner.emit import solve_trace
from hilore.planner.milp import solve, within_gap
from hilore.planner.problem import Problem, RegionProblem
from hilore.planner.verify import reference_peaks, verify
from tests.solver_fixtures import configuration, problem, qwen_trace


def units400(budget: int, count: int = 400) -> Problem:
    """400 units of different sizes, each at H, L or R."""
    regions = []
    for i in range(count):
        size, spared = 50 + (i * 37) % 101, 900 + (i * 7919) % 463
        options = (
            configuration(retained=3, backward=400, extra=spared, modes="R"),
            configuration(retained=3 + size, backward=400 - size, extra=0, modes="H"),
            configuration(retained=3 + size // 2, backward=400, demoted=400, extra=160, modes="L"),
        )
        regions.append(RegionProblem(f"u{i}", options, (0, 0, 100 + i % 17), 0))
    return problem(regions, budget=budget, risk_limit=9_000, head=300, constant_ns=1_000_000)


@pytest.mark.parametrize("budget", [8_000, 20_000])
@pytest.mark.parametrize("limit_s", [0.05, 3.0])
def test_status_gap_and_bound_hold_together_and_the_limit_is_kept(budget: int, limit_s: float) -> None:
    p = units400(budget)
    began = time.monotonic()
    solution = solve(p, time_limit_s=limit_s)
    assert time.monotonic() - began <= limit_s + 1
    assert solution.status in ("optimal", "feasible", "unknown")
    if solution.status != "unknown":
        found = verify(p, solution.choice)
        assert solution.bound_ns <= solution.extra_ns == found.extra_ns
        assert (solution.status == "optimal") == within_gap(found, solution.bound_ns, 0.1)
        assert found.peak_bytes <= budget
        assert found.risk <= p.risk_limit


def stopping_after(calls: int) -> Callable[[], float]:
    """A clock that stands still for so many looks and is then far past any limit."""
    looks = itertools.count()
    return lambda: 0.0 if next(looks) < calls else 1_000.0


def test_a_limit_that_stops_with_a_plan_in_hand_says_feasible() -> None:
    p = units400(2_000, 60)
    optimum = solve(p, time_limit_s=60, gap_percent=0)
    assert optimum.status == "optimal"
    seen = set()
    for calls in range(1, 12):
        solution = solve(p, time_limit_s=0.3, gap_percent=0, clock=stopping_after(calls))
        seen.add(solution.status)
        if solution.status == "unknown":
            assert solution.choice == ()
            continue
        assert solution.bound_ns <= optimum.extra_ns <= solution.extra_ns
        assert (solution.status == "optimal") == (solution.bound_ns == solution.extra_ns)
    assert {"unknown", "feasible"} <= seen


def test_the_set_of_plans_carries_gap_and_exit_code_3() -> None:
    trace = qwen_trace(layers=6, buckets=(1024,), kept_names=("attention", "gate", "up"))
    low, high = reference_peaks(trace)
    result = solve_trace(trace, budget_bytes=(2 * low + high) // 3, delta=0.5, gap_percent=0.0, clock=stopping_after(5))
    assert result.exit_code == 3
    assert any(plan.solver.status == "feasible" and plan.solver.gap > 0 for plan in result.plans)
    for plan in result.plans:
        gap = (plan.solver.objective_ns - plan.solver.bound_ns) / plan.predicted.step_ns
        assert plan.solver.gap == gap
        assert (plan.solver.status == "optimal") == (gap == 0)


def test_the_gap_asked_for_is_a_share_of_the_step() -> None:
    p = problem([RegionProblem("r", (configuration(retained=0, backward=0, extra=10),), (0,), 0)], budget=1)
    found = verify(p, [0])
    assert found.step_ns == 1010
    assert within_gap(found, 0, 1.0)
    assert not within_gap(found, 0, 0.99)
    assert within_gap(found, 10, 0.0)
