"""What `solve` takes from `confirm`: the factor of its budget and delta, and what was measured of its plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hilore.planner.compose import Options
from hilore.planner.digest import plan_digest
from hilore.planner.trace import Confirmed, Trace
from hilore.runtime.plan import MeasuredError, Plan

NOT_MEASURED = "that updates stay within delta rests on errors of other plans; hilore-plan confirm measures these"
OTHER_PLANS = (
    "these are not the plans that hilore-plan confirm measured for this budget and delta (another trace, --gap or "
    "--time-limit); confirm them again"
)


def confirmed_for(trace: Trace, options: Options) -> Confirmed | None:
    """What was measured of this budget and delta; None at another grain or under another rule than measuring uses."""
    if options.granularity != "unit" or options.rule != "each":
        return None
    asked = (options.budget_bytes, options.margin_bytes, options.delta)
    return next((one for one in trace.calibration.confirmed if one.is_for(*asked)), None)


def with_measured(
    plans: Sequence[Plan], largest_bucket: int, trace: Trace, confirmed: Confirmed | None
) -> tuple[tuple[Plan, ...], tuple[str, ...]]:
    """The plans with what was measured of them, and what to know where that is nothing.

    Measured are those of the largest bucket, of so many tokens.
    """
    if confirmed is None:
        silent = not trace.calibration.calibrated or not any(plan.lossy for plan in plans)
        return tuple(plans), () if silent else (NOT_MEASURED,)
    measured = [plan for plan in plans if plan.length_bucket == largest_bucket]
    if tuple(map(plan_digest, measured)) != confirmed.plans:
        return tuple(plans), (OTHER_PLANS,)
    error = MeasuredError(confirmed.error, confirmed.confidence, confirmed.microbatches)
    return tuple(
        replace(plan, measured=error, confidence=confirmed.confidence) if plan.length_bucket == largest_bucket else plan
        for plan in plans
    ), ()
