"""Exposure regimes and the error that each may cause: the rule that turns the contract into risk limits.

The contract is on a complete update: ``|sum_b e_b| <= delta * delta_star * |sum_b g_b|``, e_b the error of microbatch
b's gradient g_b. Errors of microbatches add in quadrature, gradients too (measured: their cosines are near 0; what is
left of either is in the calibrated interaction factor), and the relative error kappa of one microbatch does not
depend on its exposure, since gradients are linear in omega. With the shares ``q_b = |g_b|^2 / sum |g|^2`` that leaves

    (|sum e| / |sum g|)^2 = sum_b q_b kappa_b^2,        an average with weights that add up to 1.

A regime's **allowance** x lets its plan have ``kappa^2 <= x (delta * delta_star)^2``; the contract is then
``sum_b q_b x_b <= 1``. Exposure alone does not give q_b: that takes the other microbatches of the update, which are not
known yet.

``each`` (the default): x = 1 for every exposure above 0. An average of numbers within a limit is within it, so the
contract holds for every update, whatever exposures meet in it. And no rule that judges microbatches one by one loses
less: one with x(psi) > 1 anywhere breaks the contract on the update whose microbatches all have that psi, one with
x(psi) < 1 can be raised. (A rule on absolute error, x = (psi_reference / psi)^2, breaks it exactly where a whole update
has little exposure, and gives away what an update of much exposure may have.)

``joint``: allowances that fall with exposure, ``x_low >= x_mid >= x_high``, cut and sized for the least expected time
such that ``sum_b q_b x_b <= 1`` holds at the stated confidence over the updates that calibration saw, runs of
microbatches in the order of training. Microbatches of low exposure have small shares, so that what they may have more
costs the others little. This rests on the mixture of exposures as well as on kappa: updates made up otherwise can miss
it, which the rule ``each`` cannot. Hence an option.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hilore.planner.conformal import Floats, consecutive_updates, upper_bound
from hilore.planner.trace import Calibration
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan

RULES = ("each", "joint")
LABELS = ("null", "low", "mid", "high")
# Allowances that the joint rule chooses among: half-octaves.
ALLOWANCES = tuple(2.0 ** (step / 2) for step in range(-4, 9))
CUTS = 8
# Above what calibration saw a plan with its L units recomputed runs; bounds made before a forward need room.
HEADROOM = 2.0


@dataclass(frozen=True, slots=True)
class RegimeInterval:
    """An interval of exposure, ``low < psi <= high``, how often calibration saw it, and its allowance."""

    label: str
    low: float
    high: float
    frequency: float
    allowance: float = 1.0


def regimes(calibration: Calibration) -> tuple[RegimeInterval, ...]:
    """null, low, mid, high under the rule ``each``. Raises HiloreError where the edges do not ascend."""
    low, mid, high = calibration.psi_edges
    if not 0 <= low <= mid <= high or not math.isfinite(high):
        raise HiloreError(f"calibration.psi_edges {calibration.psi_edges}: must be finite, ascending and not negative")
    return _intervals((low, mid, high), calibration.frequencies, (1.0, 1.0, 1.0))


def edges_and_frequencies(
    exposures: Sequence[float],
) -> tuple[tuple[float, float, float], tuple[float, float, float, float]]:
    """Edges that cut the exposures above 0 into thirds (three figures, rounded up), and the share of each regime.

    Raises HiloreError where there is no exposure above 0.
    """
    seen = sorted(psi for psi in exposures if psi > 0)
    if not seen:
        raise HiloreError("every microbatch has exposure 0 (flat groups): there is nothing to calibrate on")
    low, mid = (_rounded_up(seen[math.ceil(len(seen) * part / 3) - 1]) for part in (1, 2))
    high = _rounded_up(seen[-1] * HEADROOM)
    return (low, mid, high), _frequencies(exposures, (low, mid))


def joint_regimes(
    calibration: Calibration, times_ns: Sequence[tuple[float, int]], *, accumulation: int
) -> tuple[RegimeInterval, ...]:
    """null, low, mid, high under the rule ``joint``.

    ``times_ns``: allowance and step time of the plan it gives, ascending, allowance 1 among them. Falls back to the
    allowances 1, 1, 1 exactly when nothing is faster. Raises HiloreError without samples of microbatches.
    """
    if not calibration.samples:
        raise HiloreError(
            "the rule joint weighs exposures that calibration saw, and this trace has none; type: hilore-plan "
            "calibrate model.yaml --rollouts FILE"
        )
    time_of = dict(times_ns)
    exposures = np.array([sample.psi for sample in calibration.samples])
    high = calibration.psi_edges[2]
    best = regimes(calibration)
    best_ns = _expected_ns(best, time_of)
    updates = _Updates(calibration, accumulation)
    for low, mid in _cuts(exposures):
        frequencies = _frequencies(exposures.tolist(), (low, mid))
        shares = updates.shares((low, mid))
        for allowances in itertools.combinations_with_replacement(sorted(time_of, reverse=True), 3):
            made = _intervals((low, mid, max(high, mid)), frequencies, allowances)
            expected_ns = _expected_ns(made, time_of)
            if expected_ns < best_ns and updates.keep(shares, allowances):
                best, best_ns = made, expected_ns
    return best


def plan_limit(plan: Plan) -> float | None:
    """The relative error that an update may have whose microbatches all run under this plan; None at exposure 0."""
    if plan.regime.exposure_high == 0:
        return None
    return plan.delta * plan.delta_star * math.sqrt(plan.regime.allowance)


class _Updates:
    """The updates that calibration saw, and what they may have."""

    def __init__(self, calibration: Calibration, accumulation: int) -> None:
        samples = calibration.samples
        self._psi = np.array([sample.psi for sample in samples])
        weight = np.array([sample.weight for sample in samples])
        picks = consecutive_updates(len(samples), accumulation)
        total = weight[picks].sum(axis=1)
        # An update without gradient has no error.
        self._picks = picks[total > 0]
        score2 = np.array([sample.score2 for sample in samples])
        self._parts: Floats = (weight * score2)[self._picks] / total[total > 0][:, None]
        self._samples = int((weight > 0).sum())
        self._confidence = calibration.confidence
        self._most = self._bound(self._parts.sum(axis=1))

    def shares(self, cuts: tuple[float, float]) -> Floats:
        """What each regime has of every update's squared error at allowance 1, [updates, 3]."""
        regime = np.searchsorted(np.array(cuts), self._psi[self._picks], side="left")
        return np.stack([(self._parts * (regime == place)).sum(axis=1) for place in range(3)], axis=1)

    def keep(self, shares: Floats, allowances: tuple[float, ...]) -> bool:
        """Whether the bound on the squared error is no higher than at allowance 1, which interaction was sized for."""
        return self._bound(shares @ np.array(allowances)) <= self._most * (1 + 1e-12)

    def _bound(self, squared: Floats) -> float:
        return upper_bound(squared, self._samples, self._confidence)


def _intervals(
    edges: tuple[float, float, float], frequencies: Sequence[float], allowances: tuple[float, ...]
) -> tuple[RegimeInterval, ...]:
    ends = (0.0, 0.0, *edges)
    every = (1.0, *allowances)
    return tuple(
        RegimeInterval(label, ends[place], ends[place + 1], frequencies[place], every[place])
        for place, label in enumerate(LABELS)
    )


def _expected_ns(intervals: tuple[RegimeInterval, ...], time_of: dict[float, int]) -> float:
    return sum(interval.frequency * time_of[interval.allowance] for interval in intervals[1:])


def _cuts(exposures: Floats) -> Iterator[tuple[float, float]]:
    """Pairs of cuts at quantiles of the exposures above 0."""
    seen = exposures[exposures > 0]
    if not len(seen):
        return
    places = np.quantile(seen, np.arange(1, CUTS) / CUTS, method="inverted_cdf")
    yield from itertools.combinations(sorted({_rounded_up(float(place)) for place in places}), 2)


def _frequencies(exposures: Sequence[float], cuts: tuple[float, float]) -> tuple[float, float, float, float]:
    counts = [0, 0, 0, 0]
    for psi in exposures:
        counts[0 if psi == 0 else 1 + (psi > cuts[0]) + (psi > cuts[1])] += 1
    null, low, mid, high = (count / len(exposures) for count in counts)
    return null, low, mid, high


def _rounded_up(value: float) -> float:
    """Three figures."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.3g}")
