"""--margin: a part of any budget that allocations leave free, seen in plans and output; budgets beside the card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hilore.cli import main
from hilore.planner.budget import AUTO_MARGIN_BYTES
from hilore.planner.emit import InfeasibleError, solve_trace
from hilore.planner.spec import spec_as_dict
from hilore.planner.trace import Trace
from hilore.planner.tracefile import save_trace
from hilore.planner.verify import reference_peaks
from hilore.runtime.planfile import load_plan, load_plans
from tests.solver_fixtures import MIB, qwen_trace
from tests.specs import spec_of

FEW = ("attention", "gate")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return replace(qwen_trace(layers=4, kept_names=FEW), spec=spec_as_dict(spec_of()))


def between(trace: Trace, part: float) -> int:
    low, high = reference_peaks(trace)
    return int(low + part * (high - low))


def test_plans_leave_the_margin_of_any_budget_free(trace: Trace) -> None:
    budget, margin = between(trace, 0.5), 100 * MIB
    with_margin = solve_trace(trace, budget_bytes=budget, delta=0.0, margin_bytes=margin)
    smaller = solve_trace(trace, budget_bytes=budget - margin, delta=0.0)
    whole = solve_trace(trace, budget_bytes=budget, delta=0.0)
    for plan, same, larger in zip(with_margin.plans, smaller.plans, whole.plans, strict=True):
        assert (plan.budget_bytes, plan.margin_bytes, plan.ceiling_bytes) == (budget, margin, budget - margin)
        assert plan.predicted.peak_bytes <= plan.ceiling_bytes < larger.predicted.peak_bytes
        assert plan.regions == same.regions != larger.regions


def test_the_smallest_feasible_budget_has_the_margin_in_it(trace: Trace) -> None:
    with pytest.raises(InfeasibleError) as bare:
        solve_trace(trace, budget_bytes=MIB, delta=0.0)
    with pytest.raises(InfeasibleError) as caught:
        solve_trace(trace, budget_bytes=300 * MIB, delta=0.0, margin_bytes=7 * MIB)
    smallest = caught.value.smallest_budget_bytes
    assert isinstance(smallest, int)
    assert smallest == bare.value.smallest_budget_bytes + 7 * MIB  # type: ignore[operator]
    assert "no plan stays within 300.0 MiB less the margin of 7.0 MiB; the smallest feasible" in caught.value.message
    plan = solve_trace(trace, budget_bytes=smallest, delta=0.0, margin_bytes=7 * MIB).plans[0]
    assert plan.predicted.peak_bytes == plan.ceiling_bytes
    with pytest.raises(InfeasibleError):
        solve_trace(trace, budget_bytes=smallest - 1, delta=0.0, margin_bytes=7 * MIB)


def solved(folder: Path, trace: Trace, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    save_trace(trace, folder / "a.trace.json")
    out = str(folder / "plans")
    code = main(["solve", "--trace", str(folder / "a.trace.json"), "--delta", "0", "--out", out, *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_margin_is_printed_and_stored(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = between(trace, 0.5) // MIB
    code, out, _ = solved(tmp_path, trace, capsys, "--budget", str(budget), "--margin", "64")
    assert code == 0
    assert f"budget {budget:,}.0 MiB, margin 64.0 MiB (allocations up to {budget - 64:,}.0 MiB), delta 0" in out
    plan = load_plans(str(tmp_path / "plans" / "*.json")).plans[0]
    assert (plan.budget_bytes, plan.margin_bytes) == (budget * MIB, 64 * MIB)
    assert plan.predicted.peak_bytes <= (budget - 64) * MIB
    assert main(["show", plan.path]) == 0
    shown = capsys.readouterr().out
    assert f"budget {budget:,}.0 MiB (margin 64.0 MiB, allocations up to {budget - 64:,}.0 MiB)" in shown


def test_auto_is_the_card_less_the_margin(trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = between(trace, 0.5) + AUTO_MARGIN_BYTES
    on_a_card = replace(trace, card_bytes=card, device="some card")
    code, out, _ = solved(tmp_path, on_a_card, capsys, "--budget", "auto", "--json")
    assert code == 0
    data = json.loads(out)
    assert (data["margin_bytes"], data["ceiling_bytes"]) == (AUTO_MARGIN_BYTES, card - AUTO_MARGIN_BYTES)
    plan = load_plan(data["plans"][0])
    assert plan.predicted.peak_bytes <= card - AUTO_MARGIN_BYTES
    assert plan.ceiling_bytes == card - AUTO_MARGIN_BYTES
    before = Path(plan.path).read_text(encoding="utf-8")
    code, out, err = solved(tmp_path, on_a_card, capsys, "--budget", "auto", "--margin", f"{card // MIB + 1}")
    assert (code, out) == (2, "")
    assert "leaves nothing of the card" in err
    assert Path(plan.path).read_text(encoding="utf-8") == before


@pytest.mark.parametrize(
    ("part_of_card", "expected"),
    [
        (0.5, "MiB of it are left for context, NCCL and fragmentation\n"),
        (0.999, "MiB of it are left for context, NCCL and fragmentation; --budget auto leaves 1,024.0 MiB, "),
        (1.001, "are more than it has\n"),
    ],
)
def test_how_a_budget_stands_to_the_card_is_said(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str], part_of_card: float, expected: str
) -> None:
    budget = between(trace, 0.5) // MIB
    on_a_card = replace(trace, card_bytes=int(budget * MIB / part_of_card), device="some card")
    code, out, _ = solved(tmp_path, on_a_card, capsys, "--budget", str(budget))
    assert code == 0
    assert f"note: card {on_a_card.card_bytes / MIB:,.1f} MiB (some card): " in out
    assert expected in out


@pytest.mark.parametrize("estimated", [True, False])
def test_estimated_times_are_marked_wherever_they_are_shown(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str], estimated: bool
) -> None:
    budget = str(between(trace, 0.5) // MIB)
    code, out, _ = solved(tmp_path, replace(trace, estimated=estimated), capsys, "--budget", budget)
    assert code == 0
    assert out.count("(estimated)") == (3 if estimated else 0), "step, gain, greedy"
    assert ("note: times are estimated for cpu, not measured" in out) == estimated
    plan = load_plan(tmp_path / "plans" / "qwen-like.high.json")
    assert plan.predicted.estimated == estimated
    assert main(["show", plan.path]) == 0
    assert ("predicted step (estimated) " in capsys.readouterr().out) == estimated
    assert main(["explain", plan.path, plan.unit_names[0], "--trace", str(tmp_path / "a.trace.json")]) == 0
    shown = capsys.readouterr().out
    assert (" ms (estimated); keeping its output takes " in shown) == estimated
    assert ("the same plan with one change, times estimated" in shown) == estimated
