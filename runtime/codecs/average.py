"""Means of four neighbours in two bits: the level "0.5" of ALAM (ICLR 2024), a baseline that loses most of a signal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hilore.runtime.codecs.base import (
    Codec,
    Encoded,
    decoded_stride,
    element_count,
    flat_view,
    is_dense,
    memory_order_chunks,
)
from hilore.runtime.codecs.form import form_of
from hilore.runtime.codecs.grouped import GroupCodec

NEIGHBOURS = 4


class AverageCodec(Codec):
    """Four neighbours in memory order become their mean, stored as ``int2-g128-sr``; decoding repeats it."""

    name = "mean4-int2-g128-sr"
    lossless = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = GroupCodec(form_of("int2-g128-sr"))

    def encode(self, tensor: Tensor, seed: int = 0) -> Encoded:
        self.check_input(tensor)
        parts = [flat_view(tensor)] if is_dense(tensor) else memory_order_chunks(tensor, NEIGHBOURS)
        means = torch.cat([tensor.new_empty(0), *(_means(part) for part in parts)])
        inner = self.inner.encode(means, seed)
        if inner.raw:
            return self.store_raw(tensor)
        return Encoded(self.name, inner.payload, tuple(tensor.shape), decoded_stride(tensor), tensor.dtype, raw=False)

    def decode(self, encoded: Encoded) -> Tensor:
        self.check_encoded(encoded)
        if encoded.raw:
            return encoded.payload[0].detach()
        numel = element_count(encoded.shape)
        count = (numel + NEIGHBOURS - 1) // NEIGHBOURS
        means = self.inner.decode(Encoded(self.inner.name, encoded.payload, (count,), (1,), encoded.dtype, raw=False))
        return means.repeat_interleave(NEIGHBOURS)[:numel].as_strided(encoded.shape, encoded.stride)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return self.inner.nbytes(((element_count(shape) + NEIGHBOURS - 1) // NEIGHBOURS,), dtype)

    def encode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        numel = element_count(shape) + NEIGHBOURS
        return 2 * numel * dtype.itemsize + self.inner.encode_workspace_bytes((numel,), dtype, device_type)

    def decode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        numel = element_count(shape) + NEIGHBOURS
        return 2 * numel * dtype.itemsize + self.inner.decode_workspace_bytes((numel,), dtype, device_type)


def _means(flat: Tensor) -> Tensor:
    whole = flat.numel() // NEIGHBOURS * NEIGHBOURS
    means = flat[:whole].view(-1, NEIGHBOURS).mean(dim=1)
    return means if whole == flat.numel() else torch.cat((means, flat[whole:].mean().view(1)))
