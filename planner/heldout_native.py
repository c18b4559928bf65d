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
CONTROL = 0  # the plans follow


@dataclass(frozen=True, slots=True)
class NativeErrors:
    """Relative errors of updates, medians: under the plans, and of the control."""

    plans: float
    control: float


def measure_native(
    instrument: Instrument,
    batches: Sequence[Microbatch],
    candidates: Sequence[Candidate],
    store: CalibrationState,
    tell: Progress,
) -> tuple[MeasuredMicrobatch, ...]:
    """``instrument``: on the actor as it trains. Every microbatch in eager, in another layout, and under each
    candidate's plan."""
    measured = []
    for place, batch in enumerate(batches):
        tell("own dtypes", place, len(batches))
        found = store.get(f"native-{place}")
        if found is None:
            exact = instrument.exact(batch)
            plans = [candidate.plan_for(exact.exposure) for candidate in candidates]
            errors = [instrument.exact(reshuffled(batch)).distance(exact)]
            for plan in plans:
                encodes = plan is not None and plan.lossy
                under = instrument.under(batch, plan) if plan is not None and encodes else exact
                errors.append(under.distance(exact))
            found = {
                "psi": exact.exposure,
                "gradient": sketch_as_json(instrument.sketcher.sketch(exact.gradients)),
                "errors": [sketch_as_json(instrument.sketcher.sketch(error)) for error in errors],
            }
            found = store.put(f"native-{place}", found)
        sketches = tuple(sketch_from_json(error) for error in found["errors"])
        tokens = int(batch.completion_mask.sum())
        measured.append(MeasuredMicrobatch(found["psi"], tokens, sketch_from_json(found["gradient"]), sketches))
    return tuple(measured)


def native_errors(
    measured: Sequence[MeasuredMicrobatch], loss_kind: str, *, accumulation: int, updates: int = 200
) -> tuple[NativeErrors, ...]:
    """Medians over updates of ``accumulation`` distinct microbatches, of each candidate in order."""
    composer = Composer(measured, loss_kind)
    picks = resampled_updates(len(measured), accumulation, updates=updates)
    picks = picks[composer.shares(picks).any(axis=1)]
    found = [
        float(np.median(np.sqrt(composer.squared_errors(picks, np.full(picks.shape, place)))))
        for place in range(composer.plans)
    ]
    return tuple(NativeErrors(error, found[CONTROL]) for error in found[CONTROL + 1 :])
