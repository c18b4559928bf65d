"""C-01: a step without backward leaks nothing; its graph goes at once, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hilore.runtime.runtime import Runtime
from tests import models
from tests.plans import Modes, attach_plan, keepable, loss_of, plan_for, units_of


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def mlp_model() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(models.mlp(0), models.mlp(1)).train()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    units_of(model, x, regions=("0", "1"))
    return model, x


def watch_outputs(model: nn.Module) -> tuple[list[weakref.ref[torch.Tensor]], list[Any]]:
    """Weak references to what every leaf module returns."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            seen.append(weakref.ref(output))

    return seen, [m.register_forward_hook(note) for m in model.modules() if not list(m.children())]


def assert_nothing_left(runtime: Runtime, seen: list[weakref.ref[torch.Tensor]]) -> None:
    assert seen
    assert [reference() for reference in seen if reference() is not None] == []
    assert runtime.stats.live_saved_bytes == 0
    assert len(runtime.stats._frames) == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["dropped", "backward", "replayed", "raised"])
@pytest.mark.parametrize("modes", ["H", "R", "L"])
def test_mlp(modes: Modes, how: str) -> None:
    model, x = mlp_model()
    runtime = attach_plan(model, plan_for(model, modes))
    seen, handles = watch_outputs(model)
    loss = loss_of(model, x)
    if modes != "R":
        assert runtime.stats.live_saved_bytes > 0
    if how == "backward":
        loss.backward()
    elif how == "replayed":
        torch.autograd.grad(loss, [next(model.parameters())], retain_graph=True)
    elif how == "raised":
        gelu = runtime.regions[1].module[1]
        gelu.forward = fail
        with pytest.raises(ArithmeticError):
            loss.backward()
        del gelu.forward
    del loss
    assert_nothing_left(runtime, seen)
    for handle in handles:
        handle.remove()
    runtime.detach()


def fail(*_: Any) -> torch.Tensor:
    raise ArithmeticError


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("split", [None, "mlp.gate_proj"])
@pytest.mark.parametrize("mode", ["H", "R", "L"])
def test_qwen2_lora(mode: str, split: str | None) -> None:
    model = models.qwen2_tiny_lora()
    batch = models.microbatch_for(model)
    plan = plan_for(model, keepable(units_of(model, batch), mode), split=split)
    runtime = attach_plan(model, plan)
    seen, handles = watch_outputs(model)
    loss = loss_of(model, batch)
    del loss
    assert_nothing_left(runtime, seen)
    for handle in handles:
        handle.remove()
    runtime.detach()


@pytest.mark.usefixtures("no_collector")
def test_memory_falls_as_backward_walks() -> None:
    """When the first region's backward begins, the second one's frame is gone."""
    model, x = mlp_model()
    runtime = attach_plan(model, plan_for(model, "H"))
    held: list[int] = []
    x.register_hook(lambda grad: held.append(runtime.stats.live_saved_bytes))
    between: list[set[str]] = []
    boundary = model[0](x)
    boundary.register_hook(lambda grad: between.append({frame.region_name for frame in runtime.stats._frames}))
    loss = model[1](boundary).square().sum()
    del boundary
    assert {frame.region_name for frame in runtime.stats._frames} == {"0", "1"}
    loss.backward()
    assert between == [{"0"}]
    assert held == [0]
    runtime.detach()


def test_a_hook_never_returns_the_tensor_it_was_given() -> None:
    model, x = mlp_model()
    runtime = attach_plan(model, plan_for(model, "H"))
    loss = loss_of(model, x)
    for frame in runtime.stats._frames:
        for record in frame.records.values():
            assert record.kept is not None
            assert record.kept.tensor is not None
            assert record.kept.tensor.grad_fn is None
            assert not record.kept.tensor.requires_grad
    del loss, frame, record
    runtime.detach()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("where", ["1.mlp.up_proj", "1.self_attn.o_proj", "0.post_attention_layernorm"])
@pytest.mark.parametrize("mode", ["H", "R", "L"])
@pytest.mark.parametrize("make", [models.qwen2_tiny, models.qwen2_tiny_lora])
def test_a_forward_that_dies_half_way(make: Callable[..., nn.Module], mode: str, where: str) -> None:
    """Out of memory inside a unit or between units: whoever skips that microbatch gets all of its memory back."""
    model = make()
    batch = models.microbatch_for(model)
    runtime = attach_plan(model, plan_for(model, keepable(units_of(model, batch), mode)))
    dying = next(module for name, module in model.named_modules() if name.endswith(f"model.layers.{where}"))
    inner = getattr(dying, "base_layer", dying)
    seen, handles = watch_outputs(model)
    inner.forward = fail
    with pytest.raises(ArithmeticError):
        loss_of(model, batch)
    del inner.forward
    assert_nothing_left(runtime, seen)
    loss_of(model, batch).backward()
    assert_nothing_left(runtime, seen)
    for handle in handles:
        handle.remove()
    runtime.detach()
