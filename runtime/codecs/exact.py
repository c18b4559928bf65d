"""Lossless codecs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hilore.runtime.codecs.base import (
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


class ExactBf16(Codec):
    """float32 tensors whose values are upcasts of bfloat16 ones, at half the bytes, bit for bit (NaN bits included).

    Every value is checked; one that is not an upcast (or another dtype) has the whole tensor stored raw, counted.
    """

    name = "exact-bf16"
    lossless = True

    def encode(self, tensor: Tensor) -> Encoded:
        self.check_input(tensor)
        if tensor.dtype != torch.float32:
            return self.store_raw(tensor)
        half = torch.empty(tensor.numel(), dtype=torch.int16, device=tensor.device)
        chunks = chunks_of(flat_view(tensor)) if is_dense(tensor) else memory_order_chunks(tensor, 1)
        start = 0
        for chunk in chunks:
            bits = chunk.view(torch.int32)
            if not is_abstract(bits) and bool((bits & 0xFFFF).any()):
                return self.store_raw(tensor)
            half[start : start + bits.numel()] = (bits >> 16).to(torch.int16)
            start += bits.numel()
        payload = half.view(torch.bfloat16)
        return Encoded(self.name, (payload,), tuple(tensor.shape), decoded_stride(tensor), tensor.dtype, raw=False)

    def decode(self, encoded: Encoded) -> Tensor:
        self.check_encoded(encoded)
        if encoded.raw:
            return encoded.payload[0].detach()
        half = encoded.payload[0].view(torch.int16)
        flat = torch.empty(element_count(encoded.shape), dtype=torch.float32, device=half.device)
        for target, source in zip(chunks_of(flat), chunks_of(half), strict=True):
            torch.bitwise_left_shift(source.to(torch.int32), 16, out=target.view(torch.int32))
        return flat.as_strided(encoded.shape, encoded.stride)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self.check_dtype(dtype)
        return element_count(shape) * (2 if dtype == torch.float32 else dtype.itemsize)


EXACT_BF16 = ExactBf16()
