"""Measured microbatches -> the Calibration: kappa2, interaction bound, exposure samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hilore.planner.calibration_fit import Observation, RiskModel, fit
from hilore.planner.calibration_plans import LossyUnit
from hilore.planner.conformal import Floats, Integers, check_confidence, resampled_updates, upper_bound
from hilore.planner.trace import ExposureSample
from hilore.planner.updates import Composer, MeasuredMicrobatch

FOLDS = 5


@dataclass(frozen=True, slots=True)
class Bound:
    """``interaction``: an update's error over what was predicted of it, at most, with the confidence; ``mean``: its
    root mean square. ``samples``: of the microbatches in the order given."""

    interaction: float
    mean: float
    samples: tuple[ExposureSample, ...]


@dataclass(frozen=True, slots=True)
class ScoredPlan:
    """A plan that every microbatch ran under and that took no part in the fit; ``place``: in the errors of each."""

    place: int
    units: tuple[LossyUnit, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Measurements:
    """What a calibration rests on: its random plans' errors, and every microbatch under each of ``plans``.

    ``exposed``: places in ``measured`` of those that have an exposure.
    """

    observations: tuple[Observation, ...]
    plans: tuple[ScoredPlan, ...]
    measured: tuple[MeasuredMicrobatch, ...]
    exposed: tuple[int, ...]


def folds_of(microbatches: Sequence[int]) -> dict[int, int]:
    """The fold of each microbatch, by turns."""
    return {place: turn % FOLDS for turn, place in enumerate(microbatches)}


def cross_fitted(observations: Sequence[Observation], regions: int, folds: Mapping[int, int]) -> tuple[RiskModel, ...]:
    """For each fold the model fitted without its microbatches; with one microbatch alone, the one fit there is."""
    if len(folds) == 1:
        return (fit(observations, regions),) * FOLDS
    return tuple(
        fit([found for found in observations if folds[found.microbatch] != fold], regions) for fold in range(FOLDS)
    )


def bound_errors(
    measured: Sequence[MeasuredMicrobatch],
    plans: Sequence[ScoredPlan],
    models: Sequence[RiskModel],
    folds: Mapping[int, int],
    *,
    loss_kind: str,
    accumulation: int,
    confidence: float,
) -> Bound:
    """Split conformal over updates resampled from the microbatches, those of exposure 0 among them.

    An update's score is its measured error over the predicted one; a microbatch's error is predicted by the model that
    was fitted without it, and models are fitted on other plans. What is promised is promised of one plan, so each of
    ``plans`` has its bound, and the largest of them is the one that counts. Raises ConfidenceError.
    """
    exposed = sum(found.gradient.square > 0 for found in measured)
    check_confidence(exposed, confidence, "microbatches that are not clipped throughout")
    composer = Composer(measured, loss_kind)
    picks = resampled_updates(len(measured), accumulation)
    shares = composer.shares(picks)
    picks, shares = picks[shares.any(axis=1)], shares[shares.any(axis=1)]
    predicted2 = np.array([[model.plan_kappa2(plan.units) for model in models] for plan in plans])
    fold = np.array([folds.get(place, 0) for place in range(len(measured))])
    scores2 = np.zeros((len(plans), len(picks)))
    for row, plan in enumerate(plans):
        everywhere: Integers = np.full(picks.shape, plan.place)
        expected2: Floats = (shares * predicted2[row][fold[picks]]).sum(axis=1)
        scores2[row] = composer.squared_errors(picks, everywhere) / expected2
    return Bound(
        interaction=max(upper_bound(np.sqrt(scores), exposed, confidence) for scores in scores2),
        mean=float(np.sqrt(scores2.mean())),
        samples=tuple(
            ExposureSample(
                psi=found.psi,
                weight=found.gradient.square,
                score2=float(np.mean([found.squared_error(p.place) for p in plans] / predicted2[:, fold[i]])),
            )
            for i, found in enumerate(measured)
        ),
    )
