"""Calibration on recorded, generated and synthetic rollouts: what it says, resumed and to the byte; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hilore.planner.calibrate as calibrate
import hilore.planner.calibration_measure as measure
import hilore.planner.calibration_sources as sources
import hilore.planner.gradient_error as gradient_error
from hilore.planner.actor import Actor, build_actor
from hilore.planner.calibrate import MOST_PASSES, SCORED_PLANS, calibrate_trace, fit_passes, measurements_of
from hilore.planner.calibration_state import CalibrationStateError
from hilore.planner.conformal import ConfidenceError
from hilore.planner.emit import solve_trace
from hilore.planner.rollouts import Rollout, RolloutFileError, read_rollouts, write_rollouts
from hilore.planner.spec_types import ModelSpec
from hilore.planner.tasks import Entry
from hilore.planner.trace import Trace
from hilore.planner.tracefile import load_trace, save_trace
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import reference_peaks
from hilore.runtime.errors import HiloreError, UnsupportedModelError
from hilore.runtime.naming import canonical_modules
from tests.calibration_fixtures import (
    CALIBRATION,
    DEFAULT_PASSES,
    FEW_PASSES,
    SECTIONS,
    rollouts,
    tiny_calibrated,
)
from tests.specs import spec_of


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return tiny_calibrated().spec


@pytest.fixture(scope="module")
def trace() -> Trace:
    return tiny_calibrated().trace


@pytest.fixture(scope="module")
def calibrated() -> Trace:
    return tiny_calibrated().calibrated


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FIT_PASSES", FEW_PASSES)


def test_what_a_calibration_says(calibrated: Trace, trace: Trace) -> None:
    found = calibrated.calibration
    assert (found.calibrated, found.source, found.confidence, found.delta_star) == (True, "rollouts", 0.75, 0.01)
    # Groups 0 and 3 are flat: two of their microbatches stand before the fourth that counts.
    assert [sample.psi > 0 for sample in found.samples] == [False, False, True, True, True, True]
    assert all((sample.weight > 0) == (sample.psi > 0) for sample in found.samples)
    assert found.frequencies[0] == pytest.approx(2 / 6)
    assert sum(found.frequencies) == pytest.approx(1)
    assert found.psi_edges[2] > max(sample.psi for sample in found.samples)
    assert 0.3 < found.mean_interaction < 3
    assert found.mean_interaction <= found.interaction
    assert found.noise_floor is not None
    assert 0 < found.noise_floor < 1e-5
    assert found.native_noise == found.noise_floor  # this actor computes in float32 itself
    contexts = {(risk.unit, risk.tainted) for risk in found.risks}
    assert len(contexts) > len({unit for unit, _ in contexts})
    assert {risk.codec for risk in found.risks} == {"int8-g128", "int4-g64"}
    assert all(0 < risk.kappa2 < 1 for risk in found.risks)
    by_codec = {codec: sum(r.kappa2 for r in found.risks if r.codec == codec) for codec in ("int8-g128", "int4-g64")}
    assert by_codec["int4-g64"] > 50 * by_codec["int8-g128"]
    assert calibrated.spec["calibration"]["source"] == "rollouts"
    assert replace(calibrated, calibration=trace.calibration, spec=trace.spec) == trace


def test_plans_say_that_they_are_calibrated_and_how_surely(calibrated: Trace) -> None:
    low, high = reference_peaks(calibrated)
    plan = solve_trace(calibrated, budget_bytes=(low + high) // 2, delta=1.0).plans[-1]
    assert (plan.calibrated, plan.confidence) == (True, 0.75)
    assert plan.predicted.risk <= 0.01
    assert plan.predicted.linear_risk >= plan.predicted.risk / calibrated.calibration.interaction * (1 - 1e-6)


def test_what_a_kept_state_measured(spec: ModelSpec, trace: Trace, calibrated: Trace, tmp_path: Path) -> None:
    state, path = tmp_path / "state", spec.beside(spec.calibration.path)
    made = calibrate_trace(spec, trace, rollouts=path, state=state)
    assert made.calibration == calibrated.calibration
    before = state.read_bytes()
    found = measurements_of(spec, trace, rollouts=path, state=state)
    assert state.read_bytes() == before
    assert found.exposed == (2, 3, 4, 5)
    assert len(found.observations) == 4 * FEW_PASSES[0]
    assert {one.microbatch for one in found.observations} == set(found.exposed)
    assert {len(one.errors) for one in found.measured} == {len(found.plans)} == {SCORED_PLANS}


def test_passes_have_a_limit_whatever_the_units_and_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FIT_PASSES", DEFAULT_PASSES)
    for microbatches in (1, 2, 19, 24, 48, 1000):
        assert fit_passes(microbatches) + SCORED_PLANS + 2 + 4 <= MOST_PASSES == 64


def save(trace: Trace, path: Path) -> bytes:
    save_trace(trace, path)
    assert load_trace(path) == trace
    return path.read_bytes()


class Stopped(Exception):
    pass


def test_interrupted_and_resumed_it_gives_the_same_bytes(
    spec: ModelSpec, trace: Trace, calibrated: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "tiny.calibration"
    expected = save(calibrated, tmp_path / "whole.json")
    passes: list[int] = []
    honest = gradient_error.backward

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes[-1] += 1
        if passes[-1] == limit:
            raise Stopped
        return honest(*args, **kwargs)

    monkeypatch.setattr(gradient_error, "backward", counted)
    for limit in (9, 19, 10_000):
        passes.append(0)
        if limit < 10_000:
            with pytest.raises(Stopped):
                calibrate_trace(spec, trace, state=state)
            # As if the power had gone in the middle of a line.
            state.write_bytes(state.read_bytes() + b'{"key": "fit')
        else:
            resumed = calibrate_trace(spec, trace, state=state)
    assert save(resumed, tmp_path / "resumed.json") == expected
    # 4 microbatches: 2 exact passes, 3 for the fit, 4 plans; a stop costs one pass and an exact one again at most.
    assert sum(passes) <= 4 * (2 + 3 + SCORED_PLANS) + 2 * 2
    assert passes[2] < 4 * (2 + 3 + SCORED_PLANS) - 20


def test_another_seed_gives_other_plans(spec: ModelSpec, trace: Trace, calibrated: Trace) -> None:
    other = calibrate_trace(spec, trace, seed=1)
    assert other.calibration.risks != calibrated.calibration.risks


def test_the_state_of_another_calibration_is_refused(spec: ModelSpec, trace: Trace, tmp_path: Path) -> None:
    state = tmp_path / "tiny.calibration"

    def stop(label: str, done: int, _total: int) -> None:
        if label.endswith("random plans") and done:
            raise Stopped

    with pytest.raises(Stopped):
        calibrate_trace(spec, trace, stop, state=state)
    before = state.read_bytes()
    with pytest.raises(CalibrationStateError, match=r":1: the state of another calibration \(seed differ: seed was 0"):
        calibrate_trace(spec, trace, state=state, seed=1)
    assert state.read_bytes() == before
    state.write_text("{}\nnot json\n")
    with pytest.raises(CalibrationStateError, match=r"remove the file to start again"):
        calibrate_trace(spec, trace, state=state)


def test_a_confidence_that_the_file_cannot_carry_names_what_it_takes(trace: Trace, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", rollouts(groups=3))
    wanted = "{source: rollouts, path: rollouts.jsonl, microbatches: 24, confidence: 0.9}"
    spec = spec_of(tmp_path, calibration=wanted, **SECTIONS)
    with pytest.raises(ConfidenceError) as caught:
        calibrate_trace(spec, trace)
    assert caught.value.exit_code == 2
    assert "rollouts.jsonl with exposure carry a confidence of at most 4/5, not 0.9; it needs 9 of them" in str(
        caught.value
    )


def test_flat_groups_alone_carry_nothing(trace: Trace, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", rollouts(groups=1))
    spec = spec_of(tmp_path, calibration=CALIBRATION, **SECTIONS)
    with pytest.raises(ConfidenceError, match=r"0 microbatches of .* carry a confidence of at most 0/1"):
        calibrate_trace(spec, trace)


def test_rollouts_of_another_tokenizer_are_refused_by_line(trace: Trace, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", [*rollouts(), Rollout(9, (5, 999), (3,), 1.0)])
    spec = spec_of(tmp_path, calibration=CALIBRATION, **SECTIONS)
    with pytest.raises(RolloutFileError, match=r"rollouts\.jsonl:17: prompt_ids holds token 999"):
        calibrate_trace(spec, trace)


def test_old_log_probs_of_another_policy_are_noted(trace: Trace, tmp_path: Path) -> None:
    made = [replace(row, old_logps=(-5.6,) * len(row.completion_ids)) for row in rollouts()]
    write_rollouts(tmp_path / "rollouts.jsonl", made)
    noted = calibrate_trace(spec_of(tmp_path, calibration=CALIBRATION, **SECTIONS), trace).notes
    assert any(note.startswith("calibration: microbatch") and "old log-probs lie" in note for note in noted)


def test_what_cannot_be_measured_is_refused(spec: ModelSpec, trace: Trace) -> None:
    with pytest.raises(UnsupportedModelError, match=r"calibration\.source: prior measures nothing; give --rollouts"):
        calibrate_trace(spec_of(**SECTIONS), trace)
    with pytest.raises(UnsupportedModelError, match=r"calibration\.source: rollouts runs the actor, and its device"):
        calibrate_trace(spec, replace(trace, estimated=True))
    other = spec_of(calibration=CALIBRATION, **(SECTIONS | {"adapter": "none"}))
    with pytest.raises(HiloreError, match=r"adapter is not that of the trace of tiny .*; trace again with"):
        calibrate_trace(other, trace)
    away = "{source: synthetic, microbatches: 1, confidence: 0.5}"
    with pytest.raises(UnsupportedModelError, match=r"calibration\.source: synthetic runs the actor"):
        trace_spec(spec_of(calibration=away, device="{kind: cuda, gpu: l40s-48gb}"))


def test_synthetic_rollouts_are_measured_as_recorded_ones_but_claim_nothing(trace: Trace) -> None:
    found = trace.calibration
    assert (found.calibrated, found.source, len(found.samples)) == (False, "synthetic", 1)
    assert {risk.codec for risk in found.risks} == {"int8-g128", "int4-g64"}
    low, high = reference_peaks(trace)
    plan = solve_trace(trace, budget_bytes=(low + high) // 2, delta=1.0).plans[-1]
    assert (plan.calibrated, plan.confidence) == (False, 0.0)


def test_generated_rollouts_stop_when_enough_microbatches_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat groups count for nothing; the answers are the actor's in test_smollm2."""
    spec = spec_of(tmp_path, calibration="{source: generate, microbatches: 9, confidence: 0.9}", **SECTIONS)
    actor = build_actor(spec)
    seeds: list[int] = []

    def answered(_actor: Actor, entries: list[Entry], *, completions: int, seed: int) -> tuple[Rollout, ...]:
        seeds.append(seed)
        right = seed % 2
        return tuple(Rollout(0, (5, 6), (7, 8), float(right and row == 0)) for row in range(completions))

    monkeypatch.setattr(sources, "generate_rollouts", answered)
    path = tmp_path / "made.jsonl"
    sources.generate_file(actor, path, lambda *_: None, seed=2)
    made = read_rollouts(path)
    assert [row.group for row in made] == [group for group in range(6) for _ in range(8)]
    assert len(set(seeds)) == len(seeds) == 6
    first = path.read_bytes()
    sources.generate_file(actor, path, lambda *_: None, seed=2)
    assert path.read_bytes() == first
    assert sources.recorded(actor, path).digest
    monkeypatch.setattr(sources, "generate_rollouts", lambda *_a, **_k: rollouts(groups=1))
    with pytest.raises(ConfidenceError, match="0 microbatches of 72 groups with exposure carry"):
        sources.generate_file(actor, tmp_path / "none.jsonl", lambda *_: None, seed=2)
    assert not (tmp_path / "none.jsonl").exists()


def test_a_layer_that_does_not_repeat_itself_is_held_from_then_on(
    spec: ModelSpec, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of every two runs of layer 1 adds something: its replays would be wrong in silence."""
    runs = [0]

    def flip(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        return output if runs[0] % 2 else output + 0.01

    def build(*args: Any, **kwargs: Any) -> Actor:
        actor = build_actor(*args, **kwargs)
        canonical_modules(actor.model)["model.layers.1.mlp"].register_forward_hook(flip)
        return actor

    monkeypatch.setattr(calibrate, "build_actor", build)
    found = calibrate_trace(spec, trace)
    regions = {region.name: region.hold_only for region in found.buckets[-1].regions}
    assert regions["model.layers.0"] == ""
    assert regions["model.layers.1"].startswith("its forward gave other values when it was run again")
    assert any(note.startswith("calibration: model.layers.1 can only be held: its forward") for note in found.notes)
    assert {risk.region for risk in found.calibration.risks} == {"model.layers.0"}
    low, high = reference_peaks(found)
    plan = solve_trace(found, budget_bytes=int(low + 0.7 * (high - low)), delta=1.0).plans[-1]
    assert plan.regions[1].hold
    assert not plan.regions[0].hold


def test_the_trace_file_holds_it_all(calibrated: Trace, tmp_path: Path) -> None:
    data = json.loads(save(calibrated, tmp_path / "t.json"))
    assert data["calibration"]["samples"][2].keys() == {"psi", "weight", "score2"}
    assert data["calibration"]["risks"][0].keys() == {"region", "unit", "codec", "kappa2", "tainted"}
