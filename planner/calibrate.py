"""Risk and exposure measured on the actor itself, with the runtime as instrument: a Trace with its Calibration.

Float32 compute on the actor's own weights (with a live lora_B, since a zero one hides most of the gradient). On every
microbatch the exact gradient and those of a few random plans are taken, other plans on each; from all of them together
kappa2 of every unit, codec and context is fitted (planner/calibration_fit.py). Then every microbatch runs under the
same few further plans, random ones and plans that the solver makes of the fit, and the bound on what an update's error
may be above the fitted one is taken over updates resampled from the microbatches (planner/calibration_bound.py).

Passes per microbatch: an exact one (or one for each of the two parts, where the host has no room to keep so many
gradients), ``fit_passes`` and SCORED_PLANS, and on the first one four controls (both layouts in both precisions): fewer
than MOST_PASSES whatever the number of units and codecs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hilore.planner.actor import Actor, build_actor, with_reference
from hilore.planner.calibration_bound import Bound, Measurements, ScoredPlan, bound_errors, cross_fitted, folds_of
from hilore.planner.calibration_fit import Observation, RiskModel, fit
from hilore.planner.calibration_identity import identity_of, refuse_another_actor, refuse_calibration
from hilore.planner.calibration_measure import MOST_PASSES, Measuring, fit_passes, layout_noise, seed_of
from hilore.planner.calibration_plans import every_lossy_unit, lossy_units, random_plans
from hilore.planner.calibration_sources import Recording, generate_file, is_null, recorded, synthetic
from hilore.planner.calibration_state import CalibrationState
from hilore.planner.emit import InfeasibleError, NoPlanError, solve_trace
from hilore.planner.gradient_error import Instrument
from hilore.planner.regimes import edges_and_frequencies
from hilore.planner.repeatable import unrepeatable_regions
from hilore.planner.spec import spec_as_dict
from hilore.planner.spec_types import ModelSpec
from hilore.planner.stepping import float32_twin
from hilore.planner.trace import Calibration, ExposureSample, Trace, UnitRisk
from hilore.planner.updates import MeasuredMicrobatch
from hilore.planner.verify import reference_peaks
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.exposure import LOG_MOVE
from hilore.runtime.plan import Plan

__all__ = ["MOST_PASSES", "calibrate_trace", "fit_passes", "measurements_of", "refuse_calibration"]

Progress = Callable[[str, int, int], None]


# Where the solver's own plans come from: (share of the way from GC's peak to No-GC's, delta).
OWN_PLANS = ((0.15, 1.0), (0.4, 2.0))
# Two random plans bounded too little for plans that were solved later (docs/measurements/evidence-smollm2.md).
SCORED_PLANS = 8 + len(OWN_PLANS)
OWN_TIME_LIMIT_S = 60.0
OWN_GAP_PERCENT = 1.0
# What the interaction factor is taken to be before it is measured.
EXPECTED_INTERACTION = 1.1
KAPPA_DIGITS = 6
NOTE = "calibration: "


def calibrate_trace(
    spec: ModelSpec,
    trace: Trace,
    progress: Progress | None = None,
    *,
    rollouts: Path | None = None,
    state: Path | None = None,
    seed: int = 0,
) -> Trace:
    """The trace with risk and exposure measured as ``spec.calibration`` says.

    ``rollouts``: the file to read (source rollouts; by default ``calibration.path``), or to write and read (source
    generate: one that is there is only read). ``state``: where measurements are kept, so that an interrupted
    calibration goes on from them; the same seed gives the same trace either way. It stays: remove it once the trace
    is saved. Raises HiloreError where spec and trace are not of one actor, RolloutFileError, ConfidenceError,
    CalibrationStateError, UnsupportedModelError, SourceError.
    """
    run, store = _opened(spec, trace, progress, rollouts, state, seed)
    try:
        calibrated, _ = run.calibrate()
    finally:
        store.close()
    return calibrated


def measurements_of(
    spec: ModelSpec, trace: Trace, progress: Progress | None = None, *, rollouts: Path, state: Path, seed: int = 0
) -> Measurements:
    """What a calibration measured whose state was kept. Arguments and errors as for ``calibrate_trace``."""
    run, store = _opened(spec, trace, progress, rollouts, state, seed)
    try:
        _, found = run.calibrate()
    finally:
        store.close()
    return found


def _opened(
    spec: ModelSpec, trace: Trace, progress: Progress | None, rollouts: Path | None, state: Path | None, seed: int
) -> tuple[_Run, CalibrationState]:
    tell = progress or (lambda _label, _done, _total: None)
    refuse_calibration(spec, estimated=trace.estimated)
    refuse_another_actor(spec, trace)
    native = build_actor(spec, device=torch.device(spec.device.kind), live_adapters=True, seed=seed)
    recording = _recording(native, trace, rollouts, tell, seed)
    store = CalibrationState(state, identity_of(spec, trace, recording, seed))
    return _Run(trace, native, recording, store, seed, tell), store


def _recording(actor: Actor, trace: Trace, rollouts: Path | None, tell: Progress, seed: int) -> Recording:
    source = actor.spec.calibration.source
    if source == "synthetic":
        return synthetic(actor, trace.buckets[-1].tokens, seed=seed)
    if source == "prior":
        raise UnsupportedModelError(
            "calibration.source: prior measures nothing; give --rollouts FILE, or set calibration.source to rollouts, "
            "generate or synthetic",
            unit="calibration.source",
        )
    path = rollouts or actor.spec.beside(actor.spec.calibration.path or f"{actor.spec.name}.rollouts.jsonl")
    if source == "generate" and not path.exists():
        generate_file(actor, path, tell, seed=seed)
    return recorded(actor, path)


class _Run:
    """One calibration, step by step."""

    def __init__(
        self, trace: Trace, native: Actor, recording: Recording, store: CalibrationState, seed: int, tell: Progress
    ) -> None:
        self.spec = native.spec
        self._trace = trace
        self._store = store
        self._seed = seed
        self._tell = tell
        self._native = native
        self._batches = tuple(with_reference(native, batch) for batch in recording.microbatches)
        self._exposed = [place for place, batch in enumerate(self._batches) if not is_null(self.spec.loss, batch)]
        self._first = self._batches[self._exposed[0]]

    def calibrate(self) -> tuple[Trace, Measurements]:
        """Everything in order; the native actor goes once its float32 twin takes over."""
        reasons = self._hold_only()
        native_noise = self._noise("native", self._native)
        twin = float32_twin(self._native)
        del self._native
        with Instrument(twin, [region.name for region in self._trace.buckets[-1].regions], seed=self._seed) as runs:
            args = (self._trace, self._batches, self._exposed, self._store, self._seed, self._tell)
            measuring = Measuring(runs, *args)
            observations = measuring.observations()
            model = fit(observations, self._regions)
            plans = self._scored_plans(model)
            measured = measuring.scored(plans)
        bucket = self._trace.buckets[-1]
        scored = tuple(ScoredPlan(row, lossy_units(bucket, plan.regions)) for row, plan in enumerate(plans))
        bound = self._bound(measured, scored, observations)
        calibration = replace(
            self._calibration(model, bound, [found.psi for found in measured]),
            noise_floor=self._noise("float32", twin),
            native_noise=native_noise,
        )
        notes = [f"{name} can only be held: {reason}" for name, reason in reasons.items()]
        notes += _move_notes(*measuring.largest_log_move)
        kept = [note for note in self._trace.notes if not note.startswith(NOTE)]
        calibrated = replace(
            self._trace,
            spec=spec_as_dict(self.spec),
            calibration=calibration,
            notes=(*kept, *(NOTE + note for note in notes)),
        )
        return calibrated, Measurements(tuple(observations), scored, tuple(measured), tuple(self._exposed))

    @property
    def _regions(self) -> int:
        return len(self._trace.buckets[-1].regions)

    def _hold_only(self) -> dict[str, str]:
        """Regions that may not be replayed; from then on the trace says so."""
        reasons: dict[str, str] | None = self._store.get("hold_only")
        if reasons is None:
            self._tell("run every region twice", 0, 1)
            names = [region.name for region in self._trace.buckets[-1].regions]
            reasons = unrepeatable_regions(self._native, self._first, names)
            self._store.put("hold_only", reasons)
        self._trace = _held_only(self._trace, reasons)
        return reasons

    def _noise(self, name: str, actor: Actor) -> float | None:
        found = self._store.get(f"noise-{name}")
        if found is None:
            found = self._store.put(f"noise-{name}", {"error": layout_noise(actor, self._first, self._seed)})
        error: float | None = found["error"]
        return error

    def _scored_plans(self, model: RiskModel) -> tuple[Plan, ...]:
        """Plans that are not among those of the fit: the solver's own, and random ones."""
        own = [plan for part, delta in OWN_PLANS for plan in self._own_plan(model, part, delta)]
        count, seed = SCORED_PLANS - len(own), seed_of(self._seed, len(self._batches))
        return (*own, *random_plans(self._trace, count, model.kappa2, seed=seed, name="scored"))

    def _own_plan(self, model: RiskModel, part: float, delta: float) -> tuple[Plan, ...]:
        """The solver's plan at a budget and delta; none where it has nothing at L."""
        low, high = reference_peaks(self._trace)
        assumed = self._calibration(model, Bound(EXPECTED_INTERACTION, 1.0, ()), [1.0])
        try:
            solved = solve_trace(
                replace(self._trace, calibration=assumed),
                budget_bytes=int(low + part * (high - low)),
                delta=delta,
                time_limit_s=OWN_TIME_LIMIT_S,
                gap_percent=OWN_GAP_PERCENT,
            )
        except (InfeasibleError, NoPlanError):
            # Regions that can only be held may take more than this budget; random plans stand in.
            return ()
        plan = next(plan for plan in solved.plans if plan.regime.label == "high")
        return (plan,) if plan.lossy else ()

    def _bound(
        self, measured: Sequence[MeasuredMicrobatch], plans: Sequence[ScoredPlan], observations: Sequence[Observation]
    ) -> Bound:
        if not plans:
            samples = tuple(ExposureSample(found.psi, found.gradient.square, 1.0) for found in measured)
            return Bound(1.0, 1.0, samples)
        folds = folds_of(self._exposed)
        return bound_errors(
            measured,
            plans,
            cross_fitted(observations, self._regions, folds),
            folds,
            loss_kind=self.spec.loss.kind,
            accumulation=self.spec.batch.accumulation,
            confidence=self.spec.calibration.confidence,
        )

    def _calibration(self, model: RiskModel, bound: Bound, exposures: Sequence[float]) -> Calibration:
        edges, frequencies = edges_and_frequencies(exposures)
        source = self.spec.calibration.source
        bucket = self._trace.buckets[-1]
        return Calibration(
            calibrated=source in ("rollouts", "generate"),
            source=source,
            delta_star=self.spec.calibration.reference_error,
            confidence=self.spec.calibration.confidence,
            psi_reference=math.sqrt(sum(psi**2 for psi in exposures) / len(exposures)),
            psi_edges=edges,
            frequencies=frequencies,
            interaction=bound.interaction,
            risks=tuple(
                UnitRisk(
                    region=bucket.regions[item.place].name,
                    unit=item.unit,
                    codec=item.codec,
                    kappa2=float(f"{model.kappa2(item):.{KAPPA_DIGITS}g}"),
                    tainted=item.tainted,
                )
                for item in every_lossy_unit(bucket)
            ),
            mean_interaction=bound.mean,
            samples=bound.samples,
        )


def _move_notes(log_move: float, place: int) -> list[str]:
    if log_move <= LOG_MOVE:
        return []
    return [
        f"microbatch {place + 1}: the recorded old log-probs lie {log_move:.2f} nats from this actor's (median); "
        "another policy made them, so that clipping, and exposures with it, are not those of training"
    ]


def _held_only(trace: Trace, reasons: dict[str, str]) -> Trace:
    return replace(
        trace,
        buckets=tuple(
            replace(
                bucket,
                regions=tuple(replace(region, hold_only=reasons.get(region.name, "")) for region in bucket.regions),
            )
            for bucket in trace.buckets
        ),
    )
