"""The gated product of an MLP: bitwise autograd's own, in one pass, with one tensor of its size less in backward."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hilore.runtime import region as region_module
from hilore.runtime.ambient import RunningAs
from hilore.runtime.codecs import native
from hilore.runtime.derive import same_bits
from hilore.runtime.errors import HiloreWarning
from hilore.runtime.glue import gated, gatedops
from hilore.runtime.glue.decisions import Decisions
from hilore.runtime.glue.gated import GatedForward, gated_forwards
from hilore.runtime.meter import StorageMeter
from tests import models
from tests.plans import (
    Step,
    assert_exact,
    assert_same_step,
    attach_plan,
    gradients,
    keepable,
    loss_of,
    plan_for,
    units_of,
)

BF16 = torch.bfloat16
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EVERY = torch.arange(1 << 16).to(torch.int16).view(BF16)


def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def run(product: Product, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
    result = product(leaves[0] * 1, leaves[1] * 1)
    kept = grad.clone()
    found = [result.detach(), *torch.autograd.grad(result, leaves, grad)]
    assert same_bits(grad, kept), "the incoming gradient is not ours to overwrite"
    return found


def assert_bits(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> None:
    found, expected = run(gated.product_of, gate, up, grad), run(plain, gate, up, grad)
    assert all(map(same_bits, found, expected))
    assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in expected]


# Whole vectors, half of one more, an odd one, shares of threads that end inside a vector.
@pytest.mark.parametrize(
    "shape", [(0, 64), (1, 64), (3, 32), (7, 33), (3, 8, 24), (2, 300, 256), (5, 77, 176), (601, 111)]
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_forward_and_backward_have_the_bits_of_autograd(shape: tuple[int, ...], count: int) -> None:
    with models.seeded(0), models.threads(count):
        gate, up, grad = (torch.randn(shape).mul(scale).to(BF16) for scale in (6, 1, 0.01))
        assert_bits(gate, up, grad)


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e-3, 1.0, 1e20, 1e38])
def test_every_gate_has_the_bits_of_autograd(scale: float) -> None:
    with models.seeded(1):
        for _ in range(4):
            up, grad = (torch.randn(1 << 16).mul(scale).to(BF16) for _ in range(2))
            assert_bits(EVERY, up, grad)
            assert_bits(EVERY, *(EVERY[torch.randperm(1 << 16)] for _ in range(2)))


def test_tensors_that_lie_otherwise() -> None:
    with models.seeded(0):
        gate, up, grad = (torch.randn(3, 8, 64).mul(4).to(BF16) for _ in range(3))
    assert_bits(gate, up, grad.transpose(0, 1).contiguous().transpose(0, 1))
    assert_bits(gate, up, grad[:1, :1, :1].expand(3, 8, 64))
    assert_bits(gate.mT.contiguous().mT, up, grad)
    assert_bits(*(each.mT.contiguous().mT for each in (gate, up, grad)))


def test_gradients_of_gradients() -> None:
    with models.seeded(0):
        gate, up = (torch.randn(4, 6, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradgradcheck(lambda g, u: gated.product_of(g * 1, u * 1), (gate, up))


def test_five_tensors_of_its_size_are_alive_where_autograd_has_six() -> None:
    size = 64 * 256 * 2

    def tensors_at_peak(product: Product) -> float:
        gate, up = (torch.randn(64, 256).to(BF16).requires_grad_() for _ in range(2))
        gc.collect()
        with StorageMeter() as meter:
            result = product(gate * 1, up * 1)
            root = result.mul(1.0).sum()  # a gradient with memory of its own
            del result
            meter.reset_peak()
            root.backward()
        return meter.peak_bytes / size

    assert round(tensors_at_peak(plain)) == 6
    assert round(tensors_at_peak(gated.product_of)) == 5


def test_fake_tensors_lie_as_real_ones() -> None:
    real = [torch.randn(3, 5, 64).to(BF16) for _ in range(3)]
    expected = run(gated.product_of, *real)
    with FakeTensorMode() as mode:
        found = [gatedops.gated_product(*map(mode.from_tensor, real[:2]))]
        found += gatedops.gated_product_backward(*map(mode.from_tensor, real))
    assert [(t.shape, t.stride(), t.dtype) for t in found] == [(t.shape, t.stride(), t.dtype) for t in expected]


def test_shares_that_are_whole_vectors() -> None:
    assert gatedops.whole_vectors(1024 * 2752, 2)
    assert gatedops.whole_vectors(64, 8)
    assert not gatedops.whole_vectors(96, 1)
    # Shares of 33,856 are whole vectors, those of 25,392 and of 32,800 are not.
    assert gatedops.whole_vectors(33856 * 3, 3)
    assert not gatedops.whole_vectors(33856 * 3, 4)
    assert not gatedops.whole_vectors(32800 * 2, 2)
    assert gatedops.whole_vectors(32800 * 2, 1)


def test_other_bits_are_told_once_and_torchs_operators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gatedops.verified_kernels() is not None
    exact = gatedops._native_gradients

    def wrong(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        of_gate, of_up = exact(*args)
        of_gate.view(torch.int16)[3] ^= 1
        return of_gate, of_up

    monkeypatch.setattr(gatedops, "_verified", [])
    monkeypatch.setattr(gatedops, "_native_gradients", wrong)
    rounds = 1 + 2 * gatedops._SIGNIFICANDS + gatedops._RANDOM_ROUNDS
    with pytest.warns(HiloreWarning, match=f"{rounds} results of gated.c differ") as caught:
        assert_bits(EVERY, EVERY.flip(0), EVERY.roll(7))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_bits(EVERY, EVERY.flip(0), EVERY.roll(7))


def test_without_kernels_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatedops, "_verified", [])
    monkeypatch.setattr(native, "_kernels", [None])
    assert_bits(EVERY, EVERY.flip(0), EVERY.roll(7))


@pytest.mark.parametrize("flags", ["-mno-avx512bf16", "-march=x86-64-v3", "-march=x86-64"])
def test_kernels_of_other_machines(flags: str, tmp_path: Path) -> None:
    compiler = native.find_compiler()
    if compiler is None or not native._WIDE:
        pytest.skip("no C compiler for x86-64")
    target, source = tmp_path / "gated.so", Path(gated.__file__).with_name("gated.c")
    machine = ["-march=native"] if "march" not in flags else []
    command = [compiler, *native._FLAGS, *machine, flags, "-o", str(target), str(source), "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    library = ctypes.CDLL(str(target))
    assert bool(library.gated_has_fma()) == (flags != "-march=x86-64")
    assert gatedops.differences(native.NativeKernels(library)) == 0


def test_without_fused_multiply_adds_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def gated_has_fma(self) -> int:
            return 0

    monkeypatch.setattr(gatedops, "_verified", [])
    monkeypatch.setattr(native, "_kernels", [native.NativeKernels(Library())])  # type: ignore[arg-type]
    with pytest.warns(HiloreWarning, match="no fused multiply-adds"):
        assert gatedops.verified_kernels() is None


FAMILIES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "qwen2": (lambda: models.qwen2_tiny(dtype=BF16), True),
    "llama": (lambda: models.llama_tiny(dtype=BF16), True),
    "lora": (lambda: models.qwen2_tiny_lora(dtype=BF16), True),
    "lora in bfloat16": (lambda: models.qwen2_tiny_lora(dtype=BF16, adapter_dtype=BF16), True),
    "gemma2": (lambda: models.gemma2_tiny(dtype=BF16), False),
    "float32": (models.qwen2_tiny, False),
}


def known_of(regions: Any) -> list[list[bool]]:
    return [list(part.known.values()) for region in regions for part in region.glue if isinstance(part, GatedForward)]


@pytest.mark.parametrize("family", FAMILIES)
def test_which_mlps_are_known(family: str) -> None:
    build, expected = FAMILIES[family]
    model = build()
    batch = models.microbatch_for(model)
    runtime = attach_plan(model, plan_for(model, "R"))
    with models.seeded(0):
        loss_of(model, batch).backward()
    known = known_of(runtime.regions)
    runtime.detach()
    assert known == [[expected]] * 2


@pytest.mark.parametrize("family", ["qwen2", "lora", "lora in bfloat16"])
def test_a_whole_model_has_the_bits_of_eager(family: str) -> None:
    model = FAMILIES[family][0]()
    batch = models.microbatch_for(model)
    eager = gradients(model, batch)
    units = units_of(model)
    gate, up = (next(u.name for u in units[0].units if name in u.name) for name in ("gate_proj", "up_proj"))
    for plan in (
        plan_for(model, "R"),
        plan_for(model, keepable(units)),
        plan_for(model, {gate: "H"}),
        plan_for(model, {up: "H"}),
        plan_for(model, {gate: "H"}, split=gate),
        plan_for(model, "R", hold=True),
        plan_for(model, "R", hold={units[1].name}),
    ):
        assert_exact(model, plan, batch, eager)


def test_under_autocast_the_bits_of_eager() -> None:
    model = models.qwen2_tiny()
    batch = models.microbatch_for(model)
    eager = gradients(model, batch, autocast=BF16)
    units_of(model, batch, autocast=BF16)
    for hold in (False, True):
        runtime = assert_exact(model, plan_for(model, "R", hold=hold), batch, eager, autocast=BF16)
        assert known_of(runtime.regions) == [[True]] * 2


def test_decoded_gates_and_ups_give_the_gradients_that_the_own_forward_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.qwen2_tiny_lora(dtype=BF16)
    batch = models.microbatch_for(model)
    plan = plan_for(model, lambda name: "L" if "gate_proj" in name or "up_proj" in name else "R")

    def step() -> Step:
        runtime = attach_plan(model, plan)
        found = gradients(model, batch)
        runtime.detach()
        return found

    found = step()
    monkeypatch.setattr(region_module, "glue_forwards", lambda _region: [])
    assert_same_step(found, step())


class Gated(nn.Module):
    """What an MLP may do that is not down(silu(gate(x)) * up(x))."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "another order":
            up = self.up_proj(x)
            result: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * up)
            return result
        gate, up = self.gate_proj(x * 2 if self.kind == "another input" else x), self.up_proj(x)
        if self.kind == "cut up" and x.shape[-2] > 4:
            return torch.cat([self(part) for part in x.split(4, -2)], -2)
        if self.kind == "looked at" and x.shape[-2] > 4 and gate.max() > 0.5:
            gate = gate.clamp(max=0.5)
        if self.kind == "five tokens":
            assert x.shape[-2] == 5
        product = {
            "silu in place": lambda: functional.silu(gate, inplace=True) * up,
            "product in place": lambda: self.act_fn(gate).mul_(up),
            "up in place": lambda: up.mul_(self.act_fn(gate)),
            "the other way round": lambda: up * self.act_fn(gate),
            "another activation": lambda: functional.relu(gate) * up,
            "gelu": lambda: functional.gelu(gate) * up,
            "scaled": lambda: self.act_fn(gate) * up * 2,
            "own silu": lambda: gate * gate.sigmoid() * up,
            "clamped": lambda: self.act_fn(gate.clamp(max=7)) * up,
            "in float32": lambda: (self.act_fn(gate.float()) * up).to(gate.dtype),
            "gate twice": lambda: self.act_fn(gate) * gate,
        }.get(self.kind, lambda: self.act_fn(gate) * up)()
        result = self.down_proj(product)
        return result + x if self.kind == "residual" else result


KNOWN = ("plain", "the other way round", "product in place")
OTHERS = (
    *("another activation", "gelu", "scaled", "own silu", "clamped", "in float32", "gate twice"),
    *("residual", "another input", "another order", "up in place", "five tokens"),
)


class Region(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mlp = Gated(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.mlp(x).tanh()
        return result


def regions(kind: str, dtype: torch.dtype = BF16) -> tuple[nn.Sequential, torch.Tensor]:
    with models.seeded(0):
        return nn.Sequential(Region(kind), Region(kind)).train().to(dtype), torch.randn(5, 8).to(dtype)


def run_planned(model: nn.Module, x: torch.Tensor) -> list[list[bool]]:
    """What was known after a planned step, which has the gradients of a plain one."""
    units = units_of(model, x, regions=("0", "1"))
    expected = gradients(model, x)
    runtime = attach_plan(model, plan_for(model, {units[0].units[0].name: "H"}))
    found = gradients(model, x)
    known = known_of(runtime.regions)
    runtime.detach()
    assert all(same_bits(found.gradients[name], grad) for name, grad in expected.gradients.items())
    return known


@pytest.mark.parametrize("kind", [*KNOWN, *OTHERS])
def test_a_forward_that_does_something_else_is_run_as_it_is(kind: str) -> None:
    model, x = regions(kind)
    assert [part.module for part in gated_forwards(model[0])] == [model[0].mlp]
    assert run_planned(model, x) == [[kind in KNOWN]] * 2


def step_of(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and x's gradient."""
    leaf = x.detach().requires_grad_()
    with RunningAs(frame_like()):
        result = forward(leaf)
    (grad,) = torch.autograd.grad(result.float().square().sum(), leaf)
    return result.detach(), grad


@pytest.mark.parametrize("kind", ["cut up", "looked at"])
def test_a_forward_that_does_something_else_with_more_tokens_is_run_as_it_is(kind: str) -> None:
    """That it is the form for a few tokens is not enough."""
    with models.seeded(0):
        module, x = Gated(kind).to(BF16), torch.randn(9, 8).to(BF16)
    forward = GatedForward(module)
    for tokens in (4, 9):
        assert all(map(same_bits, step_of(forward, x[:tokens]), step_of(module, x[:tokens])))
    assert list(forward.known.values()) == [True]
    assert list(forward._sizes.values()) == [True, False]


def test_a_silu_in_place_is_run_as_it_is() -> None:
    with models.seeded(0):
        module, x = Gated("silu in place").to(BF16), torch.randn(9, 8).to(BF16)
    forward = GatedForward(module)
    assert all(map(same_bits, step_of(forward, x), step_of(module, x)))
    assert list(forward.known.values()) == [False]


def frame_like() -> Any:
    """What is asked of a running frame here."""
    return SimpleNamespace(decisions=Decisions())


def test_other_dtypes_run_their_own_forward() -> None:
    assert run_planned(*regions("plain", torch.float32)) == [[False]] * 2


def test_a_hook_of_the_activation_is_called() -> None:
    model, x = regions("plain")
    seen: list[torch.Tensor] = []
    model[0].mlp.act_fn.register_forward_hook(lambda _module, _args, result: seen.append(result))
    assert run_planned(model, x) == [[], [True]]
    assert len(seen) >= 3, "plain, under the plan, and in its replay"


def test_another_activation_later_is_run() -> None:
    model, x = regions("plain")
    units = units_of(model, x, regions=("0", "1"))
    runtime = attach_plan(model, plan_for(model, {units[0].units[0].name: "H"}))
    gradients(model, x)
    model[0].mlp.act_fn = nn.GELU()
    model[1].mlp.kind = "clamped"
    found = gradients(model, x)
    assert known_of(runtime.regions) == [[True, False]] * 2
    runtime.detach()
    assert_same_step(found, gradients(model, x))


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_hooks_of_one_pass_alone(when: str, hold: bool) -> None:
    """As profilers set them. A replay does what its forward did."""
    model = models.qwen2_tiny_lora(dtype=BF16, dropout=0.0)
    batch = models.microbatch_for(model)
    eager = gradients(model, batch)
    watched = [part for part in model.modules() if isinstance(part, nn.SiLU) or type(part).__name__.endswith("Norm")]

    def hooks() -> list[Any]:
        every = nn.modules.module.register_module_forward_pre_hook(lambda _module, _args: None)
        return [every, *(part.register_forward_hook(lambda _module, _args, _result: None) for part in watched)]

    runtime = attach_plan(model, plan_for(model, "R", hold=hold))
    handles = hooks() if when == "forward" else []
    model.zero_grad()
    loss = loss_of(model, batch)
    for handle in handles:
        handle.remove()
    handles = hooks() if when == "backward" else []
    loss.backward()
    for handle in handles:
        handle.remove()
    runtime.detach()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == eager.gradients.keys()
    assert all(same_bits(found[name], grad) for name, grad in eager.gradients.items())


def test_under_torch_func_a_held_region_runs_its_own_forward() -> None:
    model, x = regions("plain")
    units = units_of(model, x.requires_grad_(), regions=("0", "1"))

    def loss(given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(given)
        return output.float().square().mean()

    expected = torch.func.grad(loss)(x)
    runtime = attach_plan(model, plan_for(model, "R", hold=True, units=units))
    assert same_bits(torch.func.grad(loss)(x), expected)
    runtime.detach()


def test_a_module_with_a_forward_of_its_own_keeps_it() -> None:
    model, x = regions("plain")
    own = model[0].mlp.forward
    calls: list[int] = []

    def patched(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        result: torch.Tensor = own(hidden)
        return result

    model[0].mlp.forward = patched
    assert run_planned(model, x) == [[], [True]]
    assert len(calls) >= 3
    assert vars(model[0].mlp)["forward"] is patched
    assert "forward" not in vars(model[1].mlp)


def test_outside_of_frames_the_module_runs_its_own_forward() -> None:
    module = Gated("plain").to(BF16)
    forward = GatedForward(module)
    x = torch.randn(3, 8).to(BF16)
    assert torch.equal(forward(x), module(x))
    assert forward.known == {}
