"""Plans that `solve` makes, measured on rollouts until updates under them keep their delta.

A calibration's interaction factor bounds new updates under the plans that it ran. A plan that is solved later is
another one, and the solver picks what the fit takes for harmless: the bound says nothing of it
(docs/measurements/evidence-smollm2.md). So the factor is settled for one budget and delta: solve, run every microbatch
under the plan that its exposure chooses, bound the error of updates (split conformal, planner/conformal.py), and solve
again with another factor where the bound is above delta, or so far below that there is a faster plan to try. Training
moves the policy on, and errors with it: what the bound may rise by (``drift``) is left free under delta.

On rollouts that calibration never saw the plans do not depend on what they are measured on, so that the bound is the
split conformal one; the few sets that are tried (SETS at most) are all that is taken from its confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from hilore.planner.actor import build_actor, with_reference
from hilore.planner.calibration_identity import identity_of, refuse_another_actor, refuse_calibration
from hilore.planner.calibration_measure import Measuring
from hilore.planner.calibration_sources import is_null, recorded
from hilore.planner.calibration_state import CalibrationState
from hilore.planner.conformal import check_confidence, resampled_updates, upper_bound
from hilore.planner.digest import plan_digest
from hilore.planner.emit import solve_trace
from hilore.planner.gradient_error import Instrument
from hilore.planner.spec_types import ModelSpec
from hilore.planner.stepping import float32_twin
from hilore.planner.trace import Confirmed, Trace
from hilore.planner.updates import Composer, MeasuredMicrobatch
from hilore.planner.verify import largest_bucket
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan

Progress = Callable[[str, int, int], None]
# The largest bucket's plans by ascending exposure, at a factor.
Solve = Callable[[float], tuple[Plan, ...]]
Measure = Callable[[Sequence[Plan]], float]

SUFFIX = ".confirmation"
# SmolLM2's bound rose 1.0 to 1.4 times in three updates at a learning rate of 1e-3; with 1.4 half of all updates stay
# under half of delta (docs/log.md).
DRIFT, MOST_DRIFT = 1.3, 100
# Sets of plans that are tried: so many passes per microbatch, and one exact one.
SETS = 6
# Factors that are tried: one that gives plans that were measured takes no pass.
SOLVES = 12
# Of delta: a bound above this is near enough, and the next factor aims at this much under delta.
ENOUGH = 0.9
AIM = 0.96
# Between a factor that keeps delta and one that does not, as near as this.
NEAR = 1.04
# Plans jump: no factor is tried that is less than so much of one that was measured.
LEAST_STEP = 0.5
# Factors in a row that give the same plans, within delta, after the first: then their risk is not what holds them back.
ALIKE = 3


class ConfirmationError(HiloreError):
    """No set of plans that was tried keeps delta. Attributes: ``trials``."""

    exit_code = 6


@dataclass(frozen=True, slots=True)
class Target:
    """What `solve` will be asked, at unit grain and with the rule each.

    ``drift``: times the bound is delta to hold, for what errors rise by until plans are confirmed again.
    """

    budget_bytes: int
    margin_bytes: int
    delta: float
    drift: float = DRIFT


@dataclass(frozen=True, slots=True)
class Trial:
    """One set of plans: ``interaction`` that it was solved with; ``bound`` of an update's error, times the drift, over
    delta's."""

    interaction: float
    bound: float
    plans: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """``trace``: with what was found. ``trials``: in order. ``passes``: per microbatch, at most."""

    trace: Trace
    confirmed: Confirmed
    trials: tuple[Trial, ...]
    passes: int

    @property
    def encodes(self) -> bool:
        """Whether any of the plans changes a value."""
        return any(plan.lossy for trial in self.trials for plan in trial.plans)


def confirm_trace(
    spec: ModelSpec,
    trace: Trace,
    target: Target,
    progress: Progress | None = None,
    *,
    rollouts: Path,
    state: Path | None = None,
    seed: int = 0,
) -> Confirmation:
    """The trace with the factor that ``target`` is to be solved with, and the bound that its plans keep.

    ``rollouts``: best others than calibration's. ``spec.calibration`` says how many microbatches and what confidence.
    ``state`` as for calibrate_trace. Raises HiloreError where the trace was not calibrated on rollouts,
    RolloutFileError, ConfidenceError, CalibrationStateError, InfeasibleError, ConfirmationError.
    """
    tell = progress or (lambda _label, _done, _total: None)
    refuse_calibration(spec, estimated=trace.estimated)
    refuse_another_actor(spec, trace)
    _refuse(trace, target)
    solve = _solver(trace, target)
    # An infeasible budget shows before anything is run.
    solve(trace.calibration.interaction)
    native = build_actor(spec, device=torch.device(spec.device.kind), live_adapters=True, seed=seed)
    recording = recorded(native, rollouts)
    store = CalibrationState(state, identity_of(spec, trace, recording, seed))
    try:
        batches = tuple(with_reference(native, batch) for batch in recording.microbatches)
        exposed = [place for place, batch in enumerate(batches) if not is_null(spec.loss, batch)]
        twin = float32_twin(native)
        del native
        with Instrument(twin, [region.name for region in trace.buckets[-1].regions], seed=seed) as instrument:
            measuring = Measuring(instrument, trace, batches, exposed, store, seed, tell)
            trials = find_factor(solve, _measurer(spec, measuring, target, trace), trace.calibration.interaction)
            passes = -(-instrument.passes // len(exposed))
        found = chosen_of(trials)
        if found is None:
            raise _none_kept(trials, spec, target)
    finally:
        store.close()
    confirmed = Confirmed(
        budget_bytes=target.budget_bytes,
        margin_bytes=target.margin_bytes,
        delta=target.delta,
        interaction=found.interaction,
        error=found.bound / target.drift * target.delta * trace.calibration.delta_star,
        drift=target.drift,
        confidence=spec.calibration.confidence,
        microbatches=len(exposed),
        plans=_digests(found.plans),
    )
    others = tuple(
        one
        for one in trace.calibration.confirmed
        if not one.is_for(target.budget_bytes, target.margin_bytes, target.delta)
    )
    calibration = replace(trace.calibration, confirmed=(*others, confirmed))
    return Confirmation(replace(trace, calibration=calibration), confirmed, trials, passes)


def find_factor(solve: Solve, measure: Measure, interaction: float) -> tuple[Trial, ...]:
    """Sets of plans solved with one factor after the other and measured, until there is nothing to gain."""
    trials: list[Trial] = []
    following: float | None = interaction
    while following is not None and _distinct(trials) < SETS and len(trials) < SOLVES:
        plans = solve(following)
        same = next((trial for trial in trials if _digests(trial.plans) == _digests(plans)), None)
        trials.append(Trial(following, measure(plans) if same is None else same.bound, plans))
        # Nothing lies between two factors that give the same plans, if a smaller one has been seen to break delta.
        kept = same is not None and same.bound <= 1 and any(trial.bound > 1 for trial in trials)
        following = None if kept else _following(trials)
    return tuple(trials)


def _distinct(trials: Sequence[Trial]) -> int:
    return len({_digests(trial.plans) for trial in trials})


def _digests(plans: Sequence[Plan]) -> tuple[str, ...]:
    return tuple(plan_digest(plan) for plan in plans)


def _following(trials: Sequence[Trial]) -> float | None:
    """The next factor to try; None where the last found is near enough."""
    last, best = trials[-1], chosen_of(trials)
    if best is None:
        # Where another factor gave the same plans, larger steps lead on.
        alike = sum(_digests(trial.plans) == _digests(last.plans) for trial in trials)
        return last.interaction * last.bound / AIM * 2.0 ** (alike - 1)
    if best.bound >= ENOUGH or not any(plan.lossy for plan in best.plans):
        return None
    broken = [trial.interaction for trial in trials if trial.bound > 1 and trial.interaction < best.interaction]
    if not broken:
        # From the smallest factor that gave these plans, in larger steps the longer they stay the same.
        same = [trial.interaction for trial in trials if _digests(trial.plans) == _digests(best.plans)]
        return None if len(same) > ALIKE else min(same) * max(best.bound / AIM, LEAST_STEP) ** len(same)
    limit = max(broken)
    return None if best.interaction < NEAR * limit else math.sqrt(best.interaction * limit)


def chosen_of(trials: Sequence[Trial]) -> Trial | None:
    """Of those that keep delta the plans that were given most room, with the largest factor that gives them."""
    kept = [trial for trial in trials if trial.bound <= 1]
    if not kept:
        return None
    roomiest = _digests(min(kept, key=lambda trial: trial.interaction).plans)
    return max((trial for trial in kept if _digests(trial.plans) == roomiest), key=lambda trial: trial.interaction)


def _solver(trace: Trace, target: Target) -> Solve:
    longest = largest_bucket(trace).tokens

    @cache
    def solve(interaction: float) -> tuple[Plan, ...]:
        calibration = replace(trace.calibration, interaction=interaction, confirmed=())
        solved = solve_trace(
            replace(trace, calibration=calibration),
            budget_bytes=target.budget_bytes,
            margin_bytes=target.margin_bytes,
            delta=target.delta,
        )
        return tuple(plan for plan in solved.plans if plan.length_bucket == longest)

    return solve


def _measurer(spec: ModelSpec, measuring: Measuring, target: Target, trace: Trace) -> Measure:
    turns = iter(range(1, SETS + 1))

    def measure(plans: Sequence[Plan]) -> float:
        measured = measuring.chosen(plans, f"confirm: plans, set {next(turns)}")
        limit = target.delta * trace.calibration.delta_star
        bound = bound_of(measured, spec.loss.kind, spec.batch.accumulation, spec.calibration.confidence)
        return target.drift * bound / limit

    return measure


def bound_of(measured: Sequence[MeasuredMicrobatch], loss_kind: str, accumulation: int, confidence: float) -> float:
    """What a new update's relative error stays within, under the one plan set that ``measured`` ran under.

    Raises ConfidenceError.
    """
    exposed = sum(found.gradient.square > 0 for found in measured)
    check_confidence(exposed, confidence, "microbatches that are not clipped throughout")
    composer = Composer(measured, loss_kind)
    picks = resampled_updates(len(measured), accumulation)
    picks = picks[composer.shares(picks).any(axis=1)]
    errors2 = composer.squared_errors(picks, np.zeros(picks.shape, dtype=np.int64))
    return upper_bound(np.sqrt(errors2), exposed, confidence)


def _refuse(trace: Trace, target: Target) -> None:
    calibration = trace.calibration
    if not calibration.calibrated:
        raise HiloreError(
            f"the trace of {trace.name} holds risks of source {calibration.source}, not measured on rollouts; first: "
            "hilore-plan calibrate MODEL.YAML --rollouts FILE"
        )
    if not 1 <= target.drift <= MOST_DRIFT:
        raise HiloreError(f"--drift {target.drift:g}: must be a number from 1 to {MOST_DRIFT}", drift=target.drift)
    if target.delta == 0:
        raise HiloreError("--delta 0: its plans change no value, so that there is nothing to measure; use --delta 1")


def _none_kept(trials: Sequence[Trial], spec: ModelSpec, target: Target) -> ConfirmationError:
    tried = ", ".join(f"{trial.bound:.2f} with factor {trial.interaction:.2f}" for trial in trials)
    sets = _distinct(trials)
    return ConfirmationError(
        f"delta {target.delta:g}: none of {sets} sets of plans keeps it with a confidence of "
        f"{spec.calibration.confidence:g} (bounds, times a drift of {target.drift:g}, over delta: {tried}); record "
        "more rollouts, or use a larger --delta",
        trials=tuple((trial.interaction, trial.bound) for trial in trials),
    )
