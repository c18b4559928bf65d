"""The group codecs: codes and scales per group of elements, optionally without means, rotated, without outliers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hilore.runtime.codecs import ops
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
from hilore.runtime.codecs.bounds import error_bound
from hilore.runtime.codecs.channels import channel_count, outlier_channels, pick_channels, sample_of, spread_values
from hilore.runtime.codecs.compiled import COMPILED_CHUNK
from hilore.runtime.codecs.flat import EAGER_CHUNK
from hilore.runtime.codecs.form import BLOCK, GroupForm
from hilore.runtime.codecs.native import NATIVE_DTYPES, native_kernels

# Bytes per element of a chunk that plain torch, or a compiled graph between its kernels, holds at once (measured).
EAGER_BYTES = 64
COMPILED_BYTES = 16


class GroupCodec(Codec):
    """Codes in groups along memory order (that of the contiguous flattening, where contiguous); form.py has the names.

    Payload: codes; scales in the tensor's dtype (bfloat16 after ``-cm``), never below their group's values; with
    ``-cm`` the channel means in the tensor's dtype; with ``-oc`` the outlier channels' numbers and exact values.
    ``error_bound`` says how far a decoded element can be. A tensor with a NaN or an infinity anywhere, or with values
    beyond the format's range, is stored raw, so both come back in their places: the scales show it, no other pass is
    needed (on CUDA this reads one number back).
    """

    lossless = False

    def __init__(self, form: GroupForm) -> None:
        super().__init__()
        self.name = form.name
        self.form = form

    def encode(self, tensor: Tensor, seed: int = 0) -> Encoded:
        self.check_input(tensor)
        sample = sample_of(tensor) if (self.form.centred or self.form.outliers) and tensor.numel() else None
        if self.form.outliers and sample is None and tensor.numel():
            return self.store_raw(tensor)
        mean = self._mean(tensor, sample)
        apart = self._apart(tensor, sample)
        if apart and mean is not None:
            mean[apart[0].long()] = 0
        used = mean if tensor.numel() else None
        if is_dense(tensor) and not apart:
            codes, parameters, bad = ops.encode_groups(flat_view(tensor), used, self.name, seed)
        else:
            codes, parameters, bad = self._encode_parts(tensor, used, apart, seed)
        if not is_abstract(bad) and bool(bad):
            return self.store_raw(tensor)
        payload = (codes, parameters, *(() if mean is None else (mean,)), *apart)
        return Encoded(self.name, payload, tuple(tensor.shape), decoded_stride(tensor), tensor.dtype, raw=False)

    def decode(self, encoded: Encoded) -> Tensor:
        self.check_encoded(encoded)
        if encoded.raw:
            return encoded.payload[0].detach()
        codes, parameters, *more = encoded.payload
        mean = more.pop(0) if self.form.centred else None
        numel = element_count(encoded.shape)
        usable = mean if mean is not None and mean.numel() else None
        flat = ops.decode_groups(codes, parameters, usable, self.name, numel, encoded.dtype)
        if more and numel:
            channels, values = more
            flat.view(-1, channel_count(encoded.shape)).index_copy_(1, channels.long(), values)
        return flat.as_strided(encoded.shape, encoded.stride)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        self.check_dtype(dtype)
        form, numel = self.form, element_count(shape)
        total = form.code_bytes(numel) + form.parameter_count(numel) * form.parameter_dtype(dtype).itemsize
        channels = channel_count(shape) if numel else 0
        if form.centred:
            total += channels * dtype.itemsize
        if form.outliers and channels:
            total += form.outlier_count(channels) * (4 + numel // channels * dtype.itemsize)
        return total

    def encode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        # Parts without their outliers are copies, with a channel number for each element.
        copies = 16 * min(element_count(shape), EAGER_CHUNK) if self.form.outliers else 0
        return 8 + copies + self.decode_workspace_bytes(shape, dtype, device_type)

    def decode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        self.check_dtype(dtype)
        numel, channels = element_count(shape), channel_count(shape)
        means = 4 * (3 * channels + 2 * BLOCK) if self.form.centred else 0
        padded = numel + 2 * BLOCK
        if device_type in ops.COMPILED_DEVICES:
            return means + COMPILED_BYTES * min(padded, COMPILED_CHUNK)
        if device_type == "cpu" and dtype in NATIVE_DTYPES and native_kernels() is not None:
            return means
        wide = 2 if dtype == torch.float64 else 1
        return wide * (means + EAGER_BYTES * min(padded, EAGER_CHUNK))

    def error_bound(self, encoded: Encoded) -> Tensor:
        """As bounds.error_bound; zeros for a raw payload."""
        return super().error_bound(encoded) if encoded.raw else error_bound(self.form, encoded)

    def _mean(self, tensor: Tensor, sample: Tensor | None) -> Tensor | None:
        if not self.form.centred:
            return None
        channels = channel_count(tensor.shape)
        if not tensor.numel():
            return tensor.new_empty(0)
        if sample is None:
            return ops.channel_mean(spread_values(tensor), 1).repeat(channels)
        if is_dense(tensor):
            return ops.channel_mean(flat_view(tensor), channels)
        return ops.channel_mean(sample.reshape(-1), channels)

    def _apart(self, tensor: Tensor, sample: Tensor | None) -> tuple[Tensor, ...]:
        """Numbers and values of the outlier channels."""
        if sample is None or not self.form.outliers:
            return ()
        channels = outlier_channels(sample, self.form.outlier_count(sample.shape[1]))
        return channels, pick_channels(tensor, channels)

    def _encode_parts(
        self, tensor: Tensor, mean: Tensor | None, apart: tuple[Tensor, ...], seed: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        form, numel = self.form, tensor.numel()
        codes = torch.empty(form.code_bytes(numel), dtype=torch.uint8, device=tensor.device)
        parameters = torch.empty(
            form.parameter_count(numel), dtype=form.parameter_dtype(tensor.dtype), device=tensor.device
        )
        bad = torch.zeros(1, dtype=torch.int64, device=tensor.device)
        start = 0
        for part in self._parts(tensor, apart):
            found = ops.encode_groups(part, mean, self.name, seed, start)
            for target, values, size in zip((codes, parameters), found, _block_sizes(form), strict=False):
                place = start // BLOCK * size
                target[place : place + values.numel()] = values
            bad += found[2]
            start += part.numel()
        return codes, parameters, bad

    def _parts(self, tensor: Tensor, apart: tuple[Tensor, ...]) -> Iterable[Tensor]:
        if not apart:
            return memory_order_chunks(tensor, BLOCK)
        channels = channel_count(tensor.shape)
        multiple = math.lcm(BLOCK, channels)
        parts = chunks_of(flat_view(tensor), multiple) if is_dense(tensor) else memory_order_chunks(tensor, multiple)
        return (part.view(-1, channels).index_fill(1, apart[0].long(), 0).view(-1) for part in parts)


def _block_sizes(form: GroupForm) -> tuple[int, int]:
    return form.block_bytes, form.block_parameters
