"""Plans measured until they keep delta: which factor is found, what solve makes of it, what is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import hilore.planner.calibration_measure as measure
import hilore.planner.confirm as confirming
from hilore.cli import main
from hilore.planner.calibration_state import STATE_VERSION, CalibrationState, CalibrationStateError
from hilore.planner.confirm import (
    DRIFT,
    SETS,
    ConfirmationError,
    Target,
    Trial,
    bound_of,
    chosen_of,
    confirm_trace,
    find_factor,
)
from hilore.planner.conformal import ConfidenceError
from hilore.planner.digest import plan_digest
from hilore.planner.emit import InfeasibleError, solve_trace
from hilore.planner.rollouts import write_rollouts
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Confirmed, Trace
from hilore.planner.tracefile import TraceFileError, load_trace, save_trace
from hilore.planner.verify import reference_peaks
from hilore.planner.verify_rollouts import verify_rollouts
from hilore.runtime.errors import HiloreError, HiloreWarning
from hilore.runtime.plan import Plan
from hilore.runtime.planfile import load_plan, save_plan
from tests.calibration_fixtures import FEW_PASSES, rollouts, tiny_calibrated

DELTA = 2.0


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return tiny_calibrated().spec


@pytest.fixture(scope="module")
def trace() -> Trace:
    return tiny_calibrated().calibrated


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Rollouts that calibration never saw."""
    path = tmp_path / "confirmation.jsonl"
    write_rollouts(path, rollouts(groups=6, seed=9))
    return path


def target_of(trace: Trace, delta: float = DELTA, part: float = 0.3) -> Target:
    low, high = reference_peaks(trace)
    return Target(int(low + part * (high - low)), 0, delta)


def solved(trace: Trace, target: Target, **options: str) -> tuple[Plan, ...]:
    return solve_trace(
        trace, budget_bytes=target.budget_bytes, margin_bytes=target.margin_bytes, delta=target.delta, **options
    ).plans


def with_risks(trace: Trace, factor: float) -> Trace:
    """As if calibration had found risks so many times those it did find (errors, not squares)."""
    risks = tuple(replace(risk, kappa2=risk.kappa2 * factor**2) for risk in trace.calibration.risks)
    return replace(trace, calibration=replace(trace.calibration, risks=risks))


def lossy_plan(trace: Trace, factor: float) -> Plan:
    """A plan that no other factor gives."""
    plan = next(plan for plan in solved(trace, target_of(trace))[::-1] if plan.lossy)
    regions = tuple(replace(region, name=f"{region.name} {factor}") for region in plan.regions)
    return replace(plan, regions=regions, predicted=replace(plan.predicted, interaction=factor))


@pytest.mark.parametrize("truth", [0.3, 0.6, 1.0, 1.3, 2.5, 20.0])
@pytest.mark.parametrize("step", [0.0, 0.5, 2.0])
def test_the_factor_is_near_what_plans_really_do(trace: Trace, truth: float, step: float) -> None:
    """Plans whose updates err ``truth`` times what is predicted of them; ``step``: by how much (of a logarithm) one
    plan's error is above that of the next."""

    def error(plans: Sequence[Plan]) -> float:
        over = math.log(truth / plans[-1].predicted.interaction)
        return math.exp(step * math.floor(over / step) if step else over)

    trials = find_factor(lambda factor: (lossy_plan(trace, factor),), error, 1.57)
    found = chosen_of(trials)
    assert found is not None
    assert found.bound <= 1
    assert len(trials) <= SETS + 1
    if not step:
        assert found.bound >= confirming.ENOUGH
        assert len(trials) <= 4
    else:
        assert found.interaction <= truth * math.exp(step)


def test_of_factors_that_give_the_same_plans_the_largest_counts(trace: Trace) -> None:
    """It predicts no less of them. Steps grow while they stay the same, until it is not their risk that holds them."""
    plans = (lossy_plan(trace, 1.0),)
    trials = find_factor(lambda _factor: plans, lambda _plans: 0.5, 1.6)
    step = 0.5 / confirming.AIM
    assert [trial.interaction for trial in trials] == pytest.approx([1.6 * step**power for power in (0, 1, 3, 6)])
    assert chosen_of(trials) == trials[0]


def test_a_factor_that_is_far_too_high_is_left_behind(trace: Trace) -> None:
    """Though the first step down gives the same plans."""
    plans = {far: (lossy_plan(trace, 2.0 + far),) for far in (True, False)}
    errors = {plan_digest(plans[True][0]): 0.1, plan_digest(plans[False][0]): 0.95}
    trials = find_factor(lambda factor: plans[factor > 0.3], lambda made: errors[plan_digest(made[0])], 1.6)
    assert [trial.bound for trial in trials] == [0.1, 0.1, 0.95]
    assert chosen_of(trials) == trials[-1]


def test_no_set_keeps_delta(trace: Trace, spec: ModelSpec) -> None:
    target, once = target_of(trace), iter([1.5])
    trials = find_factor(lambda factor: (lossy_plan(trace, factor),), lambda _plans: 1.5, 1.0)
    assert [trial.interaction for trial in trials] == pytest.approx([1.5625**turn for turn in range(SETS)])
    # The same plans again and again are measured once, and left behind by steps that grow.
    same = find_factor(lambda _factor: (lossy_plan(trace, 1.0),), lambda _plans: next(once), 1.0)
    assert len(same) == confirming.SOLVES
    assert same[3].interaction / same[2].interaction == pytest.approx(4 * 1.5625)
    assert chosen_of(trials) is None
    error = confirming._none_kept(trials, spec, target)
    assert isinstance(error, ConfirmationError)
    assert error.exit_code == 6
    assert f"none of {len(trials)} sets of plans keeps it with a confidence of 0.75 (bounds, times a drift" in str(
        error
    )
    assert "of 1.3, over delta: 1.50 with factor 1.00, 1.50 with factor 1.56," in str(error)


def test_plans_that_encode_nothing_are_measured_once() -> None:
    empty = replace(solved(tiny_calibrated().calibrated, target_of(tiny_calibrated().calibrated, 0.0))[-1])
    assert not empty.lossy
    assert find_factor(lambda _factor: (empty,), lambda _plans: 0.0, 1.4) == (Trial(1.4, 0.0, (empty,)),)


def test_solve_makes_the_confirmed_plans(spec: ModelSpec, trace: Trace, file: Path, tmp_path: Path) -> None:
    target = target_of(trace)
    before = solve_trace(trace, budget_bytes=target.budget_bytes, delta=DELTA)
    assert any("rests on errors of other plans; hilore-plan confirm measures these" in note for note in before.notes)
    assert all(plan.measured is None for plan in before.plans)
    found = confirm_trace(spec, trace, target, rollouts=file)
    one = found.confirmed
    assert (one.budget_bytes, one.delta, one.confidence, one.microbatches) == (target.budget_bytes, DELTA, 0.75, 4)
    assert 0 < DRIFT * one.error <= DELTA * trace.calibration.delta_star
    assert found.passes <= SETS + 1
    assert found.trace == replace(trace, calibration=replace(trace.calibration, confirmed=(one,)))

    after = solve_trace(found.trace, budget_bytes=target.budget_bytes, delta=DELTA)
    assert not any("confirm" in note for note in after.notes)
    assert tuple(map(plan_digest, after.plans)) == one.plans
    for plan in after.plans:
        assert plan.measured is not None
        assert (plan.measured.error, plan.measured.confidence) == (one.error, 0.75)
        assert plan.predicted.interaction == one.interaction
        save_plan(plan, tmp_path / "plan.json")
        assert replace(load_plan(tmp_path / "plan.json"), path="") == plan
    # Another budget, delta, grain or rule was not measured.
    for other in (replace(target, delta=1.0), replace(target, budget_bytes=target.budget_bytes + 1)):
        assert {plan.predicted.interaction for plan in solved(found.trace, other)} == {trace.calibration.interaction}
    for options in ({"granularity": "layer"}, {"rule": "joint"}):
        assert all(plan.measured is None for plan in solved(found.trace, target, **options))

    # Confirmed again, it replaces what was there.
    second = confirm_trace(spec, found.trace, target, rollouts=file)
    assert second.trace.calibration.confirmed == (one,)
    both = confirm_trace(spec, found.trace, replace(target, delta=1.0), rollouts=file).trace.calibration.confirmed
    assert [each.delta for each in both] == [DELTA, 1.0]


@pytest.mark.parametrize("factor", [0.01, 20.0])
def test_a_fit_that_is_wrong_throughout_is_put_right(
    spec: ModelSpec, trace: Trace, file: Path, tmp_path: Path, factor: float
) -> None:
    wrong, target = with_risks(trace, factor), target_of(trace)
    found = confirm_trace(spec, wrong, target, rollouts=file)
    if factor < 1:
        assert found.trials[0].bound > 1
        assert found.confirmed.interaction > wrong.calibration.interaction
    else:
        assert found.confirmed.interaction < wrong.calibration.interaction
    held_out = tmp_path / "held-out.jsonl"
    write_rollouts(held_out, rollouts(groups=8, seed=21))
    plans = solved(found.trace, target)
    kept = verify_rollouts(plans, spec, found.trace, held_out)
    assert kept.exit_code == 0


def test_plans_of_another_solve_are_not_called_measured(spec: ModelSpec, trace: Trace, file: Path) -> None:
    found = confirm_trace(spec, trace, target_of(trace), rollouts=file)
    one = replace(found.confirmed, plans=("another", *found.confirmed.plans[1:]))
    calibration = replace(trace.calibration, confirmed=(one,))
    result = solve_trace(replace(trace, calibration=calibration), budget_bytes=one.budget_bytes, delta=DELTA)
    assert any("these are not the plans that hilore-plan confirm measured" in note for note in result.notes)
    assert all(plan.measured is None for plan in result.plans)


class Stopped(Exception):
    pass


def test_interrupted_and_resumed_it_finds_the_same(spec: ModelSpec, trace: Trace, file: Path, tmp_path: Path) -> None:
    state, target = tmp_path / "tiny.confirmation", target_of(trace)
    expected = confirm_trace(spec, trace, target, rollouts=file)

    def stop(_label: str, done: int, _total: int) -> None:
        if done == 2:
            raise Stopped

    with pytest.raises(Stopped):
        confirm_trace(spec, trace, target, stop, rollouts=file, state=state)
    assert len(state.read_text().splitlines()) > 2
    resumed = confirm_trace(spec, trace, target, rollouts=file, state=state)
    assert resumed.confirmed == expected.confirmed


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("interaction", -1.0, "interaction -1: must be a finite number, 0 or more"),
        ("error", -0.5, "error -0.5: must be"),
        ("drift", 0.5, "drift 0.5: must be a finite number, 1 or more"),
        ("microbatches", -3, "microbatches -3: must be"),
        ("confidence", 7.0, "confidence 7: must be between 0 and 1"),
    ],
)
def test_edited_traces_are_refused(trace: Trace, tmp_path: Path, field: str, value: float, text: str) -> None:
    path = tmp_path / "tiny.trace.json"
    one = Confirmed(1 << 20, 0, 1.0, 1.0, 0.01, 1.25, 0.95, 20, ())
    save_trace(replace(trace, calibration=replace(trace.calibration, confirmed=(one,))), path)
    assert load_trace(path).calibration.confirmed == (one,)
    data = json.loads(path.read_text())
    data["calibration"]["confirmed"][0][field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(TraceFileError, match=text):
        load_trace(path)


def test_a_state_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(CalibrationStateError, match="folder: cannot be written"):
        CalibrationState(folder, {})
    for line in ("{}", "[]", "7"):
        path = tmp_path / "state"
        path.write_text(json.dumps({"version": STATE_VERSION}) + f"\n{line}\n")
        with pytest.raises(CalibrationStateError, match=":2: not a calibration's state"):
            CalibrationState(path, {})


def test_a_state_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    first = CalibrationState(path, {})
    first.put("one", 1)
    with pytest.raises(CalibrationStateError, match="state: another run is measuring for it; let that one end"):
        CalibrationState(path, {})
    first.put("two", 2)
    first.close()
    again = CalibrationState(path, {})
    assert (again.get("one"), again.get("two"), again.measured) == (1, 2, 2)
    again.close()


def test_a_disk_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(HiloreWarning, match=r"state: cannot be locked \(No locks available\); see to it that no other"):
        state = CalibrationState(tmp_path / "state", {})
    state.put("one", 1)
    state.close()


def test_what_is_refused(spec: ModelSpec, trace: Trace, file: Path) -> None:
    made = tiny_calibrated()
    with pytest.raises(HiloreError, match=r"holds risks of source synthetic, not measured on rollouts; first: "):
        confirm_trace(spec, made.trace, target_of(trace), rollouts=file)
    with pytest.raises(HiloreError, match=r"--delta 0: its plans change no value, so that there is nothing to measure"):
        confirm_trace(spec, trace, target_of(trace, 0.0), rollouts=file)
    with pytest.raises(InfeasibleError, match=r"the smallest feasible budget is"):
        confirm_trace(spec, trace, replace(target_of(trace), budget_bytes=2**10), rollouts=file)
    with pytest.raises(HiloreError, match=r"--drift 0.9: must be a number from 1 to 100"):
        confirm_trace(spec, trace, replace(target_of(trace), drift=0.9), rollouts=file)
    with pytest.raises(HiloreError, match=r"--drift 1e\+300: must be a number from 1 to 100"):
        confirm_trace(spec, trace, replace(target_of(trace), drift=1e300), rollouts=file)
    sure = replace(spec, calibration=replace(spec.calibration, confidence=0.95))
    with pytest.raises(ConfidenceError, match=r"carry a confidence of at most 4/5, not 0.95"):
        confirm_trace(sure, trace, target_of(trace), rollouts=file)


def test_a_bound_of_too_few_gradients(trace: Trace) -> None:
    with pytest.raises(ConfidenceError, match=r"0 microbatches that are not clipped throughout carry"):
        bound_of((), "grpo", 2, 0.75)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trace: Trace, file: Path
) -> None:
    monkeypatch.setattr(measure, "FIT_PASSES", FEW_PASSES)
    monkeypatch.chdir(tmp_path)
    spec = tiny_calibrated().spec
    (tmp_path / "model.yaml").write_text(Path(spec.path).read_text())
    save_trace(trace, tmp_path / "tiny.trace.json")
    command = ["confirm", "model.yaml", "--rollouts", file.name, "--budget", "2", "--delta", "2"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "updates stay within" in out
    assert "measured on 4 microbatches in float32 compute; 1.3 times as much is within delta" in out
    assert "none of these plans encodes anything" in out
    assert len(load_trace(tmp_path / "tiny.trace.json").calibration.confirmed) == 1
    assert not list(tmp_path.glob("*.confirmation"))
    assert main(["solve", "--budget", "2", "--delta", "2"]) == 0
    capsys.readouterr()
    plan = str(tmp_path / "plans" / "tiny.high.json")
    assert main(["show", plan]) == 0
    assert "measured on 4 microbatches: updates within" in " ".join(capsys.readouterr().out.split())
    unit = load_plan(plan).regions[0].units[0].name
    assert main(["explain", plan, unit]) == 0
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["confirmed"]["microbatches"] == 4
    before = (tmp_path / "tiny.trace.json").read_bytes()
    assert main([*command[:-3], "1KiB", "--delta", "2"]) == 2
    assert main([*command, "--margin", "1.9"]) == 4
    assert (tmp_path / "tiny.trace.json").read_bytes() == before
