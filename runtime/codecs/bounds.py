"""How far the values of a payload can be from those that were encoded."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hilore.runtime.codecs.base import Encoded, element_count
from hilore.runtime.codecs.channels import channel_count
from hilore.runtime.codecs.flat import decode_flat, whole_rows
from hilore.runtime.codecs.form import BLOCK, ROTATED, GroupForm, blocks
from hilore.runtime.codecs.reference import FINE_LEVELS

# Of a group's extent: what single-precision arithmetic may add to the rounding to a code.
_ARITHMETIC = 2.0**-19


def error_bound(form: GroupForm, encoded: Encoded) -> Tensor:
    """Per element of a payload that is not raw the most by which it can be off, float64, in its shape and stride.

    Half a step of its group (a whole one for stochastic rounding), the error of the mean's sums and of the rounding to
    the dtype. A rotation adds up the bounds of its 64 values, so that this bound is loose: errors there are
    nearly normal with a standard deviation of eight times a rotated value's.
    """
    codes, parameters, *more = encoded.payload
    numel, dtype = element_count(encoded.shape), encoded.dtype
    mean = more.pop(0) if form.centred else None
    mean = mean if mean is not None and mean.numel() else None
    decoded = decode_flat(codes, parameters, mean, form, numel, dtype).double()
    bound = _rounding(form, codes, parameters, numel).view(-1)
    if form.rotated:
        bound = bound.view(-1, ROTATED).sum(dim=1, keepdim=True).expand(-1, ROTATED).reshape(-1)
    bound = bound[:numel] + decoded.abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    if mean is not None:
        spread = mean.double().abs()[torch.arange(numel, device=mean.device) % mean.numel()]
        bound += spread * (2.0**-22 if dtype != torch.float64 else 2.0**-50)
    if more and numel:
        bound.view(-1, channel_count(encoded.shape)).index_fill_(1, more[0].long(), 0)
    return bound.as_strided(encoded.shape, encoded.stride)


def _rounding(form: GroupForm, codes: Tensor, parameters: Tensor, numel: int) -> Tensor:
    """Of the rounding to codes alone, ``[blocks, 256]``."""
    count = blocks(numel)
    rows = whole_rows(codes, 0, count, form.block_bytes)
    stored = whole_rows(parameters, 0, count, form.block_parameters).double()
    if not form.group:
        return _of_floats(form, rows)
    groups = BLOCK // form.group
    if form.asymmetric:
        low, high = stored.view(count, groups, 2).unbind(2)
        extent, magnitude = high - low, torch.maximum(low.abs(), high.abs())
    else:
        extent = stored
        if form.fine_scales:
            extent = stored * rows[:, BLOCK // 8 * form.bits :].double() / FINE_LEVELS
        magnitude = extent
    if form.kind in ("e4m3", "e5m2"):
        step = _of_floats(form, rows).view(count, groups, form.group) * (extent / form.levels).unsqueeze(2)
    else:
        widest = max((right - left for left, right in pairwise(form.book)), default=1 / form.levels)
        step = (extent * widest * (1 if form.stochastic else 0.5)).unsqueeze(2).expand(-1, -1, form.group)
    return (step + (magnitude * _ARITHMETIC).unsqueeze(2)).reshape(count, BLOCK)


def _of_floats(form: GroupForm, rows: Tensor) -> Tensor:
    """Half the distance to the next code, for every code."""
    kind, unit = (torch.float8_e4m3fn, 2.0**-10) if form.kind == "e4m3" else (torch.float8_e5m2, 2.0**-17)
    values = rows[:, :BLOCK].contiguous().view(kind).double().abs()
    return (values * (2.0**-4 if form.kind == "e4m3" else 2.0**-3)).clamp(min=unit)
