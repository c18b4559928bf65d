"""A linear with its adapter in fewer passes: the bits of PEFT's forward and backward, and when PEFT's own code runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hilore.runtime.adaptersum import Sum, run_adapted, run_adapted_again
from hilore.runtime.plan import Plan
from hilore.runtime.region import ATTENTION
from hilore.runtime.unitbinding import UnitBinding
from tests import models
from tests.plans import assert_exact, attach_plan, gradients, loss_of, plan_for

LAYER = "base_model.model.model.layers.1.mlp.up_proj"


class Passes(TorchDispatchMode):
    """Counts elementwise operators on tensors of one shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and tuple(result.shape) == self.shape:
            self.count[func.overloadpacket.__name__] += 1
        return result


def bound(model: nn.Module) -> UnitBinding:
    return UnitBinding.of("up", "module", model.get_submodule(LAYER))


def x_for(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 16, models.HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("rank", [4, 3], ids=["power of two", "other scaling"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("autocast", [False, True])
def test_same_bits(rank: int, dtype: torch.dtype, adapter: torch.dtype, dropout: float, autocast: bool) -> None:
    model = models.lora(models.qwen2_tiny(dtype=dtype), dropout=dropout, rank=4, adapter_dtype=adapter)
    layer = model.get_submodule(LAYER)
    layer.scaling["default"] = {4: 2.0, 3: 2 / 3}[rank]
    x, unit = x_for(model, dtype), bound(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for _ in range(2):
            with models.seeded(1):
                expected = layer(x)
                state = torch.get_rng_state()
            with models.seeded(1):
                found = run_adapted_again(unit, layer.forward, x)
                assert torch.equal(torch.get_rng_state(), state)
            assert found.dtype == expected.dtype
            assert found.requires_grad
            assert not found.is_leaf
            assert torch.equal(found, expected)
    assert [type(known) for known in unit.sums.values()] == [Sum]


def test_one_pass_beside_the_matrix_products() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    layer, unit, x = model.get_submodule(LAYER), bound(model), x_for(model)
    with Passes((2, 16, models.FFN)) as plain:
        layer(x)
    run_adapted_again(unit, layer.forward, x)
    with Passes((2, 16, models.FFN)) as again:
        run_adapted_again(unit, layer.forward, x)
    assert {name: plain.count[name] for name in ("mul", "add", "add_")} == {"mul": 1, "add": 1, "add_": 0}
    assert {name: again.count[name] for name in ("mul", "add", "add_")} == {"mul": 0, "add": 0, "add_": 1}


@pytest.mark.parametrize(
    "what", ["another sum", "base changed", "another input", "two terms", "other gradients", "none"]
)
def test_a_forward_that_does_something_else_is_run_as_it_is(what: str) -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    layer, unit, x = model.get_submodule(LAYER), bound(model), x_for(model)
    base, a, b = layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]

    def forward(x: torch.Tensor) -> torch.Tensor:
        scaling = layer.scaling["default"]
        if what == "another sum":
            return (base(x) * 3 + b(a(x)) * scaling) / 3
        if what == "base changed":
            return base(x * 2) + b(a(x)) * scaling
        if what == "another input":
            return base(x) + b(a(x + 1)) * scaling
        if what == "other gradients":
            return base(x) + b(a(x)).detach() * scaling
        if what == "none":
            return (base(x) + b(a(x)) * scaling).detach()
        return base(x) + b(a(x)) * scaling + b(a(x)) * scaling

    assert torch.equal(run_adapted_again(unit, forward, x), forward(x))
    assert list(unit.sums.values()) == [None]


def test_switching_adapters_off_or_merging_them_is_seen() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    layer, unit, x = model.get_submodule(LAYER), bound(model), x_for(model)
    for change in (
        lambda: None,
        lambda: layer.enable_adapters(False),
        lambda: layer.enable_adapters(True),
        layer.merge,
    ):
        change()
        assert torch.equal(run_adapted_again(unit, layer.forward, x), layer(x))
    assert [type(known) for known in unit.sums.values()] == [Sum, type(None), type(None)]


def test_a_changed_scaling_is_seen() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    layer, unit, x = model.get_submodule(LAYER), bound(model), x_for(model)
    for scaling in (2.0, 4.0, 0.1):
        layer.scaling["default"] = scaling
        assert torch.equal(run_adapted_again(unit, layer.forward, x), layer(x))


def test_an_adapter_put_in_anothers_place_is_the_one_that_runs() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    layer, unit, x = model.get_submodule(LAYER), bound(model), x_for(model)
    run_adapted(unit, layer.forward, x)
    for name, parts in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
        parts["default"] = nn.Linear(parts["default"].in_features, parts["default"].out_features, bias=False)
        assert torch.equal(run_adapted(unit, layer.forward, x), layer(x)), name
    layer.lora_dropout["default"] = nn.Dropout(0.5)
    with models.seeded(0):
        expected = layer(x)
    with models.seeded(0):
        assert torch.equal(run_adapted(unit, layer.forward, x), expected)
    assert len(unit.sums) == 1


def test_every_unit_with_an_adapter_runs_this_way() -> None:
    model = models.qwen2_tiny_lora(dropout=0.1, live=False)
    batch = models.microbatch_for(model)
    plan = plan_for(model, {"self_attn.q_proj": "H"})
    assert_exact(model, plan, batch, gradients(model, batch))
    assert all(type(found) is Sum for found in sums_after_a_forward(model, plan).values())


def test_a_held_region_runs_this_way() -> None:
    model = models.qwen2_tiny_lora(dropout=0.1)
    batch = models.microbatch_for(model)
    plan = plan_for(model, "R", hold=("model.layers.0",))
    assert_exact(model, plan, batch, gradients(model, batch))
    found = sums_after_a_forward(model, plan, region=0)
    assert len(found) == 7
    assert all(type(each) is Sum for each in found.values())


def sums_after_a_forward(model: nn.Module, plan: Plan, region: int = 1) -> dict[str, Sum | None]:
    runtime = attach_plan(model, plan)
    loss_of(model, models.microbatch_for(model))
    units = [unit for unit in runtime.regions[region].units.values() if unit.kind != ATTENTION]
    runtime.detach()
    return {unit.name: next(iter(unit.sums.values()), None) for unit in units}


# --- forward and backward --------------------------------------------------------------------------------------------

NAMES = ("gate_proj", "up_proj")
Run = Callable[[torch.Tensor], torch.Tensor]


def both(model: nn.Module) -> tuple[list[Run], list[Run]]:
    """Of two layers that share their input PEFT's own forwards, and ours."""
    layers = [model.get_submodule(LAYER.replace("up_proj", name)) for name in NAMES]
    units = [UnitBinding.of(name, "module", layer) for name, layer in zip(NAMES, layers, strict=True)]
    ours: list[Run] = [partial(run_adapted, unit, layer.forward) for unit, layer in zip(units, layers, strict=True)]
    return [layer.forward for layer in layers], ours


def results(model: nn.Module, runs: list[Run], x: torch.Tensor, *, leaf: bool = False) -> dict[str, torch.Tensor]:
    """Outputs and gradients, also of the shared input: its four terms are added in the order of the engine."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    with models.seeded(1):
        outs = [run(x if leaf else x.view_as(x)) for run in runs]
    product = outs[0] * outs[1]
    product.backward(torch.linspace(-1, 2, product.numel()).reshape(product.shape).to(product.dtype))
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"x": x.grad, **grads} | {f"output {place}": out.detach() for place, out in enumerate(outs)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype


@pytest.mark.parametrize("scaling", [1.0, 2.0, 0.5, 2 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_and_gradients_have_the_same_bits(
    scaling: float, dtype: torch.dtype, adapter: torch.dtype, dropout: float, autocast: bool
) -> None:
    model = models.lora(models.qwen2_tiny(dtype=dtype), dropout=dropout, rank=4, adapter_dtype=adapter)
    for name in NAMES:
        model.get_submodule(LAYER.replace("up_proj", name)).scaling["default"] = scaling
    x, (own, ours) = x_for(model, dtype), both(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = results(model, own, x)
        assert {"x", "output 0"} < expected.keys()
        assert len(expected) == 7, "x, two outputs, A and B of two layers"
        for _ in range(2):
            assert_same(results(model, ours, x), expected)
    assert known_of(ours) == [Sum, Sum]


def known_of(runs: list[Any]) -> list[type]:
    return [type(found) for run in runs for found in run.args[0].sums.values()]


def test_passes_over_the_output_in_forward_and_backward() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    x, (own, ours) = x_for(model), both(model)
    results(model, ours, x)
    counts = []
    for run in (own[1], ours[1]):
        with Passes((2, 16, models.FFN)) as passes:
            out = run(x)
            forward = Counter(passes.count)
            out.backward(torch.ones_like(out))
        backward = passes.count - forward
        counts.append({name: (forward[name], backward[name]) for name in ("mul", "add", "add_")})
    assert counts[0] == {"mul": (1, 1), "add": (1, 0), "add_": (0, 0)}
    assert counts[1] == {"mul": (0, 0), "add": (0, 0), "add_": (1, 0)}


@pytest.mark.parametrize("wanted", [False, True])
def test_the_gradient_of_an_input_is_made_where_it_is_wanted(wanted: bool) -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    _, (_, run) = both(model)
    run(x_for(model))
    with Passes((2 * 16, models.HIDDEN)) as passes:
        run(x_for(model).requires_grad_(wanted)).sum().backward()
    assert passes.count["mm"] == 2 * wanted, "of the frozen linear and of lora_A"


@pytest.mark.parametrize("change", ["hook on the base", "hook on lora_B", "lora_B with a bias", "another forward"])
def test_peft_own_forward_runs_where_a_part_is_more_than_a_product(change: str) -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    layer, (own, ours) = model.get_submodule(LAYER), both(model)
    last, outputs = layer.lora_B["default"], []
    if change.startswith("hook"):
        part = layer.base_layer if "base" in change else last
        part.register_forward_hook(lambda *call: outputs.append(call[-1]))
    elif change == "lora_B with a bias":
        last.bias = nn.Parameter(torch.ones(models.FFN))
    else:
        forward = last.forward
        last.forward = lambda x: outputs.append(x) or forward(x) * 2
    expected = results(model, own, x_for(model))
    seen = len(outputs)
    assert_same(results(model, ours, x_for(model)), expected)
    assert len(outputs) == 2 * seen == (0 if "bias" in change else 2)
    assert all(torch.equal(*outputs) for _ in outputs[:1]), "what a hook holds is not written into"
    assert known_of(ours) == [Sum], "of gate_proj alone"


@pytest.mark.parametrize("change", ["base is trained", "adapter is frozen", "a leaf under autocast"])
def test_same_bits_too_where(change: str) -> None:
    """Autocast casts a leaf once for both products, which adds their gradients in its dtype."""
    model = models.qwen2_tiny_lora(dropout=0.0)
    own, ours = both(model)
    for name in NAMES:
        layer = model.get_submodule(LAYER.replace("up_proj", name))
        layer.base_layer.requires_grad_(change == "base is trained")
        layer.lora_A.requires_grad_(change != "adapter is frozen")
        layer.lora_B.requires_grad_(change != "adapter is frozen")
    found = []
    for runs in (own, ours):
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in change):
            found.append(results(model, runs, x_for(model), leaf="leaf" in change))
    assert_same(found[1], found[0])
    assert known_of(ours) == [Sum, Sum]


def test_an_adapter_that_is_cast_or_becomes_another_variant_is_seen() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    layer, unit, x = model.get_submodule(LAYER), bound(model), x_for(model)
    run_adapted(unit, layer.forward, x)
    layer.lora_A.to(torch.bfloat16)
    layer.lora_B.to(torch.bfloat16)
    assert torch.equal(run_adapted(unit, layer.forward, x), layer(x))
    assert len(unit.sums) == 2

    class Twice:
        @staticmethod
        def forward(module: nn.Module, result: torch.Tensor, **_: Any) -> torch.Tensor:
            return result * 2

    layer.lora_variant["default"] = Twice()
    assert torch.equal(run_adapted(unit, layer.forward, x), layer.base_layer(x) * 2)
    del layer.lora_variant["default"]


def test_one_dimension_runs_as_it_is() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    layer, unit, x = model.get_submodule(LAYER), bound(model), x_for(model)[0, 0]
    assert torch.equal(run_adapted(unit, layer.forward, x), layer(x))
    assert not unit.sums


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
def test_nothing_is_saved_for_gradients_that_nobody_wants(frozen: str) -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    own, ours = both(model)
    for name in NAMES:
        model.get_submodule(LAYER.replace("up_proj", name))._modules[frozen].requires_grad_(False)
    results(model, ours, x_for(model))
    saved: list[list[int]] = []
    for runs in (own, ours):
        shapes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=shapes: into.append(t.numel()) or t, lambda t: t):
            expected = results(model, runs, x_for(model))
        saved.append(sorted(set(shapes)))
        assert_same(results(model, ours, x_for(model)), expected)
    assert set(saved[1]) <= set(saved[0])


def test_a_weight_that_lies_column_by_column() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    for name in NAMES:
        weight = model.get_submodule(LAYER.replace("up_proj", name)).lora_B["default"].weight
        weight.data = weight.data.t().contiguous().t()
    own, ours = both(model)
    assert_same(results(model, ours, x_for(model)), results(model, own, x_for(model)))


def test_hooks_of_parameters_do_not_see_the_probe() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    layer, (_, (_, ours)), calls = model.get_submodule(LAYER), both(model), []
    layer.lora_A["default"].weight.register_hook(lambda grad: calls.append(grad))
    ours(x_for(model)).sum().backward()
    assert len(calls) == 1


def test_the_probe_leaves_nothing_behind() -> None:
    model = models.qwen2_tiny_lora(dropout=0.3)
    layer, (_, (_, ours)) = model.get_submodule(LAYER), both(model)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    with models.seeded(3):
        ours(x_for(model))
        state = torch.get_rng_state()
    with models.seeded(3):
        layer(x_for(model))
        assert torch.equal(torch.get_rng_state(), state), "one mask was drawn"
    assert dict(model.named_parameters()).keys() == before.keys()
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None
    assert not any(module._forward_hooks for module in layer.modules())
