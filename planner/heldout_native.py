"""Errors in the actor's own dtypes beside their control: the same rollouts in another layout, without any plan.

In bfloat16 anything that is not bit-exact reshuffles the rounding of all that follows, so that a plan's error there
says little by itself; it is to be read beside what another order of rows does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hilore.planner.calibration_state import CalibrationState, sketch_as_json, sketch_from_json
from hilore.planner.conformal import resampled_updates
from hilore.planner.gradient_error import Instrument
from hilore.planner.heldout import Candidate
from hilore.planner.microbatch import Microbatch
from hilore.planner.stepping import reshuffled
from hilore.planner.updates import Composer, MeasuredMicrobatch

Progress = Callable[[str, int, int], None]
PLAN, CONTROL = 0, 1


@dataclass(frozen=True, slots=True)
class NativeErrors:
    """Relative errors of updates, medians: under the plans, and of the control."""

    plans: float
    control: float


def measure_native(
    instrument: Instrument, batches: Sequence[Microbatch], candidate: Candidate, store: CalibrationState, tell: Progress
) -> tuple[MeasuredMicrobatch, ...]:
    """``instrument``: on the actor as it trains. Every microbatch in eager, under its plan, and in another layout."""
    measured = []
    for place, batch in enumerate(batches):
        tell(f"own dtypes, {candidate.name}", place, len(batches))
        found = store.get(f"native-{candidate.name}-{place}")
        if found is None:
            exact = instrument.exact(batch)
            plan = candidate.plan_for(exact.exposure)
            lossy = plan is not None and plan.count("L") > 0 and exact.exposure > 0
            error = instrument.error(batch, plan, exact) if plan is not None and lossy else None
            control = instrument.sketcher.sketch(instrument.exact(reshuffled(batch)).distance(exact))
            found = {
                "psi": exact.exposure,
                "gradient": sketch_as_json(instrument.sketcher.sketch(exact.gradients)),
                "plan": sketch_as_json(error or instrument.sketcher.nothing()),
                "control": sketch_as_json(control),
            }
            found = store.put(f"native-{candidate.name}-{place}", found)
        gradient, error, control = (sketch_from_json(found[name]) for name in ("gradient", "plan", "control"))
        tokens = int(batch.completion_mask.sum())
        measured.append(MeasuredMicrobatch(found["psi"], tokens, gradient, (error, control)))
    return tuple(measured)


def native_errors(
    measured: Sequence[MeasuredMicrobatch], loss_kind: str, *, accumulation: int, updates: int = 200
) -> NativeErrors:
    """Medians over updates of ``accumulation`` distinct microbatches."""
    composer = Composer(measured, loss_kind)
    picks = resampled_updates(len(measured), accumulation, updates=updates)
    picks = picks[composer.shares(picks).any(axis=1)]
    found = [np.sqrt(composer.squared_errors(picks, np.full(picks.shape, place))) for place in (PLAN, CONTROL)]
    return NativeErrors(*(float(np.median(errors)) for errors in found))
