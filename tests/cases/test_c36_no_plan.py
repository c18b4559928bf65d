"""C-36: impossible, or not found yet? Two different answers, with two exit codes, and no plan read after either."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hilore.planner.budget import MIB
from hilore.planner.emit import InfeasibleError, NoPlanError, solve_trace, write_plans
from hilore.planner.leastpeak import smallest_budget
from hilore.planner.milp import solve
from hilore.planner.trace import Trace
from hilore.planner.verify import verify
from tests.solver_fixtures import problem36, qwen_trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return qwen_trace(layers=4, kept_names=("attention", "gate", "up"), head_scale=0.1)


@pytest.fixture(scope="module")
def smallest(trace: Trace) -> int:
    with pytest.raises(InfeasibleError) as caught:
        solve_trace(trace, budget_bytes=MIB, delta=1.0)
    found = caught.value.smallest_budget_bytes
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_one_byte_under_the_smallest_peak_is_infeasible_before_any_search(
    trace: Trace, smallest: int, delta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a search ran")

    for stage in ("Relaxer", "greedy", "Search"):
        monkeypatch.setattr(f"hilore.planner.milp.{stage}", never)
    with pytest.raises(InfeasibleError) as caught:
        solve_trace(trace, budget_bytes=smallest - 1, delta=delta)
    assert caught.value.exit_code == 4
    assert caught.value.smallest_budget_bytes == smallest
    assert f"the smallest feasible budget is {-(-smallest // MIB)} MiB ({smallest} bytes)" in caught.value.message
    assert f"which the {caught.value.event} needs" in caught.value.message
    parts = caught.value.parts
    assert isinstance(parts, dict)
    assert sum(parts.values()) == smallest
    made_of = caught.value.message.splitlines()[1]
    assert made_of.startswith(f"{-(-smallest // MIB)} MiB are made of: parameters 6,000.0 MiB + ")
    assert f" + boundaries {parts['boundaries'] / MIB:,.1f} MiB" in made_of


@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_exactly_at_it_there_is_a_plan(trace: Trace, smallest: int, delta: float) -> None:
    result = solve_trace(trace, budget_bytes=smallest, delta=delta)
    assert result.exit_code == 0
    assert all(plan.predicted.peak_bytes <= smallest for plan in result.plans)
    assert delta > 0 or all(plan.count("L") == 0 for plan in result.plans)


def test_the_named_whole_mib_work_as_they_are_typed(trace: Trace, smallest: int) -> None:
    whole = -(-smallest // MIB)
    assert solve_trace(trace, budget_bytes=whole * MIB, delta=1.0).exit_code == 0
    with pytest.raises(InfeasibleError):
        solve_trace(trace, budget_bytes=(whole - 1) * MIB, delta=1.0)


@pytest.mark.parametrize("limit_s", [1e-4, 1e-9])
def test_no_time_is_no_solution_not_infeasible_and_offers_all_r_by_name(
    trace: Trace, smallest: int, limit_s: float, tmp_path: Path
) -> None:
    with pytest.raises(NoPlanError) as caught:
        write_plans(solve_trace(trace, budget_bytes=smallest + MIB, delta=1.0, time_limit_s=limit_s), tmp_path)
    assert caught.value.exit_code == 5
    assert caught.value.all_r_fits is True
    assert caught.value.message.startswith(f"no solution within the time limit of {limit_s:g} s; the all-R plan fits")
    assert list(tmp_path.iterdir()) == []


def test_where_all_r_does_not_fit_it_is_not_offered() -> None:
    # Keeping the last layer's MLP takes less than replaying it with all that it saves.
    trace = qwen_trace(layers=3, kept_names=("gate", "up"), head_scale=0.0, split=True)
    with pytest.raises(InfeasibleError) as caught:
        solve_trace(trace, budget_bytes=MIB, delta=0.0)
    smallest = caught.value.smallest_budget_bytes
    assert isinstance(smallest, int)
    assert solve_trace(trace, budget_bytes=smallest, delta=0.0).exit_code == 0
    with pytest.raises(NoPlanError) as none:
        solve_trace(trace, budget_bytes=smallest, delta=0.0, time_limit_s=1e-4)
    assert none.value.all_r_fits is False
    assert "the all-R plan does not fit, but some plan does" in none.value.message


def test_status_is_read_before_any_value() -> None:
    p = problem36(100)
    below = solve(replace(p, budget_bytes=smallest_budget(p) - 1), time_limit_s=10)
    assert (below.status, below.choice, below.greedy_choice, below.extra_ns) == ("infeasible", (), (), 0)
    exactly = solve(replace(p, budget_bytes=smallest_budget(p)), time_limit_s=10)
    assert exactly.status == "optimal"
    assert verify(p, exactly.choice).peak_bytes == smallest_budget(p)


def test_delta_zero_has_its_own_smallest_budget_and_no_lossy_unit(trace: Trace, smallest: int) -> None:
    result = solve_trace(trace, budget_bytes=smallest * 2, delta=0.0)
    assert [plan.count("L") for plan in result.plans] == [0, 0, 0, 0]
    assert len({plan.regions for plan in result.plans}) == 1
