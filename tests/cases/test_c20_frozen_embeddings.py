"""C-20: LoRA on frozen embeddings under R: every trainable gradient exists and is that of eager."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hilore.runtime
from tests import models
from tests.plans import assert_exact, gradients, plan_for, units_of


class Frozen(nn.Module):
    """Frozen embedding, then regions with trainable linears: the first region's input requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.embed.requires_grad_(False)
        self.first, self.second = models.mlp(1), models.mlp(2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(self.embed(ids)))
        return out


@pytest.mark.parametrize("mode", ["R", "H"])
def test_embedding_then_linear(mode: str) -> None:
    with models.seeded(0):
        model = Frozen().train()
    ids = torch.arange(12).reshape(2, 6)
    units = units_of(model, ids, regions=("first", "second"))
    assert [region.input_requires_grad for region in units] == [False, True]
    expected = gradients(model, ids)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(expected.gradients) == trainable
    assert_exact(model, plan_for(model, mode), ids, expected)


@pytest.mark.parametrize("mode", ["R", "H"])
@pytest.mark.parametrize("input_grads", [False, True])
def test_lora_has_every_gradient(mode: str, input_grads: bool) -> None:
    model = models.qwen2_tiny_lora()
    if input_grads:
        model.enable_input_require_grads()
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    assert set(expected.gradients) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert_exact(model, plan_for(model, mode), batch, expected)


def test_no_reentrant_checkpointing_in_the_runtime() -> None:
    folder = Path(hilore.runtime.__file__).parent
    uses = [
        (path.name, node)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and "checkpoint" in {ast.unparse(node.func), *map(ast.unparse, node.args)}
    ]
    assert {name for name, _ in uses} == {"huggingface.py"}
    for _, call in uses:
        assert [ast.unparse(k) for k in call.keywords if k.arg == "use_reentrant"] == ["use_reentrant=False"]
