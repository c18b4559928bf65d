"""``loss.head: trl`` is the head of TRL's trainer: the same log-probs and gradients, and the same peak."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hilore.planner.head import policy_logps
from hilore.planner.microbatch import Microbatch
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.meter import StorageMeter
from tests.models import microbatch_for
from tests.trl_fixtures import policy, quiet, trainer_of


def trl_inputs(microbatch: Microbatch) -> dict[str, Any]:
    """The same rollouts as a batch of GRPOTrainer."""
    prompt = microbatch.tokens - microbatch.completion_mask.shape[1]
    return {
        "prompt_ids": microbatch.input_ids[:, :prompt],
        "prompt_mask": microbatch.attention_mask[:, :prompt],
        "completion_ids": microbatch.input_ids[:, prompt:],
        "completion_mask": microbatch.completion_mask,
        "advantages": microbatch.advantages,
        "num_items_in_batch": microbatch.completion_mask.sum(),
    }


@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_gradients_are_bitwise_trls(adapter: bool, temperature: float, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy(adapter, dropout=0.0), temperature=temperature)
    microbatch = microbatch_for(trainer.model)
    keep = microbatch.completion_mask.shape[1]
    expected, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, microbatch.input_ids, microbatch.attention_mask, keep, compute_entropy=True
    )
    found = policy_logps(trainer.model, microbatch, "trl", temperature=temperature)
    assert torch.equal(found, expected)
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad((expected * microbatch.advantages.unsqueeze(1)).sum(), parameters)
    got = torch.autograd.grad((found * microbatch.advantages.unsqueeze(1)).sum(), parameters)
    assert all(torch.equal(left, right) for left, right in zip(got, wanted, strict=True))


def test_its_peak_is_that_of_the_trainer(tmp_path: Path) -> None:
    """Live storages over forward, loss and backward of one microbatch, but for the ids that trl copies."""
    trainer = trainer_of(tmp_path, policy(True, dropout=0.0))
    microbatch = microbatch_for(trainer.model, rows=4, tokens=32)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trl_inputs(microbatch)

    def by_trainer() -> torch.Tensor:
        return trainer.compute_loss(trainer.model, inputs)

    def by_head() -> torch.Tensor:
        logps = policy_logps(trainer.model, microbatch, "trl")
        return (logps * microbatch.completion_mask * microbatch.advantages.unsqueeze(1)).sum()

    by_trainer().backward()
    peaks = [peak_above(trainer.model, loss_of, inputs) for loss_of in (by_trainer, by_head, by_trainer)]
    assert peaks[0] == peaks[2]
    # trl keeps input ids and a few rows of the completion's width of its own beside
    assert 0 <= peaks[0] - peaks[1] <= 4 * 32 * 8 * 8


def peak_above(model: Any, loss_of: Any, inputs: dict[str, Any]) -> int:
    gc.collect()
    with quiet(), StorageMeter() as meter:
        meter.track([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)])
        meter.track(value for value in inputs.values())
        before = meter.live_bytes
        loss_of().backward()
        return meter.peak_bytes - before


def test_padding_columns_are_zero(tmp_path: Path) -> None:
    model = policy(True, dropout=0.0)
    microbatch = microbatch_for(model)
    logps = policy_logps(model, microbatch, "trl")
    assert torch.equal(logps == 0, microbatch.completion_mask == 0)
    naive = policy_logps(model, microbatch, "naive")
    assert torch.allclose(logps, naive * microbatch.completion_mask, atol=1e-5)
    assert not torch.allclose(logps, policy_logps(model, replace(microbatch, padded=False), "trl"))


def test_it_is_refused_without_trls_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("trl.kernels.ChunkedLogProbFunction")
    model = policy(True)
    with pytest.raises(UnsupportedModelError, match=r"loss\.head: 'trl' needs the tiled head of trl 1\.16"):
        policy_logps(model, microbatch_for(model), "trl")
