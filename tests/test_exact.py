"""Gradients under exact plans are bitwise those of plain eager, whatever is kept, dead or held (invariant 7)."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hilore.planner.microbatch import Microbatch
from hilore.runtime.errors import ReplayMismatchError, SavedTensorMutated
from hilore.runtime.frame import Frame
from hilore.runtime.meter import StorageMeter
from hilore.runtime.plan import Plan
from hilore.runtime.runtime import Runtime
from tests import models
from tests.plans import assert_exact, attach_plan, gradients, keepable, loss_of, plan_for, random_modes, units_of

MIXTURES = range(6)
FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "qwen2": models.qwen2_tiny,
    "qwen3": models.qwen3_tiny,
    "llama": models.llama_tiny,
    "phi3": models.phi3_tiny,
    "gemma2": models.gemma2_tiny,
    "gemma2-sdpa": lambda: models.gemma2_tiny("sdpa"),
    "qwen2-bf16": lambda: models.qwen2_tiny(dtype=torch.bfloat16),
}


def check_exact(model: nn.Module, autocast: torch.dtype | None = None, *, padding: bool = True) -> None:
    """All-R, all-H, all held, attention alone, everything but attention, and random mixtures."""
    batch = models.microbatch_for(model, left_padding=padding)
    expected = gradients(model, batch, autocast=autocast)
    units = units_of(model, batch, autocast=autocast)
    every = keepable(units)
    split = next(unit.name for unit in units[0].units if unit.name.startswith("mlp."))
    plans = [
        plan_for(model, "R"),
        plan_for(model, "R", split=split),
        plan_for(model, every),
        plan_for(model, every, split=split),
        plan_for(model, hold=True),
        plan_for(model, lambda name: "H" if name.endswith(":attention") else "R"),
        plan_for(model, lambda name: "R" if name.endswith(":attention") else every[name]),
    ]
    for seed in MIXTURES:
        modes, held = random_modes(units, seed)
        plans.append(plan_for(model, modes, hold=held, split=split if seed % 2 else None))
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


@pytest.mark.parametrize("family", ["qwen2", "gemma2-sdpa", "phi3"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["", "autocast"])
def test_without_padding_attention_gets_no_mask(family: str, autocast: torch.dtype | None) -> None:
    """Other kernels run then: causal, k and v with their own number of heads."""
    check_exact(
        FAMILIES[family](attention_dropout=0.1) if family == "qwen2" else FAMILIES[family](), autocast, padding=False
    )


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["", "autocast"])
@pytest.mark.parametrize("what", ["inputs", "no inputs", "frozen embeddings", "last layer"])
def test_frozen_parts(what: str, autocast: torch.dtype | None) -> None:
    if what in ("inputs", "no inputs"):
        model = models.qwen2_tiny_lora()
        if what == "inputs":
            model.enable_input_require_grads()
    else:
        model = models.qwen2_tiny(tie_word_embeddings=False)
        frozen = model.get_input_embeddings() if what == "frozen embeddings" else model
        frozen.requires_grad_(False)
        if what == "last layer":
            model.model.layers[1].requires_grad_(True)
    units = units_of(model, autocast=autocast)
    requires_grad = [region.input_requires_grad for region in units]
    assert requires_grad == {"inputs": [True, True], "last layer": [False, False]}.get(what, [False, True])
    check_exact(model, autocast)


def test_attention_dropout_leaves_the_generator_as_eager_does() -> None:
    """A kept attention does not run in the replay, but what draws after it must draw the same (LoRA dropout)."""
    model = models.qwen2_tiny_lora(attention_dropout=0.2)
    check_exact(model)


def test_a_dead_attention_leaves_the_generator_as_eager_does() -> None:
    model = models.qwen2_tiny(attention_dropout=0.2)
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    modes = dict.fromkeys(("self_attn:attention", "mlp.gate_proj", "self_attn.o_proj"), "H")
    assert_exact(model, plan_for(model, modes), batch, expected)


@pytest.mark.parametrize("mode", ["R", "H"])
def test_arguments_made_under_inference_mode(mode: str) -> None:
    """Such tensors keep no version; autograd saves none of them, but a region may be called with them."""
    model = models.qwen2_tiny()
    batch = models.microbatch_for(model)
    with torch.inference_mode():
        positions = torch.arange(16)[None].expand(2, -1).clone()

    def step() -> list[torch.Tensor]:
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "position_ids": positions}
        loss = model(**inputs).logits.square().mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = step()
    runtime = attach_plan(model, plan_for(model, mode))
    found = step()
    runtime.detach()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- what a call keeps ----------------------------------------------------------------------------------------------


def frames_of(runtime: Runtime) -> list[Frame]:
    return sorted(runtime.stats._frames, key=lambda frame: frame.region_name)


@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "frozen mlp"])
def test_under_autocast_no_copy_of_a_weight_is_kept(adapter: bool) -> None:
    """Weights are float32 and autocast computes in bf16: a kept linear saves a cast of its weight, which is dropped."""
    model = models.qwen2_tiny_lora(dropout=0.0) if adapter else models.qwen2_tiny()
    if not adapter:
        for layer in model.model.layers:
            layer.mlp.requires_grad_(False)
    batch = models.microbatch_for(model)
    units_of(model, batch, autocast=torch.bfloat16)
    runtime = attach_plan(model, plan_for(model, "H"))
    loss = loss_of(model, batch, autocast=torch.bfloat16)
    for frame in frames_of(runtime):
        for name, record in frame.records.items():
            if name.endswith(":attention"):
                continue
            assert {role.kind for role in record.roles} <= {"parameter", "argument", "output", "rest"}
            rest = [tuple(role.layout.shape) for role in record.roles if role.kind == "rest"]
            assert rest == ([(2, 16, 4)] if adapter else []), "lora_A's output, tokens x rank"
            own = {p.untyped_storage()._cdata for p in record.unit.module.parameters()}
            entries = [entry for entry in (reference() for reference in record.entries) if entry is not None]
            held = [e.value for e in entries if e.value is not None and e.role.kind != "rest"]
            assert {value.untyped_storage()._cdata for value in held} <= own
    del frame, record, held, entries
    assert_live_bytes(runtime, loss)
    runtime.detach()


def assert_live_bytes(runtime: Runtime, loss: torch.Tensor) -> None:
    """Kept are the outputs in bf16 (2 rows x 16 tokens) and nothing else that grows with weights."""
    tokens, per_token = 32, 4 * models.HIDDEN + 2 * models.HIDDEN // 2 + 2 * models.FFN
    linears = 2 * tokens * (per_token - models.HIDDEN)
    attention = 2 * tokens * models.HIDDEN
    assert runtime.stats.live_saved_bytes == models.LAYERS * (linears + attention)
    loss.backward()
    assert runtime.stats.live_saved_bytes == 0


# --- how much a replay runs -----------------------------------------------------------------------------------------


class GemmCounter(TorchDispatchMode):
    """Counts matrix products that take a frozen weight (or a view of one)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.frozen = {p.untyped_storage()._cdata for p in model.parameters() if not p.requires_grad and p.dim() == 2}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            tensors = [item for item in args if isinstance(item, torch.Tensor)]
            self.count += any(t.untyped_storage()._cdata in self.frozen for t in tensors)
        return func(*args, **(kwargs or {}))


def frozen_gemms_in_backward(model: nn.Module, batch: Microbatch) -> tuple[int, int]:
    """(matrix products with frozen weights in backward, peak bytes of the step beyond the model)."""
    loss_of(model, batch).backward()
    model.zero_grad(set_to_none=True)
    gc.collect()
    with StorageMeter() as meter:
        meter.track(model.parameters())
        base = meter.live_bytes
        loss = loss_of(model, batch)
        with GemmCounter(model) as counter:
            loss.backward()
    del loss
    model.zero_grad(set_to_none=True)
    return counter.count, meter.peak_bytes - base


def test_all_replayed_runs_one_frozen_gemm_per_layer_fewer_than_checkpointing() -> None:
    model = models.qwen2_tiny_lora(num_hidden_layers=3)
    model.enable_input_require_grads()
    batch = models.microbatch_for(model)
    plan = plan_for(model, "R")
    model.activation_checkpointing_enable()
    checkpointing, checkpointing_peak = frozen_gemms_in_backward(model, batch)
    model.activation_checkpointing_disable()
    model.enable_input_require_grads()
    runtime = attach_plan(model, plan)
    ours, peak = frozen_gemms_in_backward(model, batch)
    assert {name.rpartition(".")[2] for name, stats in runtime.stats.units.items() if stats.dead} == {"down_proj"}
    runtime.detach()
    head, per_layer = 1, 7 + 7
    assert checkpointing == head + 3 * per_layer
    assert ours == checkpointing - 3
    assert peak <= checkpointing_peak


@pytest.mark.parametrize("kept", ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"])
def test_a_kept_linear_does_not_run_again(kept: str) -> None:
    model = models.qwen2_tiny_lora()
    batch = models.microbatch_for(model)
    replayed = {"R": 0, "H": 0}
    for mode in replayed:
        runtime = attach_plan(model, plan_for(model, {kept: mode}))
        loss_of(model, batch).backward()  # the first replay of a unit looks at its layer on a few tokens
        loss = loss_of(model, batch)
        with GemmCounter(model) as counter:
            loss.backward()
        replayed[mode] = counter.count
        stats = runtime.stats.units[f"model.layers.1.{kept}"] if mode == "H" else None
        runtime.detach()
    assert replayed["H"] == replayed["R"] - models.LAYERS
    assert stats is not None
    assert (stats.recorded, stats.answered, stats.dead) == (2, 2, 0)


@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
def test_a_call_that_is_wrongly_dead_is_loud(adapter: bool) -> None:
    """Every unit that must run, said to be dead: NaN gradients or a refusal, never other numbers in silence."""
    model = models.qwen2_tiny_lora(dropout=0.0) if adapter else models.qwen2_tiny()
    batch = models.microbatch_for(model)
    right = plan_for(model, "R")
    wrongly_dead = [unit.name for region in right.regions for unit in region.units if not unit.dead]
    assert len(wrongly_dead) == 14
    outcomes = {name: outcome_of(model, batch, with_dead(right, name)) for name in wrongly_dead}
    assert {name: seen for name, seen in outcomes.items() if seen not in ("NaN", "refused")} == {}
    assert outcomes["model.layers.1.mlp.gate_proj"] == "NaN"
    # A placeholder that reaches a call's own saved input as it is shows by its strides; an adapter adds to it first.
    assert outcomes["model.layers.1.self_attn.o_proj"] == "NaN"


def with_dead(plan: Plan, name: str) -> Plan:
    regions = tuple(
        replace(region, units=tuple(replace(unit, dead=unit.dead or unit.name == name) for unit in region.units))
        for region in plan.regions
    )
    return replace(plan, regions=regions)


def outcome_of(model: nn.Module, batch: Microbatch, plan: Plan) -> str:
    runtime = attach_plan(model, plan)
    try:
        found = gradients(model, batch)
    except ReplayMismatchError:
        return "refused"
    finally:
        runtime.detach()
    return "NaN" if any(bool(grad.isnan().any()) for grad in found.gradients.values()) else "finite"


# --- how backward may ask -------------------------------------------------------------------------------------------

ASKED_MODES = ["R", "H", "attention", "split"]


def attach_asked(model: nn.Module, mode: str) -> Runtime:
    if mode == "split":
        return attach_plan(model, plan_for(model, {"mlp.up_proj": "H", "self_attn.o_proj": "H"}, split="mlp.gate_proj"))
    return attach_plan(model, plan_for(model, {"self_attn:attention": "H"} if mode == "attention" else mode))


@pytest.mark.parametrize("mode", ASKED_MODES)
def test_backward_twice_over_a_retained_graph(mode: str) -> None:
    model = models.qwen2_tiny_lora()
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    runtime = attach_asked(model, mode)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with models.seeded(0):
        loss = loss_of(model, batch)
    for retain in (True, True, False):
        found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=retain)
        for (name, _), grad in zip(parameters.items(), found, strict=True):
            assert torch.equal(grad, expected.gradients[name]), name
    del loss
    assert runtime.stats.live_saved_bytes == 0
    runtime.detach()


@pytest.mark.parametrize("mode", ASKED_MODES)
@pytest.mark.parametrize("order", ["early first", "late first", "shuffled"])
def test_partial_backwards(mode: str, order: str) -> None:
    model = models.qwen2_tiny_lora()
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    runtime = attach_asked(model, mode)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    parameters = dict(model.named_parameters())
    if order == "late first":
        names.reverse()
    elif order == "shuffled":
        random.Random(0).shuffle(names)
    with models.seeded(0):
        loss = loss_of(model, batch)
    for start in range(0, len(names), 7):
        asked = names[start : start + 7]
        found = torch.autograd.grad(loss, [parameters[name] for name in asked], retain_graph=True)
        for name, grad in zip(asked, found, strict=True):
            assert torch.equal(grad, expected.gradients[name]), name
    runtime.detach()


@pytest.mark.parametrize("mode", ASKED_MODES)
def test_accumulated_gradients(mode: str) -> None:
    model = models.qwen2_tiny_lora()
    batches = [models.microbatch_for(model, seed=seed) for seed in range(3)]

    def accumulated() -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        with models.seeded(0):
            for batch in batches:
                loss_of(model, batch).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = accumulated()
    runtime = attach_asked(model, mode)
    found = accumulated()
    runtime.detach()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_second_order_gradients() -> None:
    model = nn.Sequential(models.mlp(0), models.mlp(1)).train()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    units = units_of(model, x, regions=("0", "1"))

    def second_order() -> list[torch.Tensor]:
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), list(model.parameters())))

    expected = second_order()
    for modes in ("R", keepable(units)):
        runtime = attach_plan(model, plan_for(model, modes))
        found = second_order()
        runtime.detach()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- outputs changed in place ---------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Changes a linear's output in place, in the middle of the region and at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        hidden.relu_()
        out: torch.Tensor = self.down(hidden * 2)
        out.mul_(0.5)
        return x + out.sin()


def in_place_model() -> tuple[nn.Module, torch.Tensor]:
    with models.seeded(0):
        model = nn.Sequential(InPlace(), InPlace()).train()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    units = units_of(model, x, regions=("0", "1"))
    assert [(unit.name, unit.keepable) for unit in units[1].units] == [("up", False), ("down", False)]
    return model, x


@pytest.mark.parametrize("mode", ["R", "hold"])
def test_a_linear_whose_output_is_changed_in_place(mode: str) -> None:
    model, x = in_place_model()
    plan = plan_for(model, "R", hold=mode == "hold")
    assert_exact(model, plan, x, gradients(model, x))


@pytest.mark.parametrize("kept", ["up", "down"])
@pytest.mark.parametrize("mode", ["H", "L"])
def test_keeping_an_output_that_is_changed_in_place_is_refused(mode: str, kept: str) -> None:
    model, x = in_place_model()
    runtime = attach_plan(model, plan_for(model, {kept: mode}))
    with pytest.raises(SavedTensorMutated) as caught:
        gradients(model, x)
    assert str(caught.value).startswith(
        f"Tensor saved by unit 0.{kept} was changed in place after it was saved (version 0 -> 1)."
    )
    assert (caught.value.unit, caught.value.saved_version, caught.value.version) == (f"0.{kept}", 0, 1)
    runtime.detach()


def test_a_dead_call_whose_output_is_changed_in_place_runs() -> None:
    """Glue cannot write into the placeholder that stands for a dead call's output, so such a call runs."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 8)
            self.down = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.down(self.gate(x).tanh())
            out.mul_(0.5)
            out.add_(x)
            return out + x.sin()

    with models.seeded(0):
        model = nn.Sequential(Residual(), Residual()).train()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    units_of(model, x, regions=("0", "1"))
    plan = plan_for(model, "R")
    assert [unit.dead for unit in plan.regions[0].units] == [False, True]
    assert_exact(model, plan, x, gradients(model, x))
