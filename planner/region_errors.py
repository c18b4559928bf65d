"""Absolute gradient errors of single regions on single microbatches, and the scores that are to foresee them.

Of one region at a time every unit that offers the codec is at L, everything else is kept exactly. The absolute error is
what a microbatch adds to its update, so that a score has to know the region and the microbatch both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hilore.planner.calibration_plans import LossyUnit, offering
from hilore.planner.calibration_sources import is_null
from hilore.planner.calibration_state import CalibrationState
from hilore.planner.conformal import Floats
from hilore.planner.evidence import Ranking, ranking
from hilore.planner.exposure_features import ExposureFeatures, exposure_features, token_pulls
from hilore.planner.gradient_error import Backward, Instrument
from hilore.planner.handmade import handmade_plan
from hilore.planner.heldout import expected_by
from hilore.planner.microbatch import Microbatch
from hilore.planner.prior import LAST_LAYER_SHARE
from hilore.planner.region_watch import REPLAY, Coupled, watched_units
from hilore.planner.trace import Trace, UnitTrace
from hilore.runtime.plan import Plan

Progress = Callable[[str, int, int], None]

FULL = "full score"
AT_REPLAY = "at the region's replay"


@dataclass(frozen=True, slots=True, eq=False)
class RegionErrors:
    """The first ``references`` microbatches say what coupling goes with what error; they are in no ranking. The very
    first is also the reference of sensitivities that know one microbatch alone.

    ``places``: in the bucket, of the regions measured. ``absolute``: norm of the error, [microbatches, regions].
    ``encoded``: relative error of each region's units by the codec itself, root of the sum of squares, same shape.
    ``norm_shift``: root of the sum of squared changes of the parameters' gradient norms on the first, [regions].
    ``gradient2``: square of the norm of the exact gradient, ``pull``: norm of what the loss sends into the regions,
    [microbatches].
    """

    codec: str
    references: int
    places: tuple[int, ...]
    absolute: Floats
    encoded: Floats
    norm_shift: Floats
    gradient2: Floats
    features: tuple[ExposureFeatures, ...]
    pull: Floats
    coupled: tuple[Coupled, ...]


def measure_regions(
    instrument: Instrument,
    trace: Trace,
    batches: Sequence[Microbatch],
    codec: str,
    store: CalibrationState,
    tell: Progress,
    *,
    every: int = 1,
    references: int = 1,
) -> RegionErrors:
    """One pass per region and microbatch, and an exact one per microbatch; none per region for a microbatch that no
    gradient can pass, whose errors are 0.

    ``every``: measure the last region and, from there towards the first, every so many-th.
    """
    regions = trace.buckets[-1].regions
    places = tuple(range(len(regions) - 1, -1, -every))[::-1]
    absolute: list[list[float]] = []
    shifts: list[float] = []
    known = []
    for place, batch in enumerate(batches):
        exact: Backward | None = None
        found = store.get(f"{codec}-exact-{place}")
        if found is None:
            exact, seen = _exact(instrument, trace, batch, codec)
            found = store.put(f"{codec}-exact-{place}", seen)
        known.append(found)
        row = []
        if is_null(instrument.actor.spec.loss, batch):
            absolute.append([0.0] * len(places))
            continue
        for turn, column in enumerate(places):
            tell(f"regions, {codec}", place * len(places) + turn, len(batches) * len(places))
            error = store.get(f"{codec}-{place}-{column}")
            if error is None:
                exact = exact or instrument.exact(batch)
                under = instrument.under(batch, region_plan(trace, regions[column].name, codec))
                error = {"norm": math.sqrt(_square(under.distance(exact))), "shift": _norm_shift(under, exact)}
                store.put(f"{codec}-{place}-{column}", error)
            row.append(error["norm"])
            if place == 0:
                shifts.append(error["shift"])
        absolute.append(row)
    return RegionErrors(
        codec=codec,
        references=references,
        places=places,
        absolute=np.array(absolute),
        encoded=np.array([[one["encoded"][column] for column in places] for one in known]),
        norm_shift=np.array(shifts),
        gradient2=np.array([one["gradient2"] for one in known]),
        features=tuple(ExposureFeatures.from_json(one["features"]) for one in known),
        pull=np.array([one["pull"] for one in known]),
        coupled=tuple(one["coupled"] for one in known),
    )


def _exact(instrument: Instrument, trace: Trace, batch: Microbatch, codec: str) -> tuple[Backward, dict[str, Any]]:
    """The exact run, and as JSON values what it tells."""
    loss = instrument.actor.spec.loss
    with watched_units(instrument.actor.model, trace, codec) as watch:
        exact = instrument.exact(batch)
    pulls = token_pulls(loss, batch, exact.logps, instrument.leverage(batch))
    return exact, {
        "features": exposure_features(loss, batch, exact.logps).as_json(),
        "pull": float(pulls["full"].norm()),
        "encoded": watch.per_region(),
        "coupled": watch.coupled(batch, pulls),
        "gradient2": _square(exact.gradients),
    }


def region_plan(trace: Trace, region: str, codec: str) -> Plan:
    """Everything kept, the units of one region that offer the codec at L."""

    def mode_of(name: str, unit: UnitTrace) -> str:
        if name == region and codec in {cost.codec for cost in unit.codecs} and unit in offered:
            return codec
        return "H" if unit.keepable else "R"

    bucket = trace.buckets[-1]
    index = next(known.class_index for known in bucket.regions if known.name == region)
    offered = offering(bucket.classes[index])
    return handmade_plan(trace, mode_of, name=f"{region}-{codec}")


def rankings(found: RegionErrors, trace: Trace, *, exposed: bool = False) -> dict[str, Ranking]:
    """How each score ranks all pairs of region and microbatch (without the references) by absolute error.

    ``exposed``: only those of microbatches with a gradient, a harder question: the others any score with omega knows.
    """
    rows = np.arange(len(found.absolute)) >= found.references
    if exposed:
        rows &= found.gradient2 > 0
    measured = found.absolute[rows].ravel()
    return {name: ranking(score[rows].ravel(), measured) for name, score in scores(found, trace).items()}


def scores(found: RegionErrors, trace: Trace) -> dict[str, Floats]:
    """Every score, [microbatches, regions].

    The full score, known before the first region's backward: what each unit of the region costs by calibration
    (susceptibility), as its coupling is to that of the references: the sum over tokens of what the loss sends the
    token out of the last region (squared) times the codec's error on the token (squared, activation weighting).
    ``at the region's replay`` has what the loss sends the token out of that very region, which is known no sooner.
    Where ``measured`` is said, a region's susceptibility is what it alone at L cost the references.
    Sensitivities in the style of ALAM (GradNormVar of Woo et al., ICLR 2024) and GACT (Liu et al., ICML 2022) are
    those of the first microbatch, which knows no exposure.
    """
    shape = found.absolute.shape

    def by_batch(values: Sequence[float]) -> Floats:
        return np.broadcast_to(np.array(values)[:, None], shape)

    def by_region(values: Floats) -> Floats:
        return np.broadcast_to(values[None, :], shape)

    of = found.features
    kappa2 = _kappa2(found, trace)
    susceptibility = np.array([[math.sqrt(sum(units.values())) for units in kappa2]])
    alike = [dict.fromkeys(units, 1.0) for units in kappa2]
    full = _coupled(found, trace, "full", kappa2)
    replay = _coupled(found, trace, REPLAY, kappa2)
    static = by_region(_static(len(trace.buckets[-1].regions))[list(found.places)])
    return {
        FULL: full,
        "susceptibility measured": _measured(found, full),
        AT_REPLAY: replay,
        f"{AT_REPLAY}, susceptibility measured": _measured(found, replay),
        "without ratio and clipping": _coupled(found, trace, "without_ratio", kappa2),
        "without mask": _coupled(found, trace, "without_mask", kappa2),
        "without KL": _coupled(found, trace, "without_kl", kappa2),
        "1 - p for the head's leverage": _coupled(found, trace, "by_probability", kappa2),
        "without the head's leverage": _coupled(found, trace, "without_leverage", kappa2),
        "without activation weighting": susceptibility * found.pull[:, None],
        "without susceptibility": _coupled(found, trace, "full", alike),
        "mean |omega| for its root mean square": full * by_batch([_mean_over_root(each) for each in of]),
        "advantage only": by_batch([each.mean_advantage for each in of]) + 0 * static,
        "ALAM-style sensitivity": by_region(found.norm_shift),
        "GACT-style sensitivity": by_region(found.absolute[0]),
        "static type and layer": static,
        "reconstruction error": found.encoded,
    }


def _coupled(found: RegionErrors, trace: Trace, weights: str, kappa2: Sequence[Mapping[str, float]]) -> Floats:
    """Root of the sum over a region's units of kappa2 times the unit's coupling, in units of what coupling the
    references have for a gradient of norm 1; [microbatches, regions]. Units that no hook reached count nothing."""
    regions, first = trace.buckets[-1].regions, found.references
    known = np.flatnonzero(found.gradient2[:first] > 0)
    result = np.zeros(found.absolute.shape)
    for column, (place, costs) in enumerate(zip(found.places, kappa2, strict=True)):
        of_region = [one[weights].get(regions[place].name, {}) for one in found.coupled]
        for unit, cost in costs.items():
            if unit not in of_region[0]:
                continue
            sums = np.array([one[unit] for one in of_region])
            usual = float((sums[known] / found.gradient2[known]).mean()) if len(known) else 0.0
            if usual:
                result[:, column] += cost * sums / usual
    root: Floats = np.sqrt(result)
    return root


def _measured(found: RegionErrors, score: Floats) -> Floats:
    """The score with each region's susceptibility such that on the references squares are right on average."""
    measured2, score2 = found.absolute[: found.references] ** 2, score[: found.references] ** 2
    known = score2.sum(axis=0) > 0
    factor2 = np.divide(measured2.sum(axis=0), score2.sum(axis=0), out=np.ones(score.shape[1]), where=known)
    result: Floats = score * np.sqrt(factor2)
    return result


def _kappa2(found: RegionErrors, trace: Trace) -> list[dict[str, float]]:
    """Of each measured region, by unit: the square of the relative error of an update that calibration gives it."""
    expected, bucket = expected_by(trace), trace.buckets[-1]
    return [
        {
            unit.name: expected(LossyUnit(place, unit.name, unit.kind, found.codec, ()))
            for unit in offering(bucket.classes[bucket.regions[place].class_index])
            if found.codec in {cost.codec for cost in unit.codecs}
        }
        for place in found.places
    ]


def _static(regions: int) -> Floats:
    """The last layer above the others, which are alike."""
    profile = np.full(regions, (1 - LAST_LAYER_SHARE) / max(regions - 1, 1))
    profile[-1] = LAST_LAYER_SHARE
    root: Floats = np.sqrt(profile)
    return root


def _mean_over_root(features: ExposureFeatures) -> float:
    return features.mean_omega / features.psi if features.psi else 0.0


def _square(tensors: Sequence[Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors))


def _norm_shift(under: Backward, exact: Backward) -> float:
    pairs = zip(under.gradients, exact.gradients, strict=True)
    return math.sqrt(sum(float(mine.double().norm() - its.double().norm()) ** 2 for mine, its in pairs))
