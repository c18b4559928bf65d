"""Which trace a plan was solved from: the one that is named, or the one that lies here under the plan's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hilore.planner.trace import Bucket, Trace
from hilore.planner.tracefile import load_trace, newest_trace
from hilore.planner.verify import verify_modes
from hilore.runtime.errors import HiloreError, InternalError
from hilore.runtime.plan import Plan


def trace_of_plan(plan: Plan, path: str | None) -> tuple[Trace, Bucket]:
    """The plan's trace and length bucket; without ``path`` ``<name>.trace.json`` here, else the newest trace here.

    Raises HiloreError where there is none, or where it is not the plan's: other regions or units, or another peak for
    the plan's modes than the plan says.
    """
    path = path if path is not None else likely_trace(plan)
    trace = load_trace(path)
    bucket = bucket_of_plan(plan, trace, path)
    return with_factor_of(plan, trace), bucket


def with_factor_of(plan: Plan, trace: Trace) -> Trace:
    """The trace with the interaction factor that the plan was solved with, which may be a confirmed one."""
    factor = plan.predicted.interaction or trace.calibration.interaction
    return replace(trace, calibration=replace(trace.calibration, interaction=factor))


def likely_trace(plan: Plan) -> str:
    """``<name>.trace.json`` here, else the newest trace here."""
    own = Path(f"{plan.name}.trace.json")
    return str(own if own.is_file() else newest_trace())


def bucket_of_plan(plan: Plan, trace: Trace, trace_path: str = "the trace") -> Bucket:
    """The length bucket that the plan was solved for. Raises HiloreError where the trace is another plan's."""
    bucket = next((bucket for bucket in trace.buckets if bucket.tokens == plan.length_bucket), None)
    names = [region.name for region in plan.regions]
    if trace.name != plan.name or bucket is None or names != [region.name for region in bucket.regions]:
        lengths = ", ".join(str(bucket.tokens) for bucket in trace.buckets)
        raise HiloreError(
            f"{plan.path}: plan of {plan.name}, {plan.length_bucket} tokens, is not of the trace of {trace.name} "
            f"({trace_path}: {lengths} tokens); name its trace with --trace"
        )
    try:
        found = verify_modes(trace, bucket, plan.regions, risk_free=plan.regime.exposure_high == 0).peak_bytes
    except InternalError as error:
        raise HiloreError(
            f"{plan.path}: not solved from {trace_path}: {error.message}; name its trace with --trace"
        ) from error
    if found != plan.predicted.peak_bytes:
        raise HiloreError(
            f"{plan.path}: predicts a peak of {plan.predicted.peak_bytes:,} bytes, but its modes take {found:,} bytes "
            f"in {trace_path}: it was solved from another trace; name that with --trace, or solve again"
        )
    return bucket
