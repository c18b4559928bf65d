"""Microbatches whose loss coefficients are all 0, skipped on request: gradients and weights as if they had run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hilore.runtime.errors import ExposureError, UnsupportedModelError
from hilore.runtime.integrations.trl import attach_trainer
from hilore.runtime.nullskip import null_loss, refuse_skipping
from tests.models import microbatch_for, qwen2_tiny
from tests.plans import attach_plan, plan_for
from tests.trl_fixtures import plan_for as trl_plan
from tests.trl_fixtures import policy, quiet, same_weights, trainer_of, weights


def update(skip: bool) -> tuple[dict[str, torch.Tensor], Any]:
    """Three microbatches, the first and the last of flat groups; gradients and the runtime's counters."""
    model = qwen2_tiny().train()
    batch = microbatch_for(model)
    runtime = attach_plan(model, plan_for(model))
    runtime.enable()
    rows, width = batch.completion_mask.shape
    for scale in (0.0, 1.0, 0.0):
        advantages = batch.advantages * scale
        with runtime.microbatch(advantages, batch.completion_mask, loss="bnpo", skip_null=skip) as microbatch:
            if microbatch.null:
                microbatch.null_loss().backward()
                continue
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.float()
            logps = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)[:, -width:]
            loss = -(logps * batch.completion_mask * advantages[:, None]).sum() / batch.completion_mask.sum()
            loss.backward()
    assert rows == len(batch.advantages)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, runtime.stats


def test_gradients_are_those_of_running_everything() -> None:
    ran, run_stats = update(skip=False)
    skipped, stats = update(skip=True)
    assert ran.keys() == skipped.keys()
    assert all(torch.equal(ran[name], skipped[name]) for name in ran)
    assert any(gradient.abs().max() > 0 for gradient in ran.values())
    assert (run_stats.null_skipped, run_stats.frames) == (0, 6)
    assert (stats.null_skipped, stats.frames) == (2, 2)
    assert [step.skipped for step in stats.steps] == [True, False, True]
    assert stats.steps[0].regime == "null"


def test_a_microbatch_that_is_not_null_cannot_be_skipped() -> None:
    model = qwen2_tiny().train()
    runtime = attach_plan(model, plan_for(model))
    mask = torch.ones(2, 3)
    with runtime.microbatch(torch.tensor([1.0, 0.0]), mask, loss="grpo", skip_null=True) as microbatch:
        assert not microbatch.null
        with pytest.raises(ExposureError, match=r"exposure 0\.70.* is not to be skipped"):
            microbatch.null_loss()
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    with runtime.microbatch(torch.zeros(2), mask, loss="grpo") as microbatch:
        assert not microbatch.null  # not asked for
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(("beta", "null"), [(0.0, True), (0.04, False)])
def test_a_kl_term_is_not_null(beta: float, null: bool) -> None:
    model = qwen2_tiny().train()
    runtime = attach_plan(model, plan_for(model))
    with runtime.microbatch(
        torch.zeros(2),
        torch.ones(2, 3),
        old_logps=torch.zeros(2, 3),
        ref_logps=torch.zeros(2, 3),
        loss={"kind": "grpo", "beta": beta},
        skip_null=True,
    ) as microbatch:
        assert microbatch.null is null
        if not null:
            model(input_ids=torch.zeros(1, 4, dtype=torch.long))


def test_zeros_reach_trainable_parameters_only() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    loss = null_loss(model)
    assert loss.item() == 0.0
    loss.backward()
    assert model[0].weight.grad is None
    assert torch.equal(model[1].weight.grad, torch.zeros(2, 2))
    with pytest.raises(UnsupportedModelError, match="no trainable parameter"):
        null_loss(model.requires_grad_(False))


def test_wrappers_that_reduce_later_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(UnsupportedModelError, match="DistributedDataParallel reduces the gradients"):
            refuse_skipping(wrapped)
        refuse_skipping(nn.Linear(2, 2))
    finally:
        dist.destroy_process_group()


def half_flat(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
    """Every completion of a prompt with a space gets 1; of the others, as its ids say."""
    pairs = zip(completion_ids, prompts, strict=True)
    return [1.0 if " " in prompt else float(len(set(ids)) + sum(ids) % 7) for ids, prompt in pairs]


def test_trl_trains_to_the_same_weights(tmp_path: Path) -> None:
    """Without dropout, which a skipped forward would not draw."""
    found, stats = [], []
    for skip in (False, True):
        trainer = trainer_of(tmp_path, policy(True, dropout=0.0), max_steps=3)
        trainer.reward_funcs = [half_flat]
        runtime = attach_trainer(trainer, [trl_plan(trainer.model)], skip_null=skip)
        with quiet():
            trainer.train()
        found.append(weights(trainer.model))
        stats.append(runtime.stats)
    assert same_weights(*found)
    assert stats[0].null_skipped == 0
    assert 0 < stats[1].null_skipped < len(stats[1].steps)
    assert stats[1].frames == stats[0].frames - 2 * stats[1].null_skipped
