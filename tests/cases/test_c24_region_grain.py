"""C-24: the grain of regions is explicit, and a finer one keeps more when everything is replayed."""

from __future__ import annotations

import pytest

from hilore.planner.capture import Capture, capture
from hilore.runtime.errors import HiloreError
from tests import models

HIDDEN_BYTES = 2 * 16 * models.HIDDEN * 4


def _captured(grain: str) -> Capture:
    model = models.qwen2_tiny()
    batch = models.microbatch_for(model)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    return capture(model, inputs, region_grain=grain)


def test_a_finer_grain_keeps_more_boundaries() -> None:
    layer, block = _captured("layer"), _captured("block")
    assert (layer.region_grain, block.region_grain) == ("layer", "block")
    assert [(r.name, r.boundary_bytes) for r in layer.regions] == [
        ("model.layers.0", HIDDEN_BYTES),
        ("model.layers.1", HIDDEN_BYTES),
    ]
    assert [(r.name, r.class_index, r.boundary_bytes) for r in block.regions] == [
        ("model.layers.0.self_attn", 0, HIDDEN_BYTES),
        ("model.layers.0.mlp", 1, HIDDEN_BYTES),
        ("model.layers.1.self_attn", 0, HIDDEN_BYTES),
        ("model.layers.1.mlp", 1, HIDDEN_BYTES),
    ]
    assert block.all_r_bytes > layer.all_r_bytes
    # Per layer: the second norm's input and its result, the first norm's result, and what the two norms save.
    norms = sum(s.nbytes for s in block.saved if s.region == "") - sum(s.nbytes for s in layer.saved if s.region == "")
    assert norms > 0
    assert block.all_r_bytes - layer.all_r_bytes <= norms + 2 * 2 * HIDDEN_BYTES


def test_units_of_a_block_are_named_from_the_block() -> None:
    attention, mlp = _captured("block").classes
    assert [unit.name for unit in attention.units] == ["q_proj", "k_proj", "v_proj", ":attention", "o_proj"]
    assert [unit.name for unit in mlp.units] == ["gate_proj", "up_proj", "down_proj"]
    assert attention.units[-1].feeds == mlp.units[-1].feeds == ()


def test_an_unknown_grain_is_named() -> None:
    with pytest.raises(HiloreError, match="region_grain 'module': use one of layer, block"):
        _captured("module")
