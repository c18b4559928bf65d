"""C-22: a plan that keeps less can need more, so feasibility is judged by events, never by the sum of kept bytes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hilore.planner.leastpeak import smallest_budget
from hilore.planner.milp import solve
from hilore.planner.problem import Problem, RegionProblem
from hilore.planner.verify import verify
from tests.solver_fixtures import MIB, configuration, problem, random_problem

# Replaying needs the 100 MiB inside at once; kept, 60 MiB stay and backward needs 30 beside them.
REPLAYED = configuration(retained=1 * MIB, forward=100 * MIB, backward=100 * MIB, extra=5, modes="R")
KEPT = configuration(retained=60 * MIB, forward=100 * MIB, backward=30 * MIB, extra=0, modes="H")


def three(budget: int) -> Problem:
    regions = [RegionProblem(f"r{i}", (REPLAYED, KEPT), (0, 0), 0) for i in range(3)]
    return problem(regions, budget=budget, base=10 * MIB)


def test_keeping_the_last_region_needs_less_than_keeping_nothing() -> None:
    p = three(0)
    nothing, last = verify(p, [0, 0, 0]), verify(p, [0, 0, 1])
    assert (nothing.peak_bytes, nothing.peak_event) == ((10 + 3 + 100) * MIB, "backward of r2")
    assert (last.peak_bytes, last.peak_event) == ((10 + 2 + 100) * MIB, "forward of r2")
    assert smallest_budget(p) == last.peak_bytes < nothing.peak_bytes


def test_in_the_middle_it_helps_nothing_although_more_is_kept() -> None:
    middle = verify(three(0), [0, 1, 0])
    assert (middle.peak_bytes, middle.peak_event) == ((10 + 62 + 100) * MIB, "backward of r2")


def test_a_budget_that_the_sum_of_kept_bytes_would_pass_is_refused() -> None:
    kept = 10 + 60 * 2 + 1
    assert verify(three(0), [1, 1, 0]).peak_bytes > kept * MIB
    solution = solve(three(kept * MIB), time_limit_s=10, gap_percent=0)
    assert solution.status == "optimal"
    assert solution.choice != (1, 1, 0)
    assert verify(three(kept * MIB), solution.choice).peak_bytes <= kept * MIB


def test_the_smallest_budget_has_a_plan_and_one_byte_less_has_none() -> None:
    smallest = smallest_budget(three(0))
    assert solve(three(smallest), time_limit_s=10, gap_percent=0).choice == (0, 0, 1)
    below = solve(three(smallest - 1), time_limit_s=10)
    assert (below.status, below.smallest_budget_bytes) == ("infeasible", smallest)


@pytest.mark.parametrize("block", range(4))
def test_peak_under_the_budget_at_every_event_of_random_problems(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        p = random_problem(random.Random(seed), 4, 3)
        p = replace(p, budget_bytes=smallest_budget(p) + seed % 7)
        solution = solve(p, time_limit_s=10, gap_percent=0)
        assert solution.status == "optimal"
        found = verify(p, solution.choice)
        assert max(found.peak_bytes, found.demoted_peak_bytes) <= p.budget_bytes, seed
