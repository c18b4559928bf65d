"""Capture: regions, classes, units and their liveness fields, classes, changes in place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hilore.planner import record
from hilore.planner.capture import Capture, UnitGraph, capture
from hilore.runtime.errors import UnsupportedModelError
from tests import models
from tests.capture_helpers import Blocks, Pair, captured, of_blocks

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ATTENTION = "self_attn:attention"
CHANGED = "its output is changed in place"


def units_of(found: Capture, region: int = 0) -> dict[str, UnitGraph]:
    return {unit.name: unit for unit in found.classes[found.regions[region].class_index].units}


def fields(unit: UnitGraph) -> tuple[bool, bool, bool]:
    return unit.feeds_saved, unit.saves_inputs, unit.saves_own


# Units and their fields


def test_lora_qwen2() -> None:
    found = captured(models.qwen2_tiny_lora())
    assert [(r.name, r.module_path, r.class_index) for r in found.regions] == [
        ("model.layers.0", "base_model.model.model.layers.0", 0),
        ("model.layers.1", "base_model.model.model.layers.1", 1),
    ], "the first region's input needs no grad, so it is a class of its own"
    assert [r.input_requires_grad for r in found.regions] == [False, True]
    units = units_of(found, 1)
    assert tuple(units) == (*QKV, ATTENTION, "self_attn.o_proj", *MLP)
    assert [u.kind for u in units.values()] == ["q", "k", "v", "attention", "o", "gate", "up", "down"]
    assert units["mlp.down_proj"].module_path == "mlp.down_proj", "the adapter layer, not the frozen linear inside"
    assert units[ATTENTION].module_path == "self_attn"
    for name in QKV:
        assert fields(units[name]) == (False, True, False), "its adapter saves its input"
        assert units[name].feeds == (ATTENTION,), "through rotary embedding and the expansion of k and v"
    assert fields(units[ATTENTION]) == (True, True, True), (
        "o_proj's adapter drops out of its input, the attention output"
    )
    assert fields(units["self_attn.o_proj"]) == (True, True, False)
    assert fields(units["mlp.gate_proj"]) == fields(units["mlp.up_proj"]) == (True, True, False)
    assert fields(units["mlp.down_proj"]) == (False, True, False), "dead in a replay that keeps nothing"
    assert units["mlp.down_proj"].feeds == ()
    assert [n for n in found.notes if "always builds an attention mask" in n]
    assert all(unit.keepable and unit.reason == "" for unit in units.values())


def test_full_qwen2() -> None:
    found = captured(models.qwen2_tiny())
    assert [r.class_index for r in found.regions] == [0, 0]
    assert found.classes[0].name == "Qwen2DecoderLayer#0"
    units = units_of(found)
    for name in QKV:
        assert fields(units[name]) == (False, True, False), "saved by attention as its input, not by glue"
    assert fields(units[ATTENTION]) == (False, True, True)
    assert units[ATTENTION].feeds == ("self_attn.o_proj",)
    assert units["self_attn.o_proj"].feeds == ("mlp.gate_proj", "mlp.up_proj")
    assert fields(units["mlp.down_proj"]) == (False, True, False)
    assert units["mlp.down_proj"].feeds == ()


def test_sizes_of_units() -> None:
    units = units_of(captured(models.qwen2_tiny()))
    assert units["mlp.gate_proj"].flops == 2 * (2 * 16) * 32 * 64
    assert units["self_attn.k_proj"].flops == 2 * (2 * 16) * 32 * 16
    assert units[ATTENTION].flops == 2 * 2 * (2 * 4 * 16 * 16 * 8)
    assert units["mlp.gate_proj"].output_shape == (2, 16, 64)
    assert units[ATTENTION].output_shape == (2, 16, 4, 8), "as the attention function returns it"
    assert {unit.output_dtype for unit in units.values()} == {"float32"}


def test_fused_projections_are_followed_through_their_views() -> None:
    units = units_of(captured(models.lora(models.phi3_tiny(), targets=["qkv_proj", "gate_up_proj"])), 1)
    assert [u.kind for u in units.values()] == ["qkv", "attention", "o", "gate_up", "down"]
    assert fields(units["self_attn.qkv_proj"]) == (False, True, False)
    assert fields(units["mlp.gate_up_proj"]) == (True, True, False), "silu and the product save its chunks"


def test_norm_after_down_proj_keeps_it_alive() -> None:
    units = units_of(captured(models.lora(models.gemma2_tiny("sdpa"))), 1)
    assert fields(units["mlp.down_proj"]) == (True, True, False)


def test_eager_attention_is_glue_and_named_with_the_setting() -> None:
    found = captured(models.gemma2_tiny("eager"))
    units = units_of(found)
    assert ATTENTION not in units
    assert units["self_attn.q_proj"].feeds == ("self_attn.o_proj",)
    assert all(units[name].feeds_saved for name in QKV)
    assert [n for n in found.notes if "'eager'" in n and "attn_implementation='sdpa'" in n]


def test_autocast_casts_belong_to_what_they_were_cast_from() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        full = captured(models.qwen2_tiny())
        adapted = captured(models.lora(models.qwen2_tiny(), targets=["q_proj", "v_proj"]))
    for name in (*QKV, *MLP, "self_attn.o_proj"):
        assert units_of(full)[name].saves_inputs
        frozen = name not in ("self_attn.q_proj", "self_attn.v_proj")
        assert units_of(adapted, 1)[name].saves_inputs != frozen, "a cast weight is no input"
        assert not units_of(full)[name].saves_own
        assert units_of(full)[name].output_dtype == "bfloat16"


# Classes


def test_regions_that_did_not_run_are_as_if_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.qwen2_tiny(num_hidden_layers=4)
    by_class = captured(model)
    assert len(by_class.classes) == 1
    real = record.structure_key
    monkeypatch.setattr(record, "structure_key", lambda span, modules: (span.region.name, real(span, modules)))
    each = captured(model)
    assert len(each.classes) == 4
    assert all(graph.units == by_class.classes[0].units for graph in each.classes)
    assert each.saved == by_class.saved
    assert each.all_r_bytes == by_class.all_r_bytes
    assert {s.region for s in each.saved} == {"", *(f"model.layers.{i}" for i in range(4))}


def test_forward_hooks_that_ask_for_input_gradients_are_seen() -> None:
    model = models.qwen2_tiny_lora()
    model.enable_input_require_grads()  # type: ignore[operator]
    found = captured(model)
    assert [(r.class_index, r.input_requires_grad) for r in found.regions] == [(0, True), (0, True)]


def test_layers_that_differ_are_classes_apart() -> None:
    model = models.lora(models.qwen2_tiny(), targets=r".*layers\.0\..*(q_proj|v_proj)")
    model.enable_input_require_grads()  # type: ignore[operator]
    assert [r.class_index for r in captured(model).regions] == [0, 1]


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_without_data_the_answer_is_the_same(kind: str) -> None:
    def build() -> Capture:
        model = models.qwen2_tiny()
        ids, mask = torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)
        return capture(model, {"input_ids": ids, "attention_mask": mask})

    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        without_data = build()
    with_data = build()
    assert without_data.classes == with_data.classes
    assert without_data.regions == with_data.regions
    assert sum(s.nbytes for s in without_data.saved) == sum(s.nbytes for s in with_data.saved)


# Changes in place


class ReluInPlace(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu_(self.up(x)))


class AddThroughView(Pair):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden.view(-1).add_(1)
        return self.down(hidden)


class ChangedLater(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


@pytest.mark.parametrize("block", [ReluInPlace, AddThroughView])
def test_output_changed_in_place_is_not_keepable(block: type[nn.Module]) -> None:
    up, down = of_blocks(block).classes[0].units
    assert (up.keepable, up.reason) == (False, CHANGED)
    assert (down.keepable, down.reason) == (True, "")
    assert up.feeds == ("down",)


def test_what_is_added_in_place_through_a_view_is_part_of_the_value() -> None:
    class AddsOther(Pair):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            hidden.view(-1).add_(self.other(x).view(-1))
            return self.down(hidden)

    units = units_of(of_blocks(AddsOther))
    assert {name: unit.feeds for name, unit in units.items()} == {"up": ("down",), "other": ("down",), "down": ()}
    assert [unit.keepable for unit in units.values()] == [False, True, True]


def test_output_changed_in_place_after_its_region_is_not_keepable_in_any_region_of_the_class() -> None:
    class Outer(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).add_(1)

    found = capture(Outer(ChangedLater), {"x": torch.randn(2, 8)}, region_names=("blocks.0", "blocks.1"))
    up, down = found.classes[0].units
    assert len(found.classes) == 1
    assert (up.keepable, down.keepable, down.reason) == (True, False, CHANGED)


def test_region_that_changes_its_input_is_refused() -> None:
    class Adds(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(self.up(x))

    with pytest.raises(UnsupportedModelError, match=r"region 'blocks.0' changes its input in place \(add_\)"):
        of_blocks(Adds)
