"""Lossless codecs. Each checks every value at run time; what it cannot hold is stored raw, and counted (pack.py has
one more)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hilore.runtime.codecs.base import (
    CHUNK_ELEMENTS,
    Codec,
    Encoded,
    chunks_of,
    decoded_stride,
    element_count,
    flat_view,
    is_abstract,
    is_dense,
    memory_order_chunks,
)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Multiplying eight bytes that are 0 or 1 by this puts them side by side into the topmost byte.
_GATHER_BITS = 0x0102040810204080


class LosslessCodec(Codec):
    """Takes tensors of any dtype."""

    lossless = True
    holds_activations = False

    @abstractmethod
    def _payload(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """The payload, None where these values cannot be held. Values of abstract tensors are taken to fit."""

    @abstractmethod
    def _restored(self, encoded: Encoded) -> Tensor:
        """The flat values, in memory order."""

    @abstractmethod
    def _packed_bytes(self, numel: int, dtype: torch.dtype) -> int | None:
        """Payload bytes, None for a dtype that is always stored raw."""

    def encode(self, tensor: Tensor, seed: int = 0) -> Encoded:
        found = self.fitting(tensor)
        return self.store_raw(tensor) if found is None else found

    def fitting(self, tensor: Tensor) -> Encoded | None:
        """As ``encode``, but None where the dtype is what the codec is for and the values are not.

        An exact copy would take more bytes than ``nbytes`` says.
        """
        self.check_input(tensor)
        if self._packed_bytes(tensor.numel(), tensor.dtype) is None:
            return self.store_raw(tensor)
        payload = self._payload(tensor.detach())
        if payload is None:
            return None
        return Encoded(self.name, payload, tuple(tensor.shape), decoded_stride(tensor), tensor.dtype, raw=False)

    def decode(self, encoded: Encoded) -> Tensor:
        self.check_encoded(encoded)
        if encoded.raw:
            return encoded.payload[0].detach()
        return self._restored(encoded).as_strided(encoded.shape, encoded.stride)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        numel = element_count(shape)
        packed = self._packed_bytes(numel, dtype)
        return numel * dtype.itemsize if packed is None else packed

    def encode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        return 32 * min(element_count(shape), CHUNK_ELEMENTS) + 64

    def decode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        return 32 * min(element_count(shape), CHUNK_ELEMENTS) + 4096

    def check_dtype(self, dtype: torch.dtype) -> None:
        pass


class ExactBf16(LosslessCodec):
    """float32 tensors whose values are upcasts of bfloat16 ones, at half the bytes, bit for bit (NaN bits included)."""

    name = "exact-bf16"

    def _payload(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        half = torch.empty(tensor.numel(), dtype=torch.int16, device=tensor.device)
        for start, chunk in _chunks(tensor):
            bits = chunk.view(torch.int32)
            if not is_abstract(bits) and bool((bits & 0xFFFF).any()):
                return None
            half[start : start + bits.numel()] = bits >> 16
        return (half.view(torch.bfloat16),)

    def _restored(self, encoded: Encoded) -> Tensor:
        half = encoded.payload[0].view(torch.int16)
        flat = torch.empty(element_count(encoded.shape), dtype=torch.float32, device=half.device)
        for target, source in zip(chunks_of(flat), chunks_of(half), strict=True):
            torch.bitwise_left_shift(source.to(torch.int32), 16, out=target.view(torch.int32))
        return flat

    def _packed_bytes(self, numel: int, dtype: torch.dtype) -> int | None:
        return numel * 2 if dtype == torch.float32 else None


class Bitmask(LosslessCodec):
    """Booleans, and tensors of zeros and one other value (a dropout mask is 0 and 1 / (1 - p)): one bit per element."""

    name = "bitmask"

    def _payload(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        packed = torch.empty((tensor.numel() + 7) // 8, dtype=torch.uint8, device=tensor.device)
        value = None if tensor.dtype == torch.bool else self._other_value(tensor)
        for start, chunk in _chunks(tensor, 8):
            set_bits = chunk
            if value is not None:
                set_bits = chunk != 0
                if not is_abstract(chunk) and not bool(((chunk == value) | ~set_bits).all()):
                    return None
            part = _pack_bits(set_bits)
            packed[start // 8 : start // 8 + part.numel()] = part
        return (packed,) if value is None else (packed, value.view(tensor.dtype))

    @staticmethod
    def _other_value(tensor: Tensor) -> Tensor:
        """The value that is not 0, as an integer of the same bits, ``[1]``; 0 if there is none."""
        found = torch.zeros(1, dtype=_INTEGERS[tensor.dtype.itemsize], device=tensor.device)
        for _, chunk in _chunks(tensor):
            largest, smallest = chunk.max(), chunk.min()
            candidate = torch.where(largest != 0, largest, smallest)
            found = torch.where(found != 0, found, candidate)
        return found

    def _restored(self, encoded: Encoded) -> Tensor:
        packed, *value = encoded.payload
        flat = torch.empty(element_count(encoded.shape), dtype=encoded.dtype, device=packed.device)
        for place, target in enumerate(chunks_of(flat)):
            start = place * CHUNK_ELEMENTS // 8
            bits = _unpack_bits(packed[start : start + (target.numel() + 7) // 8])[: target.numel()]
            target.copy_(torch.where(bits, value[0], torch.zeros_like(value[0])) if value else bits)
        return flat

    def _packed_bytes(self, numel: int, dtype: torch.dtype) -> int | None:
        if dtype.itemsize not in _INTEGERS or dtype.is_complex:
            return None
        return (numel + 7) // 8 + (0 if dtype == torch.bool else dtype.itemsize)


class NarrowInt(LosslessCodec):
    """Integers whose range fits ``width`` bytes, as offsets from the middle of that range; the range is measured."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.name = name
        self.width = width

    def _payload(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        codes = torch.empty(tensor.numel(), dtype=_INTEGERS[self.width], device=tensor.device)
        base = 0
        if tensor.numel() and not is_abstract(tensor):
            low, high = int(tensor.min()), int(tensor.max())
            if high - low >= 1 << (8 * self.width):
                return None
            base = low + (1 << (8 * self.width - 1))
            if not -(1 << 63) <= base < 1 << 63:
                return None
        for start, chunk in _chunks(tensor, as_integers=False):
            codes[start : start + chunk.numel()] = chunk.to(torch.int64) - base
        return codes, torch.full((1,), base, dtype=torch.int64, device=tensor.device)

    def _restored(self, encoded: Encoded) -> Tensor:
        codes, base = encoded.payload
        flat = torch.empty(element_count(encoded.shape), dtype=encoded.dtype, device=codes.device)
        for target, source in zip(chunks_of(flat), chunks_of(codes), strict=True):
            target.copy_(source.to(torch.int64) + base)
        return flat

    def _packed_bytes(self, numel: int, dtype: torch.dtype) -> int | None:
        integer = dtype in _INTEGERS.values()
        return numel * self.width + 8 if integer and dtype.itemsize > self.width else None


def _chunks(tensor: Tensor, multiple: int = 1, *, as_integers: bool = True) -> Iterator[tuple[int, Tensor]]:
    """(first element, flat chunk) in memory order, booleans as they are, others as integers of the same bits."""
    chunks = chunks_of(flat_view(tensor)) if is_dense(tensor) else memory_order_chunks(tensor, multiple)
    start = 0
    for chunk in chunks:
        viewed = chunk if not as_integers or chunk.dtype == torch.bool else chunk.view(_INTEGERS[chunk.dtype.itemsize])
        yield start, viewed
        start += chunk.numel()


def _pack_bits(bits: Tensor) -> Tensor:
    """Eight booleans per byte, the first in the lowest bit; missing ones are 0."""
    missing = -bits.numel() % 8
    whole = torch.cat((bits, bits.new_zeros(missing))) if missing else bits.contiguous()
    gathered = whole.view(torch.int64) * _GATHER_BITS
    return ((gathered >> 56) & 0xFF).to(torch.uint8)


def _unpack_bits(packed: Tensor) -> Tensor:
    """The booleans of whole bytes."""
    every = torch.arange(256, dtype=torch.int64, device=packed.device)
    table = sum(((every >> bit) & 1) << (8 * bit) for bit in range(8))
    assert isinstance(table, Tensor)
    return table[packed.to(torch.int32)].view(torch.bool)


EXACT = (
    ExactBf16(),
    Bitmask(),
    NarrowInt("narrow-int", 2),
    NarrowInt("narrow-int8", 1),
    NarrowInt("narrow-int32", 4),
)
