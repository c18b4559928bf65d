"""From a trace to its plan files: what is in them, that they are the same every time, and all or none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import hilore.planner.compose as compose
import hilore.planner.planwriter as planwriter
from hilore.planner.emit import InfeasibleError, NoPlanError, SolveResult, solve_trace, write_plans
from hilore.planner.trace import Trace
from hilore.planner.verify import reference_peaks, reference_times, verify_modes
from hilore.runtime.errors import HiloreError, InternalError, PlanFileError
from hilore.runtime.plan import Plan
from hilore.runtime.planfile import plan_text
from tests.solver_fixtures import MIB, qwen_trace

FEW = ("attention", "o", "gate", "up")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return qwen_trace(layers=4, buckets=(512, 1024), kept_names=FEW, split=True)


def between(trace: Trace, part: float) -> int:
    low, high = reference_peaks(trace)
    return int(low + part * (high - low))


@pytest.fixture(scope="module")
def result(trace: Trace) -> SolveResult:
    return solve_trace(trace, budget_bytes=between(trace, 0.4), delta=0.5, margin_bytes=7 * MIB, command="solve it")


def same(plan: Plan) -> dict[str, Any]:
    """A plan without the two fields that tell when and how fast it was made."""
    data: dict[str, Any] = json.loads(plan_text(plan))
    del data["provenance"]["created_at"]
    del data["solver"]["wall_s"]
    return data


def test_four_regimes_per_bucket_the_largest_first(trace: Trace, result: SolveResult) -> None:
    expected = [(tokens, label) for tokens in (1024, 512) for label in ("null", "low", "mid", "high")]
    assert [(plan.length_bucket, plan.regime.label) for plan in result.plans] == expected
    assert [(row.tokens, row.regime) for row in result.rows] == expected
    assert result.exit_code == 0
    assert {plan.set_id for plan in result.plans} == {result.set_id}
    edges = [(p.regime.exposure_low, p.regime.exposure_high, p.regime.frequency) for p in result.plans[:4]]
    assert edges == [(0.0, 0.0, 0.1), (0.0, 0.6, 0.4), (0.6, 1.1, 0.3), (1.1, 2.0, 0.2)]


def test_every_plan_keeps_its_limits_recomputed_from_its_modes(trace: Trace, result: SolveResult) -> None:
    buckets = {bucket.tokens: bucket for bucket in trace.buckets}
    for plan in result.plans:
        found = verify_modes(trace, buckets[plan.length_bucket], plan.regions, risk_free=plan.regime.label == "null")
        assert max(found.peak_bytes, found.demoted_peak_bytes) <= plan.budget_bytes
        assert (plan.predicted.peak_bytes, plan.predicted.peak_event) == (found.peak_bytes, found.peak_event)
        assert plan.predicted.step_ns == found.step_ns
        assert plan.predicted.risk <= plan.delta * plan.delta_star
        gc_ns, no_gc_ns = reference_times(trace, buckets[plan.length_bucket])
        assert (plan.predicted.gc_step_ns, plan.predicted.no_gc_step_ns) == (gc_ns, no_gc_ns)
        assert plan.solver.objective_ns == found.extra_ns
        assert plan.solver.bound_ns <= found.extra_ns <= plan.solver.greedy_ns
        assert plan.solver.gap == (found.extra_ns - plan.solver.bound_ns) / found.step_ns
    assert any(plan.count("L") for plan in result.plans)


def test_one_mode_per_unit_and_everything_recorded(trace: Trace, result: SolveResult) -> None:
    for plan in result.plans:
        assert len(set(plan.unit_names)) == len(plan.unit_names) == 4 * 8
        assert plan.margin_bytes == 7 * MIB
        assert plan.loss == {"kind": "grpo", "beta": 0.001}
        assert (plan.delta, plan.delta_star, plan.calibrated) == (0.5, 0.01, False)
        assert plan.fingerprint == trace.fingerprint
        assert plan.provenance["command"] == "solve it"
        assert plan.provenance["versions"]["torch"] == "2.13.0"
        assert plan.provenance["versions"]["ortools"] in plan.solver.name


def test_a_lower_regime_is_never_slower(result: SolveResult) -> None:
    for tokens in (512, 1024):
        steps = [row.step_ns for row in result.rows if row.tokens == tokens]
        assert steps == sorted(steps)


def test_rows_repeat_the_plans(result: SolveResult) -> None:
    for plan, row in zip(result.plans, result.rows, strict=True):
        assert (row.kept, row.lossy, row.replayed) == (plan.count("H"), plan.count("L"), plan.count("R"))
        assert row.held == sum(region.hold for region in plan.regions)
        assert row.gain == plan.predicted.gc_step_ns / plan.predicted.step_ns - 1
        assert row.greedy_step_ns - row.step_ns == plan.solver.greedy_ns - plan.solver.objective_ns
        assert (row.status, row.gap, row.risk) == (plan.solver.status, plan.solver.gap, plan.predicted.risk)


def test_same_input_same_plans(trace: Trace, result: SolveResult) -> None:
    again = solve_trace(trace, budget_bytes=between(trace, 0.4), delta=0.5, margin_bytes=7 * MIB, command="solve it")
    assert [same(plan) for plan in again.plans] == [same(plan) for plan in result.plans]


@pytest.mark.parametrize(
    "change",
    [
        {"budget_bytes": 10**10 + 1},
        {"delta": 0.25},
        {"margin_bytes": 1},
        {"gap_percent": 0.2},
        {"granularity": "layer"},
        {"time_limit_s": 61.0},
    ],
)
def test_the_set_id_stands_for_everything_asked(change: dict[str, Any]) -> None:
    trace = qwen_trace(layers=1, kept_names=("attention",))
    options: dict[str, Any] = {"budget_bytes": 10**10, "delta": 0.5}
    first = solve_trace(trace, **options)
    assert solve_trace(trace, **(options | change)).set_id != first.set_id
    assert solve_trace(replace(trace, name="other"), **options).set_id != first.set_id
    assert solve_trace(trace, **options, command="other").set_id == first.set_id


def test_equal_problems_are_solved_once(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    import hilore.planner.emit as emit

    solved = []
    honest = emit.solve
    monkeypatch.setattr(emit, "solve", lambda p, **options: solved.append(p) or honest(p, **options))
    exact = solve_trace(trace, budget_bytes=between(trace, 0.4), delta=0.0)
    assert len(solved) == 2
    assert all(plan.count("L") == 0 for plan in exact.plans)
    by_bucket = {plan.length_bucket: plan.regions for plan in exact.plans}
    assert all(plan.regions == by_bucket[plan.length_bucket] for plan in exact.plans)


def test_layer_granularity_decides_for_whole_layers(trace: Trace) -> None:
    found = solve_trace(trace, budget_bytes=between(trace, 0.4), delta=1.0, granularity="layer")
    units = solve_trace(trace, budget_bytes=between(trace, 0.4), delta=1.0)
    for plan, finer in zip(found.plans, units.plans, strict=True):
        for region in plan.regions:
            modes = {unit.name.removeprefix(region.name + "."): unit.mode for unit in region.units}
            if region.hold:
                continue
            kept = {name for name, mode in modes.items() if mode != "R"}
            assert kept in (set(), {"self_attn:attention", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"})
        assert finer.predicted.step_ns <= plan.predicted.step_ns


def test_too_small_a_budget_names_the_smallest_one_that_works(trace: Trace) -> None:
    with pytest.raises(InfeasibleError) as caught:
        solve_trace(trace, budget_bytes=100 * MIB, delta=1.0)
    error = caught.value
    assert error.exit_code == 4
    smallest = error.smallest_budget_bytes
    assert isinstance(smallest, int)
    whole = -(-smallest // MIB)
    assert error.message.splitlines()[0] == (
        f"infeasible: no plan stays within 100.0 MiB; the smallest feasible budget is {whole} MiB ({smallest} bytes), "
        f"which the {error.event} needs at 1024 tokens per row; use --budget {whole} or more"
    )
    plans = solve_trace(trace, budget_bytes=smallest, delta=1.0).plans
    assert max(plan.predicted.peak_bytes for plan in plans) == smallest
    with pytest.raises(InfeasibleError):
        solve_trace(trace, budget_bytes=smallest - 1, delta=1.0)


def test_a_disagreement_of_the_verifiers_is_our_bug(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = compose.verify_modes

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = honest(*arguments, **options)
        return replace(found, peak_bytes=found.peak_bytes + 1)

    monkeypatch.setattr(compose, "verify_modes", wrong)
    with pytest.raises(InternalError, match="the solver's figures"):
        solve_trace(trace, budget_bytes=between(trace, 0.4), delta=0.5)


def test_file_names_and_the_replacement_of_an_earlier_set(result: SolveResult, tmp_path: Path) -> None:
    out = tmp_path / "plans"
    out.mkdir()
    for name in ("qwen-like.t256.low.json", "qwen-like.low.json", "qwen-like.notes.json", "qwen.low.json"):
        (out / name).write_text("earlier")
    written = write_plans(result, out)
    labels = ("null", "low", "mid", "high")
    names = [f"qwen-like.{label}.json" for label in labels] + [f"qwen-like.t512.{label}.json" for label in labels]
    assert [path.name for path in written] == names
    assert {path.name for path in out.iterdir()} == {*names, "qwen-like.notes.json", "qwen.low.json"}
    assert (out / "qwen.low.json").read_text() == "earlier"
    for path, plan in zip(written, result.plans, strict=True):
        assert path.read_text() == plan_text(plan)


@pytest.mark.parametrize("broken_at", range(9))
def test_a_failed_write_leaves_everything_as_it_was(
    result: SolveResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_at: int
) -> None:
    earlier = {"qwen-like.null.json": "a", "qwen-like.t512.high.json": "b", "qwen-like.t256.low.json": "c"}
    for name, text in earlier.items():
        (tmp_path / name).write_text(text)
    calls = iter(range(100))
    honest_replace, honest_unlink = os.replace, Path.unlink

    def step(name: object) -> None:
        if next(calls) == broken_at:
            raise OSError(28, "No space left on device", str(name))

    def replace_or_fail(source: Path, target: Path) -> None:
        step(target)
        honest_replace(source, target)

    def unlink_or_fail(self: Path, missing_ok: bool = False) -> None:
        if self.suffix == ".json" and not missing_ok:
            step(self)
        honest_unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(planwriter.os, "replace", replace_or_fail)
    monkeypatch.setattr(planwriter.Path, "unlink", unlink_or_fail)
    with pytest.raises(PlanFileError, match="No space left on device; earlier ones are as they were"):
        write_plans(result, tmp_path)
    monkeypatch.undo()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == earlier


def test_a_folder_that_cannot_be_made_is_named(result: SolveResult, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanFileError, match="file: plans cannot be written"):
        write_plans(result, tmp_path / "file")


def test_time_up_before_the_search_is_not_infeasible(trace: Trace) -> None:
    ticks = iter([0.0])
    with pytest.raises(NoPlanError) as caught:
        solve_trace(trace, budget_bytes=between(trace, 0.4), delta=0.5, clock=lambda: next(ticks, 100.0))
    assert (caught.value.exit_code, caught.value.all_r_fits) == (5, True)
    assert "no solution within the time limit of 60 s; the all-R plan fits" in caught.value.message


def test_time_up_after_one_regime_falls_back_on_its_plan_and_says_so(trace: Trace) -> None:
    one = replace(trace, buckets=trace.buckets[1:])
    calls = iter(range(10**6))

    def clock() -> float:
        return 0.0 if next(calls) < 6 else 100.0

    found = solve_trace(one, budget_bytes=between(one, 0.4), delta=0.5, clock=clock)
    assert found.exit_code == 3
    steps = [row.step_ns for row in found.rows]
    assert steps == sorted(steps)
    for row in found.rows:
        assert row.peak_bytes <= between(one, 0.4)
        assert (row.status == "optimal") == (row.gap <= 0.001)


def test_a_search_cut_short_is_never_slower_than_the_plan_without_l(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hilore.planner.emit as emit

    one = replace(trace, buckets=trace.buckets[1:])
    exact = solve_trace(one, budget_bytes=between(one, 0.4), delta=0.0)
    honest = emit.solve

    def cut(problem: Any, **options: Any) -> Any:
        lossy = any(region.most_lossy for region in problem.regions)
        return honest(problem, **options | ({"time_limit_s": 0.0} if lossy else {}))

    monkeypatch.setattr(emit, "solve", cut)
    found = solve_trace(one, budget_bytes=between(one, 0.4), delta=0.5)
    pairs = zip(found.rows, exact.rows, strict=True)
    assert all(row.step_ns <= other.step_ns for row, other in pairs)
    assert found.exit_code == 3


def test_the_time_limit_is_shared_by_the_problems_that_differ(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    import hilore.planner.emit as emit

    shares = []
    honest = emit.solve
    monkeypatch.setattr(emit, "solve", lambda p, **o: shares.append(o["time_limit_s"]) or honest(p, **o))
    solve_trace(trace, budget_bytes=between(trace, 0.4), delta=0.5, time_limit_s=60.0, clock=lambda: 0.0)
    # Two buckets; in each no L, one problem for low, mid and high, and one without limit for null.
    assert shares == [60 / 6, 60 / 5, 60 / 4, 60 / 3, 60 / 2, 60.0]


def test_noisy_times_are_told(trace: Trace) -> None:
    found = solve_trace(replace(trace, time_spread=0.9), budget_bytes=between(trace, 0.4), delta=0.0)
    assert [note for note in found.notes if "spread by 90% of their median" in note]


def test_a_trace_without_bucket_or_with_edges_that_fall_is_refused(trace: Trace) -> None:
    falling = replace(trace, calibration=replace(trace.calibration, psi_edges=(1.0, 0.5, 2.0)))
    with pytest.raises(HiloreError, match="must be finite, ascending and not negative"):
        solve_trace(falling, budget_bytes=10**10, delta=0.5)
    with pytest.raises(InternalError, match="has no length bucket"):
        solve_trace(replace(trace, buckets=()), budget_bytes=10**10, delta=0.5)


def test_nothing_in_the_result_is_left_out_of_the_files(result: SolveResult) -> None:
    data = json.loads(plan_text(result.plans[0]))
    assert set(data) == set(asdict(result.plans[0])) - {"path"}


def test_plans_do_not_depend_on_the_process(result: SolveResult, trace: Trace) -> None:
    """Two ranks that solve the same trace must hold the same plans: sets iterate in another order there."""
    program = (
        "import sys, json\n"
        "from tests.test_emit import FEW, between, same\n"
        "from tests.solver_fixtures import MIB, qwen_trace\n"
        "from hilore.planner.emit import solve_trace\n"
        "trace = qwen_trace(layers=4, buckets=(512, 1024), kept_names=FEW, split=True)\n"
        "found = solve_trace(trace, budget_bytes=between(trace, 0.4), delta=0.5, margin_bytes=7 * MIB,"
        " command='solve it')\n"
        "json.dump([same(plan) for plan in found.plans], sys.stdout)\n"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert run.returncode == 0, run.stderr
        assert json.loads(run.stdout) == [same(plan) for plan in result.plans]


@pytest.mark.parametrize("share", [0.05, 0.4, 0.8])
def test_a_delta_that_leaves_no_risk_gives_the_plans_of_delta_0(trace: Trace, share: float) -> None:
    """Apart from the null regime, where L is free."""
    budget = between(trace, share)
    tiny, none = (solve_trace(trace, budget_bytes=budget, delta=delta).plans for delta in (1e-9, 0.0))
    for found, expected in zip(tiny, none, strict=True):
        if found.regime.label != "null":
            assert found.count("L") == 0
            assert found.predicted.step_ns == expected.predicted.step_ns
