"""Codecs that keep small integers (or e4m3) and one magnitude per group: int8-g128, int8-g64, int4-g64, fp8-e4m3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hilore.runtime.codecs import ops, reference
from hilore.runtime.codecs.base import (
    Codec,
    Encoded,
    decoded_stride,
    element_count,
    flat_view,
    is_abstract,
    is_dense,
    memory_order_chunks,
)


class GroupCodec(Codec):
    """Symmetric absmax codes in groups along memory order (that of the contiguous flattening, where contiguous).

    Payload: codes and each group's largest magnitude in the tensor's dtype. Error of an element: at most
    ``amax / (2 levels)`` for integers, ``amax * 2^-18 + |x| * 2^-4`` for e4m3, plus one rounding to the dtype; 0 for
    the group's largest magnitude. A tensor with a NaN or an infinity anywhere is stored raw, so both come back in
    their places: the magnitudes show it, no other pass is needed (on CUDA this reads one number back).
    """

    lossless = False

    def __init__(self, name: str, kind: str, group: int) -> None:
        super().__init__()
        self.name = name
        self.kind = kind
        self.group = group

    def encode(self, tensor: Tensor) -> Encoded:
        self.check_input(tensor)
        if is_dense(tensor):
            codes, peaks, bad = ops.encode_groups(flat_view(tensor), self.kind, self.group)
        else:
            codes, peaks, bad = self._encode_gapped(tensor)
        if not is_abstract(bad) and bool(bad):
            return self.store_raw(tensor)
        return Encoded(self.name, (codes, peaks), tuple(tensor.shape), decoded_stride(tensor), tensor.dtype, raw=False)

    def _encode_gapped(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        form, numel = reference.FORMATS[self.kind], tensor.numel()
        codes = torch.empty(form.code_count(numel, self.group), dtype=form.code_dtype, device=tensor.device)
        peaks = torch.empty(reference.group_count(numel, self.group), dtype=tensor.dtype, device=tensor.device)
        bad = torch.zeros(1, dtype=torch.int64, device=tensor.device)
        start = 0
        for chunk in memory_order_chunks(tensor, self.group):
            part, part_peaks, part_bad = ops.encode_groups(chunk, self.kind, self.group)
            first = form.code_count(start, self.group)
            codes[first : first + part.numel()] = part
            peaks[start // self.group : start // self.group + part_peaks.numel()] = part_peaks
            bad += part_bad
            start += chunk.numel()
        return codes, peaks, bad

    def decode(self, encoded: Encoded) -> Tensor:
        self.check_encoded(encoded)
        if encoded.raw:
            return encoded.payload[0].detach()
        codes, peaks = encoded.payload
        flat = ops.decode_groups(codes, peaks, self.kind, self.group, element_count(encoded.shape))
        return flat.as_strided(encoded.shape, encoded.stride)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self.check_dtype(dtype)
        numel = element_count(shape)
        codes = reference.FORMATS[self.kind].code_count(numel, self.group)
        return codes + reference.group_count(numel, self.group) * dtype.itemsize


INT8_G128 = GroupCodec("int8-g128", "int8", 128)
INT8_G64 = GroupCodec("int8-g64", "int8", 64)
INT4_G64 = GroupCodec("int4-g64", "int4", 64)
FP8_E4M3 = GroupCodec("fp8-e4m3", "e4m3", 128)
