"""Split conformal bounds: which order statistic of a sample bounds the next value with a stated confidence.

Of n exchangeable scores and one more, the new one is at most the k-th smallest of the n with probability of at least
k / (n + 1); so confidence 1 - a takes k = ceil((n + 1)(1 - a)), and n scores carry at most n / (n + 1) (Vovk, Gammerman
and Shafer 2005; Lei et al. 2018, arXiv:1604.04173). Scores of updates that are resampled from n microbatches are not n
independent ones: there the same *level* (1 - a)(n + 1) / n is taken of their distribution, which is above 1 - a by what
n samples cannot tell, so that resampling adds no confidence. (As many scores as samples: rank k again.)
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hilore.runtime.errors import HiloreError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class ConfidenceError(HiloreError):
    """A confidence that a sample cannot carry. Attributes: ``confidence``, ``found``, ``needed``."""


def needed_samples(confidence: float) -> int:
    """The smallest n with n / (n + 1) >= confidence, exactly."""
    wanted = Fraction(str(confidence))
    return math.ceil(wanted / (1 - wanted))


def check_confidence(found: int, confidence: float, what: str) -> None:
    """Raise ConfidenceError where ``found`` samples (called ``what``) cannot carry the confidence."""
    needed = needed_samples(confidence)
    if found < needed:
        raise ConfidenceError(
            f"{found} {what} carry a confidence of at most {found}/{found + 1}, not {confidence}; it needs {needed} of "
            "them: record more rollouts, or lower calibration.confidence",
            confidence=confidence,
            found=found,
            needed=needed,
        )


def upper_bound(scores: Floats, samples: int, confidence: float) -> float:
    """The order statistic of ``scores`` that bounds a new one, at the level that ``samples`` independent ones carry.

    With as many scores as samples this is the split conformal bound itself. Raises ConfidenceError.
    """
    check_confidence(samples, confidence, "samples")
    level = Fraction(str(confidence)) * Fraction(samples + 1, samples)
    rank = math.ceil(level * len(scores))
    return float(np.partition(scores, rank - 1)[rank - 1])


def resampled_updates(microbatches: int, size: int, *, updates: int = 1000, seed: int = 0) -> Integers:
    """``updates`` draws of distinct microbatches, [updates, size or less].

    Never more than half of the microbatches, so that updates differ. Errors of smaller updates vary more, which makes
    a bound from them wider, not narrower.
    """
    taken = max(1, min(size, microbatches // 2))
    draw = np.random.default_rng(seed)
    return np.argsort(draw.random((updates, microbatches)), axis=1, kind="stable")[:, :taken].astype(np.int64)


def consecutive_updates(microbatches: int, size: int) -> Integers:
    """Every run of ``size`` microbatches (never more than half of them) in the order of training, end to end in a ring.

    [microbatches, size or less]. What meets in an update is no accident: whole groups of completions do.
    """
    taken = max(1, min(size, microbatches // 2))
    return (np.arange(microbatches)[:, None] + np.arange(taken)) % microbatches


def disjoint_updates(microbatches: int, size: int) -> Integers:
    """Runs of ``size`` microbatches in the order of training that share none, [microbatches // size, size].

    One shorter run where there are fewer microbatches than that.
    """
    taken = max(1, min(size, microbatches))
    whole = microbatches // taken
    return np.arange(whole * taken, dtype=np.int64).reshape(whole, taken)
