"""bench.evidence, bench.training: parts of a calibration, what goes on after a stop, tables. Nothing here is timed."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from rich.table import Table

import hilore.planner.calibration_measure as measure
from bench import training
from bench.evidence_policy import spread, train, until_exposed
from bench.evidence_report import markdown
from bench.evidence_sensitivity import _calibrated_on, _part, sizes_table
from bench.evidence_setting import Setting
from bench.training import GC, PLAN, Run, keep_run, read_runs, summary
from hilore.planner.actor import build_actor, microbatch_of
from hilore.planner.calibrate import calibrate_trace, measurements_of
from tests.calibration_fixtures import FEW_PASSES, tiny_calibrated


def test_a_calibration_on_a_part_of_its_microbatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FIT_PASSES", FEW_PASSES)
    made, state = tiny_calibrated(), tmp_path / "state"
    rollouts = made.spec.beside(made.spec.calibration.path)
    calibrate_trace(made.spec, made.trace, rollouts=rollouts, state=state)
    found = measurements_of(made.spec, made.trace, rollouts=rollouts, state=state)
    part = _part(found, found.exposed[1:3])
    assert part.exposed == (0, 1)
    assert [one.psi for one in part.measured] == [found.measured[place].psi for place in found.exposed[1:3]]
    assert {one.microbatch for one in part.observations} == {0, 1}
    assert len(part.observations) == 2 * FEW_PASSES[0]
    setting = Setting(made.spec, tmp_path, argparse.Namespace(confidence=0.75))
    # All of it is the calibration itself, but for the flat groups in between.
    model, bound = _calibrated_on(setting, _part(found, found.exposed), made.calibrated)
    unit = found.plans[0].units[0]
    assert model.kappa2(unit) == pytest.approx(
        next(
            risk.kappa2
            for risk in made.calibrated.calibration.risks
            if (risk.unit, risk.codec, risk.tainted) == (unit.unit, unit.codec, unit.tainted)
            and risk.region == made.calibrated.buckets[-1].regions[unit.place].name
        ),
        rel=1e-4,
    )
    assert bound.mean == pytest.approx(made.calibrated.calibration.mean_interaction, rel=0.5)


def test_microbatches_are_taken_evenly_and_until_enough_have_advantages() -> None:
    actor = build_actor(tiny_calibrated().spec)
    batch = microbatch_of(actor, 16)
    flat = replace(batch, advantages=torch.zeros_like(batch.advantages))
    assert len(until_exposed([flat, batch, flat, batch, batch], 2)) == 4
    assert len(until_exposed([flat, batch], 3)) == 2
    assert spread([0, 1, 2, 3, 4, 5], 3) == [0, 2, 4]  # type: ignore[list-item,comparison-overlap]
    before = [parameter.detach().clone() for parameter in actor.model.parameters() if parameter.requires_grad]
    train(actor, [batch, batch, batch], lr=0.01, seed=0, accumulation=2)
    after = [parameter.detach() for parameter in actor.model.parameters() if parameter.requires_grad]
    moved = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))
    # One update of Adam moves by the learning rate at most; what is left of the second is dropped.
    assert moved == pytest.approx(0.01, rel=1e-3)
    assert all(parameter.grad is None for parameter in actor.model.parameters())


def test_tables_become_markdown() -> None:
    table = Table(title="two")
    table.add_column("a")
    table.add_column("b")
    table.add_row("1", "[x] |A|")
    lines = markdown([table]).splitlines()
    assert lines[0] == "two:"
    assert lines[2:] == ["| a | b |", "|---|---|", r"| 1 | [x] \|A\| |"]
    row = {
        **dict.fromkeys(("microbatches", "draws"), 4),
        **dict.fromkeys(("confidence", "interaction", "least_interaction", "most_interaction", "fit_error"), 0.5),
        **{name: {"same": 1.0, "other": 0.5} for name in ("within", "least_within", "tightness", "spearman")},
    }
    assert sizes_table([row]).row_count == 1


def test_trainings_that_are_finished_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    given = training.parser().parse_args(["--updates", "2", "--seeds", "3", "--runs", str(path)])
    run = Run(policy=GC, seed=3, rewards=(0.1, 0.2), score=0.3, regimes={}, update_s=1.0)
    keep_run(given, run)
    assert read_runs(given) == [run]
    assert read_runs(argparse.Namespace(**{**vars(given), "updates": 4})) == []
    asked: list[tuple[str | None, int]] = []

    def once(plans: str | None, seed: int, _given: argparse.Namespace) -> Run:
        asked.append((plans, seed))
        return replace(run, policy=PLAN, score=0.5, regimes={"high": 2})

    monkeypatch.setattr(training, "train_once", once)
    out = tmp_path / "out.json"
    assert training.main(["--updates", "2", "--seeds", "3", "--runs", str(path), "--out", str(out)]) == 0
    assert asked == [(given.plans, 3)]
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["score_differences"] == [pytest.approx(0.2)]
    assert [one["policy"] for one in report["runs"]] == [GC, PLAN]
    assert report["end_mean_difference"] == summary([run, replace(run, policy=PLAN)])["end_mean_difference"] == 0
    assert asdict(run)["audits"] == 0
