"""Statistics of times that were measured side by side: paired within a round, medians, bootstrap over rounds.

A machine's speed drifts from minute to minute, but two policies of one round see the same minute: only their ratio
is used, and only whole rounds are resampled, so that figures that share a reference share its noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
CONFIDENCE = 0.95

Floats = NDArray[np.float64]
Picks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the ends of its bootstrap interval (percentiles, ``CONFIDENCE``)."""

    value: float
    low: float
    high: float


def resampled_rounds(rounds: int, *, resamples: int = RESAMPLES, seed: int = 0) -> Picks:
    """Indices [resamples, rounds] of rounds drawn with replacement; row by row one resample."""
    if rounds < 1 or resamples < 1:
        raise ValueError(f"{rounds} rounds and {resamples} resamples: at least one of each")
    return np.random.default_rng(seed).integers(0, rounds, size=(resamples, rounds), dtype=np.int64)


def paired_gain(reference_ns: Sequence[int], policy_ns: Sequence[int], picks: Picks) -> Interval:
    """How much faster than the reference: median of reference / policy, less 1 (0.1 is 10 %)."""
    return _interval(lambda ratios: np.median(ratios, axis=-1) - 1, _ratios(reference_ns, policy_ns), picks)


def paired_ratio(reference_ns: Sequence[int], policy_ns: Sequence[int], picks: Picks) -> Interval:
    """How much time against the reference: median of policy / reference (1.02 is 2 % slower)."""
    return _interval(lambda ratios: np.median(ratios, axis=-1), _ratios(policy_ns, reference_ns), picks)


def paired_share(
    reference_ns: Sequence[int], policy_ns: Sequence[int], best_ns: Sequence[int], picks: Picks
) -> Interval | None:
    """Part of the best policy's gain over the reference that a policy reaches; both resampled from the same rounds.

    None where the best one's gain is not above 0 with confidence: then there is nothing to have a part of.
    """
    gains = _ratios(reference_ns, policy_ns)
    best = _ratios(reference_ns, best_ns)
    if paired_gain(reference_ns, best_ns, picks).low <= 0:
        return None
    value = (np.median(gains) - 1) / (np.median(best) - 1)
    above = np.median(best[picks], axis=1) - 1
    # A resample in which the best gain vanishes says nothing; with a lower end above 0 these are at most 2.5 %.
    usable = above > 0
    shares = (np.median(gains[picks], axis=1) - 1)[usable] / above[usable]
    return Interval(float(value), *_ends(shares))


def median_interval(values: Sequence[float], picks: Picks) -> Interval:
    """Median of one figure per round, with its interval."""
    return _interval(lambda found: np.median(found, axis=-1), np.asarray(values, dtype=np.float64), picks)


def _interval(figure: Callable[[Floats], Any], ratios: Floats, picks: Picks) -> Interval:
    return Interval(float(figure(ratios)), *_ends(figure(ratios[picks])))


def _ends(values: Floats) -> tuple[float, float]:
    rest = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [rest, 1 - rest])
    return float(low), float(high)


def _ratios(above: Sequence[int], below: Sequence[int]) -> Floats:
    if len(above) != len(below):
        raise ValueError(f"{len(above)} and {len(below)} rounds: times are paired within a round")
    return np.asarray(above, dtype=np.float64) / np.asarray(below, dtype=np.float64)
