"""C-35: an "optimal" plan over budget. All choices of small problems are tried; greedy must never beat a proof."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

import hilore.planner.milp as milp
from hilore.planner.greedy import greedy
from hilore.planner.leastpeak import fitting_choice, smallest_budget
from hilore.planner.milp import solve
from hilore.planner.problem import Problem
from hilore.planner.tables import make_tables
from hilore.planner.verify import verify
from hilore.runtime.errors import InternalError
from tests.solver_fixtures import problem36, random_problem


def least_extra(p: Problem) -> int | None:
    """The least time of all choices that keep every limit, or None. Rows are worked out for all choices at once."""
    n = len(p.regions)
    picks = np.array(list(itertools.product(*(range(len(region.configurations)) for region in p.regions))))
    base, upto = p.base_bytes, np.zeros(len(picks), dtype=np.int64)
    time, risk, peak = (np.zeros(len(picks), dtype=np.int64) for _ in range(3))
    gradients = sum(region.gradient_bytes for region in p.regions)
    for i in range(n):
        region, pick = p.regions[i], picks[:, i]
        fields = [
            (c.retained_bytes, c.forward_bytes, c.backward_bytes, c.demoted_backward_bytes, c.extra_ns)
            for c in region.configurations
        ]
        retained, forward, backward, demoted, extra = np.array(fields).T[:, pick]
        gradients -= region.gradient_bytes
        peak = np.maximum(peak, base + upto + forward)
        upto = upto + retained
        peak = np.maximum(peak, base + p.head_left_bytes + gradients + upto + np.maximum(backward, demoted))
        time, risk = time + extra, risk + np.array(region.risk)[pick]
    peak = np.maximum(peak, base + upto + p.head_bytes)
    total = sum(region.gradient_bytes for region in p.regions)
    peak = np.maximum(peak, base + total + max(p.tail_bytes, p.optimizer_bytes))
    allowed = (peak <= p.budget_bytes) & (risk <= p.risk_limit)
    return int(time[allowed].min()) if allowed.any() else None


@pytest.mark.parametrize("block", range(10))
def test_every_small_problem_agrees_with_all_its_choices(block: int) -> None:
    solved = 0
    for seed in range(5000 + block * 50, 5050 + block * 50):
        rng = random.Random(seed)
        p = random_problem(rng, rng.choice([1, 2, 3, 4, 5, 6, 6, 7, 8]), 3)
        best = least_extra(p)
        solution = solve(p, time_limit_s=60, gap_percent=0)
        if best is None:
            assert solution.status == "infeasible", seed
            continue
        assert (solution.status, solution.extra_ns, solution.bound_ns) == ("optimal", best, best), seed
        assert best <= solution.greedy_extra_ns, seed
        for choice in (solution.choice, solution.greedy_choice):
            found = verify(p, choice)
            assert max(found.peak_bytes, found.demoted_peak_bytes) <= p.budget_bytes, seed
            assert found.risk <= p.risk_limit, seed
        solved += 1
    assert solved >= 15


@pytest.mark.parametrize("budget", range(4 * 36 + 120, 4 * 36 + 3_800, 460))
def test_problem36_agrees_with_counting(budget: int) -> None:
    """36 equal units: only how many are at H and at L matters, and whether the last one is at H."""
    p = problem36(budget)
    best = None
    for kept in range(37):
        for lossy in range(min(12, 36 - kept) + 1):
            total = 4 * 36 + 100 * kept + 53 * lossy
            last = [20] if kept else []
            last += [120] if kept < 36 else []
            # Units at H come last; the last replayed one has all R and L units before it.
            before = 4 * (36 - kept) + 53 * lossy
            peak = max(total + 60, total + min(last), before + 120 if kept < 36 else 0)
            if peak <= budget:
                time = 1000 * (36 - kept - lossy) + 130 * lossy
                best = time if best is None else min(best, time)
    solution = solve(p, time_limit_s=60, gap_percent=0)
    assert (solution.status, solution.extra_ns, solution.bound_ns) == ("optimal", best, best)
    assert solution.greedy_extra_ns >= solution.extra_ns


@pytest.mark.parametrize("seed", range(40))
def test_greedy_ends_where_no_single_switch_helps(seed: int) -> None:
    p = random_problem(random.Random(seed), 5, 4)
    p = replace(p, budget_bytes=smallest_budget(p) + seed * 3)
    tables = make_tables(p)
    start = fitting_choice(tables)
    assert start is not None
    found = greedy(tables, start)
    assert tables.fits(found)
    assert tables.total_cost(found) <= tables.total_cost(start)
    for region, k in itertools.product(range(5), range(4)):
        other = (*found[:region], k, *found[region + 1 :])
        assert not (tables.fits(other) and tables.total_cost(other) < tables.total_cost(found))


def test_the_verifier_has_the_last_word_on_time_and_on_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = milp.verify
    monkeypatch.setattr(milp, "verify", lambda p, c: replace(honest(p, c), extra_ns=honest(p, c).extra_ns + 1))
    with pytest.raises(InternalError, match="the verifier"):
        solve(problem36(900), time_limit_s=10)
    monkeypatch.setattr(milp, "verify", lambda p, c: replace(honest(p, c), risk=p.risk_limit + 1))
    with pytest.raises(InternalError, match="verified risk 12001, limit 12000"):
        solve(problem36(900), time_limit_s=10)


def test_a_bound_above_a_known_plan_is_our_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = milp.Relaxer.relax

    def too_high(relaxer: milp.Relaxer) -> milp.Relaxation:
        found = honest(relaxer)
        return replace(found, exact_bound=found.exact_bound << 1)

    monkeypatch.setattr(milp.Relaxer, "relax", too_high)
    with pytest.raises(InternalError, match="lies above a choice of cost"):
        solve(problem36(900), time_limit_s=10)
