"""A plan's peak beside GC's and No-GC's, each taken apart: from the trace that the plan was solved from."""

from __future__ import annotations

from dataclasses import dataclass

from hilore.planner.composition import Composition, highest, plan_compositions, reference_compositions
from hilore.planner.plantrace import trace_of_plan
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan


@dataclass(frozen=True, slots=True)
class PlanPeaks:
    """``plan``, ``gc``, ``no_gc``: the events that set the peaks. ``demoted``: the plan's with its L units run as R,
    where that is higher."""

    plan: Composition
    gc: Composition
    no_gc: Composition
    demoted: Composition | None


def plan_peaks(plan: Plan, trace_path: str | None) -> PlanPeaks | str:
    """What the peaks are made of; without ``trace_path`` and without a trace of the plan here, why that is not known.

    Raises HiloreError where the trace that is named is missing, damaged or not the plan's.
    """
    try:
        trace, bucket = trace_of_plan(plan, trace_path)
    except HiloreError as error:
        if trace_path is not None:
            raise
        return error.message
    demoted = highest(plan_compositions(trace, bucket, plan.regions, demoted=True))
    return PlanPeaks(
        plan=(normal := highest(plan_compositions(trace, bucket, plan.regions))),
        gc=highest(reference_compositions(trace, bucket, gc=True)),
        no_gc=highest(reference_compositions(trace, bucket, gc=False)),
        demoted=demoted if demoted.live_bytes > normal.live_bytes else None,
    )
