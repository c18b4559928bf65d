"""How much the tokens of a microbatch weigh in its gradient, and how many bits each then takes.

A token whose value is kept with b bits adds about ``w 4^-b`` to the squared gradient error. With the mean number of
bits given, the error is least where ``b = c + log2(w) / 2``. Weights are relative: a completion token of a row weighs
the row's mean squared coefficient; a prompt token PROMPT_WEIGHT of it (2 bits less), as only what attention reads of
it reaches the loss; what no loss token can see, a row of zero coefficients, padding, weighs 0 and takes no bits: its
gradient is exactly 0. docs/measurements/fidelity.md has what that gains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

PROMPT_WEIGHT = 1 / 16
LEAST_BITS, MOST_BITS = 2, 12
SEGMENTS_PER_ROW = 4

Segment = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """``segments``: (first, end, weight) over the flattened tokens [rows x tokens], in order, without gaps."""

    rows: int
    tokens: int
    segments: tuple[tuple[int, int, float], ...]

    def bits(self, mean_bits: int) -> tuple[Segment, ...]:
        """(first, end, bits) with a mean of at most ``mean_bits`` bits per token; 0 bits: nothing is kept."""
        return _allotted(self.segments, mean_bits)


@lru_cache(maxsize=16)
def _allotted(segments: tuple[tuple[int, int, float], ...], mean_bits: int) -> tuple[Segment, ...]:
    sizes = [end - first for first, end, _ in segments]
    shifts = [0.5 * math.log2(weight) if weight > 0 else None for _, _, weight in segments]
    room = mean_bits * sum(sizes)
    level = _level(sizes, shifts, room)
    bits = [0 if shift is None else _clamped(math.floor(level + shift)) for shift in shifts]
    room -= sum(size * count for size, count in zip(sizes, bits, strict=True))
    # What rounding down left over goes where one bit more helps most for its size.
    order = sorted(
        (i for i, shift in enumerate(shifts) if shift is not None),
        key=lambda i: (level + (shifts[i] or 0.0) - bits[i], -sizes[i]),
        reverse=True,
    )
    for i in order:
        if sizes[i] <= room and bits[i] < MOST_BITS:
            bits[i] += 1
            room -= sizes[i]
    return tuple((first, end, count) for (first, end, _), count in zip(segments, bits, strict=True))


def _clamped(bits: float) -> int:
    return int(min(max(bits, LEAST_BITS), MOST_BITS))


def _level(sizes: list[int], shifts: list[float | None], room: int) -> float:
    """The largest c (to 2^-20) at which the clamped ``c + log2(w) / 2`` need no more than ``room`` bits in all."""
    low, high = -64.0, 64.0
    for _ in range(28):
        middle = (low + high) / 2
        pairs = zip(sizes, shifts, strict=True)
        need = sum(s * min(max(middle + x, LEAST_BITS), MOST_BITS) for s, x in pairs if x is not None)
        low, high = (middle, high) if need <= room else (low, middle)
    return low


def token_weights(
    coefficients: Tensor, mask: Tensor, tokens: int, prompt_mask: Tensor | None = None
) -> TokenWeights | None:
    """Weights of rows of ``tokens`` tokens, whose last ``T`` are the completion.

    ``coefficients`` [B, T]: |omega| in any unit (or a bound of it), 0 where ``mask`` [B, T] is;
    ``prompt_mask`` [B, tokens - T]: 0 at padding (None: no padding). None where the rows are shorter than the mask.
    Log-probs come from the position before theirs, so everything is one place to the left.
    """
    rows, width = mask.shape
    prompt = tokens - width
    if prompt < 1 or (prompt_mask is not None and tuple(prompt_mask.shape) != (rows, prompt)):
        return None
    seen = mask != 0
    places = torch.arange(1, width + 1, device=mask.device)
    ends = (seen * places).amax(1) if width else torch.zeros(rows, dtype=torch.long, device=mask.device)
    squares = (coefficients.double().square() * seen).sum(1) / seen.sum(1).clamp(min=1)
    if prompt_mask is None:
        starts = torch.zeros_like(ends)
    else:
        first = torch.arange(prompt, 0, -1, device=mask.device)
        starts = prompt - ((prompt_mask != 0) * first).amax(1)
    found: list[tuple[int, int, float]] = []
    table = torch.stack([starts.double(), ends.double(), squares]).tolist()
    for row, (start, end, square) in enumerate(zip(*table, strict=True)):
        _row(found, row * tokens, tokens, int(start), prompt - 1, prompt - 1 + int(end), square)
    return TokenWeights(rows, tokens, tuple(found))


def _row(
    found: list[tuple[int, int, float]], base: int, tokens: int, start: int, answer: int, end: int, weight: float
) -> None:
    """The segments of one row: padding, prompt, completion, what follows the last loss token."""
    if end <= answer:
        weight = 0.0
    start = min(start, answer)
    cuts = (0, start, answer, max(end, answer), tokens)
    for (first, last), value in zip(pairwise(cuts), (0.0, PROMPT_WEIGHT * weight, weight, 0.0), strict=True):
        if last == first:
            continue
        if found and found[-1][2] == value and found[-1][1] == base + first:
            found[-1] = (found[-1][0], base + last, value)
        else:
            found.append((base + first, base + last, value))


__all__ = ["PROMPT_WEIGHT", "SEGMENTS_PER_ROW", "Segment", "TokenWeights", "token_weights"]
