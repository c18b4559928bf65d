"""What is not written out: the menu against every assignment, and solving from menus against complete lists."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from hilore.planner import configure
from hilore.planner.build import build_problem
from hilore.planner.configure import offer
from hilore.planner.listing import Listing
from hilore.planner.milp import solve
from hilore.planner.modecost import region_cost
from hilore.planner.problem import Problem
from hilore.planner.regionmenu import RegionMenu, UnitPrices
from hilore.planner.relaxation import Relaxer
from hilore.planner.risks import RiskTable
from hilore.planner.tables import make_tables
from hilore.planner.trace import CodecCost, RegionClass, RegionTrace, Trace, UnitRisk
from tests.solver_fixtures import assignments, qwen_trace, random_class, region_plan

CODECS = ("c4", "c6", "c8")


def codec_class(seed: int) -> RegionClass:
    """A random class whose units offer up to three codecs: less payload, more risk."""
    rng = random.Random(seed)
    found = random_class(seed, split=seed % 2 == 1)
    units = []
    for unit in found.units:
        offered = rng.sample(CODECS, rng.randint(0, 3))
        costs = [
            CodecCost(c, rng.randint(1, 9), rng.randint(0, 5), rng.randint(0, 5), rng.randint(0, 9))
            for c in sorted(offered)
        ]
        units.append(replace(unit, codecs=tuple(costs)))
    return replace(found, units=tuple(units))


def risks_of(region_class: RegionClass, rng: random.Random, region: str) -> list[UnitRisk]:
    """Some with an entry of their own for one set of tainted units, some without any."""
    found = []
    for unit, later in zip(region_class.units, (*region_class.units[1:], None), strict=True):
        for cost in unit.codecs:
            if rng.random() < 0.9:
                found.append(UnitRisk(region, unit.name, cost.codec, rng.randint(0, 50) * 1e-12))
            if later is not None and rng.random() < 0.3:
                found.append(UnitRisk(region, unit.name, cost.codec, rng.randint(0, 50) * 1e-12, (later.name,)))
    return found


def random_trace(seed: int) -> Trace:
    rng = random.Random(seed)
    like = qwen_trace(layers=1)
    region_class = codec_class(seed)
    regions = tuple(RegionTrace(f"r{i}", 0) for i in range(rng.randint(2, 3)))
    risks = risks_of(region_class, rng, "")
    same = rng.random() < 0.5
    every = [
        replace(risk, region=region.name, kappa2=risk.kappa2 * (1 if same else rng.randint(1, 3)))
        for region in regions
        for risk in risks
    ]
    outside = replace(
        like.buckets[0].outside,
        before_bytes=0,
        head_bytes=rng.randint(0, 90),
        head_left_bytes=rng.randint(0, 20),
        tail_bytes=0,
        optimizer_bytes=0,
        leaf_boundary_bytes=rng.choice([0, 3]),
    )
    bucket = replace(like.buckets[0], classes=(region_class,), regions=regions, outside=outside)
    calibration = replace(like.calibration, risks=tuple(every), delta_star=1e-6, interaction=1.0)
    fixed = replace(like.fixed, parameter_bytes=0, gradient_bytes=0, optimizer_state_bytes=0)
    return replace(like, buckets=(bucket,), calibration=calibration, fixed=fixed)


def problem_of(trace: Trace, budget: int, delta: float) -> Problem:
    return build_problem(trace, trace.buckets[0], budget_bytes=budget, delta=delta, psi_high=1.0)


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_and_all_within_a_margin_are_those_of_every_assignment(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configure, "LISTED_LIMIT", 0)
    rng = random.Random(seed)
    region_class = codec_class(seed)
    menu = offer(region_class, lossy=True).menu
    assert menu is not None
    kappa2 = {(u.name, c.codec, None): Fraction(rng.randint(0, 90)) for u in region_class.units for c in u.codecs}
    region = RegionMenu(menu, RiskTable(kappa2, Fraction(1)))
    prices = UnitPrices(*(rng.randint(0, 4) for _ in range(4)), time=rng.randint(0, 3), lossy=0, risk_room=None)

    def worth(retained: int, forward: int, needed: int, extra: int, risk: int) -> int:
        return (
            retained * prices.retained
            + forward * prices.forward
            + needed * prices.needed
            + extra * prices.time
            + risk * prices.risk
        )

    every = []
    for modes, split in assignments(region_class):
        cost = region_cost(region_plan(region_class, modes, split=split), region_class, 0)
        risk = sum(int(kappa2[name, mode, None]) for name, mode in modes.items() if mode not in "HR")
        needed = max(cost.backward_bytes, cost.demoted_backward_bytes)
        every.append(worth(cost.retained_bytes, cost.forward_bytes, needed, cost.extra_ns, risk))
    value, recipe = region.cheapest(prices)
    # What a backward needs may depend on several codecs; then the least is a bound.
    at = worth(*region.figures(recipe), region.risk(recipe))
    assert value <= min(every) <= at
    assert value == at or prices.needed > 0
    margin = rng.randint(0, 60)
    found = region.within(prices, value + margin, 10_000)
    assert found is not None
    assert len(found) == len(set(found))
    worths = [worth(*region.figures(r), region.risk(r)) for r in found]
    assert prices.needed > 0 or max(worths) <= value + margin
    # Beaten shapes are not in the menu, but the cheapest of all is, and nothing that is not an assignment.
    assert min(every) > value + margin or min(worths) == min(every)
    assert set(every) >= set(worths)
    assert region.within(prices, value + margin, len(found) - 1) is None
    for recipe in found:
        built = region.build(recipe)
        assert {u.name for u in built.units if u.mode == "L"} <= {u.name for u in region_class.units if u.codecs}


@pytest.mark.parametrize("block", range(4))
def test_solving_from_menus_is_solving_from_complete_lists(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses, written_out = set(), 0
    for seed in range(block * 30, block * 30 + 30):
        rng = random.Random(seed)
        trace = random_trace(seed)
        budget, delta = rng.choice([30, rng.randint(60, 260)]), rng.choice([3.0, 8.0, 1000.0])
        monkeypatch.setattr(configure, "LISTED_LIMIT", 10**9)
        complete = problem_of(trace, budget, delta)
        assert all(region.menu is None for region in complete.regions)
        expected = solve(complete, time_limit_s=60, gap_percent=0)
        monkeypatch.setattr(configure, "LISTED_LIMIT", 0)
        listed = problem_of(trace, budget, delta)
        found = solve(listed, time_limit_s=60, gap_percent=0)
        assert found.status == expected.status, seed
        assert found.smallest_budget_bytes == expected.smallest_budget_bytes, seed
        assert (found.extra_ns, found.bound_ns) == (expected.extra_ns, expected.bound_ns), seed
        statuses.add(found.status)
        for before, after in zip(listed.regions, found.problem.regions, strict=True):
            assert after.configurations[: len(before.configurations)] == before.configurations
            written_out += len(after.configurations) - len(before.configurations)
    assert statuses == {"optimal", "infeasible"}
    assert written_out > 0


@pytest.mark.parametrize("seed", range(30))
def test_no_bound_lies_above_the_optimum_of_everything(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left out: the relaxation's bound, and the one reported when every effort is cut short."""
    trace = random_trace(1000 + seed)
    for budget, delta in itertools.product((90, 140, 220), (3.0, 8.0)):
        monkeypatch.setattr(configure, "LISTED_LIMIT", 10**9)
        optimum = solve(problem_of(trace, budget, delta), time_limit_s=60, gap_percent=0)
        if optimum.status != "optimal":
            continue
        monkeypatch.setattr(configure, "LISTED_LIMIT", 0)
        problem = problem_of(trace, budget, delta)
        relaxer = Relaxer(Listing(problem, make_tables(problem)), (0,) * len(problem.regions))
        assert relaxer.relax().bound // relaxer.listing.tables.cost_scale <= optimum.extra_ns
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hilore.planner.search.MOST_LISTED", 1)
            patch.setattr("hilore.planner.search.MOST_PAIRS", 20)
            patch.setattr("hilore.planner.search.CLASS_EFFORT", 1e-6)
            short = solve(problem, time_limit_s=60, gap_percent=30)
        assert short.bound_ns <= optimum.extra_ns <= short.extra_ns
