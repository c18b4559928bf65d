"""Attaching plans to a trainer and taking them off again: all or nothing, and nothing is left behind."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hilore.runtime.errors import BindError, FingerprintError, HiloreWarning, UnsupportedModelError
from hilore.runtime.integrations import trl as integration
from hilore.runtime.integrations.trl import attach_trainer
from hilore.runtime.integrations.trl_loss import loss_of
from tests.trl_fixtures import (
    MICROBATCHES,
    exact,
    plan_for,
    policy,
    quiet,
    refused_untouched,
    same_weights,
    trained,
    trainer_of,
    weights,
)


def test_another_loss_needs_to_be_told(tmp_path: Path) -> None:
    from trl import GRPOTrainer

    class Own(GRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return 2 * super()._compute_loss(model, inputs)

    trainer = trainer_of(tmp_path, policy(True), Own)
    refused_untouched(trainer, "its own _compute_loss")
    runtime = attach_trainer(trainer, exact(trainer.model), loss=loss_of(trainer))
    with quiet():
        trainer.train()
    assert len(runtime.stats.steps) == MICROBATCHES


def test_a_loss_that_does_not_score_through_the_trainer_is_an_error(tmp_path: Path) -> None:
    from trl import GRPOTrainer

    class Own(GRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return model(input_ids=inputs["completion_ids"]).logits.float().mean()

    trainer = trainer_of(tmp_path, policy(True), Own)
    runtime = attach_trainer(trainer, exact(trainer.model), loss=loss_of(trainer))
    with quiet(), pytest.raises(UnsupportedModelError, match="nothing confirmed the exposure"):
        trainer.train()
    assert runtime.stats.steps == []


def test_other_trainers_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"attach to a trl\.GRPOTrainer"):
        attach_trainer(object(), [])


def test_plans_for_another_head_are_told(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy(True))
    by_head = [replace(p, loss={"kind": "grpo", "head": "naive"}) for p in exact(trainer.model)]
    with pytest.warns(HiloreWarning, match=r"loss\.head 'naive', but TRL's trainer scores completions here as 'trl'"):
        attach_trainer(trainer, by_head).detach()
    own = [replace(plan, loss={"kind": "grpo", "head": "trl"}) for plan in by_head]
    with warnings.catch_warnings():
        warnings.simplefilter("error", HiloreWarning)
        attach_trainer(trainer, own).detach()


def test_detach_gives_the_trainer_back(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy(True), gradient_checkpointing=False)
    before = dict(trainer.__dict__)
    hooks = [len(module._forward_hooks) for module in trainer.model.modules()]
    runtime = attach_trainer(trainer, exact(trainer.model))
    assert "compute_loss" in trainer.__dict__
    with pytest.raises(BindError, match="attached to this trainer already"):
        attach_trainer(trainer, exact(trainer.model))
    runtime.detach()
    assert trainer.__dict__ == before
    assert [len(module._forward_hooks) for module in trainer.model.modules()] == hooks
    attach_trainer(trainer, exact(trainer.model)).detach()
    with quiet():
        trainer.train()
    plain = trained(tmp_path, True, gradient_checkpointing=False)
    assert same_weights(weights(trainer.model), weights(plain.model))
    assert runtime.stats.steps == []


def test_a_plan_for_another_model_leaves_the_trainer_alone(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy(True))
    before = dict(trainer.__dict__)
    with pytest.raises(FingerprintError) as caught:
        attach_trainer(trainer, [plan_for(trainer.model, num_layers=36)])
    assert (caught.value.field, caught.value.planned, caught.value.found) == ("num_layers", 36, 2)
    assert trainer.__dict__ == before


def test_a_plan_traced_without_input_gradients_is_refused_in_the_first_forward(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy(True))
    attach_trainer(trainer, [plan_for(trainer.model, first_input_requires_grad=False)])
    with quiet(), pytest.raises(FingerprintError, match="first_input_requires_grad"):
        trainer.train()


def test_switched_off_the_trainer_trains_without_plans(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy(True), gradient_checkpointing=False)
    runtime = attach_trainer(trainer, exact(trainer.model))
    runtime.disable()
    with quiet():
        trainer.train()
    assert (runtime.stats.steps, runtime.stats.frames) == ([], 0)
    plain = trained(tmp_path, True, gradient_checkpointing=False)
    assert same_weights(weights(trainer.model), weights(plain.model))


def test_saved_weights_carry_no_trace_of_the_plan(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    files = []
    for plans, folder in ((exact, tmp_path / "plan"), (None, tmp_path / "plain")):
        trainer = trained(folder, True, plans)
        with quiet():
            trainer.save_model(str(folder))
        files.append(load_file(folder / "adapter_model.safetensors"))
    assert same_weights(files[0], files[1])


def test_names_in_trl_that_the_integration_leans_on() -> None:
    from trl import GRPOTrainer

    for name in (integration.COMPUTE_LOSS, integration.SCORE, integration.LOSS):
        assert callable(getattr(GRPOTrainer, name))
