"""`verify`: real updates under each plan (or fake ones), measured against what the plan promises.

Promises are the budget, the predicted peak, the loss (always that of eager), the gradients (bitwise without L units,
within delta with them). Time is compared, not promised: it is another machine's or another hour's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hilore.planner.actor import build_actor, microbatch_of
from hilore.planner.checkfake import FakePeak, check_fake, fake_breaches, plan_label
from hilore.planner.regimes import plan_limit
from hilore.planner.rivals import PlanPolicy
from hilore.planner.sidebyside import Contender, Measured, SideBySide, measure_policies
from hilore.planner.sidebyside_runs import Progress
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Trace
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan

MIB = 2**20
VERIFICATION_FAILED = 6
# Above every exposure: the plan is measured as it is, on whatever microbatch.
ANY_EXPOSURE = 1e30


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """One plan. ``budget_bytes``: less the margin. ``measured_gain`` over GC and ``error`` (relative L2 of the update's
    gradient in float32 compute) are None in a fake check, ``error_limit`` where nothing limits it: no L unit, or
    exposure 0. ``estimated``: the predicted gain is of a card's data sheet. ``demoted_peak_bytes``: of a fake check of
    a plan with L units, when they run as R. ``rounding_bytes``, ``segment_bytes``: of a fake check, what CUDA's
    allocator would show as allocated and as reserved beyond the storages at the peak (planner/allocator.py)."""

    plan: str
    regime: str
    tokens: int
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_gain: float
    measured_gain: float | None
    exact: bool | None
    error: float | None
    error_limit: float | None
    estimated: bool = False
    demoted_peak_bytes: int | None = None
    rounding_bytes: int | None = None
    segment_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """``breaches``: a line for each promise that did not hold. ``measurements``: one per bucket, none if fake."""

    checks: tuple[PlanCheck, ...]
    breaches: tuple[str, ...]
    measurements: tuple[SideBySide, ...]
    fake: bool

    @property
    def exit_code(self) -> int:
        return VERIFICATION_FAILED if self.breaches else 0


def verify_plans(
    plans: Sequence[Plan],
    spec: ModelSpec,
    *,
    trace: Trace | None = None,
    fake: bool = False,
    microbatches: int = 2,
    rounds: int = 5,
    seed: int = 0,
    progress: Progress | None = None,
) -> Verification:
    """Measure every plan on the actor of ``spec``, synthetic rollouts of its length bucket, one process.

    ``trace`` gives the memory of others. ``fake``: whole updates under fake tensors (planner/checkfake.py), which take
    no memory and give the peak alone; any size of model, also one rank's of FSDP2.
    Raises HiloreError where one process cannot stand for the run, and what building the actor and attaching raise.
    """
    if fake:
        peaks = check_fake(plans, spec, trace=trace, progress=progress)
        broken = [line for found in peaks for line in fake_breaches(found, tight=not _collectives_copy(spec))]
        return Verification(tuple(map(_fake_check, peaks)), tuple(broken), (), True)
    if spec.parallel.kind != "none":
        raise HiloreError(
            f"parallel.kind is {spec.parallel.kind}: verify runs one process, whose memory is not that of a rank; "
            "use --fake, which runs a rank's update under fake tensors, or a model.yaml with parallel: none"
        )
    buckets = sorted({plan.length_bucket for plan in plans}, reverse=True)
    other_bytes = trace.fixed.other_bytes if trace is not None else spec.resident.other_mib * MIB
    actor = build_actor(spec, device=spec.device.kind, live_adapters=True, seed=seed)
    checks: list[PlanCheck] = []
    breaches: list[str] = []
    measurements: list[SideBySide] = []
    for tokens in buckets:
        group = [plan for plan in plans if plan.length_bucket == tokens]
        update = [microbatch_of(actor, tokens, seed=seed + place) for place in range(microbatches)]
        result = measure_policies(
            actor,
            update,
            [_contender(plan, trace) for plan in group],
            gradients_exist=spec.batch.accumulation > 1,
            other_bytes=other_bytes,
            rounds=rounds,
            seed=seed,
            threads=None,
            progress=progress,
        )
        checks += [_check(plan, trace, row) for plan, row in zip(group, result.rows[2:], strict=True)]
        breaches += result.breaches
        measurements.append(result)
    return Verification(tuple(checks), tuple(breaches), tuple(measurements), False)


def error_limit(plan: Plan) -> float | None:
    """What the gradient error of an update may be (planner/regimes.py); None where nothing limits it."""
    return plan_limit(plan) if plan.lossy else None


def _contender(plan: Plan, trace: Trace | None) -> Contender:
    always = replace(plan, regime=replace(plan.regime, exposure_low=0.0, exposure_high=ANY_EXPOSURE))
    return Contender(
        PlanPolicy(plan_label(plan), (always,)), budget_bytes=plan.ceiling_bytes, error_limit=error_limit(plan)
    )


def _check(plan: Plan, trace: Trace | None, row: Measured) -> PlanCheck:
    return PlanCheck(
        plan=plan_label(plan),
        regime=plan.regime.label,
        tokens=plan.length_bucket,
        budget_bytes=plan.ceiling_bytes,
        predicted_peak_bytes=plan.predicted.peak_bytes,
        measured_peak_bytes=row.peak_bytes,
        predicted_gain=plan.predicted.gc_step_ns / plan.predicted.step_ns - 1,
        measured_gain=row.gain.value,
        exact=row.exact,
        error=row.error,
        error_limit=error_limit(plan),
        estimated=plan.predicted.estimated,
    )


def _fake_check(found: FakePeak) -> PlanCheck:
    plan = found.plan
    return PlanCheck(
        plan=plan_label(plan),
        regime=plan.regime.label,
        tokens=plan.length_bucket,
        budget_bytes=plan.ceiling_bytes,
        predicted_peak_bytes=plan.predicted.peak_bytes,
        measured_peak_bytes=found.peak_bytes,
        predicted_gain=plan.predicted.gc_step_ns / plan.predicted.step_ns - 1,
        measured_gain=None,
        exact=None,
        error=None,
        error_limit=None,
        estimated=plan.predicted.estimated,
        demoted_peak_bytes=found.demoted_peak_bytes,
        rounding_bytes=found.rounding.rounding_bytes,
        segment_bytes=found.rounding.segment_bytes,
    )


def _collectives_copy(spec: ModelSpec) -> bool:
    """Whether collectives take memory of their own (gloo's, on the CPU): a prediction has it, a fake run has not."""
    return spec.parallel.kind != "none" and spec.device.kind == "cpu"
