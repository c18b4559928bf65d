"""The solver against brute force, its answers kept apart, and what it promises about more budget and more delta."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from hilore.planner import labels
from hilore.planner.build import assemble, build_problem, build_regions, risk_limit
from hilore.planner.leastpeak import least_peak, possible_held, smallest_budget
from hilore.planner.listing import Listing
from hilore.planner.milp import canonical, solve, within_gap
from hilore.planner.problem import Configuration, Problem, RegionProblem
from hilore.planner.relaxation import Relaxation, Relaxer
from hilore.planner.search import Best, Search
from hilore.planner.tables import make_tables
from hilore.planner.verify import reference_peaks, verify
from hilore.runtime.errors import InternalError
from tests.solver_fixtures import configuration, problem, problem36, qwen_trace, random_problem


def brute_force(p: Problem) -> tuple[int | None, int]:
    """Least extra time that fits (None: nothing does) and the least peak under the risk limit, from the formulas."""
    picks = np.array(list(itertools.product(*(range(len(r.configurations)) for r in p.regions))))
    columns = np.arange(len(p.regions))

    def field(name: str) -> np.ndarray:
        table = [[getattr(c, name) for c in region.configurations] for region in p.regions]
        return np.array([[row[k] for row in table] for k in range(len(table[0]))])[picks, columns]

    retained, forward, extra = field("retained_bytes"), field("forward_bytes"), field("extra_ns")
    risk = np.array([list(region.risk) for region in p.regions])[columns, picks].sum(axis=1)
    gradients = [region.gradient_bytes for region in p.regions]
    peak = p.base_bytes + retained.sum(axis=1) + p.head_bytes
    for i in range(len(p.regions)):
        peak = np.maximum(peak, p.base_bytes + retained[:, :i].sum(axis=1) + forward[:, i])
        for need in (field("backward_bytes"), field("demoted_backward_bytes")):
            live = retained[:, : i + 1].sum(axis=1) + need[:, i] + sum(gradients[i + 1 :])
            peak = np.maximum(peak, p.base_bytes + p.head_left_bytes + live)
    peak = np.maximum(peak, p.base_bytes + sum(gradients) + max(p.tail_bytes, p.optimizer_bytes))
    allowed = risk <= p.risk_limit
    fits = allowed & (peak <= p.budget_bytes)
    return (int(extra.sum(axis=1)[fits].min()) if fits.any() else None), int(peak[allowed].min())


@pytest.mark.parametrize("block", range(10))
def test_solver_equals_brute_force_on_random_problems(block: int) -> None:
    answers = set()
    for seed in range(block * 30, block * 30 + 30):
        rng = random.Random(seed)
        p = random_problem(rng, rng.randint(1, 5), rng.randint(1, 4))
        best, least = brute_force(p)
        solution = solve(p, time_limit_s=60, gap_percent=0)
        assert smallest_budget(p) == least, seed
        answers.add(solution.status)
        if best is None:
            assert (solution.status, solution.choice, solution.smallest_budget_bytes) == ("infeasible", (), least), seed
            continue
        assert (solution.status, solution.extra_ns, solution.bound_ns) == ("optimal", best, best), seed
        assert solution.greedy_extra_ns >= best, seed
        found = verify(p, solution.choice)
        assert max(found.peak_bytes, found.demoted_peak_bytes) <= p.budget_bytes, seed
        assert found.risk <= p.risk_limit, seed
    assert "optimal" in answers


def searched(listing: Listing, start: tuple[int, ...]) -> tuple[Relaxer, Best, Search]:
    relaxer, best = Relaxer(listing, start), Best(listing, start)
    search = Search(relaxer, best, allowed=0, step_cost=1000, deadline=60.0, clock=lambda: 0.0)
    return relaxer, best, search


@pytest.mark.parametrize("block", range(4))
def test_cp_sat_and_label_search_each_equal_brute_force_alone(block: int) -> None:
    checked = branched = 0
    for seed in range(1000 + block * 20, 1020 + block * 20):
        rng = random.Random(seed)
        p = random_problem(rng, rng.randint(2, 5), rng.randint(2, 4))
        best, _ = brute_force(p)
        if best is None:
            continue
        tables = make_tables(p)
        start = least_peak(p).choice
        relaxer, whole, search = searched(Listing(p, tables), start)
        root = relaxer.relax()
        assert root.bound <= best * tables.cost_scale + tables.cost_scale - 1, seed
        bound = search.cp_sat(root, 60.0, gap=0)
        assert (tables.total_extra(whole.choice), bound) == (best, whole.cost), seed
        relaxer, by_labels, search = searched(Listing(p, tables), start)
        branches = relaxer.branches(relaxer.relax(), tables.total_cost(start) - 1)
        proven = [search.close(branch) for branch in branches]
        assert tables.total_extra(by_labels.choice) == best, seed
        assert min(proven, default=by_labels.cost) >= by_labels.cost, seed
        relaxer, by_branches, search = searched(Listing(p, tables), start)
        for branch in relaxer.branches(relaxer.relax(), tables.total_cost(start) - 1):
            search.cp_sat(branch, 60.0, gap=0)
        assert tables.total_extra(by_branches.choice) == best, seed
        checked += 1
        branched += len(branches) > 1
    assert checked >= 8
    assert branched >= 2


@pytest.mark.parametrize("seed", range(30))
def test_a_branch_holds_so_many_regions_and_its_bound_is_one(seed: int) -> None:
    rng = random.Random(seed)
    p = random_problem(rng, 4, 3)
    tables = make_tables(p)
    cheapest: dict[int, int] = {}
    choices: dict[int, tuple[int, ...]] = {}
    for choice in itertools.product(*(range(len(region.configurations)) for region in p.regions)):
        if tables.fits(choice):
            held = sum(p.regions[r].configurations[k].hold for r, k in enumerate(choice))
            if tables.total_cost(choice) < cheapest.get(held, 10**18):
                cheapest[held], choices[held] = tables.total_cost(choice), choice
    relaxer = Relaxer(Listing(p, tables), next(iter(choices.values()), (0,) * 4))
    root = relaxer.relax()
    assert root.bound <= min(cheapest.values(), default=root.bound)
    assert possible_held(tables) >= cheapest.keys()
    if tables.risk_room is None:
        assert possible_held(tables) == cheapest.keys()
    for branch in relaxer.branches(root, 10**9):
        if branch.held is None:
            assert root is branch
        elif branch.held in cheapest:
            assert branch.bound <= cheapest[branch.held]
            assert_penalties(relaxer, branch, choices[branch.held], cheapest[branch.held])
    open_branches = {branch.held for branch in relaxer.branches(root, min(cheapest.values(), default=0))}
    assert not cheapest or {None, min(cheapest, key=lambda h: cheapest[h])} & open_branches


def assert_penalties(relaxer: Relaxer, branch: Relaxation, choice: tuple[int, ...], cost: int) -> None:
    """The penalties of a choice that fits add up to no more than what it costs above the bound."""
    penalty = relaxer.penalty(branch)
    assert (penalty[relaxer.listing.tables.usable] >= 0).all()
    assert sum(int(penalty[r, k]) for r, k in enumerate(choice)) <= branch.slack(cost)


def test_ties_go_to_fewer_lossy_units_and_the_bound_stays_a_bound_of_time() -> None:
    options = (
        configuration(retained=1, backward=0, extra=10, modes="R"),
        configuration(retained=2, backward=0, extra=4, modes="L"),
        configuration(retained=2, backward=0, extra=4, modes="H"),
    )
    p = problem([RegionProblem(f"r{i}", options, (0, 0, 0), 0) for i in range(3)], budget=5)
    solution = solve(p, time_limit_s=10, gap_percent=0)
    assert solution.choice == (0, 2, 2)
    assert (solution.extra_ns, solution.bound_ns) == (18, 18)


def test_interchangeable_regions_come_in_one_order() -> None:
    p = problem36(budget=4 * 36 + 400, risk_limit=0)
    tables = make_tables(p)
    scattered = tuple(1 if i in (3, 17, 30) else 0 for i in range(36))
    ordered = canonical(p, tables, scattered)
    assert ordered == (0,) * 33 + (1,) * 3
    assert verify(p, ordered).extra_ns == verify(p, scattered).extra_ns


def test_solving_twice_gives_the_same_plan() -> None:
    trace = qwen_trace(layers=6)
    low, high = reference_peaks(trace)
    p = build_problem(trace, trace.buckets[0], budget_bytes=(low * 3 + high) // 4, delta=1.0, psi_high=1.1)
    first, second = (solve(p, time_limit_s=60) for _ in range(2))
    assert replace(first, wall_s=0.0) == replace(second, wall_s=0.0)


def test_more_budget_or_more_delta_never_costs_time() -> None:
    trace = qwen_trace(layers=6, kept_names=("attention", "o", "gate", "up"))
    low, high = reference_peaks(trace)
    times: dict[tuple[int, float], int] = {}
    budgets = [low + (high - low) * step // 8 for step in range(9)]
    deltas = [0.0, 0.2, 0.5, 1.0, 3.0]
    for i, budget in enumerate(budgets):
        for delta in deltas:
            p = build_problem(trace, trace.buckets[0], budget_bytes=budget, delta=delta, psi_high=1.1)
            solution = solve(p, time_limit_s=60)
            assert solution.status == "optimal"
            times[i, delta] = solution.extra_ns
    for i, _ in enumerate(budgets):
        for a, b in itertools.pairwise(deltas):
            assert times[i, b] <= times[i, a]
    for delta in deltas:
        column = [times[i, delta] for i, _ in enumerate(budgets)]
        assert column == sorted(column, reverse=True)
        assert column[0] > column[-1] == 0


def test_a_sweep_of_a_hundred_budgets_and_three_deltas_only_goes_down() -> None:
    """From menus: every plan proven to 0.1 % of the step, never slower with more budget or more delta."""
    trace = qwen_trace(layers=8, codecs=("int8-g128", "int4-g64", "fp8-e4m3"), seed=None)
    bucket = trace.buckets[0]
    low, high = reference_peaks(trace)
    rows: list[list[int]] = []
    for delta in (0.0, 0.4, 1.0):
        regions = build_regions(trace, bucket, lossy=delta > 0, risk_free=False, granularity="unit")
        assert (regions[0].menu is not None) == (delta > 0)
        limit = risk_limit(trace.calibration, delta=delta, psi_high=1.0)
        times = []
        for step in range(100):
            p = assemble(trace, bucket, regions, budget_bytes=low + (high - low) * step // 99, limit=limit)
            solution = solve(p, time_limit_s=60)
            step_ns = solution.problem.constant_ns + solution.extra_ns
            assert solution.status == "optimal", (delta, step)
            assert 0 <= 1000 * (solution.extra_ns - solution.bound_ns) <= step_ns, (delta, step)
            times.append(solution.extra_ns)
        assert times == sorted(times, reverse=True)
        assert len(set(times)) > 50
        assert times[-1] == 0
        rows.append(times)
    for before, after in itertools.pairwise(rows):
        assert all(a <= b for a, b in zip(after, before, strict=True))
    assert rows[2] != rows[1] != rows[0]


def picked(p: Problem, choice: tuple[int, ...]) -> tuple[Configuration, ...]:
    return tuple(region.configurations[k] for region, k in zip(p.regions, choice, strict=True))


def test_a_hint_that_fits_is_never_beaten_by_the_answer() -> None:
    p = problem36(budget=4 * 36 + 500)
    best = solve(p, time_limit_s=60, gap_percent=0)
    hinted = solve(p, time_limit_s=60, gap_percent=50, hints=[picked(p, best.choice), picked(p, (1,) * 36)])
    assert hinted.extra_ns == best.extra_ns


def test_no_clock_left_means_unknown_and_no_plan() -> None:
    ticks = itertools.count()
    solution = solve(problem36(budget=700), time_limit_s=0.5, clock=lambda: float(next(ticks)))
    assert (solution.status, solution.choice, solution.extra_ns, solution.bound_ns) == ("unknown", (), 0, 0)


def knapsack() -> Problem:
    """Density takes the first region's 60 for 6 bytes; the optimum is the other two's 90 for 10."""
    regions = [
        RegionProblem(
            f"r{i}",
            (configuration(retained=0, backward=0, extra=spared), configuration(retained=size, backward=0, extra=0)),
            (0, 0),
            0,
        )
        for i, (size, spared) in enumerate([(6, 60), (5, 45), (5, 45)])
    ]
    return problem(regions, budget=10)


def test_time_up_after_the_heuristic_means_feasible_with_a_true_bound() -> None:
    ticks = iter([0.0, 0.1])

    def clock() -> float:
        return next(ticks, 5.0)

    p = knapsack()
    solution = solve(p, time_limit_s=1.0, gap_percent=0, clock=clock)
    optimum = solve(p, time_limit_s=60, gap_percent=0)
    assert (optimum.status, optimum.extra_ns, optimum.choice) == ("optimal", 60, (0, 1, 1))
    assert (solution.status, solution.extra_ns, solution.choice) == ("feasible", 90, (1, 0, 0))
    assert solution.bound_ns <= 60
    assert solution.greedy_extra_ns == optimum.greedy_extra_ns == 90
    assert not within_gap(verify(p, solution.choice), solution.bound_ns, 0.0)


def test_an_infeasible_problem_never_reaches_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the solver ran")

    monkeypatch.setattr("hilore.planner.milp.Relaxer", never)
    p = problem36(budget=100)
    solution = solve(p, time_limit_s=60)
    assert solution.status == "infeasible"
    assert solution.smallest_budget_bytes == 4 * 36 + 120
    assert solve(replace(p, budget_bytes=4 * 36 + 119), time_limit_s=60).status == "infeasible"


def test_a_disagreement_between_search_and_verifier_is_our_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    import hilore.planner.milp as milp

    honest = milp.verify
    monkeypatch.setattr(milp, "verify", lambda p, c: replace(honest(p, c), peak_bytes=p.budget_bytes + 1))
    with pytest.raises(InternalError, match=r"verified peak 701 bytes, budget 700 bytes"):
        solve(problem36(budget=700), time_limit_s=10)


@pytest.mark.parametrize("risky", [False, True])
@pytest.mark.parametrize("count", [50, 3000])
def test_labels_are_dropped_only_for_a_better_one_with_as_many_held_regions(count: int, risky: bool) -> None:
    rng = np.random.default_rng(count)
    retained, risk, cost = (rng.integers(0, 60, count) for _ in range(3))
    held = rng.integers(0, 3, count)
    if not risky:
        risk = np.zeros(count, dtype=np.int64)
    kept = labels._unbeaten(retained, risk, cost, held, risky=risky)
    assert len(set(kept.tolist())) == len(kept) < count / 2
    for lost in set(range(count)) - set(kept.tolist()):
        assert (
            (held[kept] == held[lost])
            & (retained[kept] <= retained[lost])
            & (risk[kept] <= risk[lost])
            & (cost[kept] <= cost[lost])
        ).any()
