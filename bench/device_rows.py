"""One row per policy of bench/device_runs.py: what was predicted beside what was measured, and what that breaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.device_card import DevicePeaks
from hilore.planner.paired import Interval, paired_gain, paired_share, resampled_rounds
from hilore.planner.sidebyside_runs import (
    Run,
)
from hilore.planner.trace import Trace
from hilore.planner.verify import largest_bucket, reference_peaks, reference_times, verify_modes
from hilore.runtime.plan import Plan

RESAMPLES = 2000
MIB = 2**20


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One policy. ``predicted_bytes``: by the trace made here; ``predicted_elsewhere_bytes``: by the one without the
    device (None: it does not know what this plan keeps). ``counted_bytes``: the storage counter's peak, with what the
    prediction reserves for libraries. ``error``: relative L2 of the gradient in the actor's dtypes; ``float32_error``
    in float32 (None: exact, or not measured)."""

    policy: str
    budget_bytes: int | None
    predicted_bytes: int
    predicted_elsewhere_bytes: int | None
    counted_bytes: int
    device: DevicePeaks
    step_ns: int
    predicted_step_ns: int
    estimated_step_ns: int | None
    gain: Interval
    share: Interval | None
    exact: bool
    error: float
    float32_error: float | None


@dataclass(frozen=True, slots=True)
class Traces:
    """``here``: measured on the device; ``elsewhere``: estimated without it, None where that cannot be."""

    here: Trace
    elsewhere: Trace | None


def device_rows(
    runs: Sequence[Run],
    peaks: Sequence[tuple[int, DevicePeaks]],
    float32: dict[str, float],
    traces: Traces,
    rounds: int,
) -> Iterator[DeviceRow]:
    picks = resampled_rounds(rounds, resamples=RESAMPLES, seed=0)
    gc_run, no_gc_run = runs[0], runs[1]
    for place, (run, (counted, device)) in enumerate(zip(runs, peaks, strict=True)):
        plan = run.choices[0].plan
        made_here = _predicted(traces.here, place, plan)
        if made_here is None and plan is not None:
            made_here = plan.predicted.peak_bytes, plan.predicted.step_ns
        assert made_here is not None
        made_elsewhere = None if traces.elsewhere is None else _predicted(traces.elsewhere, place, plan)
        yield DeviceRow(
            policy=run.contender.label,
            budget_bytes=run.contender.budget_bytes,
            predicted_bytes=made_here[0],
            predicted_elsewhere_bytes=None if made_elsewhere is None else made_elsewhere[0],
            counted_bytes=counted + traces.here.fixed.other_bytes,
            device=device,
            step_ns=round(median(run.times_ns)),
            predicted_step_ns=made_here[1],
            estimated_step_ns=None if made_elsewhere is None else made_elsewhere[1],
            gain=paired_gain(gc_run.times_ns, run.times_ns, picks),
            share=paired_share(gc_run.times_ns, run.times_ns, no_gc_run.times_ns, picks),
            exact=run.exact,
            error=run.native_error,
            float32_error=float32.get(run.contender.label),
        )


def _predicted(trace: Trace, place: int, plan: Plan | None) -> tuple[int, int] | None:
    """Peak bytes and step nanoseconds by a trace, of GC (first), No-GC (second) or a plan.

    None where the trace never measured what the plan keeps: which sets are worth it depends on its times.
    """
    if plan is None:
        return reference_peaks(trace)[place], reference_times(trace)[place]
    known = {(sets.kept, sets.split) for found in largest_bucket(trace).classes for sets in found.keep_sets}
    for region in plan.regions:
        kept = tuple(u.name.removeprefix(f"{region.name}.") for u in region.units if u.mode != "R")
        if not region.hold and (kept, region.split_at is not None) not in known:
            return None
    found = verify_modes(trace, largest_bucket(trace), plan.regions, risk_free=True)
    return found.peak_bytes, found.step_ns


def row_breaches(rows: Iterable[DeviceRow], floor: float) -> Iterator[str]:
    """A line for each promise that did not hold. ``floor``: gradients that differ by less differ by rounding alone."""
    for row in rows:
        measured = row.counted_bytes if row.device.requested is None else row.device.requested
        for what, promised in (("predicted peak", row.predicted_bytes), ("budget", row.budget_bytes)):
            if promised is not None and measured > promised:
                over = (measured - promised) / MIB
                yield f"{row.policy}: measured peak {measured / MIB:,.1f} MiB is {over:,.2f} MiB over the {what}"
        if not row.exact and row.float32_error is None and row.error > floor:
            yield f"{row.policy}: gradients differ from eager's by {row.error:.3%} although nothing is encoded"
