"""Group arithmetic in plain torch: what a group codec computes, on any device.

kernels.c equals it bit for bit; torch.compile of the two functions on blocks is what runs on CUDA (compiled.py).

A flat tensor is cut into blocks of 256 elements (the last one is filled up), these into groups. Per group one magnitude
(or a smallest and a largest value) is stored, never below what is in the group: nothing clips, and the group's
largest element decodes to itself unless a mean or a rotation is in between. Arithmetic is float32 (float64 for
float64 input); a division, products and sums are single operations, so that every back end rounds alike.

Sources: OCP 8-bit floating point (2023) for e4m3 and e5m2; Dettmers et al. 2023 (QLoRA) for nf4's values; OCP
microscaling formats (2023) for fp4 (e2m1); the hash is Wellons' lowbias32.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hilore.runtime.codecs.form import BLOCK, ROTATED, GroupForm
from hilore.runtime.codecs.packing import pack, unpack

SAMPLED_ROWS = 64
INDEX_STEP = 0x9E3779B1
FINE_LEVELS = 255
NUDGE = 1 + 2.0**-22
# Below TINY a scale's reciprocal would overflow: such groups are lifted by a power of two first.
_TINY = {torch.float32: 2.0**-100, torch.float64: 2.0**-900}
# A rotation sums 64 values; up to here no sum of decoded values can overflow.
_ROTATED_LIMIT = {torch.float32: 2.0**120, torch.float64: 2.0**1016}


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def encode_blocks(
    rows: Tensor, form: GroupForm, mean: Tensor | None, salt: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, parameters and the number of groups that cannot be encoded (not finite, too large for the format).

    ``rows`` ``[blocks, 256]``; ``mean`` ``[channels]``, the channel of element i being i mod channels; ``salt`` a
    0-dim int32 for stochastic rounding. Returns uint8 ``[blocks, block_bytes]``, ``[blocks, parameters]`` and an
    int64 ``[1]``.
    The codes of a group that cannot be encoded mean nothing.
    """
    values = rows.to(work_dtype(rows.dtype))
    if mean is not None:
        values = values - _by_element(mean.to(values.dtype), values)
    if form.rotated:
        values = rotate(values) * (1 / ROTATED)
    if not form.group:
        largest = values.abs().amax(dim=1, keepdim=True)
        return pack(_float_codes(values, form), form), rows[:, :0], _count(~(largest <= form.levels))
    groups = values.view(-1, BLOCK // form.group, form.group)
    dtype = form.parameter_dtype(rows.dtype)
    largest = groups.abs().amax(dim=2)
    fine, low = None, None
    if form.asymmetric:
        # Adding 0 leaves no negative zeros, whose order among zeros is nobody's.
        low = -_rounded_up(-groups.amin(dim=2), dtype) + 0
        high = _rounded_up(groups.amax(dim=2), dtype) + 0
        parameters = torch.stack((low, high), dim=2).view(groups.shape[0], -1)
        extent = high.to(values.dtype) - low.to(values.dtype)
    elif form.fine_scales:
        parameters = _rounded_up(largest.amax(dim=1, keepdim=True), dtype)
        fine, extent = _fine_scales(largest, parameters.to(values.dtype))
    else:
        parameters = _rounded_up(largest, dtype)
        extent = parameters.to(values.dtype)
    limit = _ROTATED_LIMIT[values.dtype] if form.rotated else torch.finfo(values.dtype).max
    bad = ~(largest <= limit) | ~torch.isfinite(extent)
    shifted = groups if low is None else groups - low.to(values.dtype).unsqueeze(2)
    scaled = _scaled(shifted, extent.unsqueeze(2), form.levels).view(values.shape)
    packed = pack(_codes(scaled, form, None if salt is None else uniform(scaled, salt)), form)
    return packed if fine is None else torch.cat((packed, fine), dim=1), parameters, _count(bad)


def decode_blocks(
    codes: Tensor, parameters: Tensor, form: GroupForm, dtype: torch.dtype, mean: Tensor | None
) -> Tensor:
    """Rows ``[blocks, 256]`` of ``dtype`` from uint8 ``[blocks, 32 bits]`` and ``[blocks, parameters]``."""
    work = work_dtype(dtype)
    values = _relative(unpack(codes, form), form, work)
    if form.group:
        groups = values.view(-1, BLOCK // form.group, form.group)
        stored = parameters.to(work)
        if form.asymmetric:
            low, high = stored.view(-1, BLOCK // form.group, 2, 1).unbind(2)
            groups = groups * (high - low) + low
        elif form.fine_scales:
            fine = codes[:, BLOCK // 8 * form.bits :].to(work)
            groups = groups * (stored * (fine * (1 / FINE_LEVELS))).unsqueeze(2)
        else:
            groups = groups * stored.unsqueeze(2)
        values = groups.reshape(-1, BLOCK)
    if form.rotated:
        values = rotate(values)
    if mean is not None:
        values = values + _by_element(mean.to(work), values)
    if form.rotated or mean is not None:
        # Half a step more than the largest number would be an infinity.
        most = torch.finfo(dtype).max
        values = values.clamp(-most, most)
    return values.to(dtype)


def channel_mean(flat: Tensor, channels: int) -> Tensor:
    """The mean of up to 64 evenly spread rows of ``channels`` values, in ``flat``'s dtype: ``[channels]``.

    The number of rows is a power of two, added in pairs, so that constant channels are exact and the order is fixed.
    """
    rows = flat.numel() // channels
    count = sampled_rows(rows)
    spacing = rows // count
    sample = flat.view(rows, channels)[spacing // 2 :: spacing][:count].to(work_dtype(flat.dtype))
    while sample.shape[0] > 1:
        half = sample.shape[0] // 2
        sample = sample[:half] + sample[half:]
    return (sample[0] * (1 / count)).to(flat.dtype)


def sampled_rows(rows: int) -> int:
    """The largest power of two that is at most ``rows`` and SAMPLED_ROWS."""
    return min(SAMPLED_ROWS, 1 << (rows.bit_length() - 1))


def rotate(values: Tensor) -> Tensor:
    """Every 64 values times the 64 x 64 Hadamard matrix of ones and minus ones (Sylvester's order); its own inverse
    but for a factor of 64. Sums are in pairs at distances 8, 16, 32, 1, 2, 4."""
    cube = values.view(-1, 8, 8)
    return _mix(_mix(cube, 1), 2).view(values.shape)


def _mix(cube: Tensor, dim: int) -> Tensor:
    parts = list(cube.unbind(dim))
    for distance in (1, 2, 4):
        parts = [
            parts[place] + parts[place + distance] if not place & distance else parts[place - distance] - parts[place]
            for place in range(8)
        ]
    return torch.stack(parts, dim)


def uniform(like: Tensor, salt: Tensor) -> Tensor:
    """Numbers in [0, 1), multiples of 2^-24, from a hash of ``salt`` and each element's index; of ``like``'s shape.

    int32 products wrap around.
    """
    index = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    hashed = index * _signed(INDEX_STEP) + salt
    hashed = (hashed ^ _shifted(hashed, 16)) * _signed(0x7FEB352D)
    hashed = (hashed ^ _shifted(hashed, 15)) * _signed(0x846CA68B)
    hashed = hashed ^ _shifted(hashed, 16)
    return (_shifted(hashed, 8).to(like.dtype) * 2.0**-24).view(like.shape)


def salt_of(seed: int, start: int) -> int:
    """What ``uniform`` adds to the index, for a tensor's part that begins at element ``start``: a signed 32-bit int."""
    mixed = seed & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 31)) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    return _signed(((mixed >> 32) + start * INDEX_STEP) & 0xFFFFFFFF)


def _fine_scales(largest: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Each group's scale as a share of its block's in 255ths, rounded up, uint8; and as it decodes."""
    ratio = largest / torch.where(whole == 0, torch.ones_like(whole), whole)
    share = torch.ceil(ratio * FINE_LEVELS).clamp(max=FINE_LEVELS)
    short = whole * (share * (1 / FINE_LEVELS)) < largest
    share = torch.where(short, share + 1, share).clamp(max=FINE_LEVELS)
    # Products of tiny scales are not exact enough to stay above their group's values.
    share = torch.where((whole < _TINY[whole.dtype]) & (largest > 0), torch.full_like(share, FINE_LEVELS), share)
    return share.to(torch.uint8), whole * (share * (1 / FINE_LEVELS))


def _rounded_up(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest values of ``dtype`` that are not below."""
    nearest = values.to(dtype)
    if dtype == values.dtype:
        return nearest
    as_integers = torch.int16 if dtype.itemsize == 2 else torch.int32
    step = torch.where(nearest < 0, -1, 1).to(as_integers)
    above = (nearest.view(as_integers) + step).view(dtype)
    smallest = torch.ones_like(step).view(dtype)
    above = torch.where(nearest == 0, smallest, above)
    return torch.where(nearest.to(values.dtype) < values, above, nearest)


def _scaled(groups: Tensor, extent: Tensor, levels: int) -> Tensor:
    tiny = _TINY[extent.dtype]
    one = torch.ones_like(extent)
    lift = torch.where(extent < tiny, one / tiny, one)
    # Not "levels / divisor", which torch computes as a reciprocal and a product: two roundings.
    factor = torch.full_like(extent, levels) / torch.where(extent == 0, one, extent * lift)
    factor = torch.where(extent == 0, torch.zeros_like(extent), factor)
    return groups * lift * factor


def _codes(scaled: Tensor, form: GroupForm, offsets: Tensor | None) -> Tensor:
    if form.kind in ("e4m3", "e5m2"):
        return _float_codes(scaled, form)
    if form.book:
        codes = torch.zeros_like(scaled, dtype=torch.int32)
        for threshold in thresholds(form):
            codes = codes + (scaled > threshold)
        return codes
    zero = 0 if form.asymmetric else form.levels
    if offsets is None:
        return torch.round(scaled).to(torch.int32) + zero
    # Nudged outwards, so that rounding errors leave the group's largest value the largest code.
    return torch.floor(scaled * NUDGE + offsets).clamp(-zero, form.levels).to(torch.int32) + zero


def thresholds(form: GroupForm) -> tuple[float, ...]:
    """Middles between neighbours of the format's values, as float32 numbers."""
    return tuple(float(torch.tensor((left + right) / 2)) for left, right in pairwise(form.book))


def _relative(codes: Tensor, form: GroupForm, work: torch.dtype) -> Tensor:
    """What the codes stand for, the group's largest magnitude (or range) being 1; without a scale the values."""
    if form.kind in ("e4m3", "e5m2"):
        values = _float_values(codes, form).to(work)
        return values * (1.0 / form.levels) if form.group else values
    if form.book:
        return torch.tensor(form.book, dtype=work, device=codes.device)[codes]
    zero = 0 if form.asymmetric else form.levels
    return (codes - zero).to(work) * (1.0 / form.levels)


def _float_codes(values: Tensor, form: GroupForm) -> Tensor:
    """8-bit float codes of values of magnitude at most ``levels``, ties to even.

    Integer arithmetic on float32 bits: casts to 8-bit floats are missing on some devices. Below the smallest normal
    number adding a power of two leaves the right number of mantissa bits.
    """
    dropped, smallest, carrier = (20, 0x3C800000, 2.0**14) if form.kind == "e4m3" else (21, 0x38800000, 2.0**7)
    bits = values.to(torch.float32).view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    half = (1 << (dropped - 1)) - 1
    normal = ((magnitude + half + ((magnitude >> dropped) & 1)) >> dropped) - _rebias(form)
    small = (magnitude.view(torch.float32) + carrier).view(torch.int32) - _bits_of(carrier)
    return torch.where(magnitude >= smallest, normal, small) | ((bits >> 24) & 0x80)


def _float_values(codes: Tensor, form: GroupForm) -> Tensor:
    dropped, first, step = (20, 8, 2.0**-9) if form.kind == "e4m3" else (21, 4, 2.0**-16)
    magnitude = codes & 0x7F
    normal = ((magnitude + _rebias(form)) << dropped).view(torch.float32)
    found = torch.where(magnitude >= first, normal, magnitude.to(torch.float32) * step)
    return torch.where(codes >= 0x80, -found, found)


def _rebias(form: GroupForm) -> int:
    return 120 << 3 if form.kind == "e4m3" else 112 << 2


def _bits_of(power_of_two: float) -> int:
    return int(torch.tensor(power_of_two).view(torch.int32))


def _by_element(mean: Tensor, values: Tensor) -> Tensor:
    index = torch.arange(values.numel(), device=values.device) % mean.shape[0]
    return mean[index].view(values.shape)


def _count(bad: Tensor) -> Tensor:
    return bad.sum().view(1)


def _shifted(values: Tensor, places: int) -> Tensor:
    """Logical shift to the right of int32."""
    return (values >> places) & ((1 << (32 - places)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
