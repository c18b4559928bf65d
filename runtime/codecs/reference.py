"""Group arithmetic in plain torch: what a codec computes, on any device; kernels.c must equal it bit for bit.

A flat tensor is cut into groups of ``group`` elements (the last may be smaller). Per group the largest magnitude is
stored in the tensor's own dtype, so exactly: nothing clips, the largest element and constant groups decode to
themselves, zeros to zeros. Codes are ``x / amax * levels``; rounding is to nearest, ties to even. Arithmetic is
float32 (float64 for float64 input). Source of the format e4m3: OCP 8-bit floating point (2023), largest value 448.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hilore.runtime.codecs.base import CHUNK_ELEMENTS


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """``levels``: the code of the group's largest magnitude. ``packed``: two codes per byte."""

    kind: str
    levels: int
    code_dtype: torch.dtype
    packed: bool

    def code_count(self, numel: int, group: int) -> int:
        """Elements of the code tensor (one byte each) for ``numel`` values."""
        if not self.packed:
            return numel
        return numel // group * (group // 2) + (numel % group + 1) // 2


FORMATS = {
    "int8": GroupFormat("int8", 127, torch.int8, packed=False),
    "int4": GroupFormat("int4", 7, torch.uint8, packed=True),
    "e4m3": GroupFormat("e4m3", 448, torch.float8_e4m3fn, packed=False),
}


def group_count(numel: int, group: int) -> int:
    return (numel + group - 1) // group


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def encode_groups(flat: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, largest magnitudes and the number of groups that are not finite.

    ``flat`` is ``[n]``; returns ``[code_count]`` codes, ``[ceil(n / group)]`` of ``flat``'s dtype and an int64
    ``[1]``. The codes of a group that is not finite mean nothing.
    """
    form, numel = FORMATS[kind], flat.numel()
    codes = torch.empty(form.code_count(numel, group), dtype=form.code_dtype, device=flat.device)
    peaks = torch.empty(group_count(numel, group), dtype=flat.dtype, device=flat.device)
    bad = torch.zeros(1, dtype=torch.int64, device=flat.device)
    for start, stop, width in _spans(numel, group):
        rows = flat[start:stop].view(-1, width)
        peak = rows.abs().amax(dim=1, keepdim=True)
        bad += (~torch.isfinite(peak)).sum()
        codes[form.code_count(start, group) : form.code_count(stop, group)] = _quantise(rows, peak, form).view(-1)
        peaks[start // group : group_count(stop, group)] = peak.view(-1)
    return codes, peaks, bad


def decode_groups(codes: Tensor, peaks: Tensor, kind: str, group: int, numel: int) -> Tensor:
    """The flat ``[numel]`` tensor of ``peaks``' dtype."""
    form = FORMATS[kind]
    flat = torch.empty(numel, dtype=peaks.dtype, device=peaks.device)
    for start, stop, width in _spans(numel, group):
        part = codes[form.code_count(start, group) : form.code_count(stop, group)]
        values = _values(part, form, width).to(work_dtype(peaks.dtype))
        peak = peaks[start // group : group_count(stop, group)].to(values.dtype).unsqueeze(1)
        flat[start:stop].view(-1, width).copy_(values * (1.0 / form.levels) * peak)
    return flat


def _spans(numel: int, group: int) -> list[tuple[int, int, int]]:
    """(start, stop, group width) of chunks of whole groups, then of the smaller last group."""
    whole, step = numel // group * group, max(1, CHUNK_ELEMENTS // group) * group
    spans = [(start, min(start + step, whole), group) for start in range(0, whole, step)]
    return spans if whole == numel else [*spans, (whole, numel, numel - whole)]


def _quantise(rows: Tensor, peak: Tensor, form: GroupFormat) -> Tensor:
    divisor = torch.where(peak == 0, 1, peak).to(work_dtype(rows.dtype))
    scaled = rows.to(divisor.dtype) / divisor * form.levels
    if form.kind == "e4m3":
        return scaled.to(torch.float8_e4m3fn)
    codes = torch.round(scaled).to(torch.int8)
    return _pack(codes) if form.packed else codes


def _pack(codes: Tensor) -> Tensor:
    """The first half of a group in the low four bits, the second in the high four."""
    half = (codes.shape[1] + 1) // 2
    packed = (codes[:, :half] & 15).view(torch.uint8)
    packed[:, : codes.shape[1] - half] |= codes[:, half:].view(torch.uint8) << 4
    return packed


def _values(codes: Tensor, form: GroupFormat, width: int) -> Tensor:
    if not form.packed:
        return codes.view(-1, width)
    packed = codes.view(-1, (width + 1) // 2).view(torch.int8)
    low, high = (packed << 4) >> 4, packed >> 4
    return torch.cat([low, high], dim=1)[:, :width]
