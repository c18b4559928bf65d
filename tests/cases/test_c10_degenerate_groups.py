"""C-10: constant, empty, infinite and lopsided groups. Finite in, finite out; NaN and infinity stay in their places."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hilore.runtime.codecs import CODEC_NAMES, get_codec
from hilore.runtime.codecs.base import FLOAT_DTYPES

LOSSY = [name for name in CODEC_NAMES if not get_codec(name).lossless]
# Groups that know nothing of each other: no means of channels, no rotation, no scales shared by blocks.
APART = [name for name in LOSSY if not any(option in name for option in ("-cm", "-h64", "-s8", "-oc"))]


def within_bound(name: str, tensor: Tensor) -> bool:
    codec = get_codec(name)
    encoded = codec.encode(tensor)
    decoded = codec.decode(encoded)
    near = (decoded.double() - tensor.double()).abs() <= codec.error_bound(encoded)
    same = decoded == tensor
    return bool((near | same).all())


def round_trip(name: str, tensor: Tensor) -> Tensor:
    return get_codec(name).decode(get_codec(name).encode(tensor))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_constants_are_exact(name: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for value in (0.0, 1.0, -0.1, 3.14159, info.max, info.min, info.tiny, info.smallest_normal / 4):
        for size in (1, 2, 63, 64, 128, 257):
            tensor = torch.full((size,), value, dtype=dtype)
            encoded = get_codec(name).encode(tensor)
            assert torch.equal(get_codec(name).decode(encoded), tensor), (value, size)
            # Sums of 64 of the largest numbers overflow: such tensors are stored raw.
            large = abs(value) == info.max and ("-h64" in name or "-cm" in name)
            assert encoded.raw <= (get_codec(name).lossless or large)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_what_is_not_finite_comes_back_in_its_place(name: str, value: float, dtype: torch.dtype) -> None:
    tensor = torch.linspace(-1, 1, 1000).to(dtype).view(10, 100)
    tensor[3, 7] = tensor[9, 99] = value
    for view in (tensor, tensor.t(), tensor[:, 5:]):
        codec = get_codec(name)
        before = codec.stored_raw
        encoded = codec.encode(view)
        decoded = codec.decode(encoded)
        assert torch.equal(decoded.isnan(), view.isnan())
        assert torch.equal(decoded.isinf(), view.isinf())
        assert torch.equal(decoded.nan_to_num(), view.nan_to_num())
        assert codec.stored_raw == before + encoded.raw
        assert encoded.raw or "-oc" in name, "an outlier channel is kept exactly"
        assert not encoded.raw or encoded.nbytes == view.numel() * view.element_size()


@pytest.mark.parametrize("name", LOSSY)
def test_causal_masks(name: str) -> None:
    above = torch.ones(64, 64, dtype=torch.bool).triu(1)
    infinite = torch.zeros(64, 64).masked_fill(above, -math.inf)
    assert torch.equal(round_trip(name, infinite), infinite)
    for dtype in (torch.bfloat16, torch.float32):
        finite = torch.zeros(64, 64, dtype=dtype).masked_fill(above, torch.finfo(dtype).min)
        decoded = round_trip(name, finite)
        assert bool(decoded.isfinite().all())
        assert within_bound(name, finite)
        if name in APART:
            assert torch.equal(decoded, finite)
            assert not get_codec(name).encode(finite).raw


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_empty_and_0_dim(name: str) -> None:
    for shape in ((0,), (3, 0, 2)):
        decoded = round_trip(name, torch.empty(shape))
        assert decoded.shape == shape
    scalar = torch.tensor(2.7)
    decoded = round_trip(name, scalar)
    assert decoded.shape == ()
    assert torch.equal(decoded, scalar)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_one_huge_outlier_stays_in_its_group(name: str, dtype: torch.dtype) -> None:
    tensor = torch.linspace(-1, 1, 257).to(dtype)
    tensor[200] = torch.finfo(dtype).max
    decoded = round_trip(name, tensor)
    assert bool(torch.isfinite(decoded).all())
    assert within_bound(name, tensor)
    if name not in APART:
        return
    assert decoded[200] == tensor[200]
    others = round_trip(name, tensor[:128])
    assert torch.equal(decoded[:128], others)
    assert decoded[256] == tensor[256], "the last group has one element"


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_tail_smaller_than_a_group(name: str) -> None:
    for length in (1, 31, 33, 63, 65, 127, 255, 257, 300, 511):
        assert within_bound(name, torch.linspace(-1, 1, length))
        assert within_bound(name, torch.linspace(-1, 1, 3 * length).view(3, length).bfloat16())
