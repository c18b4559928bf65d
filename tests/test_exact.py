"""Gradients under exact plans are bitwise those of plain eager, whatever is kept, dead or held (invariant 7)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests import models
from tests.plans import assert_exact, gradients, keepable, plan_for, random_modes, units_of

MIXTURES = range(6)
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "qwen2": models.qwen2_tiny,
    "qwen3": models.qwen3_tiny,
    "llama": models.llama_tiny,
    "phi3": models.phi3_tiny,
    "gemma2": models.gemma2_tiny,
    "gemma2-sdpa": lambda: models.gemma2_tiny("sdpa"),
    "qwen2-bf16": lambda: models.qwen2_tiny(dtype=torch.bfloat16),
}


def check_exact(model: nn.Module, autocast: torch.dtype | None = None) -> None:
    """All-R, all-H, all held, attention alone, everything but attention, and random mixtures."""
    batch = models.microbatch_for(model)
    expected = gradients(model, batch, autocast=autocast)
    units = units_of(model, batch, autocast=autocast)
    every = keepable(units)
    plans = [
        plan_for(model, "R"),
        plan_for(model, every),
        plan_for(model, hold=True),
        plan_for(model, lambda name: "H" if name.endswith(":attention") else "R"),
        plan_for(model, lambda name: "R" if name.endswith(":attention") else every[name]),
    ]
    for seed in MIXTURES:
        modes, held = random_modes(units, seed)
        plans.append(plan_for(model, modes, hold=held))
    for plan in plans:
        assert_exact(model, plan, batch, expected, autocast=autocast)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["", "autocast"])
def test_full_fine_tuning(family: str, autocast: torch.dtype | None) -> None:
    check_exact(FAMILIES[family](), autocast)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["", "autocast"])
def test_lora_with_dropout(family: str, autocast: torch.dtype | None) -> None:
    targets = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"] if family == "phi3" else None
    check_exact(models.lora(FAMILIES[family](), dropout=0.1, targets=targets), autocast)
