"""Solution -> Plan: names, figures from the verifier, and the last checks before a plan exists."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from hilore.planner.milp import within_gap
from hilore.planner.problem import RISK_SCALE, Configuration, Problem, Solution, Verified
from hilore.planner.regimes import RegimeInterval
from hilore.planner.solved import SolveRow
from hilore.planner.trace import Bucket, Trace
from hilore.planner.verify import linear_risk, reference_peaks, reference_times, verify, verify_modes
from hilore.runtime.codecs import loses
from hilore.runtime.errors import InternalError
from hilore.runtime.plan import (
    SCHEMA_VERSION,
    Plan,
    PlannedMicrobatch,
    Predicted,
    Regime,
    RegionPlan,
    SolverReport,
    UnitPlan,
)


@dataclass(frozen=True, slots=True)
class Job:
    """One regime of one bucket."""

    bucket: Bucket
    regime: RegimeInterval
    problem: Problem


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked. All of it goes into the set_id. ``margin_bytes`` of the budget are not for allocations."""

    budget_bytes: int
    margin_bytes: int
    delta: float
    time_limit_s: float
    gap_percent: float
    granularity: str
    rule: str = "each"

    @property
    def ceiling_bytes(self) -> int:
        """What the allocated peak may reach."""
        return self.budget_bytes - self.margin_bytes


def make_plan(
    trace: Trace, job: Job, solution: Solution, options: Options, set_id: str, provenance: dict[str, Any]
) -> tuple[Plan, SolveRow]:
    """The plan of one regime and its row, after the verifier has recomputed both from the modes.

    Raises InternalError where its figures are not the solver's, or a limit is broken.
    """
    regions = tuple(
        region_plan(region.name, region.configurations[index])
        for region, index in zip(job.problem.regions, solution.choice, strict=True)
    )
    verified = verify(job.problem, solution.choice)
    recomputed = verify_modes(trace, job.bucket, regions, risk_free=job.regime.high == 0)
    if verified != recomputed:
        raise InternalError(f"{job.regime.label}: the solver's figures {verified}, from the modes {recomputed}")
    if max(recomputed.peak_bytes, recomputed.demoted_peak_bytes) > options.ceiling_bytes:
        raise InternalError(f"{job.regime.label}: peak {recomputed.peak_bytes} over {options.ceiling_bytes} bytes")
    if recomputed.risk > job.problem.risk_limit:
        raise InternalError(f"{job.regime.label}: risk {recomputed.risk} over its limit {job.problem.risk_limit}")
    if options.delta == 0 and any(loses(unit.codec) for region in regions for unit in region.units):
        raise InternalError(f"{job.regime.label}: a codec that loses values at delta 0")
    closed = within_gap(verified, solution.bound_ns, options.gap_percent)
    if (solution.status == "optimal") != closed:
        raise InternalError(f"{job.regime.label}: status {solution.status}, gap closed: {closed}")
    plan = Plan(
        schema_version=SCHEMA_VERSION,
        set_id=set_id,
        name=trace.name,
        loss=dict(trace.spec["loss"]),
        regime=_regime(job.regime),
        budget_bytes=options.budget_bytes,
        margin_bytes=options.margin_bytes,
        delta=options.delta,
        delta_star=trace.calibration.delta_star,
        calibrated=trace.calibration.calibrated,
        predicted=_predicted(trace, job, verified, regions),
        length_bucket=job.bucket.tokens,
        microbatch=_microbatch(job.bucket),
        regions=regions,
        solver=SolverReport(
            name=solution.solver,
            status=solution.status,
            objective_ns=verified.extra_ns,
            bound_ns=solution.bound_ns,
            gap=(verified.extra_ns - solution.bound_ns) / verified.step_ns,
            wall_s=solution.wall_s,
            greedy_ns=solution.greedy_extra_ns,
        ),
        fingerprint=trace.fingerprint,
        provenance=provenance,
        confidence=trace.calibration.confidence if trace.calibration.calibrated else 0.0,
    )
    return plan, _row(plan, verify(job.problem, solution.greedy_choice))


def _regime(interval: RegimeInterval) -> Regime:
    return Regime(_label(interval.label), interval.low, interval.high, interval.frequency, interval.allowance)


def _microbatch(bucket: Bucket) -> PlannedMicrobatch | None:
    if not bucket.completions:
        return None
    return PlannedMicrobatch(bucket.rows, bucket.completions, bucket.masked)


def _predicted(trace: Trace, job: Job, verified: Verified, regions: tuple[RegionPlan, ...]) -> Predicted:
    gc_peak, no_gc_peak = reference_peaks(trace, job.bucket)
    gc_step, no_gc_step = reference_times(trace, job.bucket)
    return Predicted(
        peak_bytes=verified.peak_bytes,
        peak_event=verified.peak_event,
        step_ns=verified.step_ns,
        gc_step_ns=gc_step,
        gc_peak_bytes=gc_peak,
        no_gc_step_ns=no_gc_step,
        no_gc_peak_bytes=no_gc_peak,
        risk=update_error(verified.risk),
        linear_risk=0.0 if job.regime.high == 0 else linear_risk(trace, job.bucket, regions),
        estimated=trace.estimated,
        interaction=trace.calibration.interaction,
    )


def update_error(risk: int) -> float:
    """Relative error of an update whose microbatches all run under a plan of this risk."""
    return math.sqrt(risk / RISK_SCALE)


def _row(plan: Plan, greedy: Verified) -> SolveRow:
    return SolveRow(
        tokens=plan.length_bucket,
        regime=plan.regime.label,
        kept=plan.count("H"),
        lossy=plan.count("L"),
        replayed=plan.count("R"),
        held=sum(region.hold for region in plan.regions),
        peak_bytes=plan.predicted.peak_bytes,
        peak_event=plan.predicted.peak_event,
        step_ns=plan.predicted.step_ns,
        gain=plan.predicted.gc_step_ns / plan.predicted.step_ns - 1,
        risk=plan.predicted.risk,
        greedy_step_ns=greedy.step_ns,
        status=plan.solver.status,
        gap=plan.solver.gap,
        greedy_peak_bytes=greedy.peak_bytes,
    )


def region_plan(name: str, configuration: Configuration) -> RegionPlan:
    """A region of a plan from its configuration; unit names get the region's."""
    units = tuple(
        UnitPlan(
            name=f"{name}.{unit.name}",
            mode=_mode(unit.mode),
            codec=unit.codec,
            dead=unit.dead,
            dead_if_demoted=unit.dead_if_demoted,
            dead_late=unit.dead_late,
            dead_late_if_demoted=unit.dead_late_if_demoted,
        )
        for unit in configuration.units
    )
    split_at = f"{name}.{configuration.split_at}" if configuration.split_at else None
    return RegionPlan(name, configuration.hold, units, split_at)


def _mode(mode: str) -> Literal["H", "L", "R"]:
    match mode:
        case "H" | "L" | "R":
            return mode
    raise InternalError(f"a unit has mode {mode!r}")


def _label(label: str) -> Literal["null", "low", "mid", "high"]:
    match label:
        case "null" | "low" | "mid" | "high":
            return label
    raise InternalError(f"a regime is called {label!r}")
