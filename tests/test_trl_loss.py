"""The loss read from a trainer is the loss it computes; what a plan cannot follow is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hilore.runtime.errors import ExposureError
from hilore.runtime.exposure import token_coefficients
from hilore.runtime.integrations.trl import attach_trainer
from hilore.runtime.integrations.trl_loss import exposure_inputs, loss_of
from tests.trl_fixtures import plan_for, policy, refused_untouched, trainer_of

LOSSES: list[dict[str, Any]] = [
    {"loss_type": kind, "importance_sampling_level": level, "beta": beta}
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
    for level in ("token", "sequence")
    for beta in (0.0, 0.1)
] + [
    {"loss_type": "vespo"},
    {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.5},
    {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    {"loss_type": "grpo", "epsilon": 0.05, "epsilon_high": 0.3, "delta": 1.2},
    {"loss_type": "cispo", "epsilon_high": 1.1},
    {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": True},
    {"loss_type": "dapo", "steps_per_generation": 4},
]


class Scored:
    """Stands in for the model's scoring: log-probs that are leaves, so that autograd gives dLoss/dlogp itself."""

    def __init__(self, logps: Tensor) -> None:
        self.logps = logps.requires_grad_()

    def __call__(self, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor, None]:
        return self.logps, torch.zeros_like(self.logps), None


def batch_of(reference: bool, seed: int = 0) -> tuple[dict[str, Any], Tensor]:
    """A GRPOTrainer batch of three rows, five tokens, and the log-probs of the policy; ratios on both sides of 1."""
    generator = torch.Generator().manual_seed(seed)
    logps = -torch.rand(3, 5, generator=generator, dtype=torch.float64) - 0.5
    inputs = {
        "prompt_ids": torch.ones(3, 2, dtype=torch.int64),
        "prompt_mask": torch.ones(3, 2, dtype=torch.int64),
        "completion_ids": torch.ones(3, 5, dtype=torch.int64),
        "completion_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]),
        "advantages": torch.tensor([1.3, -0.7, -0.2], dtype=torch.float64),
        "old_per_token_logps": logps + 0.4 * torch.randn(3, 5, generator=generator, dtype=torch.float64),
        "num_items_in_batch": torch.tensor(23),
    }
    if reference:
        inputs["ref_per_token_logps"] = logps + 0.3 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    return inputs, logps


def gradient_of(trainer: Any, inputs: dict[str, Any], logps: Tensor) -> Tensor:
    trainer._get_per_token_logps_and_entropies = Scored(logps)
    trainer.current_gradient_accumulation_steps = 2
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, logps)
    return gradient


def omega_of(trainer: Any, inputs: dict[str, Any], logps: Tensor) -> Tensor:
    advantages, mask, old_logps, ref_logps = exposure_inputs(inputs)
    return token_coefficients(loss_of(trainer, inputs), advantages, mask, logps, old_logps, ref_logps)


@pytest.mark.parametrize("options", LOSSES, ids=lambda options: " ".join(str(value) for value in options.values()))
def test_the_loss_read_from_the_trainer_is_the_loss_it_computes(options: dict[str, Any], tmp_path: Path) -> None:
    """omega from ``loss_of`` against autograd through TRL's own loss."""
    trainer = trainer_of(tmp_path, policy(True), **options)
    inputs, logps = batch_of(options.get("beta", 0.0) != 0)
    gradient = gradient_of(trainer, inputs, logps)
    omega = omega_of(trainer, inputs, logps)
    torch.testing.assert_close(omega, gradient, rtol=1e-6, atol=1e-12)  # sapo's temperatures are float32 in trl
    assert float(gradient.abs().max()) > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("width", [1, 5])
def test_rollout_ratio_and_tool_mask_reach_the_exposure(level: str, width: int, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy(True), importance_sampling_level=level)
    trainer.use_vllm = True
    inputs, logps = batch_of(False)
    inputs["importance_sampling_ratio"] = torch.tensor([[0.5], [1.7], [0.0]], dtype=torch.float64).expand(3, width)
    inputs["tool_mask"] = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    gradient = gradient_of(trainer, inputs, logps)
    omega = omega_of(trainer, inputs, logps)
    torch.testing.assert_close(omega, gradient, rtol=1e-9, atol=1e-12)
    assert gradient[0, 1] == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"entropy_coef": 0.01}, "entropy_coef=0.01"),
    ({"use_adaptive_entropy": True}, "use_adaptive_entropy=True"),
    ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2"),
    ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold=0.5"),
    ({"use_liger_kernel": True}, "use_liger_kernel=True"),
    ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
    ({"gradient_checkpointing_kwargs": {"every_n_layers": 2}}, "every_n_layers"),
    ({"gradient_checkpointing_kwargs": {"offload": True}}, "offload"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_setting_that_a_plan_cannot_follow_is_refused_by_name(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    later = {key: value for key, value in options.items() if key == "use_liger_kernel"}
    trainer = trainer_of(tmp_path, policy(True), **{k: v for k, v in options.items() if k not in later})
    for key, value in later.items():
        setattr(trainer.args, key, value)
    refused_untouched(trainer, named)


@pytest.mark.parametrize(
    ("attribute", "value", "named"),
    [
        ("aux_loss_enabled", True, "router_aux_loss_coef"),
        ("loss_type", "gppo", "loss_type='gppo'"),
    ],
)
def test_a_loss_that_has_no_closed_form_is_refused(attribute: str, value: Any, named: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy(True))
    setattr(trainer, attribute, value)
    refused_untouched(trainer, named)


def test_vespo_with_rollout_ratios_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy(True), loss_type="vespo")
    trainer.use_vllm = True
    refused_untouched(trainer, "vllm_importance_sampling_correction")


def test_compilation_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy(True))
    trainer.args.torch_compile = True
    refused_untouched(trainer, "torch_compile=True")


def test_a_nan_advantage_stops_before_the_forward(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, policy(True))
    runtime = attach_trainer(trainer, [plan_for(trainer.model)])
    inputs, _ = batch_of(False)
    inputs["advantages"][1] = math.nan
    trainer.model.train()
    with pytest.raises(ExposureError):
        trainer.compute_loss(trainer.model, inputs)
    assert runtime.stats.frames == 0
