"""RMSNorm in fewer passes: the bits of the modules' own forward and backward, and when their own code runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from hilore.runtime.ambient import RunningAs
from hilore.runtime.derive import same_bits
from hilore.runtime.errors import HiloreWarning
from hilore.runtime.glue import normops, rmsnorm
from hilore.runtime.glue.decisions import Decisions
from hilore.runtime.glue.rmsnorm import NormForward, norm_forwards, rms_norm
from hilore.runtime.meter import StorageMeter
from hilore.runtime.region import RegionBinding
from tests import models
from tests.plans import assert_exact, attach_plan, gradients, keepable, loss_of, plan_for, random_modes, units_of

DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(1, 7, 24), (1, 1, 64), (1, 40), (2, 3, 4, 16), (3, 5, 17), (2, 100, 333), (1, 1024, 64)]
EPS = 1e-6


def norms_of(regions: Iterable[RegionBinding]) -> list[NormForward]:
    return [part for region in regions for part in region.glue if isinstance(part, NormForward)]


def norm(width: int, dtype: torch.dtype = torch.float32) -> Any:
    module = Qwen2RMSNorm(width, EPS).to(dtype)
    with models.seeded(width), torch.no_grad():
        module.weight.normal_()
    return module.requires_grad_(False)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


def as_laid(tensor: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        return tensor.transpose(0, -2).contiguous().transpose(0, -2)
    if layout == "with gaps":
        return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
    if layout == "columns":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return tensor[..., :1, :].expand(tensor.shape) if layout == "expanded" else tensor


def run(forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output; x's gradient alone, and added to one from another use of x, as a residual's is."""
    leaf = x.detach().requires_grad_()
    inner = leaf.view_as(leaf)
    result = forward(inner)
    (alone,) = torch.autograd.grad(result, inner, grad, retain_graph=True)
    other = drawn(tuple(x.shape), x.dtype, 5)
    (summed,) = torch.autograd.grad((result, inner), leaf, (grad, other))
    return result.detach(), alone, summed


def assert_alike(module: Any, x: Tensor, grad: Tensor) -> None:
    expected = run(module, x, grad)
    found = run(lambda given: rms_norm(given, module.weight, EPS), x, grad)
    for ours, own in zip(found, expected, strict=True):
        assert ours.stride() == own.stride()
        assert torch.equal(ours.isnan(), own.isnan())
        assert same_bits(ours.masked_fill(ours.isnan(), 0), own.masked_fill(own.isnan(), 0))


@pytest.fixture(params=["C", "ATen"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "ATen":
        monkeypatch.setattr(normops, "native_kernels", lambda: None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.usefixtures("kernels")
def test_same_bits(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> None:
    with models.threads(count):
        assert_alike(norm(shape[-1], dtype), drawn(shape, dtype), drawn(shape, dtype, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 16), (2, 65, 8, 64), (3, 5, 17)], ids=str)
@pytest.mark.parametrize("layout", ["plain", "transposed", "with gaps", "columns", "expanded"])
@pytest.mark.parametrize("grad_layout", ["plain", "transposed", "with gaps", "columns", "expanded"])
@pytest.mark.usefixtures("kernels")
def test_same_bits_however_tensors_lie(
    dtype: torch.dtype, shape: tuple[int, ...], layout: str, grad_layout: str
) -> None:
    x, grad = as_laid(drawn(shape, dtype), layout), as_laid(drawn(shape, dtype, 1), grad_layout)
    assert_alike(norm(shape[-1], dtype), x, grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("kernels")
def test_same_bits_of_special_values(dtype: torch.dtype) -> None:
    """A row each of zeros, infinities, NaN, denormals, the largest numbers; each also in a gradient."""
    inf, nan, largest = float("inf"), float("nan"), torch.finfo(dtype).max
    special = [0.0, -0.0, inf, -inf, nan, 1e-40, -3e-39, 1e-20, 1e19, largest, -largest]
    rows = drawn((len(special) * 2, 40), dtype)
    for place, value in enumerate(special):
        rows[2 * place] = value
        rows[2 * place + 1, 3::7] = value
    for x, grad in ((rows, drawn(tuple(rows.shape), dtype, 1)), (drawn(tuple(rows.shape), dtype, 1), rows)):
        assert_alike(norm(40, dtype), x, grad)


def test_every_bfloat16() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(-1, 64)
    finite = torch.where(every.isfinite(), every, torch.zeros_like(every))
    assert_alike(norm(64, torch.bfloat16), finite, drawn((1024, 64), torch.bfloat16))
    assert_alike(norm(64, torch.bfloat16), drawn((1024, 64), torch.bfloat16), finite)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_gradients(dtype: torch.dtype) -> None:
    module = norm(24, dtype)

    def second(forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        x, weights = drawn((4, 24), dtype).requires_grad_(), drawn((4, 24), dtype, 2).requires_grad_()
        (first,) = torch.autograd.grad(forward(x), x, weights, create_graph=True)
        return (first, *torch.autograd.grad(first.square().sum(), (x, weights)))

    expected, found = second(module), second(lambda x: rms_norm(x, module.weight, EPS))
    torch.testing.assert_close(found, expected)
    assert same_bits(found[0], expected[0])


@pytest.mark.parametrize(("dtype", "saved_of_x"), [(torch.bfloat16, (2, 1)), (torch.float32, (1, 1))], ids=str)
def test_bytes_kept_and_at_peak(dtype: torch.dtype, saved_of_x: tuple[int, int]) -> None:
    """In tensors of x's size; without x itself, whose float32 is what autograd keeps of a bfloat16 x."""
    module, shape = norm(256, dtype), (64, 256)

    def measured(forward: Callable[[Tensor], Tensor]) -> tuple[float, float, float]:
        leaf = drawn(shape, dtype).requires_grad_()
        size = leaf.untyped_storage().nbytes()
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor is not module.weight and tensor.numel() == leaf.numel():
                saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        gc.collect()
        with StorageMeter() as meter:
            x = leaf * 1
            meter.reset_peak()
            base = meter.live_bytes
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                result = forward(x)
            forward_peak = meter.peak_bytes - base
            root = result.mul(1.0).sum()
            del x, result
            meter.reset_peak()
            base = meter.live_bytes
            root.backward()
            return sum(saved.values()) / size, forward_peak / size, (meter.peak_bytes - base) / size

    own, ours = measured(module), measured(lambda x: rms_norm(x, module.weight, EPS))
    assert (round(own[0]), round(ours[0])) == saved_of_x
    assert ours[1] < own[1]
    assert ours[2] < own[2]


FAMILIES: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "qwen2": (models.qwen2_tiny, 2),
    "qwen3": (models.qwen3_tiny, 4),
    "llama": (models.llama_tiny, 2),
    "phi3": (models.phi3_tiny, 2),
    "gemma2": (models.gemma2_tiny, 0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_which_norms_are_known_and_whole_models_are_exact(family: str, dtype: torch.dtype) -> None:
    build, per_layer = FAMILIES[family]
    targets = "all-linear" if family == "phi3" else None
    model = models.lora(build(dtype=dtype), dropout=0.1, targets=targets)
    batch, units = models.microbatch_for(model), units_of(model)
    expected = gradients(model, batch)
    modes, held = random_modes(units, 1)
    for plan in (
        plan_for(model, "R"),
        plan_for(model, keepable(units)),
        plan_for(model, "R", hold=True),
        plan_for(model, modes, hold=held),
    ):
        runtime = assert_exact(model, plan, batch, expected)
    known = [sum(forward.known.values()) for forward in norms_of(runtime.regions)]
    assert sum(known) == per_layer * models.LAYERS
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("build", [models.qwen2_tiny, models.qwen3_tiny])
def test_a_split_replay_is_exact(build: Callable[..., nn.Module]) -> None:
    model = models.lora(build(dtype=torch.bfloat16))
    batch, units = models.microbatch_for(model), units_of(model)
    plan = plan_for(model, {"self_attn:attention": "H"}, split="mlp.gate_proj", units=units)
    assert any(unit.dead_late for region in plan.regions for unit in region.units)
    assert_exact(model, plan, batch, gradients(model, batch))


def test_full_fine_tuning_keeps_the_modules_own_forward() -> None:
    model = models.qwen2_tiny()
    batch = models.microbatch_for(model)
    runtime = assert_exact(model, plan_for(model, "R"), batch, gradients(model, batch))
    assert [forward.known for forward in norms_of(runtime.regions)] == [{}] * 4


def test_autocast_runs_the_modules_own_forward() -> None:
    model = models.qwen2_tiny_lora()
    batch = models.microbatch_for(model)
    expected = gradients(model, batch, autocast=torch.bfloat16)
    runtime = assert_exact(model, plan_for(model, "R"), batch, expected, autocast=torch.bfloat16)
    assert [forward.known for forward in norms_of(runtime.regions)] == [{}] * 4


class Norm(nn.Module):
    """The form, or something that differs from it in one place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.linspace(-2, 2, 24), requires_grad=False)
        self.eps = EPS

    def forward(self, x: Tensor) -> Tensor:
        kind, eps = self.kind, self.eps * (2 if self.kind == "other eps" else 1)
        h = x.to(torch.float32)
        if kind == "centered":
            h = h - h.mean(-1, keepdim=True)
        square = h * h if kind == "h * h" else h.pow(2)
        mean = square.sum(-1, keepdim=True) / 24 if kind == "sum" else square.mean(-1, keepdim=True)
        inverse = 1 / torch.sqrt(mean + eps) if kind == "sqrt" else torch.rsqrt(mean + eps)
        normed = h * (inverse.detach() if kind == "no gradient of the mean" else inverse)
        if kind == "weight in float32":
            return (self.weight * normed).to(x.dtype)
        weight = 1 + self.weight if kind == "one plus weight" else self.weight
        result = weight * normed.to(x.dtype)
        if kind == "no gradient":
            return result.detach()
        if kind == "added input":
            return result + x
        return torch.tanh(result) if kind == "tanh" else result


KINDS = [
    "centered", "h * h", "sum", "sqrt", "other eps", "no gradient of the mean", "weight in float32", "one plus weight",
    "no gradient", "added input", "tanh",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_a_forward_that_does_something_else_is_run_as_it_is(kind: str, fake: bool, dtype: torch.dtype) -> None:
    """Decided alike for fake tensors, from operators alone. In float32 one kind is the form itself."""
    mode = FakeTensorMode() if fake else None
    module = Norm(kind).to(dtype)
    x = drawn((3, 24), dtype)
    if mode is not None:
        module.weight = nn.Parameter(mode.from_tensor(module.weight.detach()), requires_grad=False)
        x = mode.from_tensor(x)
    (forward,) = norm_forwards(nn.ModuleList([module]))
    with RunningAs(frame_like()), mode or torch.enable_grad():
        found = forward(x.requires_grad_())
        assert fake or same_bits(found, module(x))
    same = kind == "plain" or (kind == "weight in float32" and dtype == torch.float32)
    assert list(forward.known.values()) == [same]


def frame_like() -> Any:
    """What is asked of a running frame here."""
    return SimpleNamespace(decisions=Decisions())


def standing_in(module: nn.Module, x: Tensor) -> bool:
    forward = NormForward(module)
    with RunningAs(frame_like()):
        assert same_bits(forward(x), module(x))
    return any(forward.known.values())


def test_who_has_changed_a_module_keeps_its_own_forward() -> None:
    x = drawn((3, 24), torch.bfloat16).requires_grad_()
    assert standing_in(norm(24, torch.bfloat16), x)
    trained = norm(24, torch.bfloat16)
    trained.weight.requires_grad_()
    assert not standing_in(trained, x)
    assert not standing_in(norm(24, torch.float32), x)
    hooked = norm(24, torch.bfloat16)
    hooked.register_forward_hook(lambda _module, _args, result: result)
    assert not standing_in(hooked, x)
    without_frame = NormForward(norm(24, torch.bfloat16))
    without_frame(x)
    assert without_frame.known == {}


def test_a_patched_forward_stays() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0, dtype=torch.bfloat16)
    patched = model.get_submodule("base_model.model.model.layers.1.input_layernorm")
    calls = []

    def forward(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return type(patched).forward(patched, x)

    patched.forward = forward
    batch = models.microbatch_for(model)
    runtime = assert_exact(model, plan_for(model, "R"), batch, gradients(model, batch))
    assert len(calls) >= 3
    assert patched.forward is forward
    known = [forward.module is not patched and bool(forward.known) for forward in norms_of(runtime.regions)]
    assert known == [True, True, False, True]


def test_the_probe_leaves_no_trace() -> None:
    module, packed = norm(24, torch.bfloat16), []
    weight, x = module.weight, drawn((3, 24), torch.bfloat16).requires_grad_()
    forward, state = NormForward(module), torch.get_rng_state()
    with RunningAs(frame_like()), saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        forward(x)
    assert module.weight is weight
    assert torch.equal(torch.get_rng_state(), state)
    assert packed == [(3, 24), (24,), (3, 1)]
    assert x.grad is None


def test_other_bits_are_told_and_the_modules_own_forward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = norm(24, torch.bfloat16), drawn((3, 24), torch.bfloat16).requires_grad_()
    scale = normops.rms_scale
    monkeypatch.setattr(rmsnorm, "rms_scale", lambda *given: scale(*given) * 1.01)
    with pytest.warns(HiloreWarning, match="Qwen2RMSNorm: this torch gives RMSNorm's operators other bits"):
        assert not standing_in(module, x)


def test_retained_graphs_run_twice() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0, dtype=torch.bfloat16)
    batch = models.microbatch_for(model)
    runtime = attach_plan(model, plan_for(model, "R"))
    loss = loss_of(model, batch)
    parameters = [p for p in model.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    runtime.detach()
    assert all(same_bits(*pair) for pair in zip(first, second, strict=True))


def test_an_input_changed_in_place_afterwards_is_loud_or_right() -> None:
    """A replay that ends before the change has the values that were saved."""

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm(24, torch.bfloat16)
            self.up = nn.Linear(24, 24, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            hidden = x * 2
            out = self.up(self.norm(hidden))
            return hidden.add_(out)

    with models.seeded(0):
        model = nn.Sequential(Region(), Region()).train()
    x = drawn((5, 24), torch.bfloat16)
    units = units_of(model, x, regions=("0", "1"))
    assert_exact(model, plan_for(model, "R", units=units), x, gradients(model, x))
    runtime = attach_plan(model, plan_for(model, "R", hold=True, units=units))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, x)
    runtime.detach()
