"""Squared errors of random plans -> kappa2 of every unit, codec and context, by a non-negative fit of a few factors.

Errors of units add in quadrature, so the squared error of a plan is modelled as a sum over its L units of

    kappa2 = scale * kind(kind) * level(kind, context) * codec(kind, codec) * layer(region) * place(kind, region)
             * microbatch,

whatever the number of units and codecs: one scale, how kinds of units compare, a level per kind and set of tainted
units, how codecs compare on a kind (what is expected is how they compare on Gaussian values, for integers 4 per bit),
one profile over layers, small deviations from it per kind, and what a microbatch as a whole is above the others (left
out of predictions).

Measured squared errors are spread about their mean in proportion to it, so the likelihood is a gamma's, with DISPERSION
for the square of that proportion; each factor's logarithm has a normal prior about what is expected of it. The mode of
both solves, for each factor value f with expectation f0 and prior deviation s,

    sum_i share_if (measured_i / predicted_i - 1) / DISPERSION = log(f / f0) / s^2,

share_if being the part of plan i's predicted error that passes through f. It is reached by scoring steps on one factor
after the other; factors are exponentials, so that no kappa2 is negative.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hilore.planner.calibration_plans import LossyUnit
from hilore.planner.prior import ERRORS, LAST_LAYER_SHARE
from hilore.runtime.codecs import get_codec

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

REFERENCE_CODEC = "int8-g128"
# Relative error of a kind that the prior does not know, in percent.
UNKNOWN_KIND_PERCENT = 1.0
SWEEPS = 400
TOLERANCE = 1e-6
# A single plan is believed up to this factor, and no step goes further than this logarithm.
MOST_SURPRISE = 8.0
MOST_STEP = 0.5
DISPERSION = 0.25
# How far each factor may lie from what is expected of it: standard deviations of its logarithm (of squared errors).
DEVIATIONS = {
    "scale": 10.0,
    "kind": 1.5,
    "level": 1.0,
    "codec": 0.5,
    "layer": 0.5,
    "place": 0.25,
    "microbatch": 0.5,
}


@dataclass(frozen=True, slots=True)
class Observation:
    """One plan on one microbatch: what it had at L and the squared relative error that was measured."""

    microbatch: int
    units: tuple[LossyUnit, ...]
    squared_error: float


class RiskModel:
    """kappa2 of any L unit. Raises KeyError for a codec that has no name here."""

    def __init__(self, factors: dict[str, dict[Hashable, float]], regions: int) -> None:
        self._factors = factors
        self._regions = regions

    def kappa2(self, unit: LossyUnit) -> float:
        """Where a context was never seen: what is expected of it."""
        result = 1.0
        for name, key in _keys(unit):
            known = self._factors[name].get(key)
            result *= _expectation(name, key, self._regions) if known is None else known
        return result

    def plan_kappa2(self, units: Sequence[LossyUnit]) -> float:
        return sum(map(self.kappa2, units))


def expected_model(regions: int) -> RiskModel:
    """What is expected before anything was measured, for ``regions`` regions."""
    return RiskModel({name: {} for name in DEVIATIONS}, regions)


def fit(observations: Sequence[Observation], regions: int) -> RiskModel:
    """The factors' posterior mode. Deterministic."""
    seen = [found for found in observations if found.units and found.squared_error > 0]
    if not seen:
        return expected_model(regions)
    data = _Data.of(seen, regions)
    values = {name: expected.copy() for name, expected in data.expected.items()}
    for _ in range(SWEEPS):
        moved = max(_improve(data, values, name) for name in DEVIATIONS)
        if moved < TOLERANCE:
            break
    known = {
        name: {key: float(values[name][place]) for key, place in data.places[name].items()}
        for name in DEVIATIONS
        if name != "microbatch"
    }
    return RiskModel(known, regions)


@dataclass(frozen=True, slots=True, eq=False)
class _Data:
    """Entries are the L units of all plans: ``plan`` [entries], and per factor which of its values they use."""

    measured: Floats
    plan: Integers
    index: dict[str, Integers]
    places: dict[str, dict[Hashable, int]]
    expected: dict[str, Floats]

    @classmethod
    def of(cls, observations: Sequence[Observation], regions: int) -> _Data:
        places: dict[str, dict[Hashable, int]] = {name: {} for name in DEVIATIONS}
        index: dict[str, list[int]] = {name: [] for name in DEVIATIONS}
        plan = []
        for row, found in enumerate(observations):
            for unit in found.units:
                plan.append(row)
                for name, key in (*_keys(unit), ("microbatch", found.microbatch)):
                    index[name].append(places[name].setdefault(key, len(places[name])))
        expected = {name: np.array([_expectation(name, key, regions) for key in keys]) for name, keys in places.items()}
        return cls(
            measured=np.array([found.squared_error for found in observations]),
            plan=np.array(plan, dtype=np.int64),
            index={name: np.array(found, dtype=np.int64) for name, found in index.items()},
            places=places,
            expected=expected,
        )


def _improve(data: _Data, values: dict[str, Floats], name: str) -> float:
    """One step of one factor; returns by how much the logarithm of any of its values moved."""
    entry = np.ones(len(data.plan))
    for other, index in data.index.items():
        entry = entry * values[other][index]
    predicted = np.bincount(data.plan, entry, minlength=len(data.measured))
    share = entry / predicted[data.plan]
    surprise = np.clip(data.measured / predicted, 1 / MOST_SURPRISE, MOST_SURPRISE)
    index, old, precision = data.index[name], values[name], DISPERSION / DEVIATIONS[name] ** 2
    information = np.bincount(index, share, minlength=len(old))
    missing = np.bincount(index, share * (surprise[data.plan] - 1), minlength=len(old))
    pull = missing - precision * np.log(old / data.expected[name])
    step = np.clip(pull / (information + precision), -MOST_STEP, MOST_STEP)
    values[name] = old * np.exp(step)
    return float(np.abs(step).max())


def _keys(unit: LossyUnit) -> tuple[tuple[str, Hashable], ...]:
    return (
        ("scale", ""),
        ("kind", unit.kind),
        ("level", (unit.kind, unit.tainted)),
        ("codec", (unit.kind, unit.codec)),
        ("layer", unit.place),
        ("place", (unit.kind, unit.place)),
    )


def _expectation(name: str, key: Hashable, regions: int) -> float:
    if name == "kind":
        kind = str(key)
        return (ERRORS.get(kind, {}).get(REFERENCE_CODEC, UNKNOWN_KIND_PERCENT) / 100) ** 2 / regions
    if name == "codec":
        assert isinstance(key, tuple)
        codec = str(key[1])
        return (reconstruction_error(codec) / reconstruction_error(REFERENCE_CODEC)) ** 2
    if name == "layer" and regions > 1:
        last = max(LAST_LAYER_SHARE, 1 / regions)
        return regions * (last if key == regions - 1 else (1 - last) / (regions - 1))
    return 1.0


_GAUSSIAN = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
_RECONSTRUCTION: dict[str, float] = {}


def reconstruction_error(codec: str) -> float:
    """Relative error of a codec on Gaussian values, at least 1e-6 (a lossless one)."""
    if codec not in _RECONSTRUCTION:
        found = get_codec(codec)
        decoded = found.decode(found.encode(_GAUSSIAN))
        _RECONSTRUCTION[codec] = max(float((decoded - _GAUSSIAN).norm() / _GAUSSIAN.norm()), 1e-6)
    return _RECONSTRUCTION[codec]
