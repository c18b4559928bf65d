"""Rotary embedding in one pass: the bits of transformers' function, forward and backward, and when that itself runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from hilore.planner.profile import timing_units
from hilore.runtime.ambient import RunningAs
from hilore.runtime.codecs import native
from hilore.runtime.glue.decisions import Decisions
from hilore.runtime.glue.rotary import NAME, RotaryCall, RotaryGlobal, rotary_globals
from hilore.runtime.glue.rotaryops import plain_rotary
from hilore.runtime.meter import StorageMeter
from tests import models
from tests.plans import assert_exact, attach_plan, gradients, loss_of, plan_for

Function = Callable[..., Any]
ORIGINAL: Function = modeling_qwen2.apply_rotary_pos_emb


def called(apply_rotary_pos_emb: Function, projected: Any, other: Any, cos: Any, sin: Any, **more: Any) -> Any:
    """As attention modules call it."""
    q = itself(projected)
    k = itself(other)
    q, k = apply_rotary_pos_emb(q, k, cos, sin, **more)
    return q, k


def itself(tensor: Any) -> Any:
    return tensor


def stand_in(function: Function = ORIGINAL) -> RotaryCall:
    return RotaryCall(function, {})


def under_a_frame() -> RunningAs:
    frame: Any = SimpleNamespace(decisions=Decisions())
    return RunningAs(frame)


def values(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Case:
    """Projections' results and angles; ``run`` gives results and gradients of both projections."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        rows: int = 2,
        tokens: int = 7,
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 64,
        angle_rows: int = 1,
    ) -> None:
        self.shapes = (rows, tokens, heads, width), (rows, tokens, kv_heads, width)
        self.q = values(rows, tokens, heads * width, dtype=dtype, seed=0)
        self.k = values(rows, tokens, kv_heads * width, dtype=dtype, seed=1)
        self.cos = values(angle_rows, tokens, width, dtype=dtype, seed=2)
        self.sin = values(angle_rows, tokens, width, dtype=dtype, seed=3)
        self.grads: list[torch.Tensor] = []
        self.dim = 1

    def inputs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k)]
        heads = [leaf.view(shape) for leaf, shape in zip(leaves, self.shapes, strict=True)]
        return leaves, [x.transpose(1, 2) if self.dim == 1 else x for x in heads]

    def to_fake(self, fakes: FakeTensorMode) -> None:
        self.q, self.k, self.cos, self.sin = map(fakes.from_tensor, (self.q, self.k, self.cos, self.sin))

    def run(self, function: Function) -> list[torch.Tensor]:
        leaves, (q, k) = self.inputs()
        more = {} if self.dim == 1 else {"unsqueeze_dim": self.dim}
        with under_a_frame():
            results = called(function, q, k, self.cos, self.sin, **more)
        grads = self.grads or [values(*x.shape, dtype=x.dtype, seed=4 + place) for place, x in enumerate(results)]
        return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, grads)]

    def assert_same(self) -> None:
        ours = stand_in()
        expected, found = self.run(ORIGINAL), self.run(ours)
        assert list(ours.known.values()) == [True]
        for left, right in zip(found, expected, strict=True):
            assert left.stride() == right.stride()
            assert_same_bits(left, right)


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN for NaN, and the same bits elsewhere, signs of zeros too."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    kind = {2: torch.int16, 4: torch.int32}[found.element_size()]
    left, right = (x.masked_fill(expected.isnan(), 0).view(kind) for x in (found, expected))
    assert torch.equal(left, right)


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@DTYPES
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("rows", "angle_rows"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_same_bits_and_strides(dtype: torch.dtype, kv_heads: int, rows: int, angle_rows: int, tokens: int) -> None:
    Case(dtype, kv_heads=kv_heads, rows=rows, angle_rows=angle_rows, tokens=tokens).assert_same()


@DTYPES
@pytest.mark.parametrize("width", [2, 8, 32, 40, 80, 128, 256])
def test_every_width(dtype: torch.dtype, width: int) -> None:
    Case(dtype, width=width).assert_same()


@DTYPES
def test_heads_after_tokens(dtype: torch.dtype) -> None:
    case = Case(dtype)
    case.dim = 2
    case.assert_same()


@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_number_of_threads(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        Case(dtype, tokens=101, rows=3).assert_same()
    finally:
        torch.set_num_threads(before)


@DTYPES
def test_zeros_infinities_nan_and_subnormals(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, tiny, -tiny, tiny / 64, torch.inf, -torch.inf, torch.nan, 3e38])
    case = Case(dtype, tokens=128)
    draw = torch.Generator().manual_seed(5)

    def mixed(*shape: int) -> torch.Tensor:
        return special[torch.randint(len(special), shape, generator=draw)].to(dtype)

    case.q, case.k = mixed(*case.q.shape), mixed(*case.k.shape)
    case.cos, case.sin = mixed(*case.cos.shape), mixed(*case.sin.shape)
    (rows, tokens, heads, width), (_, _, kv_heads, _) = case.shapes
    case.grads = [mixed(rows, heads, tokens, width), mixed(rows, kv_heads, tokens, width)]
    case.assert_same()


@DTYPES
@pytest.mark.parametrize("how", ["transposed", "expanded", "last dimension apart"])
def test_gradients_that_lie_otherwise(dtype: torch.dtype, how: str) -> None:
    case = Case(dtype, tokens=16)
    for place, (rows, tokens, heads, width) in enumerate(case.shapes):
        shape, order = {
            "transposed": ((rows, tokens, heads, width), (0, 2, 1, 3)),
            "expanded": ((1, 1, 1, 1), (0, 1, 2, 3)),
            "last dimension apart": ((rows, heads, width, tokens), (0, 1, 3, 2)),
        }[how]
        grad = values(*shape, dtype=dtype, seed=4 + place).permute(order)
        case.grads.append(grad.expand(rows, heads, tokens, width))
    case.assert_same()


def lying(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "contiguous":
        return x.contiguous()
    if how == "part of a wider one":
        return torch.cat((x, x), -1)[..., : x.shape[-1]]
    return x.mT.contiguous().mT if how == "last dimension apart" else x[:1, :1, :1, :1].expand_as(x)


@DTYPES
@pytest.mark.parametrize("how", ["contiguous", "part of a wider one", "last dimension apart", "expanded"])
def test_tensors_that_lie_otherwise(dtype: torch.dtype, how: str) -> None:
    ours, case = stand_in(), Case(dtype)
    results = []
    for function in (ORIGINAL, ours):
        leaves, heads = case.inputs()
        q, k = (lying(x, how) for x in heads)
        with under_a_frame():
            out = called(function, q, k, case.cos, case.sin)
        grads = [values(*x.shape, dtype=dtype, seed=4) for x in out]
        results.append([*out, *torch.autograd.grad(out, leaves, grads)])
    assert list(ours.known.values()) == [True]
    for found, expected in zip(*results, strict=True):
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_result_without_a_gradient(wanted: int) -> None:
    case, found = Case(torch.bfloat16), []
    for function in (ORIGINAL, stand_in()):
        leaves, (q, k) = case.inputs()
        with under_a_frame():
            result = called(function, q, k, case.cos, case.sin)[wanted]
        grad = values(*result.shape, dtype=result.dtype, seed=4)
        found.append(torch.autograd.grad(result, leaves, grad, allow_unused=True))
    assert torch.equal(found[0][wanted], found[1][wanted])
    assert [grads[1 - wanted] for grads in found] == [None, None]


def test_gradients_of_gradients() -> None:
    case, found = Case(torch.float32), []
    for function in (ORIGINAL, stand_in()):
        leaves, (q, k) = case.inputs()
        with under_a_frame():
            results = called(function, q, k, case.cos, case.sin)
        loss = sum(x.pow(3).sum() for x in results)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_hook_sees_the_gradient_as_eager_has_it() -> None:
    case, seen = Case(torch.bfloat16), []
    for function in (ORIGINAL, stand_in()):
        _, (q, k) = case.inputs()
        q.register_hook(lambda grad: seen.append((grad.stride(), grad)))
        k.retain_grad()
        with under_a_frame():
            results = called(function, q, k, case.cos, case.sin)
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
        seen.append((k.grad.stride(), k.grad))
    assert [strides for strides, _ in seen[:2]] == [strides for strides, _ in seen[2:]]
    assert all(torch.equal(left, right) for (_, left), (_, right) in zip(seen[:2], seen[2:], strict=True))


@DTYPES
def test_without_kernels_the_same_operator_runs_the_formulas(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_kernels", [None])
    Case(dtype, tokens=101, rows=3, angle_rows=3).assert_same()
    case = Case(dtype, width=40)
    case.dim = 2
    case.assert_same()


def test_kernels_were_there() -> None:
    assert native.native_kernels() is not None, "no compiler: the kernels are untested"


# --- memory -----------------------------------------------------------------------------------------------------------


def test_angles_alone_are_kept() -> None:
    case, ours, kept = Case(torch.bfloat16), stand_in(), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage()._cdata)
        return tensor

    case.run(ours)
    _, (q, k) = case.inputs()
    with under_a_frame(), saved_tensors_hooks(keep, lambda tensor: tensor):
        called(ours, q, k, case.cos, case.sin)
    assert kept == [case.cos.untyped_storage()._cdata, case.sin.untyped_storage()._cdata]


def peaks(function: Function, case: Case) -> tuple[float, float]:
    """Of q's size, what forward and backward have alive beyond what they get."""
    leaves, (q, k) = case.inputs()
    unit = case.q.nbytes
    meter = StorageMeter()
    meter.track([*leaves, case.cos, case.sin])
    with under_a_frame(), meter:
        before = meter.live_bytes
        results = called(function, q, k, case.cos, case.sin)
        forward = meter.peak_bytes - before
        grads = [torch.ones_like(x) for x in results]
        before = meter.live_bytes
        meter.reset_peak()
        torch.autograd.grad(results, leaves, grads)
    return forward / unit, (meter.peak_bytes - before) / unit


def test_what_is_alive_at_the_peak() -> None:
    case, ours = Case(torch.bfloat16, tokens=64, heads=8, kv_heads=1), stand_in()
    case.run(ours)
    forward, backward = peaks(ours, case)
    assert (forward, backward) == (1.125, 1.125), "what is returned"
    plain = peaks(ORIGINAL, case)
    assert plain[0] > 2.9
    assert plain[1] > 3
    with FakeTensorMode() as fakes:
        case.to_fake(fakes)
        fake = stand_in()
        assert peaks(fake, case) == (forward, backward)
        assert list(fake.known.values()) == [True]


# --- which functions are known ----------------------------------------------------------------------------------------

FAMILIES: dict[str, tuple[Callable[..., nn.Module], bool]] = {
    "qwen2": (models.qwen2_tiny, True),
    "qwen3": (models.qwen3_tiny, True),
    "llama": (models.llama_tiny, True),
    "gemma2": (models.gemma2_tiny, True),
    "phi3": (models.phi3_tiny, False),
}


@pytest.mark.parametrize("family", FAMILIES)
@DTYPES
def test_which_families_functions_are_known(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    build, expected = FAMILIES[family]
    model = build(dtype=dtype)
    batch = models.microbatch_for(model)
    runtime = attach_plan(model, plan_for(model, "R"))
    (shared,) = {id(each): each for region in runtime.regions for each in region.rotary}.values()
    monkeypatch.setattr(shared, "known", {})
    with models.seeded(0):
        loss_of(model, batch).backward()
    runtime.detach()
    assert list(shared.known.values()) == [expected]
    assert_exact(model, plan_for(model, "R"), batch, gradients(model, batch))


def half_turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def variant(kind: str) -> Function:
    def apply_rotary(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        if kind == "another dimension":
            unsqueeze_dim = 2 if q.shape[1] == cos.shape[1] else 1
        results = plain_rotary(q, k, cos, sin, unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        if kind == "minus":
            return q * cos - half_turned(q) * sin, results[1]
        if kind == "k as it is":
            return results[0], k * 1
        if kind == "scaled":
            return results[0] * 2, results[1]
        if kind == "angles the other way round":
            return q * sin + half_turned(q) * cos, results[1]
        if kind == "other way round":
            return q * cos + half_turned(q) * sin, k * cos - half_turned(k) * sin
        if kind == "in float":
            return (q.double() * cos + half_turned(q.double()) * sin).to(q.dtype), results[1]
        if kind == "without a gradient":
            return results[0].detach(), results[1]
        if kind == "half a gradient":
            return q * cos + half_turned(q.detach()) * sin, results[1]
        if kind == "a list":
            return list(results)
        return results[0].contiguous(), results[1]

    return apply_rotary


@pytest.mark.parametrize(
    "kind",
    [
        "minus",
        "k as it is",
        "scaled",
        "angles the other way round",
        "other way round",
        "in float",
        "without a gradient",
        "half a gradient",
        "a list",
        "contiguous",
    ],
)
@pytest.mark.parametrize("fake", [False, True])
def test_a_function_that_does_something_else_is_run_as_it_is(kind: str, fake: bool) -> None:
    case, function = Case(torch.bfloat16), variant(kind)
    ours = stand_in(function)
    if fake:
        with FakeTensorMode() as fakes:
            case.to_fake(fakes)
            _, (q, k) = case.inputs()
            with under_a_frame():
                called(ours, q, k, case.cos, case.sin)
    else:
        _, (q, k) = case.inputs()
        with under_a_frame():
            found = called(ours, q, k, case.cos, case.sin)
        for left, right in zip(found, called(function, q, k, case.cos, case.sin), strict=True):
            assert torch.equal(left, right)
            assert left.grad_fn is None or left.grad_fn.name() != "_RotaryBackward"
    assert list(ours.known.values()) == [False]


def test_the_probe_touches_no_generator_and_no_hook_of_others() -> None:
    case, packed = Case(torch.float32), []

    def noisy(*args: Any) -> Any:
        torch.rand(3)
        return ORIGINAL(*args)

    ours = stand_in(noisy)
    _, (q, k) = case.inputs()
    with models.seeded(0), under_a_frame(), saved_tensors_hooks(packed.append, lambda tensor: tensor):
        expected = torch.get_rng_state()
        torch.rand(3)
        after_one = torch.get_rng_state()
        torch.set_rng_state(expected)
        called(ours, q, k, case.cos, case.sin)
        assert torch.equal(torch.get_rng_state(), after_one), "of the call itself"
    assert list(ours.known.values()) == [False]
    assert len(packed) == 4


@pytest.mark.parametrize(
    "change", ["float16", "angles in float32", "angles need gradients", "q needs none", "odd width"]
)
def test_other_tensors_get_the_function_itself(change: str) -> None:
    case = Case(torch.float16 if change == "float16" else torch.bfloat16, width=64)
    _, (q, k) = case.inputs()
    cos, sin = case.cos, case.sin
    if change == "angles in float32":
        cos, sin = cos.float(), sin.float()
    if change == "angles need gradients":
        cos = cos.clone().requires_grad_()
    if change == "q needs none":
        q = q.detach()
    if change == "odd width":
        q, k, cos, sin = (x[..., :1] for x in (q, k, cos, sin))
    ours = stand_in(lambda *args: args[:2])
    with under_a_frame():
        found = called(ours, q, k, cos, sin)
    assert (found[0] is q, found[1] is k, ours.known) == (True, True, {})


def keeping(apply_rotary_pos_emb: Function, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    turned, other = apply_rotary_pos_emb(q, k, cos, sin)
    return turned + q.tanh(), other


def test_a_caller_that_keeps_q_gets_the_function_itself() -> None:
    case, found, ours = Case(torch.bfloat16), [], stand_in()
    for function in (ORIGINAL, ours):
        leaves, (q, k) = case.inputs()
        with under_a_frame():
            results = keeping(function, q, k, case.cos, case.sin)
        found.append(torch.autograd.grad(results, leaves, [values(*x.shape, dtype=x.dtype, seed=9) for x in results]))
    assert ours.known == {}
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def passed_on(apply_rotary_pos_emb: Function, q: Any, k: Any, cos: Any, sin: Any) -> Any:
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q, k


def second_name(apply_rotary_pos_emb: Function, projected: Any, other: Any, cos: Any, sin: Any) -> Any:
    q = itself(projected)
    k = itself(other)
    before = q
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q + before.tanh(), k


def first_name(apply_rotary_pos_emb: Function, projected: Any, other: Any, cos: Any, sin: Any) -> Any:
    before = itself(projected)
    q = before
    k = itself(other)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q + before.tanh(), k


def both_names(apply_rotary_pos_emb: Function, projected: Any, other: Any, cos: Any, sin: Any) -> Any:
    before = q = itself(projected)
    k = itself(other)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q + before.tanh(), k


def used_before(apply_rotary_pos_emb: Function, projected: Any, other: Any, cos: Any, sin: Any) -> Any:
    q = itself(projected)
    k = itself(other)
    weight = q.tanh()
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q + weight, k


def made_of_q(apply_rotary_pos_emb: Function, projected: Any, _other: Any, cos: Any, sin: Any) -> Any:
    q = itself(projected)
    k = q.view_as(q)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q, k


def same_twice(apply_rotary_pos_emb: Function, projected: Any, _other: Any, cos: Any, sin: Any) -> Any:
    q = itself(projected)
    k = itself(projected)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q, k


ELSEWHERE = (passed_on, second_name, first_name, both_names, used_before, made_of_q, same_twice)


@pytest.mark.parametrize("caller", ELSEWHERE, ids=lambda caller: caller.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_where_q_is_used_elsewhere_too_the_function_itself_runs(caller: Function, dtype: torch.dtype) -> None:
    case, found, ours = Case(dtype, kv_heads=4), [], stand_in()
    for function in (ORIGINAL, ours):
        leaves, (q, k) = case.inputs()
        with under_a_frame():
            results = caller(function, q, k, case.cos, case.sin)
        grads = [values(*x.shape, dtype=x.dtype, seed=9 + place) for place, x in enumerate(results)]
        found.append(torch.autograd.grad(results, leaves[: 1 if caller in (made_of_q, same_twice) else 2], grads))
    assert ours.known == {}
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def bound_anew(apply_rotary_pos_emb: Function, projected: Any, other: Any, cos: Any, sin: Any) -> Any:
    q, k = itself((projected, other))
    q = q.view(q.shape)
    q, k = (q[:], k[:])
    if k.dtype == q.dtype:
        k = itself(k) * 2
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    return q + q.tanh(), k


def test_a_caller_that_binds_q_anew_lets_go_of_it() -> None:
    case, ours = Case(torch.bfloat16), stand_in()
    _, (q, k) = case.inputs()
    with under_a_frame():
        bound_anew(ours, q, k, case.cos, case.sin)
    assert list(ours.known.values()) == [True]


def test_a_function_that_changes_q_in_place_is_run_as_it_is() -> None:
    def in_place(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        turned, other = ORIGINAL(q, k, cos, sin)
        return q.mul_(turned), other

    case, ours = Case(torch.bfloat16), stand_in(in_place)
    _, (q, k) = case.inputs()
    with under_a_frame():
        called(ours, q * 1, k, case.cos, case.sin)
    assert list(ours.known.values()) == [False]


# --- in its place -----------------------------------------------------------------------------------------------------


@pytest.fixture
def llama() -> RotaryGlobal:
    (found,) = rotary_globals(models.llama_tiny())
    return found


def test_nested_and_again(llama: RotaryGlobal) -> None:
    original = modeling_llama.apply_rotary_pos_emb
    for _ in range(2):
        with llama:
            first = modeling_llama.apply_rotary_pos_emb
            assert type(first) is RotaryCall
            with llama:
                assert modeling_llama.apply_rotary_pos_emb is first
            assert modeling_llama.apply_rotary_pos_emb is first
        assert modeling_llama.apply_rotary_pos_emb is original


def test_what_others_put_there_meanwhile_stays(llama: RotaryGlobal, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.float32)
    _, (q, k) = case.inputs()
    with llama:
        inner = modeling_llama.apply_rotary_pos_emb

        def theirs(*args: Any) -> Any:
            q, k = inner(*args)
            return q * 2, k

        monkeypatch.setattr(modeling_llama, NAME, theirs)
    with llama, under_a_frame():
        ours: Any = modeling_llama.apply_rotary_pos_emb
        found = called(ours, q, k, case.cos, case.sin)
        assert torch.equal(found[0], theirs(q, k, case.cos, case.sin)[0])
    assert modeling_llama.apply_rotary_pos_emb is theirs
    setattr(modeling_llama, NAME, inner.call)


def test_a_replaced_function_stays_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        calls.append(1)
        q_turned, k_turned = plain_rotary(q, k, cos, sin, unsqueeze_dim)
        return q_turned * 0.5, k_turned

    calls: list[int] = []
    monkeypatch.setattr(modeling_qwen2, NAME, theirs)
    model = models.qwen2_tiny()
    batch = models.microbatch_for(model)
    plan = plan_for(model, "R")
    expected = gradients(model, batch)
    calls.clear()
    assert_exact(model, plan, batch, expected)
    assert len(calls) == 4 + 1, "two layers, twice, and a probe"
    assert modeling_qwen2.apply_rotary_pos_emb is theirs


def test_other_threads_get_the_function_itself(llama: RotaryGlobal) -> None:
    case, found = Case(torch.float32), []
    with llama, under_a_frame():
        function = modeling_llama.apply_rotary_pos_emb

        def run() -> None:
            _, (q, k) = case.inputs()
            found.append(called(function, q, k, case.cos, case.sin)[0].grad_fn.name())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == ["AddBackward0"]


def test_the_function_is_there_again_after_a_step_an_error_and_a_detach() -> None:
    model = models.qwen2_tiny()
    batch = models.microbatch_for(model)
    plan = plan_for(model, "R", hold=("model.layers.0",))
    runtime = attach_plan(model, plan)
    loss_of(model, batch).backward()
    assert modeling_qwen2.apply_rotary_pos_emb is ORIGINAL
    seen: list[object] = []

    def fails(*_: object) -> None:
        seen.append(modeling_qwen2.apply_rotary_pos_emb)
        raise RuntimeError("here")

    for layer in (0, 1):
        handle = model.get_submodule(f"model.layers.{layer}.mlp").register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match="here"):
            loss_of(model, batch)
        handle.remove()
        assert modeling_qwen2.apply_rotary_pos_emb is ORIGINAL
    assert [type(each) for each in seen] == [RotaryCall, RotaryCall]
    loss = loss_of(model, batch)
    runtime.detach()
    assert modeling_qwen2.apply_rotary_pos_emb is ORIGINAL
    loss.backward()
    assert modeling_qwen2.apply_rotary_pos_emb is ORIGINAL


def test_a_stopwatch_times_the_function_itself() -> None:
    model = models.qwen2_tiny()
    runtime = attach_plan(model, plan_for(model, "R"))
    runner: Any = SimpleNamespace(binding=runtime.regions[0], units={})
    with timing_units(runner, lambda: 0):
        assert modeling_qwen2.apply_rotary_pos_emb is ORIGINAL
    runtime.detach()


@pytest.mark.parametrize(
    "build", [models.qwen2_tiny, models.qwen2_tiny_lora, models.qwen3_tiny], ids=lambda f: f.__name__
)
@DTYPES
@pytest.mark.parametrize("plan", ["R", "H", "attention", "held", "split"])
def test_whole_models(build: Callable[..., nn.Module], dtype: torch.dtype, plan: str) -> None:
    model = build(dtype=dtype)
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    if plan == "held":
        made = plan_for(model, "R", hold=True)
    elif plan == "split":
        made = plan_for(model, {"self_attn:attention": "H"}, split="mlp.gate_proj")
    else:
        made = plan_for(model, {"self_attn:attention": "H"} if plan == "attention" else plan)
    assert_exact(model, made, batch, expected)


def test_a_lossy_plan_runs_and_demoted_is_exact() -> None:
    model = models.qwen2_tiny(dtype=torch.bfloat16)
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    plan = plan_for(model, {"mlp.up_proj": "L", "self_attn.v_proj": "L"})
    runtime = attach_plan(model, plan)
    found = gradients(model, batch)
    runtime.detach()
    assert torch.equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    assert all(grad.isfinite().all() for grad in found.gradients.values())
