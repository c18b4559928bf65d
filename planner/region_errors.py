"""Absolute gradient errors of single regions on single microbatches, and the scores that are to foresee them.

Of one region at a time every unit that offers the codec is at L, everything else is kept exactly. The absolute error is
what a microbatch adds to its update, so that a score has to know the region and the microbatch both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hilore.planner.calibration_plans import LossyUnit, offering
from hilore.planner.calibration_state import CalibrationState
from hilore.planner.conformal import Floats
from hilore.planner.evidence import Ranking, ranking
from hilore.planner.exposure_features import ExposureFeatures, Strength, exposure_features, strength_of
from hilore.planner.gradient_error import Backward, Instrument
from hilore.planner.handmade import handmade_plan
from hilore.planner.heldout import expected_by
from hilore.planner.microbatch import Microbatch
from hilore.planner.prior import LAST_LAYER_SHARE
from hilore.planner.trace import Trace, UnitTrace
from hilore.runtime.codecs import get_codec
from hilore.runtime.naming import canonical_modules
from hilore.runtime.plan import Plan

Progress = Callable[[str, int, int], None]

FULL = "full score"


@dataclass(frozen=True, slots=True, eq=False)
class RegionErrors:
    """The first microbatch is the reference of sensitivities that know one microbatch alone; it is in no ranking.

    ``places``: in the bucket, of the regions measured. ``absolute``: norm of the error, [microbatches, regions].
    ``encoded``: relative error of each region's units by the codec itself, root of the sum of squares, same shape.
    ``norm_shift``: root of the sum of squared changes of the parameters' gradient norms on the reference, [regions].
    """

    codec: str
    places: tuple[int, ...]
    absolute: Floats
    encoded: Floats
    norm_shift: Floats
    features: tuple[ExposureFeatures, ...]
    strengths: tuple[Strength, ...]


def measure_regions(
    instrument: Instrument,
    trace: Trace,
    batches: Sequence[Microbatch],
    codec: str,
    store: CalibrationState,
    tell: Progress,
    *,
    every: int = 1,
) -> RegionErrors:
    """One pass per region and microbatch, and an exact one per microbatch. ``every``: measure the last region and, from
    there towards the first, every so many-th."""
    bucket = trace.buckets[-1]
    places = tuple(range(len(bucket.regions) - 1, -1, -every))[::-1]
    loss = instrument.actor.spec.loss
    absolute, encoded, features, strengths, shifts = [], [], [], [], []
    for place, batch in enumerate(batches):
        exact: Backward | None = None
        found = store.get(f"{codec}-exact-{place}")
        if found is None:
            with watched_units(instrument.actor.model, trace, codec) as watch:
                exact = instrument.exact(batch)
            seen = {
                "features": exposure_features(loss, batch, exact.logps).as_json(),
                "strength": asdict(strength_of(loss, batch, exact.logps, instrument.leverage(batch))),
                "encoded": watch.per_region(),
            }
            found = store.put(f"{codec}-exact-{place}", seen)
        features.append(ExposureFeatures.from_json(found["features"]))
        strengths.append(Strength(**found["strength"]))
        encoded.append([found["encoded"][column] for column in places])
        row = []
        for turn, column in enumerate(places):
            tell(f"regions, {codec}", place * len(places) + turn, len(batches) * len(places))
            error = store.get(f"{codec}-{place}-{column}")
            if error is None:
                exact = exact or instrument.exact(batch)
                under = instrument.under(batch, region_plan(trace, bucket.regions[column].name, codec))
                error = {"norm": math.sqrt(_square(under.distance(exact))), "shift": _norm_shift(under, exact)}
                store.put(f"{codec}-{place}-{column}", error)
            row.append(error["norm"])
            if place == 0:
                shifts.append(error["shift"])
        absolute.append(row)
    return RegionErrors(
        codec, places, np.array(absolute), np.array(encoded), np.array(shifts), tuple(features), tuple(strengths)
    )


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


def rankings(found: RegionErrors, trace: Trace) -> dict[str, Ranking]:
    """How each score ranks all pairs of region and microbatch (without the reference) by absolute error."""
    measured = found.absolute[1:].ravel()
    return {name: ranking(score[1:].ravel(), measured) for name, score in scores(found, trace).items()}


def scores(found: RegionErrors, trace: Trace) -> dict[str, Floats]:
    """Every score, [microbatches, regions].

    The full score: what the region costs by calibration (susceptibility), times how much worse than on the reference
    the codec does on this microbatch's values (activation weighting), times the norm of the gradient that the loss
    sends into the regions (Strength.full), which is there before the first region's backward. Sensitivities in
    the style of ALAM (GradNormVar of Woo et al., ICLR 2024) and GACT (Liu et al., ICML 2022) are those of the reference
    microbatch, which knows no exposure.
    """
    susceptibility = _susceptibility(found, trace)
    activation = found.encoded / np.where(found.encoded[:1] > 0, found.encoded[:1], 1.0)
    shape = found.absolute.shape

    def by_batch(values: Sequence[float]) -> Floats:
        return np.broadcast_to(np.array(values)[:, None], shape)

    def by_region(values: Floats) -> Floats:
        return np.broadcast_to(values[None, :], shape)

    of, pulls = found.features, found.strengths
    strength = by_batch([each.full for each in pulls])
    alone = susceptibility * activation
    static = by_region(_static(len(trace.buckets[-1].regions))[list(found.places)])
    return {
        FULL: alone * strength,
        "without ratio and clipping": alone * by_batch([each.without_ratio for each in pulls]),
        "without mask": alone * by_batch([each.without_mask for each in pulls]),
        "without KL": alone * by_batch([each.without_kl for each in pulls]),
        "1 - p for the head's leverage": alone * by_batch([each.by_probability for each in pulls]),
        "without the head's leverage": alone * by_batch([each.without_leverage for each in pulls]),
        "without activation weighting": susceptibility * strength,
        "without susceptibility": activation * strength,
        "mean |omega| for its root mean square": alone
        * by_batch([_by_mean(*each) for each in zip(of, pulls, strict=True)]),
        "advantage only": by_batch([each.mean_advantage for each in of]) + 0 * static,
        "ALAM-style sensitivity": by_region(found.norm_shift),
        "GACT-style sensitivity": by_region(found.absolute[0]),
        "static type and layer": static,
        "reconstruction error": found.encoded,
    }


@contextmanager
def watched_units(model: nn.Module, trace: Trace, codec: str) -> Iterator[UnitWatch]:
    """In a forward inside, every unit that offers the codec is put through it and compared."""
    watch = UnitWatch(trace, codec)
    modules = canonical_modules(model)
    handles = []
    try:
        for region, unit, feeds in watch.units():
            # Attention is no module: what it gives is what the output projection gets.
            named = modules.get(f"{region}.{unit}")
            if named is not None:
                handles.append(named.register_forward_hook(watch.output_of(region)))
            elif feeds and f"{region}.{feeds[0]}" in modules:
                handles.append(modules[f"{region}.{feeds[0]}"].register_forward_pre_hook(watch.input_of(region)))
        yield watch
    finally:
        for handle in handles:
            handle.remove()


class UnitWatch:
    def __init__(self, trace: Trace, codec: str) -> None:
        self._bucket = trace.buckets[-1]
        self._name = codec
        self._codec = get_codec(codec)
        self._squares = {region.name: 0.0 for region in self._bucket.regions}

    def units(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Region, unit and what the unit feeds, of every unit that offers the codec."""
        for region in self._bucket.regions:
            for unit in offering(self._bucket.classes[region.class_index]):
                if self._name in {cost.codec for cost in unit.codecs}:
                    yield region.name, unit.name, unit.feeds

    def output_of(self, region: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _args, output: self._add(region, output)

    def input_of(self, region: str) -> Callable[[nn.Module, Any], None]:
        return lambda _module, args: self._add(region, args[0])

    def per_region(self) -> list[float]:
        return [math.sqrt(square) for square in self._squares.values()]

    def _add(self, region: str, values: Tensor) -> None:
        with torch.no_grad():
            exact = values.detach()
            whole = float(exact.double().square().sum())
            if whole:
                decoded = self._codec.decode(self._codec.encode(exact))
                self._squares[region] += float((decoded - exact).double().square().sum()) / whole


def _susceptibility(found: RegionErrors, trace: Trace) -> Floats:
    """Relative error that the calibration gives a region whose units are all at L, [1, regions]."""
    expected, bucket = expected_by(trace), trace.buckets[-1]
    result = []
    for place in found.places:
        units = offering(bucket.classes[bucket.regions[place].class_index])
        result.append(
            math.sqrt(sum(expected(LossyUnit(place, unit.name, unit.kind, found.codec, ())) for unit in units))
        )
    return np.array([result], dtype=np.float64)


def _static(regions: int) -> Floats:
    """The last layer above the others, which are alike."""
    profile = np.full(regions, (1 - LAST_LAYER_SHARE) / max(regions - 1, 1))
    profile[-1] = LAST_LAYER_SHARE
    root: Floats = np.sqrt(profile)
    return root


def _by_mean(features: ExposureFeatures, strength: Strength) -> float:
    return strength.full * features.mean_omega / features.psi if features.psi else 0.0


def _square(tensors: Sequence[Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors))


def _norm_shift(under: Backward, exact: Backward) -> float:
    pairs = zip(under.gradients, exact.gradients, strict=True)
    return math.sqrt(sum(float(mine.double().norm() - its.double().norm()) ** 2 for mine, its in pairs))
