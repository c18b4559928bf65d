"""A linear with its adapter as one unit: what a replay runs of it, what it keeps, and that it stays exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hilore.runtime.adapter import front_modules, is_adapted_linear, unit_modules
from hilore.runtime.frame import Frame
from hilore.runtime.plan import Plan
from hilore.runtime.runtime import Runtime
from tests import models
from tests.plans import assert_exact, attach_plan, gradients, keepable, loss_of, plan_for, random_modes, units_of

LINEARS = (*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj", "mlp.up_proj")
TOKENS, RANK = 32, 4


# --- what a replay runs ---------------------------------------------------------------------------------------------


class WeightUses(TorchDispatchMode):
    """Counts matrix products by the module that owns the weight: "lora_A", "lora_B" or "base_layer"."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.kinds = {
            p.untyped_storage()._cdata: kind
            for name, p in model.named_parameters()
            for kind in ("lora_A", "lora_B", "base_layer")
            if kind in name and p.dim() == 2
        }
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            for item in args:
                storage = item.untyped_storage()._cdata if isinstance(item, torch.Tensor) else -1
                if storage in self.kinds:
                    self.count[self.kinds[storage]] += 1
        return func(*args, **(kwargs or {}))


def frames_of(runtime: Runtime) -> list[Frame]:
    return sorted(runtime.stats._frames, key=lambda frame: frame.region_name)


def used_in_replay(model: nn.Module, plan: Plan) -> Counter[str]:
    """Weights used by one replay of the last region, its second."""
    runtime = attach_plan(model, plan)
    loss_of(model, models.microbatch_for(model)).backward()
    loss = loss_of(model, models.microbatch_for(model))
    frame = frames_of(runtime)[-1]
    with WeightUses(model) as uses:
        frame.replay(late=True)
    runtime.detach()
    del loss
    return uses.count


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_replay_of_kept_linears_runs_nothing_of_them_nor_of_their_adapters(dropout: float) -> None:
    model = models.qwen2_tiny_lora(dropout=dropout)
    kept = dict.fromkeys((*LINEARS, "self_attn:attention"), "H")
    down_alone = Counter({"lora_A": 1})
    assert used_in_replay(model, plan_for(model, kept)) == down_alone, "of the dead down_proj its adapter's front"
    assert used_in_replay(model, plan_for(model, kept | {"mlp.down_proj": "H"})) == Counter()
    up_runs = Counter({"lora_A": 2, "lora_B": 1, "base_layer": 1})
    assert used_in_replay(model, plan_for(model, kept | {"mlp.up_proj": "R"})) == up_runs


def test_dropout_is_drawn_again_and_lora_a_is_not_run_again() -> None:
    model = models.qwen2_tiny_lora(dropout=0.1)
    runtime = attach_plan(model, plan_for(model, {"mlp.gate_proj": "H"}))
    loss = loss_of(model, models.microbatch_for(model))
    record = frames_of(runtime)[-1].records["model.layers.1.mlp.gate_proj"]
    roles = [(role.kind, role.source, role.place) for role in record.roles]
    mask, dropped, rest = ("front", 0, 0), ("front", 0, -1), ("rest", -1, -1)
    assert [role for role in roles if role[0] != "parameter"] == [mask, dropped, rest]
    assert [type(step.module) for step in record.front.steps] == [nn.Dropout, nn.Linear]
    runtime.detach()
    del loss


# --- what it keeps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["", "bf16"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["", "autocast"])
def test_a_kept_unit_holds_its_output_and_what_is_as_small_as_the_rank(
    dropout: float, dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    """Of a bf16 model's float32 adapters too: the cast of the input, or of what dropout leaves of it, is made again."""
    model = models.qwen2_tiny_lora(dropout=dropout, dtype=dtype)
    runtime = attach_plan(model, plan_for(model, dict.fromkeys(LINEARS, "H")))
    loss = loss_of(model, models.microbatch_for(model), autocast=autocast)
    for record in frames_of(runtime)[-1].records.values():
        entries = [entry for entry in (reference() for reference in record.entries) if entry is not None]
        own = {p.untyped_storage()._cdata for p in record.unit.module.parameters()}
        held = {e.value.untyped_storage() for e in entries if e.value is not None and e.role.kind != "parameter"}
        rest = sum(storage.nbytes() for storage in held if storage._cdata not in own)
        dead = record.unit.name.endswith("down_proj")
        assert rest == (0 if dead else TOKENS * RANK * (2 if autocast else 4))
        assert record.kept is None if dead else record.kept is not None
        if record.kept is not None and record.kept.tensor is not None:
            assert record.kept.tensor.dtype == (autocast or dtype)
    runtime.detach()
    del loss, record, entries, held


# --- exact ----------------------------------------------------------------------------------------------------------


def two_adapters() -> nn.Module:
    """Both active at once, of different ranks, one of them with dropout."""
    from peft import LoraConfig

    model = models.qwen2_tiny_lora(dropout=0.0)
    config = LoraConfig(
        r=2, lora_alpha=8, lora_dropout=0.2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    with models.seeded(7):
        model.add_adapter("second", config)
        model.base_model.set_adapter(["default", "second"])
        for name, parameter in model.named_parameters():
            if "lora_B.second" in name:
                nn.init.normal_(parameter, 0.0, 0.02)
    return model.train()


def with_config(**changes: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": "all-linear"} | changes
    with models.seeded(3):
        model = get_peft_model(models.qwen2_tiny(), LoraConfig(**settings))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, 0.0, 0.02)
    return model.train()


def without_input_gradients_of_lora_a() -> nn.Module:
    model = models.qwen2_tiny_lora(dropout=0.1)
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return model


def disabled() -> nn.Module:
    """Adapters off in a training forward: what is left to train is a norm."""
    model = models.qwen2_tiny_lora()
    model.base_model.disable_adapter_layers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layernorm" in name)
    return model


def merged() -> nn.Module:
    model = disabled()
    model.base_model.enable_adapter_layers()
    model.base_model.merge_adapter()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layernorm" in name)
    return model


ADAPTERS: dict[str, Callable[[], nn.Module]] = {
    "bf16": lambda: models.qwen2_tiny_lora(dtype=torch.bfloat16, adapter_dtype=torch.bfloat16, dropout=0.0),
    "bf16, float32 adapters": lambda: models.qwen2_tiny_lora(dtype=torch.bfloat16),
    "adapters of another dtype than float32 models": lambda: models.qwen2_tiny_lora(adapter_dtype=torch.bfloat16),
    "lora_B zero": lambda: models.qwen2_tiny_lora(live=False),
    "two adapters": two_adapters,
    "frozen lora_A": without_input_gradients_of_lora_a,
    "bias": lambda: with_config(lora_bias=True, bias="lora_only"),
    "rank pattern": lambda: with_config(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 3}, use_rslora=True),
    "modules to save": lambda: with_config(target_modules=["q_proj", "up_proj"], modules_to_save=["down_proj"]),
    "dora": lambda: with_config(use_dora=True, lora_dropout=0.1),
    "disabled": disabled,
    "merged": merged,
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["", "autocast"])
def test_exact(adapter: str, autocast: torch.dtype | None) -> None:
    model = ADAPTERS[adapter]()
    batch = models.microbatch_for(model)
    expected = gradients(model, batch, autocast=autocast)
    assert expected.gradients
    units = units_of(model, batch, autocast=autocast)
    plans = [plan_for(model, "R"), plan_for(model, keepable(units)), plan_for(model, "R", split="mlp.gate_proj")]
    for seed in range(3):
        modes, held = random_modes(units, seed)
        plans.append(plan_for(model, modes, hold=held, split="mlp.gate_proj" if seed else None))
    for plan in plans:
        assert_exact(model, plan, batch, expected, autocast=autocast)


def test_plans_from_before_there_were_adapted_units_keep_the_frozen_linear() -> None:
    model = models.qwen2_tiny_lora()
    batch = models.microbatch_for(model)
    plan = plan_for(model, keepable(units_of(model, batch)))
    fingerprint = {name: value for name, value in plan.fingerprint.items() if name != "unit_grain"}
    before = replace(plan, fingerprint=fingerprint)
    runtime = attach_plan(model, before)
    kinds = {type(u.module) for region in runtime.regions for u in region.units.values() if u.kind == "module"}
    runtime.detach()
    assert kinds == {nn.Linear}
    assert_exact(model, before, batch, gradients(model, batch))


def test_adapters_off_for_reference_log_probs_leave_the_plan_alone() -> None:
    model = models.qwen2_tiny_lora()
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, "H"))
    with torch.no_grad(), model.disable_adapter():
        loss_of(model, batch)
    assert runtime.stats.frames == 0
    found = gradients(model, batch)
    runtime.detach()
    assert all(torch.equal(found.gradients[name], grad) for name, grad in expected.gradients.items())


def test_a_front_that_gets_something_else_is_run_where_the_plan_has_it_dead() -> None:
    """lora_A reads neither the layer's argument nor a cast of it, so that it cannot be run on its own."""
    model = models.qwen2_tiny_lora(dropout=0.0)
    batch = models.microbatch_for(model)
    layer = model.base_model.model.model.layers[1].mlp.down_proj

    def forward(x: torch.Tensor) -> torch.Tensor:
        return layer.base_layer(x) + layer.lora_B["default"](layer.lora_A["default"](x * 2))

    layer.forward = forward
    expected = gradients(model, batch)
    plan = plan_for(model, "R")
    assert plan.regions[1].units[-1].dead
    runtime = assert_exact(model, plan, batch, expected)
    assert "model.layers.1.mlp.down_proj" in runtime.stats.units
    assert runtime.stats.units["model.layers.1.mlp.down_proj"].dead == 0
    assert_exact(model, plan_for(model, "H"), batch, expected)
    del layer.forward


# --- which modules --------------------------------------------------------------------------------------------------


def test_which_layers_are_units_with_their_adapter() -> None:
    plain, dora = models.qwen2_tiny_lora(dropout=0.1), with_config(use_dora=True)
    name = "model.layers.0.mlp.up_proj"
    layer = unit_modules(plain, "adapted")[name]
    assert is_adapted_linear(layer)
    assert [type(module) for module in front_modules(layer)] == [nn.Dropout, nn.Linear]
    assert type(unit_modules(plain, "")[name]) is nn.Linear
    assert type(unit_modules(dora, "adapted")[name]) is nn.Linear
    unit = {unit.name: unit for unit in units_of(dora)[0].units}["mlp.up_proj"]
    assert unit.module_path == "mlp.up_proj.base_layer"
