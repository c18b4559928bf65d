"""The group codecs' names and what they mean: ``int6-g128-asym-cm-sr`` and so on, and the sizes that follow.

A name is a number format, then options in this order:

| part | meaning |
|---|---|
| ``int2`` to ``int12`` | integers of that many bits |
| ``nf4``, ``fp4``; ``fp8-e4m3``, ``fp8-e5m2`` | 16 values; 8-bit floats |
| ``-plain`` | fp8 without a scale; nothing else may follow |
| ``-g32`` to ``-g256`` | elements that share a scale; needed but by fp8, where it is 128 without |
| ``-s8`` | scales are 8-bit fractions of one scale per 256 elements |
| ``-asym`` | smallest and largest value per group instead of one magnitude (integers without ``-s8``, ``-h64``) |
| ``-oc`` | one channel in 128, those of the largest magnitudes, kept apart and exact (without ``-h64``) |
| ``-cm`` | a mean per channel taken off before, from a sample of rows, stored with the payload |
| ``-h64`` | every 64 values rotated by a Hadamard matrix before rounding |
| ``-sr`` | stochastic rounding (integers), else to nearest |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch

# Elements that are packed together; every group size divides it.
BLOCK = 256
ROTATED = 64
GROUPS = (32, 64, 128, 256)
BITS = tuple(range(2, 13))
FLOAT_GROUP = 128
CHANNELS_PER_OUTLIER = 128
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = tuple(value / 6 for value in (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
_PATTERN = re.compile(
    r"(?:int(?P<bits>\d+)|(?P<format>nf4|fp4|fp8-e4m3|fp8-e5m2))(?P<plain>-plain)?(?:-g(?P<group>\d+))?(?P<s8>-s8)?"
    r"(?P<asym>-asym)?(?P<oc>-oc)?(?P<cm>-cm)?(?P<h64>-h64)?(?P<sr>-sr)?"
)


@dataclass(frozen=True, slots=True)
class GroupForm:
    """One group codec. ``kind``: "int", "nf4", "fp4", "e4m3" or "e5m2"; ``group`` 0: no scale."""

    name: str
    kind: str
    bits: int
    group: int
    fine_scales: bool = False
    asymmetric: bool = False
    outliers: bool = False
    centred: bool = False
    rotated: bool = False
    stochastic: bool = False

    @property
    def levels(self) -> int:
        """What the group's largest magnitude (asymmetric: its range) is scaled to."""
        if self.kind == "int":
            return (1 << self.bits) - 1 if self.asymmetric else (1 << (self.bits - 1)) - 1
        return {"e4m3": 448, "e5m2": 57344}.get(self.kind, 1)

    @property
    def book(self) -> tuple[float, ...]:
        """The values of a 4-bit format, ascending, relative to the group's largest magnitude."""
        return {"nf4": NF4, "fp4": FP4}.get(self.kind, ())

    @property
    def pieces(self) -> tuple[int, ...]:
        """Widths of the bit fields that a code is cut into, from its low bits: powers of two, so that each packs."""
        return tuple(width for width in (8, 4, 2, 1) if self.bits & width)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's codes, with the 8-bit scales behind them."""
        return BLOCK // 8 * self.bits + (BLOCK // self.group if self.fine_scales else 0)

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        if self.fine_scales or not self.group:
            return int(self.fine_scales)
        return BLOCK // self.group * (2 if self.asymmetric else 1)

    def coded(self, numel: int) -> int:
        """How many values of the last block are needed to decode ``numel``: all of a rotated 64."""
        return -(-numel // ROTATED) * ROTATED if self.rotated else numel

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes. Plain bytes take one each, others come in whole blocks."""
        return self.coded(numel) if self.block_bytes == BLOCK else blocks(numel) * self.block_bytes

    def parameter_count(self, numel: int) -> int:
        """Scales, or pairs of smallest and largest value, of all groups; scales of blocks with ``-s8``."""
        if self.fine_scales:
            return blocks(numel)
        if not self.group:
            return 0
        return -(-self.coded(numel) // self.group) * (2 if self.asymmetric else 1)

    def parameter_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The tensor's own, in which a group's largest magnitude is exact; bfloat16, rounded up, after ``-cm``."""
        return torch.bfloat16 if self.centred else dtype

    def outlier_count(self, channels: int) -> int:
        return -(-channels // CHANNELS_PER_OUTLIER) if self.outliers else 0


def blocks(numel: int) -> int:
    return (numel + BLOCK - 1) // BLOCK


@cache
def parse_form(name: str) -> GroupForm | None:
    """The form of this name, None where it names none."""
    found = _PATTERN.fullmatch(name)
    if found is None:
        return None
    part = found.groupdict()
    kind = "int" if part["bits"] else part["format"].removeprefix("fp8-")
    bits = int(part["bits"] or (8 if kind in ("e4m3", "e5m2") else 4))
    options = [key for key in ("s8", "asym", "oc", "cm", "h64", "sr") if part[key]]
    if part["plain"]:
        if kind not in ("e4m3", "e5m2") or part["group"] or options:
            return None
        return GroupForm(name, kind, bits, 0)
    group = int(part["group"] or (FLOAT_GROUP if bits == 8 and kind != "int" else 0))
    if group not in GROUPS or bits not in BITS or f"int0{bits}" in name:
        return None
    if (part["asym"] and (part["h64"] or part["s8"])) or (part["oc"] and part["h64"]):
        return None
    if kind != "int" and (part["asym"] or part["sr"]):
        return None
    flags = (bool(part[key]) for key in ("s8", "asym", "oc", "cm", "h64", "sr"))
    return GroupForm(name, kind, bits, group, *flags)


def form_of(name: str) -> GroupForm:
    form = parse_form(name)
    assert form is not None, name
    return form


@cache
def all_names() -> tuple[str, ...]:
    """Every valid name, for guessing what a misspelt one meant."""
    options = [""]
    for option in ("-s8", "-asym", "-oc", "-cm", "-h64", "-sr"):
        options += [before + option for before in options]
    formats = (*(f"int{bits}" for bits in BITS), "nf4", "fp4", "fp8-e4m3", "fp8-e5m2")
    groups = ("", *(f"-g{group}" for group in GROUPS))
    names = [f"{form}{group}{option}" for form in formats for group in groups for option in options]
    return tuple(name for name in (*names, "fp8-e4m3-plain", "fp8-e5m2-plain") if parse_form(name) is not None)
