"""Real GRPOTrainer runs on tiny models: the plan runs in every microbatch, and the weights are those without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hilore.runtime.integrations.trl import HiloreMixin, attach_trainer
from hilore.runtime.plan import Plan
from tests.models import qwen2_tiny
from tests.trl_fixtures import (
    MICROBATCHES,
    exact,
    plan_for,
    policy,
    quiet,
    same_weights,
    trained,
    trainer_of,
    weights,
)


def runtime_of(trainer: Any) -> Any:
    return trainer.__dict__["_hilore_link"].runtime


def all_recomputed(model: Any) -> list[Plan]:
    return [plan_for(model, "R")]


def all_kept(model: Any) -> list[Plan]:
    return [plan_for(model, "H")]


def encoded(model: Any, **options: Any) -> list[Plan]:
    return [plan_for(model, lambda _, unit: "L" if unit in ("mlp.up_proj", "mlp.gate_proj") else "R", **options)]


SETTINGS = {
    "one epoch": (True, {}),
    "two epochs, reference, autocast": (True, {"num_iterations": 2, "beta": 0.04, "bf16": True}),
    "full": (False, {}),
    "full, two epochs, autocast": (False, {"num_iterations": 2, "bf16": True}),
    "no accumulation, dapo": (True, {"gradient_accumulation_steps": 1, "loss_type": "dapo", "max_steps": 3}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_final_weights_are_bitwise_those_without_plans(case: str, tmp_path: Path) -> None:
    adapter, options = SETTINGS[case]
    expected = weights(trained(tmp_path, adapter, gradient_checkpointing=True, **options).model)
    untrained = weights(trainer_of(tmp_path, policy(adapter)).model)
    assert not any(torch.equal(expected[name], untrained[name]) for name in expected)
    assert same_weights(weights(trained(tmp_path, adapter, gradient_checkpointing=False, **options).model), expected)
    for plans, checkpointing in ((exact, True), (exact, False), (all_recomputed, True), (all_kept, False)):
        trainer = trained(tmp_path, adapter, plans, gradient_checkpointing=checkpointing, **options)
        assert same_weights(weights(trainer.model), expected)


def test_an_encoded_plan_changes_the_weights(tmp_path: Path) -> None:
    """So the test above can fail."""
    expected = weights(trained(tmp_path, True).model)
    changed = weights(trained(tmp_path, True, encoded).model)
    assert not same_weights(changed, expected)
    assert all(torch.isfinite(weight).all() for weight in changed.values())


@pytest.mark.parametrize("checkpointing", [True, False])
def test_every_microbatch_runs_all_regions_under_the_plan(checkpointing: bool, tmp_path: Path) -> None:
    trainer = trained(tmp_path, True, exact, gradient_checkpointing=checkpointing, num_iterations=2)
    stats = runtime_of(trainer).stats
    assert [(s.regions_replayed, s.regions_held, s.regime, s.fallback) for s in stats.steps] == [
        (1, 1, "high", "")
    ] * MICROBATCHES
    assert (stats.replays, stats.held, stats.frames) == (MICROBATCHES, MICROBATCHES, MICROBATCHES)
    assert stats.live_saved_bytes == 0
    left_out = stats.units["model.layers.0.mlp.down_proj"]
    assert (left_out.recorded, left_out.dead) == (MICROBATCHES, MICROBATCHES)
    assert stats.units["model.layers.0.self_attn:attention"].answered == MICROBATCHES


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
        {"max_steps": 4, "steps_per_generation": 1, "gradient_accumulation_steps": 1, "num_iterations": 2},
        {"max_steps": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "beta": 0.1},
    ],
)
def test_the_plan_survives_evaluation_and_repeated_generation(options: dict[str, Any], tmp_path: Path) -> None:
    trainer = trained(tmp_path, True, exact, **options)
    stats = runtime_of(trainer).stats
    per_update = options.get("gradient_accumulation_steps", 2)
    assert [(s.regions_replayed, s.regions_held) for s in stats.steps] == [(1, 1)] * (options["max_steps"] * per_update)
    assert stats.replays == len(stats.steps)
    expected = trained(tmp_path, True, **options)
    assert same_weights(weights(trainer.model), weights(expected.model))


def test_generation_still_uses_its_cache(tmp_path: Path) -> None:
    """A plan sets config.use_cache off; generation must not fall back to running the whole row for every token."""
    with quiet():
        trainer = trainer_of(tmp_path, qwen2_tiny(use_cache=True))
        runtime = attach_trainer(trainer, exact(trainer.model))
    widths: list[int] = []
    trainer.model.model.layers[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    with quiet():
        trainer.train()
    assert runtime.stats.frames == MICROBATCHES
    assert widths.count(1) >= 2 * 6


def test_mixin_and_attach_trainer_do_the_same(tmp_path: Path) -> None:
    from trl import GRPOTrainer

    class Mixed(HiloreMixin, GRPOTrainer):
        pass

    model = policy(True)
    mixed = trainer_of(tmp_path, model, Mixed, given={"plans": exact(model)})
    assert mixed.hilore is not None
    with quiet():
        mixed.train()
    wrapped = trained(tmp_path, True, exact)
    assert same_weights(weights(mixed.model), weights(wrapped.model))
    assert mixed.hilore.stats.steps == runtime_of(wrapped).stats.steps
    keys = [sorted(key for key in log if key.startswith("hilore/")) for log in mixed.state.log_history]
    assert keys == [sorted(key for key in log if key.startswith("hilore/")) for log in wrapped.state.log_history]


def test_a_mixin_without_plans_is_the_trainer_itself(tmp_path: Path) -> None:
    from trl import GRPOTrainer

    class Mixed(HiloreMixin, GRPOTrainer):
        pass

    trainer = trained(tmp_path, True, None, Mixed)
    assert trainer.hilore is None
    assert same_weights(weights(trainer.model), weights(trained(tmp_path, True).model))
    assert not [key for log in trainer.state.log_history for key in log if key.startswith("hilore/")]


def test_the_log_of_the_trainer(tmp_path: Path) -> None:
    trainer = trained(tmp_path, True, exact)
    stats = runtime_of(trainer).stats
    first, second = trainer.state.log_history[:2]
    assert {key: first[key] for key in first if key.startswith("hilore/regime_")} == {
        "hilore/regime_null": 0.0,
        "hilore/regime_low": 0.0,
        "hilore/regime_mid": 0.0,
        "hilore/regime_high": 1.0,
        "hilore/regime_none": 0.0,
    }
    assert first["hilore/gain"] == 0.25
    assert first["hilore/planned_peak_mib"] == 1.0
    assert (first["hilore/demotions"], second["hilore/demotions"]) == (0.0, 0.0)
    exposures = [step.exact_exposure for step in stats.steps]
    assert first["hilore/exposure"] == pytest.approx(sum(exposures[:2]) / 2, abs=1e-12)
    assert second["hilore/exposure"] == pytest.approx(sum(exposures[2:]) / 2, abs=1e-12)
    assert len(set(exposures)) == MICROBATCHES


def test_exposure_chooses_among_plans(tmp_path: Path) -> None:
    """Flat groups take the null plan; the others the plan whose interval holds their exposure."""

    def plans(model: Any) -> list[Plan]:
        return [
            plan_for(model, "R", label="null", low=0.0, high=0.0),
            plan_for(model, "R", label="low", low=0.0, high=0.9),
            plan_for(model, "R", hold=(0,), label="mid", low=0.9, high=2.0),
            plan_for(model, "R", hold=(0, 1), label="high", low=2.0, high=1e9),
        ]

    trainer = trained(tmp_path, True, plans)
    steps = runtime_of(trainer).stats.steps
    for step in steps:
        assert step.exposure == step.exact_exposure
        assert step.regime == ("low" if step.exposure <= 0.9 else "mid")
        assert step.regions_held == (0 if step.regime == "low" else 1)
    assert {step.regime for step in steps} == {"low", "mid"}

    flat = trainer_of(tmp_path, policy(True))
    flat.reward_funcs[0] = lambda completions, **_: [1.0] * len(completions)
    runtime = attach_trainer(flat, plans(flat.model))
    with quiet():
        flat.train()
    assert [(s.regime, s.exposure) for s in runtime.stats.steps] == [("null", 0.0)] * MICROBATCHES


def test_a_microbatch_above_its_plan_is_demoted_and_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound before the forward is made too low here; the log-probs of the forward correct it."""
    monkeypatch.setattr("hilore.runtime.microbatch.exposure_before_forward", lambda *_args, **_options: 0.0)

    def plans(model: Any) -> list[Plan]:
        return [*encoded(model, label="null", low=0.0, high=0.0), *all_recomputed(model)]

    trainer = trained(tmp_path, True, plans)
    stats = runtime_of(trainer).stats
    assert [(s.regime, s.demoted) for s in stats.steps] == [("null", True)] * MICROBATCHES
    assert stats.demotions == MICROBATCHES
    assert trainer.state.log_history[1]["hilore/demotions"] == MICROBATCHES
    assert same_weights(weights(trainer.model), weights(trained(tmp_path, True).model))
