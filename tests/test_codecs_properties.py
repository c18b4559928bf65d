"""Properties of every codec over shapes, strides, dtypes and values."""

from __future__ import annotations

import random

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hilore.runtime.codecs import LOSSLESS_NAMES, get_codec, rounding_seed
from hilore.runtime.codecs.base import FLOAT_DTYPES
from hilore.runtime.codecs.form import all_names

QUICK = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
GROUPED = st.sampled_from(all_names())
SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple) | st.tuples(
    st.integers(1, 40), st.sampled_from((1, 31, 64, 100, 256, 300))
)
KINDS = st.sampled_from(("normal", "wide", "constant", "one-sided", "outliers", "subnormal", "integers"))
LAYOUTS = st.sampled_from(("contiguous", "reversed", "every other", "sliced", "expanded"))


def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "wide":
        x = x * torch.exp(4 * torch.randn(shape, generator=generator, dtype=torch.float64))
    elif kind == "constant":
        x = torch.full(shape, float(torch.randn((), generator=generator)), dtype=torch.float64)
    elif kind == "one-sided":
        x = torch.nn.functional.silu(2 * x)
    elif kind == "outliers":
        x = torch.where(torch.rand(shape, generator=generator) < 0.01, 100 * x, x)
    elif kind == "subnormal":
        x = x * torch.finfo(dtype).smallest_normal / 8
    elif kind == "integers":
        x = x.round()
    return x.to(dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    if x.dim() == 0 or layout == "contiguous":
        return x
    if layout == "reversed":
        return x.permute(tuple(reversed(range(x.dim()))))
    if layout == "every other":
        return x[..., ::2]
    if layout == "sliced":
        return x[..., 1:]
    return x[..., :1].expand(x.shape)


@QUICK
@given(GROUPED, SHAPES, st.sampled_from(FLOAT_DTYPES), KINDS, LAYOUTS, st.integers(0, 1 << 40))
def test_lossy_codecs_stay_within_their_bound(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str, layout: str, seed: int
) -> None:
    tensor = laid_out(values(kind, shape, dtype, seed), layout)
    before, states = tensor.clone(), (torch.get_rng_state(), random.getstate())
    codec = get_codec(name)
    encoded = codec.encode(tensor, seed)
    decoded = codec.decode(encoded)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.equal(tensor, before)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
    assert decoded.stride() == torch.empty_like(tensor).stride()
    assert bool(decoded.isfinite().all())
    assert bool(((decoded.double() - tensor.double()).abs() <= codec.error_bound(encoded)).all())
    assert encoded.raw or encoded.nbytes == codec.nbytes(tensor.shape, dtype)
    if kind == "constant":
        assert torch.equal(decoded, tensor)
    again = codec.encode(tensor, seed)
    assert all(torch.equal(a, b) for a, b in zip(again.payload, encoded.payload, strict=True))


@QUICK
@given(
    st.sampled_from(LOSSLESS_NAMES),
    SHAPES,
    st.sampled_from((torch.bool, torch.int16, torch.int64, torch.bfloat16, torch.float32)),
    st.sampled_from(("integers", "constant", "normal")),
    LAYOUTS,
    st.integers(0, 1 << 20),
)
def test_lossless_codecs_are_exact(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str, layout: str, seed: int
) -> None:
    drawn = values(kind, shape, torch.float64, seed)
    tensor = laid_out((drawn * (1 if dtype.is_floating_point else 300)).to(dtype), layout)
    codec = get_codec(name)
    encoded = codec.encode(tensor)
    assert torch.equal(codec.decode(encoded), tensor)
    assert encoded.raw or encoded.nbytes == codec.nbytes(tensor.shape, dtype)


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    st.sampled_from(("int8-g64-sr", "int4-g128-asym-sr", "int2-g32-sr", "int6-g32-s8-cm-h64-sr", "int10-g64-cm-sr")),
    st.sampled_from((torch.float32, torch.float64)),
    st.sampled_from(("normal", "one-sided", "outliers")),
    st.integers(0, 1 << 30),
)
def test_stochastic_rounding_is_unbiased(name: str, dtype: torch.dtype, kind: str, seed: int) -> None:
    """The mean over seeds nears the tensor as 1 / sqrt(seeds), for every element; its sum too."""
    x, repeats = values(kind, (8, 256), dtype, seed), 200
    codec = get_codec(name)
    rounds = torch.stack([codec.decode(codec.encode(x, seed + repeat)).double() for repeat in range(repeats)])
    once = codec.encode(x, seed)
    step = codec.error_bound(once)
    share = ((x.double() - rounds[0]) / step).remainder(1)  # of the way to the next code: the odds of rounding up
    drawn = step * (share * (1 - share)).clamp(min=0.01).sqrt()
    spread = rounds.std(0) if "h64" in name else drawn
    deviation = (rounds.mean(0) - x.double()) / (spread / repeats**0.5)
    assert float(deviation.abs().max()) < 6
    assert abs(float(deviation.mean())) < 5 / x.numel() ** 0.5
    error = codec.decode(once).double() - x.double()
    assert float((rounds.mean(0) - x.double()).norm()) < 0.15 * float(error.norm())


def test_seeds_differ_by_unit_step_and_rank_and_nothing_else() -> None:
    found = {
        rounding_seed(unit, step, rank)
        for unit in ("model.layers.0.mlp.gate_proj", "model.layers.1.mlp.gate_proj")
        for step in range(10)
        for rank in range(4)
    }
    assert len(found) == 80
    assert rounding_seed("a", 1, 0) == rounding_seed("a", 1, 0)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    codec = get_codec("int4-g64-sr")
    first, same, other = (codec.encode(x, rounding_seed("a", step)).payload[0] for step in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
