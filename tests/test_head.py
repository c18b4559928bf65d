"""Heads and losses: naive as TRL computes it, chunked equal to it, no full logits, losses equal to TRL's own."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hilore.planner import chunked_head
from hilore.planner.head import grpo_loss, policy_logps, selected_logps
from hilore.planner.microbatch import Microbatch
from hilore.planner.spec_types import Loss
from hilore.runtime.errors import ExposureError, UnsupportedModelError
from hilore.runtime.meter import StorageMeter
from tests import models

LOSS = Loss(kind="grpo", clip_low=0.2, clip_high=0.2, beta=0.0, inner_epochs=1, head="naive")
BUILDERS: dict[str, Any] = {
    "qwen2": models.qwen2_tiny,
    "lora": models.qwen2_tiny_lora,
    "qwen3": models.qwen3_tiny,
    "llama": models.llama_tiny,
    "phi3": models.phi3_tiny,
    "gemma2": models.gemma2_tiny,
    "gemma2-sdpa": lambda: models.gemma2_tiny("sdpa"),
}


def logps_and_gradients(
    model: nn.Module, microbatch: Microbatch, head: str, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Dropout draws the same numbers each time."""
    model.zero_grad()
    with models.seeded(7):
        logps = policy_logps(model, microbatch, head, **options)
    grpo_loss(logps, microbatch, LOSS).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logps.detach(), gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selected_logps_is_bitwise_what_trl_computes(dtype: torch.dtype) -> None:
    from trl.trainer.utils import selective_log_softmax

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 17, generator=generator).to(dtype)
    index = torch.randint(0, 17, (3, 5), generator=generator)
    assert torch.equal(selected_logps(logits, index), selective_log_softmax(logits, index))


@pytest.mark.parametrize("family", BUILDERS)
def test_naive_is_log_softmax_of_the_next_token(family: str) -> None:
    model = BUILDERS[family]().eval()
    microbatch = models.microbatch_for(model, rows=3)
    logits = model(input_ids=microbatch.input_ids, attention_mask=microbatch.attention_mask).logits
    keep = microbatch.completion_mask.shape[1]
    expected = torch.stack(
        [
            torch.log_softmax(logits[:, column - 1].double(), -1).gather(-1, microbatch.input_ids[:, column, None])[
                :, 0
            ]
            for column in range(microbatch.tokens - keep, microbatch.tokens)
        ],
        dim=1,
    )
    logps = policy_logps(model, microbatch)
    assert logps.dtype == torch.float32
    assert logps.shape == (3, keep)
    assert torch.allclose(logps.double(), expected, atol=2e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", BUILDERS)
def test_chunked_equals_naive_with_every_gradient(family: str, temperature: float) -> None:
    model = BUILDERS[family]()
    microbatch = models.microbatch_for(model, rows=3)
    naive, expected = logps_and_gradients(model, microbatch, "naive", temperature=temperature)
    chunked, found = logps_and_gradients(model, microbatch, "chunked", temperature=temperature, chunk_tokens=5)
    assert torch.allclose(chunked, naive, atol=5e-6)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert torch.allclose(found[name], gradient, atol=1e-5 * scale + 1e-9), name


def test_chunked_with_an_output_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((7, 4), (11, 4), (11,))
    )
    targets = torch.randint(0, 11, (7,), generator=generator)
    scale = torch.arange(1.0, 8.0)
    expected = torch.log_softmax(hidden @ weight.t() + bias, -1).gather(-1, targets[:, None])[:, 0]
    reference = torch.autograd.grad((expected * scale).sum(), (hidden, weight, bias))
    for trained in ("all", "hidden", "bias"):
        for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
            tensor.requires_grad_(trained in ("all", name))
        logps = chunked_head.chunked_logps(hidden, weight, bias, targets, chunk_tokens=3)
        assert torch.allclose(logps.double(), expected, atol=1e-6)
        inputs = [tensor for tensor in (hidden, weight, bias) if tensor.requires_grad]
        wanted = [g for g, tensor in zip(reference, (hidden, weight, bias), strict=True) if tensor.requires_grad]
        found = torch.autograd.grad((logps * scale).sum(), inputs)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, wanted, strict=True)), trained


def test_chunked_agrees_with_naive_in_bfloat16_and_under_autocast() -> None:
    plain = models.qwen2_tiny_lora(dropout=0.0, dtype=torch.bfloat16)
    mixed = models.qwen2_tiny_lora(dropout=0.0)
    for model, autocast in ((plain, False), (mixed, True)):
        microbatch = models.microbatch_for(model)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            naive = policy_logps(model, microbatch)
            chunked = policy_logps(model, microbatch, "chunked")
        assert naive.dtype == chunked.dtype == torch.float32
        assert torch.allclose(naive, chunked, atol=0.03)
        chunked.sum().backward()


def test_chunked_under_no_grad_keeps_nothing_and_gives_the_same() -> None:
    model = models.qwen2_tiny()
    microbatch = models.microbatch_for(model)
    with torch.no_grad():
        without = policy_logps(model, microbatch, "chunked")
    assert not without.requires_grad
    assert torch.equal(without, policy_logps(model, microbatch, "chunked").detach())


@pytest.mark.parametrize("trains_head", [False, True])
def test_chunked_never_holds_more_logits_than_a_chunk(trains_head: bool) -> None:
    tokens, width, vocabulary, chunk = 512, 8, 2000, 16
    weight = torch.zeros(vocabulary, width, requires_grad=trains_head)
    hidden = torch.zeros(tokens, width, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    with StorageMeter() as meter:
        chunked_head.chunked_logps(hidden, weight, None, targets, chunk_tokens=chunk).sum().backward()
    logits_bytes, chunk_bytes = 4 * tokens * vocabulary, 4 * chunk * vocabulary
    weight_bytes = 4 * vocabulary * width
    assert meter.peak_bytes < 4 * chunk_bytes + 3 * weight_bytes + 4 * 4 * tokens * width
    assert meter.peak_bytes < logits_bytes // 4


@pytest.mark.parametrize("trains_head", [False, True])
def test_projections_that_a_frozen_head_saves(trains_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward runs the output projection again only where its weight is trained."""
    calls: list[str] = []
    real = chunked_head._forward_chunk
    monkeypatch.setattr(chunked_head, "_forward_chunk", lambda *args: (calls.append("run"), real(*args))[1])
    weight = torch.ones(11, 4, requires_grad=trains_head)
    hidden = torch.ones(6, 4, requires_grad=True)
    chunked_head.chunked_logps(hidden, weight, None, torch.zeros(6, dtype=torch.int64), chunk_tokens=3).sum().backward()
    assert len(calls) == (4 if trains_head else 2)


def test_a_mask_of_ones_is_left_out_and_changes_nothing() -> None:
    model = models.qwen2_tiny()
    microbatch = models.microbatch_for(model, left_padding=False)
    assert torch.equal(policy_logps(model, microbatch), policy_logps(model, replace(microbatch, padded=False)))


def test_left_padding_does_not_change_a_row() -> None:
    model = models.qwen2_tiny()
    padded = models.microbatch_for(model, rows=3)
    row = 2
    real = padded.attention_mask[row].bool()
    alone = Microbatch(
        padded.input_ids[row : row + 1, real],
        padded.attention_mask[row : row + 1, real],
        padded.completion_mask[row : row + 1, padded.completion_mask[row].bool()],
        padded.advantages[row : row + 1],
    )
    together = policy_logps(model, padded)[row][padded.completion_mask[row].bool()]
    assert torch.allclose(together, policy_logps(model, alone)[0], atol=1e-5)


def test_chunked_refuses_what_it_would_leave_out() -> None:
    scaled = models.causal_lm("cohere", logit_scale=0.5)
    with pytest.raises(UnsupportedModelError, match=r"does not know the logit scale 'logit_scale'.*head: naive"):
        policy_logps(scaled, models.microbatch_for(scaled), "chunked")
    policy_logps(scaled, models.microbatch_for(scaled), "naive")
    adapted = models.lora(models.qwen2_tiny(), targets=["lm_head"])
    with pytest.raises(UnsupportedModelError, match=r"needs a plain nn\.Linear as output layer.*head: naive"):
        policy_logps(adapted, models.microbatch_for(adapted), "chunked")
    with pytest.raises(UnsupportedModelError, match="'tiled' is not one of naive, chunked"):
        policy_logps(scaled, models.microbatch_for(scaled), "tiled")


class PlainLogits(nn.Module):
    """Not of transformers: no logits_to_keep, returns a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 32)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.table(input_ids)
        return logits


def test_a_module_outside_transformers_is_scored() -> None:
    model = PlainLogits()
    microbatch = models.microbatch_for(model)
    ids = microbatch.input_ids.clamp(max=31)
    logps = policy_logps(model, replace(microbatch, input_ids=ids))
    expected = torch.log_softmax(model.table(ids[:, 7:-1]), -1).gather(-1, ids[:, 8:, None])[..., 0]
    assert torch.allclose(logps, expected, atol=1e-6)


def trl_loss(kind: str, logps: Tensor, microbatch: Microbatch, loss: Loss, accumulation: int, items: float) -> Tensor:
    """TRL's own ``_compute_loss`` over given log-probabilities."""
    from trl import GRPOTrainer

    keep = microbatch.completion_mask.shape[1]
    same = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, torch.zeros_like(logps), None),
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=None,
            steps_per_generation=accumulation,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        accelerator=same,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        importance_sampling_level="sequence" if kind == "gspo" else "token",
        loss_type="grpo" if kind == "gspo" else kind,
        beta=loss.beta,
        epsilon_low=loss.clip_low,
        epsilon_high=loss.clip_high,
        max_completion_length=keep,
        current_gradient_accumulation_steps=accumulation,
        _entropy_bonus_enabled=False,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    inputs = {
        "prompt_ids": microbatch.input_ids[:, :-keep],
        "prompt_mask": microbatch.attention_mask[:, :-keep],
        "completion_ids": microbatch.input_ids[:, -keep:],
        "completion_mask": microbatch.completion_mask,
        "advantages": microbatch.advantages,
        "old_per_token_logps": microbatch.old_logps,
        "ref_per_token_logps": microbatch.ref_logps,
        "num_items_in_batch": torch.tensor(items),
    }
    result: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo"])
def test_loss_and_its_gradient_are_those_of_trl(kind: str, off_policy: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    microbatch = models.microbatch_for(nn.Identity(), rows=4)
    shape = microbatch.completion_mask.shape
    values = -3 * torch.rand(shape, generator=generator)
    microbatch = replace(
        microbatch,
        advantages=torch.tensor([1.2, -0.7, 0.4, 0.0]),
        old_logps=values + 0.3 * torch.randn(shape, generator=generator) if off_policy else None,
        ref_logps=values + 0.3 * torch.randn(shape, generator=generator),
    )
    loss = replace(LOSS, kind=kind, beta=0.05, clip_high=1.3 if kind == "cispo" else 0.28)
    items = 200.0
    ours, theirs = (values.clone().requires_grad_() for _ in range(2))
    found = grpo_loss(ours, microbatch, loss, 4, num_items=items)
    expected = trl_loss(kind, theirs, microbatch, loss, 4, items)
    assert torch.allclose(found, expected, rtol=1e-6)
    found.backward()
    expected.backward()
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)
    assert torch.count_nonzero(ours.grad) > 0


def test_a_fully_masked_completion_gives_zero_and_not_nan() -> None:
    microbatch = models.microbatch_for(nn.Identity())
    microbatch = replace(microbatch, completion_mask=torch.zeros_like(microbatch.completion_mask))
    for kind in ("grpo", "bnpo", "dapo", "luspo"):
        logps = torch.full(microbatch.completion_mask.shape, -2.0, requires_grad=True)
        loss = grpo_loss(logps, microbatch, replace(LOSS, kind=kind))
        loss.backward()
        assert loss.item() == 0
        assert torch.count_nonzero(logps.grad) == 0


def test_beta_without_reference_says_what_to_do() -> None:
    microbatch = models.microbatch_for(nn.Identity())
    logps = torch.zeros(microbatch.completion_mask.shape)
    with pytest.raises(ExposureError, match=r"has no ref_logps; fill them with .*with_reference, or set loss\.beta: 0"):
        grpo_loss(logps, microbatch, replace(LOSS, beta=0.1))
