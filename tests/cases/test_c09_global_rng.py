"""C-09: a codec that drew from the global generator would move every dropout mask after it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from hilore.runtime.codecs import CODEC_NAMES, get_codec, native
from tests.models import drop, seeded


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_random_states_are_untouched_even_when_kernels_are_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "int8-g128":
        monkeypatch.setattr(native, "_kernels", [])
    codec = get_codec(name)
    x = torch.linspace(-3, 3, 4000).view(50, 80)
    states = torch.get_rng_state(), random.getstate()
    for tensor in (x, x.t(), x[:, ::3], x.bfloat16(), x.double(), x.log()):
        codec.decode(codec.encode(tensor))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_loss_is_the_same_bit_for_bit(name: str) -> None:
    model, codec = drop(), get_codec(name)
    x = torch.linspace(-2, 2, 80).view(10, 8).requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        with seeded(1):
            loss = model(model(x)).square().sum()
            loss.backward()
            return loss.detach(), torch.get_rng_state()

    plain = step()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: codec.encode(t) if t.is_floating_point() else t,
        lambda packed: packed if isinstance(packed, Tensor) else codec.decode(packed),
    ):
        hooked = step()
    assert torch.equal(plain[0], hooked[0])
    assert torch.equal(plain[1], hooked[1])
