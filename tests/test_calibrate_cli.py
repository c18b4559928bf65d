"""calibrate, solve and verify --rollouts by their commands: files, tables, JSON, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import hilore.planner.calibration_measure as measure
from hilore.cli import main
from hilore.planner.emit import solve_trace, write_plans
from hilore.planner.files import OutputFileError
from hilore.planner.gradient_error import Backward, Instrument
from hilore.planner.microbatch import Microbatch
from hilore.planner.rollouts import write_rollouts
from hilore.planner.trace import Trace
from hilore.planner.tracefile import load_trace, save_trace
from hilore.planner.verify import reference_peaks
from hilore.runtime.planfile import load_plan
from tests.calibration_fixtures import CALIBRATION, FEW_PASSES, SECTIONS, rollouts, tiny_calibrated
from tests.specs import spec_of


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FIT_PASSES", FEW_PASSES)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """model.yaml (source prior), its trace, and two files of rollouts."""
    monkeypatch.chdir(tmp_path)
    spec_of(tmp_path, **SECTIONS)
    save_trace(tiny_calibrated().trace, tmp_path / "tiny.trace.json")
    write_rollouts(tmp_path / "rollouts.jsonl", rollouts())
    write_rollouts(tmp_path / "held-out.jsonl", rollouts(groups=6, seed=5))
    return tmp_path


def test_calibrate_updates_the_trace_that_solve_and_verify_then_use(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "model.yaml").read_text()
    (folder / "model.yaml").write_text(f"{text}calibration: {CALIBRATION}\n")
    assert main(["calibrate", "model.yaml", "--rollouts", "rollouts.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "6 microbatches, 4 with exposure; source rollouts" in out
    assert "with a confidence of 0.75" in out
    assert out.endswith("written: tiny.trace.json\n")
    first = (folder / "tiny.trace.json").read_bytes()
    assert load_trace(folder / "tiny.trace.json").calibration == tiny_calibrated().calibrated.calibration
    assert not list(folder.glob("*.calibration"))
    assert main(["calibrate", "model.yaml", "--trace", "tiny.trace.json", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["calibrated"] is True
    assert data["errors_percent"]["gate"].keys() == {"int8-g128", "int4-g64"}
    assert (folder / "tiny.trace.json").read_bytes() == first
    assert main(["solve", "--budget", "2", "--delta", "1", "--rule", "joint"]) == 0
    plan = load_plan(folder / "plans" / "tiny.low.json")
    assert (plan.calibrated, plan.confidence, plan.regime.allowance) == (True, 0.75, 1.0)
    capsys.readouterr()


def solved(folder: Path, calibrated: Trace, delta: float) -> list[str]:
    """The trace and its plans in ``folder``; their paths."""
    save_trace(calibrated, folder / "tiny.trace.json")
    low, high = reference_peaks(calibrated)
    write_plans(solve_trace(calibrated, budget_bytes=int(low + 0.3 * (high - low)), delta=delta), folder / "plans")
    return [str(path) for path in sorted((folder / "plans").glob("*.json"))]


def test_verify_on_rollouts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrated = tiny_calibrated().calibrated
    plans = solved(folder, calibrated, 4.0)
    assert main(["verify", *plans, "--rollouts", "held-out.jsonl", "--risk-microbatches", "3"]) == 0
    out = capsys.readouterr().out
    assert "updates of 2 of 12 microbatches" in out
    assert "reconstruction error" in out
    assert out.endswith("every promise was kept\n")
    # Calibration that promised far too much.
    lying = replace(calibrated.calibration, risks=tuple(replace(r, kappa2=1e-12) for r in calibrated.calibration.risks))
    wrong = replace(calibrated, calibration=lying)
    plans = solved(folder, wrong, 0.01)
    assert main(["verify", *plans, "--rollouts", "held-out.jsonl", "--json"]) == 6
    data = json.loads(capsys.readouterr().out)
    assert "updates stay within 0.010%" in data["breaches"][0]
    assert data["plans"][0]["coverage"]["within"] < data["plans"][0]["coverage"]["updates"]


def test_measurements_stay_until_the_trace_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (folder / "model.yaml").read_text()
    (folder / "model.yaml").write_text(f"{text}calibration: {CALIBRATION}\n")

    def full(_trace: object, path: object) -> None:
        raise OutputFileError(f"{path}: cannot be written: No space left on device", path=str(path))

    with monkeypatch.context() as patch:
        patch.setattr("hilore.planner.tracefile.save_trace", full)
        assert main(["calibrate", "model.yaml", "--rollouts", "rollouts.jsonl"]) == 2
    assert capsys.readouterr().err == "tiny.trace.json: cannot be written: No space left on device\n"
    measured = (folder / "tiny.trace.json.calibration").read_bytes()
    assert measured.count(b"\n") > 10
    monkeypatch.setattr("hilore.planner.calibrate.Instrument", _NoRuns)
    assert main(["calibrate", "model.yaml", "--rollouts", "rollouts.jsonl"]) == 0
    assert load_trace(folder / "tiny.trace.json").calibration == tiny_calibrated().calibrated.calibration
    assert not list(folder.glob("*.calibration"))


class _NoRuns(Instrument):
    def _backward(self, microbatch: Microbatch) -> Backward:
        raise AssertionError("everything was measured")


def test_verify_says_what_its_rollouts_lack(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = solved(folder, tiny_calibrated().calibrated, 4.0)
    assert main(["verify", *plans, "--rollouts", "held-out.jsonl", "--risk-microbatches", "1"]) == 2
    assert "--risk-microbatches 1: held-out.jsonl has" in capsys.readouterr().err
    rows = [json.loads(line) for line in (folder / "held-out.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("reward", None)
        row |= {"advantage": -1.0, "old_logps": [30.0] * len(row["completion_ids"])}
    (folder / "clipped.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["verify", *plans, "--rollouts", "clipped.jsonl"]) == 2
    assert "clipped.jsonl: every token is clipped, so that no gradient passes" in capsys.readouterr().err


def test_what_goes_wrong_leaves_the_trace_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "tiny.trace.json").read_bytes()
    (folder / "bad.jsonl").write_text('{"group": 0, "prompt_ids": [1], "completion_ids": [2]}\n')
    assert main(["calibrate", "model.yaml", "--rollouts", "bad.jsonl"]) == 2
    assert capsys.readouterr().err == "bad.jsonl:1: neither reward nor advantage is given\n"
    assert main(["calibrate", "model.yaml"]) == 2
    assert "calibration.source: prior measures nothing; give --rollouts FILE" in capsys.readouterr().err
    assert main(["calibrate", "model.yaml", "--rollouts", "rollouts.jsonl"]) == 2
    assert "carry a confidence of at most 4/5, not 0.95; it needs 19 of them" in capsys.readouterr().err
    assert (folder / "tiny.trace.json").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["model.yaml", "tiny.trace.json", "rollouts.jsonl", "held-out.jsonl", "bad.jsonl"]
    )
