"""C-12: bytes are counted by storage, never by tensor, and parameters are not what autograd costs."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hilore.planner.capture import capture
from hilore.planner.storages import count_saved

MIB = 2**20


def _one_layer_of_qwen2_5_3b() -> nn.Module:
    from tests.models import causal_lm

    return causal_lm(
        "qwen2",
        dtype=torch.bfloat16,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )


def test_one_decoder_layer_of_qwen2_5_3b() -> None:
    with FakeTensorMode():
        model = _one_layer_of_qwen2_5_3b()
        mask = torch.ones(1, 1, 2048, 2048, dtype=torch.bool)
        hidden = torch.empty(1, 2048, 2048, dtype=torch.bfloat16, requires_grad=True)
        rotary = model.model.rotary_emb(hidden, torch.arange(2048)[None])  # type: ignore[union-attr, operator]
        with count_saved([*model.parameters(), *model.buffers()]) as count:
            layer = model.model.layers[0]  # type: ignore[union-attr, index]
            layer(hidden, position_embeddings=rotary, attention_mask=mask)  # type: ignore[operator]
    assert round(count.naive_bytes / MIB) == 489
    assert round(count.fixed_bytes / MIB) == 147
    assert round(count.unique_bytes / MIB) == 277


def test_the_captured_graph_counts_the_same_storages() -> None:
    with FakeTensorMode():
        model = _one_layer_of_qwen2_5_3b()
        ids = torch.ones(1, 2048, dtype=torch.int64)
    found = capture(model, {"input_ids": ids})
    saved = [entry for entry in found.saved if entry.region == "model.layers.0"]
    assert round(sum(entry.nbytes for entry in saved) / MIB) == 277
    gate, up = (entry for entry in saved if entry.nbytes == 2048 * 11008 * 2 and entry.producer.startswith("linear"))
    assert (gate.saver, up.saver) == ("silu", "mul_11"), "each output once, though two nodes save it"


def test_a_view_costs_its_whole_storage() -> None:
    big = torch.randn(1024, 1024, requires_grad=True) * 2
    with count_saved([]) as count:
        big[:1].square().sum()
    assert count.naive_bytes == 1024 * 4
    assert count.unique_bytes == 1024 * 1024 * 4


def test_views_and_aliases_count_once_and_parameters_never() -> None:
    linear = nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True) * 2
    with count_saved(linear.parameters()) as count:
        linear(x) * x.view(2, 2, 8).flatten(0, 1) * linear.weight.t()[:4]
    assert count.fixed_bytes == 8 * 8 * 4 + 4 * 8 * 4, "a transposed view of a weight is still the weight"
    assert (count.storages, count.unique_bytes) == (3, 3 * 4 * 8 * 4), "x, the linear's output, the first product"
