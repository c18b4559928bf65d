"""How well predictions hold on data that nobody calibrated on: coverage with its certainty, and rankings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Certainty of the lower limit of a share (Clopper and Pearson 1934, one-sided).
CERTAINTY = 0.95


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of ``updates`` updates ``within`` kept their limit. ``lower``: Clopper-Pearson's lower limit of the share.

    ``median_ratio``, ``largest_ratio``: measured over allowed.
    """

    updates: int
    within: int
    share: float
    lower: float
    median_ratio: float
    largest_ratio: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """How a score orders what was measured. ``recall``: of the top share by measurement how much is in the top share by
    score; ``auroc``: that one of the top share has the higher score than one of the rest; ties count half."""

    spearman: float
    recall: float
    auroc: float


def coverage(measured: Floats, allowed: Floats | float) -> Coverage:
    """``measured`` and ``allowed`` errors of updates, [updates]; an error of 0 is within any limit."""
    limits = np.broadcast_to(np.asarray(allowed, dtype=np.float64), measured.shape)
    within = int(((measured <= limits) | (measured == 0)).sum())
    ratios = np.divide(measured, limits, out=np.zeros_like(measured), where=limits > 0)
    updates = len(measured)
    return Coverage(
        updates=updates,
        within=within,
        share=within / updates,
        lower=clopper_pearson_lower(within, updates),
        median_ratio=float(np.median(ratios)),
        largest_ratio=float(ratios.max()),
    )


def clopper_pearson_lower(successes: int, trials: int, certainty: float = CERTAINTY) -> float:
    """The smallest share that makes so many successes or more no less likely than 1 - certainty."""
    if successes == 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_least(successes, trials, middle) < 1 - certainty:
            low = middle
        else:
            high = middle
    return low


def ranking(score: Floats, measured: Floats, *, top: float = 0.1) -> Ranking:
    """Of two arrays of equal length, NaN nowhere; ``top``: the share that counts as positive, one at least."""
    count = max(1, round(top * len(measured)))
    positive = np.zeros(len(measured), dtype=bool)
    positive[np.argsort(-measured, kind="stable")[:count]] = True
    ranks = average_ranks(score)
    above = ranks[positive].sum() - count * (count + 1) / 2
    rest = len(measured) - count
    # Ties at the edge of the top share are in it by their part.
    edge = np.sort(score)[-count]
    inside, ties = score > edge, score == edge
    free = count - int(inside.sum())
    found = float((positive & inside).sum()) + free * float((positive & ties).sum()) / int(ties.sum())
    return Ranking(
        spearman=correlation(ranks, average_ranks(measured)),
        recall=found / count,
        auroc=float(above / (count * rest)) if rest else 1.0,
    )


def average_ranks(values: Floats) -> Floats:
    """Ranks from 1, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: Floats = (last - (counts - 1) / 2)[inverse]
    return means


def correlation(one: Floats, other: Floats) -> float:
    """Pearson's; 0 where one of them does not vary."""
    first, second = one - one.mean(), other - other.mean()
    norm = math.sqrt(float((first**2).sum()) * float((second**2).sum()))
    return float((first * second).sum()) / norm if norm else 0.0


def _at_least(successes: int, trials: int, share: float) -> float:
    """P(Bin(trials, share) >= successes)."""
    if share <= 0:
        return 0.0
    if share >= 1:
        return 1.0
    logs = [
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(share)
        + (trials - k) * math.log1p(-share)
        for k in range(successes, trials + 1)
    ]
    top = max(logs)
    return math.exp(top) * math.fsum(math.exp(value - top) for value in logs)
