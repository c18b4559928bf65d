"""Lossless codecs: bit for bit or stored raw, and counted; never on trust."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hilore.runtime.codecs import LOSSLESS_NAMES, get_codec
from hilore.runtime.codecs.base import CHUNK_ELEMENTS

DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16)
DTYPES += (torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSLESS_NAMES)
def test_any_tensor_of_any_dtype_comes_back(name: str, dtype: torch.dtype) -> None:
    codec = get_codec(name)
    base = torch.randint(-3, 4, (7, 9, 11), generator=torch.Generator().manual_seed(0)).to(torch.float32).to(dtype)
    for tensor in (base, base.transpose(0, 2), base[:, ::2], base[..., 3:5], base[1, 2, 3], base[:0], base[:, :1]):
        before = codec.stored_raw
        encoded = codec.encode(tensor)
        decoded = codec.decode(encoded)
        assert same_bits(decoded, tensor)
        assert (decoded.shape, decoded.stride()) == (tensor.shape, torch.empty_like(tensor).stride())
        assert codec.stored_raw == before + encoded.raw
        assert encoded.raw or encoded.nbytes == codec.nbytes(tensor.shape, dtype)
        assert not codec.error_bound(encoded).any()


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_masks_take_one_bit(dtype: torch.dtype, probability: float) -> None:
    """As torch saves them on CPU: 0 and 1 / (1 - p); on CUDA they are booleans."""
    codec = get_codec("bitmask")
    drawn = torch.rand(300, 70, generator=torch.Generator().manual_seed(0)) > probability
    for mask in (drawn, drawn.to(dtype).div(1 - probability)):
        encoded = codec.encode(mask)
        assert not encoded.raw
        assert encoded.nbytes == 300 * 70 // 8 + (0 if mask.dtype == torch.bool else mask.element_size())
        assert same_bits(codec.decode(encoded), mask)


def test_a_bitmask_is_not_taken_for_granted() -> None:
    codec = get_codec("bitmask")
    mask = torch.zeros(2 * CHUNK_ELEMENTS + 3)
    mask[5] = 2.0
    assert not codec.encode(mask).raw
    for value in (3.0, -0.0, float("nan")):
        mask[-1] = value
        encoded = codec.encode(mask)
        assert encoded.raw, value
        assert same_bits(codec.decode(encoded), mask)
    nan = torch.tensor([0.0, float("nan"), float("nan"), 0.0])
    assert not codec.encode(nan).raw
    assert same_bits(codec.decode(codec.encode(nan)), nan)


@pytest.mark.parametrize(("name", "width"), [("narrow-int8", 1), ("narrow-int", 2), ("narrow-int32", 4)])
def test_integers_of_a_small_range_are_narrow(name: str, width: int) -> None:
    codec = get_codec(name)
    reach = 1 << (8 * width)
    for low in (0, -5, 1 << 40, -(1 << 62)):
        for high, fits in ((low + reach - 1, True), (low + reach, False)):
            tensor = torch.tensor([low, high, low + 1], dtype=torch.int64).repeat(50)
            encoded = codec.encode(tensor)
            assert encoded.raw != fits
            assert torch.equal(codec.decode(encoded), tensor)
            assert encoded.nbytes == (150 * width + 8 if fits else 150 * 8)
    extremes = torch.tensor([torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max])
    assert codec.encode(extremes).raw
    assert codec.encode(torch.zeros(5, dtype=torch.int8)).raw
    assert codec.encode(torch.zeros(0, dtype=torch.int64)).nbytes == 8


def test_exact_bf16_keeps_every_bit() -> None:
    codec = get_codec("exact-bf16")
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    x = patterns.view(torch.float32)  # all bfloat16 values: infinities, NaN payloads, subnormals, both zeros
    encoded = codec.encode(x)
    assert not encoded.raw
    assert encoded.nbytes == 2 << 16
    assert torch.equal(codec.decode(encoded).view(torch.int32), patterns)


def test_exact_bf16_stores_what_is_no_upcast_as_it_is_and_counts_it() -> None:
    codec = get_codec("exact-bf16")
    x = torch.randn(3 * CHUNK_ELEMENTS // 2, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    x[-1] = 1 + 2**-20
    before = codec.stored_raw
    encoded = codec.encode(x)
    assert (encoded.raw, codec.stored_raw, encoded.nbytes) == (True, before + 1, 4 * x.numel())
    kept = x.clone()
    x.zero_()
    assert torch.equal(codec.decode(encoded), kept)
