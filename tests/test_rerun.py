"""A replay's own way of running a linear with its adapter: the bits of the layer's forward, in fewer passes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hilore.runtime.region import ATTENTION
from hilore.runtime.rerun import Sum, run_again
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
                found = run_again(unit, layer.forward, (x,), {})
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
    run_again(unit, layer.forward, (x,), {})
    with Passes((2, 16, models.FFN)) as again:
        run_again(unit, layer.forward, (x,), {})
    assert {name: plain.count[name] for name in ("mul", "add", "add_")} == {"mul": 1, "add": 1, "add_": 0}
    assert {name: again.count[name] for name in ("mul", "add", "add_")} == {"mul": 0, "add": 0, "add_": 1}


@pytest.mark.parametrize("what", ["another sum", "base changed", "another input", "two terms"])
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
        return base(x) + b(a(x)) * scaling + b(a(x)) * scaling

    assert torch.equal(run_again(unit, forward, (x,), {}), forward(x))
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
        assert torch.equal(run_again(unit, layer.forward, (x,), {}), layer(x))
    assert [type(known) for known in unit.sums.values()] == [Sum, type(None), type(None)]


def test_a_changed_scaling_is_seen() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    layer, unit, x = model.get_submodule(LAYER), bound(model), x_for(model)
    for scaling in (2.0, 4.0, 0.1):
        layer.scaling["default"] = scaling
        assert torch.equal(run_again(unit, layer.forward, (x,), {}), layer(x))


def test_every_unit_of_a_replay_that_has_an_adapter_runs_this_way() -> None:
    model = models.qwen2_tiny_lora(dropout=0.1, live=False)
    batch = models.microbatch_for(model)
    plan = plan_for(model, {"self_attn.q_proj": "H"})
    assert_exact(model, plan, batch, gradients(model, batch))
    runtime = attach_plan(model, plan)
    loss_of(model, batch).backward()
    known = {u.name: list(u.sums.values()) for u in runtime.regions[1].units.values() if u.kind != ATTENTION}
    runtime.detach()
    left_out = {"model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"}
    assert {name for name, found in known.items() if not found} == left_out
    assert all(type(found[0]) is Sum for name, found in known.items() if name not in left_out)
