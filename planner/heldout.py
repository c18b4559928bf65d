"""Predicted against measured errors of updates, on rollouts and plans that calibration never saw.

Every held-out microbatch runs once in plain eager and once under what each candidate has for its exposure, in float32.
Updates are then composed of them (planner/updates.py), any number without another run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hilore.planner.calibration_plans import Expected, LossyUnit, lossy_units, plan_at, random_plans
from hilore.planner.calibration_sources import is_null
from hilore.planner.calibration_state import CalibrationState, sketch_as_json, sketch_from_json
from hilore.planner.conformal import Floats, Integers, disjoint_updates, resampled_updates
from hilore.planner.digest import plan_digest
from hilore.planner.evidence import Coverage, coverage, ranking
from hilore.planner.exposure_features import ExposureFeatures, exposure_features
from hilore.planner.gradient_error import Backward, Instrument
from hilore.planner.heldout_audit import AuditOutcome, audited
from hilore.planner.microbatch import Microbatch
from hilore.planner.sketch import Sketch
from hilore.planner.trace import Trace
from hilore.planner.updates import Composer, MeasuredMicrobatch
from hilore.runtime.plan import Plan

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """``plans`` of one length bucket, by ascending exposure; ``limit``: what an update's error may be (None: what is
    predicted of it)."""

    name: str
    plans: tuple[Plan, ...]
    limit: float | None

    def plan_for(self, psi: float) -> Plan | None:
        return plan_at(self.plans, psi)


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """``measured[b].errors[c]``: microbatch b under candidate c. ``quadrature2``, ``linear``: what the calibration says
    of that plan's relative error, before the interaction factor, [microbatches, candidates]."""

    candidates: tuple[Candidate, ...]
    measured: tuple[MeasuredMicrobatch, ...]
    quadrature2: Floats
    linear: Floats
    regimes: tuple[tuple[str, ...], ...]
    features: tuple[ExposureFeatures, ...]


@dataclass(frozen=True, slots=True)
class CandidateEvidence:
    """One candidate over all updates. Errors are medians over updates, relative.

    ``predicted``: the bound that the calibration gives; ``coverage`` of the limit, ``bound_coverage`` of the bound.
    ``worst_region``: error of the parameters of the region where it is largest. ``over_quadrature``,
    ``over_linear``: measured over the plain quadrature and over the linear sum. ``lossy_updates``: updates in which
    anything was encoded.

    Composed updates share microbatches, so that their number says nothing of certainty. ``disjoint``: updates of the
    exposed microbatches in the order of the file, none shared. ``alone``: each exposed microbatch as an update of its
    own, which asks for more, since an update of such as are within the limit is within it. ``audit``: what an audit of
    every exposed microbatch would find.
    """

    name: str
    limit: float | None
    measured: float
    predicted: float
    coverage: Coverage
    bound_coverage: Coverage
    worst_region: float
    over_quadrature: float
    over_linear: float
    spearman: float
    lossy_updates: int
    disjoint: Coverage
    alone: Coverage
    audit: AuditOutcome


def plan_candidates(plans: Sequence[Plan], name: str) -> Candidate:
    """A set of plans of the largest length bucket among them, with the limit of their delta."""
    longest = max(plan.length_bucket for plan in plans)
    own = sorted((plan for plan in plans if plan.length_bucket == longest), key=lambda plan: plan.regime.exposure_high)
    return Candidate(name, tuple(own), own[0].delta * own[0].delta_star)


def random_candidates(trace: Trace, count: int, *, seed: int) -> tuple[Candidate, ...]:
    """Random plans of the kind that calibration scores, other ones; their limit is what is predicted of them."""
    made = random_plans(trace, count, expected_by(trace), seed=seed, name="held-out")
    return tuple(Candidate(f"random plan {place + 1}", (plan,), None) for place, plan in enumerate(made))


def expected_by(trace: Trace) -> Expected:
    """kappa2 as a trace has it."""
    known = {(risk.region, risk.unit, risk.codec, risk.tainted): risk.kappa2 for risk in trace.calibration.risks}
    regions = trace.buckets[-1].regions
    any_context: dict[tuple[str, str, str], float] = {}
    for (region, unit, codec, _), kappa2 in known.items():
        any_context[region, unit, codec] = max(any_context.get((region, unit, codec), 0.0), kappa2)

    def expected(unit: LossyUnit) -> float:
        region = regions[unit.place].name
        anyhow = known.get((region, unit.unit, unit.codec, None), any_context.get((region, unit.unit, unit.codec)))
        return known.get((region, unit.unit, unit.codec, unit.tainted), anyhow or 0.0)

    return expected


def measure_held_out(
    instrument: Instrument,
    trace: Trace,
    batches: Sequence[Microbatch],
    candidates: Sequence[Candidate],
    store: CalibrationState,
    tell: Progress,
) -> HeldOut:
    """``batches``: in the order of training. ``store``: keeps what was measured, so that it can go on."""
    expected = expected_by(trace)
    measured, quadrature2, linear, regimes, features = [], [], [], [], []
    for place, batch in enumerate(batches):
        exact: Backward | None = None
        found = store.get(f"exact-{place}")
        if found is None:
            loss = instrument.actor.spec.loss
            if is_null(loss, batch):
                # Whatever the log-probs are.
                logps, sketch = (
                    torch.zeros_like(batch.completion_mask, dtype=torch.float32),
                    instrument.sketcher.nothing(),
                )
            else:
                exact = instrument.exact(batch)
                logps, sketch = exact.logps, instrument.sketcher.sketch(exact.gradients)
            gradient = sketch_as_json(sketch)
            seen = exposure_features(loss, batch, logps).as_json()
            found = store.put(f"exact-{place}", {"features": seen, "gradient": gradient})
        features.append(ExposureFeatures.from_json(found["features"]))
        psi = features[-1].psi
        errors: list[Sketch] = []
        chosen = [candidate.plan_for(psi) for candidate in candidates]
        for column, plan in enumerate(chosen):
            tell("held-out updates", place * len(candidates) + column, len(batches) * len(candidates))
            if plan is None or not plan.lossy or psi == 0:
                errors.append(instrument.sketcher.nothing())
                continue
            key = f"error-{place}-{plan_digest(plan)}"
            error = store.get(key)
            if error is None:
                exact = exact or instrument.exact(batch)
                error = store.put(key, sketch_as_json(instrument.error(batch, plan, exact)))
            errors.append(sketch_from_json(error))
        units = [() if plan is None else lossy_units(trace.buckets[-1], plan.regions) for plan in chosen]
        quadrature2.append([sum(map(expected, each)) for each in units])
        linear.append([sum(math.sqrt(expected(unit)) for unit in each) for each in units])
        regimes.append(tuple("above" if plan is None else plan.regime.label for plan in chosen))
        tokens = int(batch.completion_mask.sum())
        measured.append(MeasuredMicrobatch(psi, tokens, sketch_from_json(found["gradient"]), tuple(errors)))
    tell("held-out updates", 1, 1)
    return HeldOut(
        candidates=tuple(candidates),
        measured=tuple(measured),
        quadrature2=np.array(quadrature2),
        linear=np.array(linear),
        regimes=tuple(regimes),
        features=tuple(features),
    )


def evidence(
    found: HeldOut, trace: Trace, *, accumulation: int, updates: int = 200, seed: int = 1
) -> tuple[CandidateEvidence, ...]:
    """What each candidate did, over updates of ``accumulation`` distinct microbatches that have a gradient."""
    composer = Composer(found.measured, str(trace.spec["loss"]["kind"]))
    picks = resampled_updates(len(found.measured), accumulation, updates=updates, seed=seed)
    shares = composer.shares(picks)
    picks, shares = picks[shares.any(axis=1)], shares[shares.any(axis=1)]
    return tuple(_of_candidate(found, composer, trace, picks, shares, place) for place in range(len(found.candidates)))


def _of_candidate(
    found: HeldOut, composer: Composer, trace: Trace, picks: Integers, shares: Floats, place: int
) -> CandidateEvidence:
    column: Integers = np.full(picks.shape, place)
    measured = np.sqrt(composer.squared_errors(picks, column))
    quadrature = np.sqrt((shares * found.quadrature2[:, place][picks]).sum(axis=1))
    linear = (np.sqrt(shares) * found.linear[:, place][picks]).sum(axis=1)
    predicted = trace.calibration.interaction * quadrature
    limit = found.candidates[place].limit
    lossy = quadrature > 0
    exposed: Integers = np.flatnonzero(composer.squares)
    return CandidateEvidence(
        name=found.candidates[place].name,
        limit=limit,
        measured=float(np.median(measured)),
        predicted=float(np.median(predicted)),
        coverage=coverage(measured, predicted if limit is None else limit),
        bound_coverage=coverage(measured, predicted),
        worst_region=float(np.median(np.sqrt(composer.worst_region_errors(picks, column)))),
        over_quadrature=_median_ratio(measured, quadrature),
        over_linear=_median_ratio(measured, linear),
        spearman=ranking(predicted, measured).spearman,
        lossy_updates=int(lossy.sum()),
        disjoint=_coverage_of(found, composer, trace, exposed[disjoint_updates(len(exposed), picks.shape[1])], place),
        alone=_coverage_of(found, composer, trace, exposed[:, None], place),
        audit=audited(
            found.measured, place, [_allowed(found, trace, row, place) for row in range(len(found.measured))]
        ),
    )


def _coverage_of(found: HeldOut, composer: Composer, trace: Trace, picks: Integers, place: int) -> Coverage:
    """Of the updates ``picks``: of the candidate's limit, or of the bound where it has none."""
    measured = np.sqrt(composer.squared_errors(picks, np.full(picks.shape, place)))
    limit = found.candidates[place].limit
    quadrature = np.sqrt((composer.shares(picks) * found.quadrature2[:, place][picks]).sum(axis=1))
    return coverage(measured, trace.calibration.interaction * quadrature if limit is None else limit)


def _allowed(found: HeldOut, trace: Trace, row: int, place: int) -> float:
    limit = found.candidates[place].limit
    return trace.calibration.interaction * math.sqrt(found.quadrature2[row, place]) if limit is None else limit


def all_spearman(found: HeldOut, trace: Trace, *, accumulation: int, updates: int = 200, seed: int = 1) -> float:
    """Spearman of predicted against measured over the updates of all candidates together."""
    composer = Composer(found.measured, str(trace.spec["loss"]["kind"]))
    picks = resampled_updates(len(found.measured), accumulation, updates=updates, seed=seed)
    shares = composer.shares(picks)
    columns = range(len(found.candidates))
    measured = [composer.squared_errors(picks, np.full(picks.shape, column)) for column in columns]
    predicted = [(shares * found.quadrature2[:, column][picks]).sum(axis=1) for column in columns]
    return ranking(np.concatenate(predicted), np.concatenate(measured)).spearman


def _median_ratio(measured: Floats, of: Floats) -> float:
    there = of > 0
    return float(np.median(measured[there] / of[there])) if there.any() else 0.0
