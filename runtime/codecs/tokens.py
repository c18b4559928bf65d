"""Integers of a given mean width whose tokens take bits by their weight: ``tw8-g64-cm-h64`` and so on.

``tw8-REST`` holds what ``int8-REST`` (form.py) holds, and never more bytes but for a little padding; which tokens
take more than 8 bits and which fewer is decided by the microbatch's token weights (runtime/tokenweights.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hilore.runtime.codecs import ops
from hilore.runtime.codecs.base import Codec, Encoded, decoded_stride, element_count, flat_view, is_abstract
from hilore.runtime.codecs.channels import channel_count
from hilore.runtime.codecs.form import BLOCK, ROTATED, GroupForm, form_of, parse_form
from hilore.runtime.codecs.grouped import GroupCodec
from hilore.runtime.tokenweights import SEGMENTS_PER_ROW, Segment, TokenWeights

_NAME = re.compile(r"tw(?P<bits>\d+)-(?P<rest>.+)")
# A segment ends in a block that may be half empty, of at most 12 bits per element, and its scales.
_SEGMENT_PADDING = BLOCK * 12 // 8 + BLOCK // 32 * 4


@dataclass(frozen=True, slots=True)
class SegmentedEncoded(Encoded):
    """``segments``: (first, end, bits) over tokens; the payload is the mean, if any, then codes and scales of each."""

    segments: tuple[Segment, ...]


class TokenCodec(Codec):
    """``encode`` takes the weights of a tensor's tokens; without them (or for another shape) all take the mean."""

    lossless = False

    def __init__(self, name: str, bits: int, rest: str) -> None:
        super().__init__()
        self.name, self.bits, self.rest = name, bits, rest
        self.uniform = GroupCodec(form_of(f"int{bits}-{rest}"))

    def fits(self, shape: Sequence[int], weights: TokenWeights) -> bool:
        """Whether ``shape`` is [rows, tokens, ...] of the weights, whole rotations per token."""
        channels = element_count(shape[2:])
        return tuple(shape[:2]) == (weights.rows, weights.tokens) and channels % ROTATED == 0 and channels > 0

    def encode(self, tensor: Tensor, seed: int = 0, weights: TokenWeights | None = None) -> Encoded:
        self.check_input(tensor)
        if weights is None or not tensor.is_contiguous() or not self.fits(tensor.shape, weights):
            found = self.uniform.encode(tensor, seed)
            return Encoded(self.name, found.payload, found.shape, found.stride, found.dtype, found.raw)
        flat, channels = flat_view(tensor), element_count(tensor.shape[2:])
        centred = self.uniform.form.centred
        parts: list[Tensor] = [ops.channel_mean(flat, channel_count(tensor.shape))] if centred else []
        mean = parts[0] if parts else None
        bad = torch.zeros(1, dtype=torch.int64, device=tensor.device)
        segments = weights.bits(self.bits)
        for first, end, bits in segments:
            part = flat[first * channels : end * channels]
            if not bits:
                # What is dropped must be finite all the same, or the trainer's own check would miss it.
                bad += part.isfinite().logical_not().any()
                continue
            codes, scales, wrong = ops.encode_groups(part, mean, f"int{bits}-{self.rest}", seed, first * channels)
            parts += [codes, scales]
            bad += wrong
        if not is_abstract(bad) and bool(bad):
            return self.store_raw(tensor)
        shape, stride = tuple(tensor.shape), decoded_stride(tensor)
        return SegmentedEncoded(self.name, tuple(parts), shape, stride, tensor.dtype, False, segments)

    def decode(self, encoded: Encoded) -> Tensor:
        self.check_encoded(encoded)
        if encoded.raw:
            return encoded.payload[0].detach()
        if not isinstance(encoded, SegmentedEncoded):
            same = Encoded(
                self.uniform.name, encoded.payload, encoded.shape, encoded.stride, encoded.dtype, encoded.raw
            )
            return self.uniform.decode(same)
        parts = list(encoded.payload)
        mean = parts.pop(0) if self.uniform.form.centred else None
        channels = element_count(encoded.shape[2:])
        device = encoded.payload[0].device if encoded.payload else torch.device("cpu")
        flat = torch.empty(element_count(encoded.shape), dtype=encoded.dtype, device=device)
        for first, end, bits in encoded.segments:
            target = flat[first * channels : end * channels]
            if not bits:
                target.zero_()
                continue
            codes, scales = parts.pop(0), parts.pop(0)
            name = f"int{bits}-{self.rest}"
            target.copy_(ops.decode_groups(codes, scales, mean, name, target.numel(), encoded.dtype))
        return flat.as_strided(encoded.shape, encoded.stride)

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """At most this: the uniform codec's bytes and each segment's padding. Without weights exact but for that."""
        rows = shape[0] if len(shape) > 2 else 0
        return self.uniform.nbytes(shape, dtype) + SEGMENTS_PER_ROW * rows * _SEGMENT_PADDING

    def encode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        # The look for a NaN among dropped tokens makes booleans of them.
        return element_count(shape) + self.uniform.encode_workspace_bytes(shape, dtype, device_type)

    def decode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        # A segment is decoded apart and copied into its place.
        return element_count(shape) * dtype.itemsize + self.uniform.decode_workspace_bytes(shape, dtype, device_type)


@cache
def token_codec(name: str) -> TokenCodec | None:
    """The codec of this name, None where it names none."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    form = parse_form(f"int{found['bits']}-{found['rest']}")
    if form is None or form.outliers or form.asymmetric:
        return None
    return TokenCodec(name, int(found["bits"]), found["rest"])


def form_behind(name: str) -> GroupForm | None:
    """The form of a group codec, or the one that a token codec's bits average to; None for other codecs."""
    codec = token_codec(name)
    return parse_form(name) if codec is None else codec.uniform.form


__all__ = ["SegmentedEncoded", "TokenCodec", "form_behind", "token_codec"]
