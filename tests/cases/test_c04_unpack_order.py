"""C-04: saved tensors may be asked for in any order, any number of times, by several replays at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hilore.runtime.frame import Frame
from hilore.runtime.saved import Entry
from hilore.runtime.slots import Slot
from tests import models
from tests.plans import assert_exact, attach_plan, gradients, keepable, loss_of, plan_for, units_of


class Order(nn.Module):
    """h = exp(a), u = sin(h), v = cos(h): autograd asks for them in an order that no stack gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).exp()
        return x + (h.sin() * h.cos()).tanh()


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def order_model() -> nn.Module:
    with models.seeded(0):
        model = nn.Sequential(Order(), Order()).train()
    units_of(model, X, regions=("0", "1"))
    return model


@pytest.mark.parametrize("mode", ["R", "H"])
def test_sine_times_cosine(mode: str) -> None:
    model = order_model()
    assert_exact(model, plan_for(model, mode), X, gradients(model, X))


def record_packed(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Tensor]]:
    """Everything that a frame gives to autograd, beside a copy of what it was given."""
    packed: list[Any] = []
    originals: list[Tensor] = []
    pack: Callable[[Frame, Tensor], Any] = Frame._pack

    def note(frame: Frame, tensor: Tensor) -> Any:
        result = pack(frame, tensor)
        packed.append(result)
        originals.append(tensor.detach().clone())
        return result

    monkeypatch.setattr(Frame, "_pack", note)
    return packed, originals


@pytest.mark.parametrize("split", [None, "mlp.gate_proj"])
@pytest.mark.parametrize("mode", ["R", "H", "attention"])
@pytest.mark.parametrize("seed", range(3))
def test_shuffled_unpacks_give_what_was_packed(
    seed: int, mode: str, split: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.qwen2_tiny()
    batch = models.microbatch_for(model)
    units = units_of(model, batch)
    modes = {"self_attn:attention": "H"} if mode == "attention" else keepable(units, mode)
    runtime = attach_plan(model, plan_for(model, modes, split=split))
    packed, originals = record_packed(monkeypatch)
    loss = loss_of(model, batch)
    places = list(range(len(packed))) * 2
    random.Random(seed).shuffle(places)
    assert sum(isinstance(item, Slot) for item in packed) > 20
    if mode == "H":
        assert sum(isinstance(item, Entry) for item in packed) > 20
    for place in places:
        assert torch.equal(packed[place].take(), originals[place]), place
    del loss
    runtime.detach()


def test_every_packed_object_carries_what_it_needs() -> None:
    """No shared cursor: two graphs of one region, asked alternately."""
    model = order_model()
    other = torch.randn(8, 64, generator=torch.Generator().manual_seed(9))
    expected = [gradients(model, x).gradients for x in (X, other)]
    runtime = attach_plan(model, plan_for(model, "R"))
    runtime_losses = [loss_of(model, x) for x in (X, other)]
    names = list(expected[0])
    parameters = dict(model.named_parameters())
    for name in names:
        for loss, grads in zip(runtime_losses, expected, strict=True):
            (found,) = torch.autograd.grad(loss, [parameters[name]], retain_graph=True)
            assert torch.equal(found, grads[name])
    runtime.detach()
