"""The gated product of an MLP: bitwise autograd's own, with one tensor of its size less in backward."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from hilore.runtime.gated import Activation, GatedForward, _product, gated_modules
from hilore.runtime.meter import StorageMeter
from tests import models
from tests.plans import assert_exact, attach_plan, gradients, loss_of, plan_for

ACTIVATIONS: dict[str, tuple[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": (Activation(None), functional.silu),
    "gelu": (Activation("none"), functional.gelu),
    "gelu tanh": (Activation("tanh"), lambda x: functional.gelu(x, approximate="tanh")),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("contiguous", [True, False])
def test_forward_and_backward_have_the_bits_of_autograd(name: str, dtype: torch.dtype, contiguous: bool) -> None:
    activation, plain = ACTIVATIONS[name]
    with models.seeded(0):
        gate, up, gradient = (torch.randn(3, 8, 24).mul(4).to(dtype) for _ in range(3))
    if not contiguous:
        gradient = gradient.transpose(0, 1).contiguous().transpose(0, 1)
    found, expected = [], []
    for results, product in ((found, lambda g, u: _product(g, u, activation)), (expected, lambda g, u: plain(g) * u)):
        leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
        result = product(leaves[0] * 1, leaves[1] * 1)
        kept = gradient.clone()
        results += [result.detach(), *torch.autograd.grad(result, leaves, gradient)]
        assert torch.equal(gradient, kept), "the incoming gradient is not ours to overwrite"
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_gradients_of_gradients() -> None:
    activation, plain = ACTIVATIONS["silu"]
    with models.seeded(0):
        gate, up = (torch.randn(4, 6, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradgradcheck(lambda g, u: _product(g * 1, u * 1, activation), (gate, up))
    assert torch.equal(_product(gate, up, activation), plain(gate) * up)


def test_five_tensors_of_its_size_are_alive_where_autograd_has_six() -> None:
    activation, plain = ACTIVATIONS["silu"]
    size = 64 * 256 * 4

    def tensors_at_peak(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        gate, up = (torch.randn(64, 256).requires_grad_() for _ in range(2))
        gc.collect()
        with StorageMeter() as meter:
            result = product(gate * 1, up * 1)
            root = result.mul(1.0).sum()  # a gradient with memory of its own
            del result
            meter.reset_peak()
            root.backward()
        return meter.peak_bytes / size

    assert round(tensors_at_peak(lambda g, u: plain(g) * u)) == 6
    assert round(tensors_at_peak(lambda g, u: _product(g, u, activation))) == 5


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Activation | None]] = {
    "qwen2": (models.qwen2_tiny, Activation(None)),
    "llama": (models.llama_tiny, Activation(None)),
    "gemma2": (models.gemma2_tiny, Activation("tanh")),
    "lora": (models.qwen2_tiny_lora, Activation(None)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_which_mlps_are_known(family: str) -> None:
    build, expected = FAMILIES[family]
    model = build()
    batch = models.microbatch_for(model)
    runtime = attach_plan(model, plan_for(model, "R"))
    with models.seeded(0):
        loss_of(model, batch).backward()
    known = [forward.known for region in runtime.regions for forward in region._gated]
    runtime.detach()
    assert known == [{torch.float32: expected}] * 2
    assert_exact(model, plan_for(model, "R"), batch, gradients(model, batch))


class Gated(nn.Module):
    """What an MLP may do that is not down(act(gate(x)) * up(x))."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "another order":
            up = self.up_proj(x)
            result: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * up)
            return result
        gate, up = self.gate_proj(x * 2 if self.kind == "another input" else x), self.up_proj(x)
        product = {
            "plain": lambda: functional.silu(gate) * up,
            "the other way round": lambda: up * functional.silu(gate),
            "another activation": lambda: functional.relu(gate) * up,
            "scaled": lambda: functional.silu(gate) * up * 2,
            "own silu": lambda: gate * gate.sigmoid() * up,
            "clamped": lambda: functional.silu(gate.clamp(max=7)) * up,
            "residual": lambda: functional.silu(gate) * up,
            "another input": lambda: functional.silu(gate) * up,
        }[self.kind]()
        result = self.down_proj(product)
        return result + x if self.kind == "residual" else result


KINDS = ("another activation", "scaled", "own silu", "clamped", "residual", "another input", "another order")


@pytest.mark.parametrize("kind", ["plain", "the other way round", *KINDS])
def test_a_forward_that_does_something_else_is_run_as_it_is(kind: str) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Gated(kind)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = x + self.mlp(x).tanh()
            return result

    with models.seeded(0):
        model = nn.Sequential(Region(), Region()).train()
        x = torch.randn(5, 8)
    assert gated_modules(model[0]) == (model[0].mlp,)
    units = plan_units(model, x)
    plan = plan_for(model, {units[0]: "H"})
    expected = gradients(model, x)
    runtime = attach_plan(model, plan)
    found = gradients(model, x)
    known = [list(forward.known.values()) for region in runtime.regions for forward in region._gated]
    runtime.detach()
    assert all(torch.equal(found.gradients[name], grad) for name, grad in expected.gradients.items())
    assert known == [[None if kind in KINDS else Activation(None)]] * 2


def plan_units(model: nn.Module, x: torch.Tensor) -> list[str]:
    from tests.plans import units_of

    return [unit.name for unit in units_of(model, x, regions=("0", "1"))[0].units]


def test_outside_of_frames_the_module_runs_its_own_forward() -> None:
    module = Gated("plain")
    forward = GatedForward(module)
    x = torch.randn(3, 8)
    assert torch.equal(forward(x), module(x))
    assert forward.known == {}
