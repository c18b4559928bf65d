"""Measure memory policies side by side on one actor: peak, time, gain over GC, share of No-GC's gain, gradient error.

Everything runs in one process on the same weights and microbatches. Times are paired within a round
(planner/paired.py); peaks come from untimed steps under the storage counter; gradients are compared with plain eager.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from hilore.planner.actor import Actor
from hilore.planner.microbatch import Microbatch
from hilore.planner.paired import RESAMPLES, Interval, Picks, paired_gain, paired_share, resampled_rounds
from hilore.planner.profile import Clock, device_clock
from hilore.planner.rivals import Policy, counts
from hilore.planner.sidebyside_runs import (
    GC,
    NO_GC,
    Contender,
    Progress,
    Run,
    Setting,
    compare_gradients,
    compare_in_float32,
    find_twins,
    measure_peaks,
    measure_times,
)
from hilore.planner.steadyheap import freed_memory_kept
from hilore.planner.stepping import idle_optimizer, peak_of_step
from hilore.runtime.errors import HiloreError

__all__ = ["Contender", "Measured", "SideBySide", "fixed_conditions", "measure_peak", "measure_policies"]


# The plan that replays nothing.
HELD = "plan, all held"


@dataclass(frozen=True, slots=True)
class Measured:
    """One row's figures.

    ``step_ns``: median of forward, loss and backward. ``gain`` over GC, ``share`` of No-GC's gain (None: No-GC has
    none). ``peak_bytes``: of a step with its optimizer step. ``exact``: loss and gradients bitwise those of eager on
    every microbatch. ``error``: relative L2 of the update's gradient in float32 compute, 0 where exact;
    ``native_error``: the same in the actor's own dtypes. ``modes``: units at H, L, R, dead units, held regions, and
    ``peak_event`` what binds, both of the plan with the highest peak. ``same_as``: the row whose times and peak these
    are, since both do the same. ``share_of_held``: of the gain of the row HELD, which is No-GC with all that runs in
    fewer passes under a plan; None without that row.
    """

    policy: str
    ceiling: str
    step_ns: int
    gain: Interval
    share: Interval | None
    peak_bytes: int
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    peak_event: str
    exact: bool
    error: float
    native_error: float
    regimes: tuple[str, ...]
    modes: dict[str, int]
    same_as: str
    share_of_held: Interval | None = None


@dataclass(frozen=True, slots=True)
class SideBySide:
    """All rows, GC and No-GC first. ``breaches``: a line for each promise that a measurement broke.

    ``control_error``: relative L2 between two runs of plain eager that differ in layout alone, in the actor's dtypes
    (None where dropout draws); ``control_float32``: the same in float32 (None where every row is exact).
    ``tokens_per_step``: mean, padding included. ``times_ns``: every timed step, by row.
    """

    rows: tuple[Measured, ...]
    breaches: tuple[str, ...]
    control_error: float | None
    control_float32: float | None
    tokens_per_step: int
    rounds: int
    threads: int
    microbatches: int
    resamples: int
    seed: int
    gradients_exist: bool
    times_ns: dict[str, tuple[int, ...]]


def measure_policies(
    actor: Actor,
    microbatches: Sequence[Microbatch],
    contenders: Sequence[Contender],
    *,
    gradients_exist: bool,
    other_bytes: int = 0,
    reference_peaks: tuple[int, int] | None = None,
    rounds: int = 15,
    warm_up_rounds: int = 1,
    resamples: int = RESAMPLES,
    seed: int = 0,
    threads: int | None = 1,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> SideBySide:
    """Measure GC, No-GC and ``contenders`` on ``microbatches`` (one update), which the rounds take in turn.

    ``gradients_exist``: gradient buffers are there before a step, as under accumulation, and are zeroed outside the
    timed part; else each backward makes them. ``other_bytes``: what the budget reserves for memory of others, added
    to every peak. ``reference_peaks``: predicted peaks of GC and of No-GC. ``threads`` None leaves torch's setting.
    A row's label (policy name and ceiling) must be its own: HiloreError. Raises what attaching a plan raises.
    """
    predicted = reference_peaks or (None, None)
    first = [Contender(GC, predicted_peak_bytes=predicted[0]), Contender(NO_GC, predicted_peak_bytes=predicted[1])]
    runs = [Run(contender) for contender in (*first, *contenders)]
    _refuse_doubles([run.contender.label for run in runs])
    with fixed_conditions(threads):
        setting = Setting(
            actor,
            tuple(microbatches),
            gradients_exist,
            seed,
            clock or device_clock(actor.device),
            progress or (lambda _label, _done, _total: None),
        )
        control_error = compare_gradients(setting, runs)
        control_float32 = compare_in_float32(setting, runs)
        find_twins(runs)
        measure_peaks(setting, runs, other_bytes)
        distinct = [run for run in runs if run.twin_of is None]
        measure_times(setting, distinct, rounds=rounds, warm_up_rounds=warm_up_rounds)
        used_threads = torch.get_num_threads()
    picks = resampled_rounds(rounds, resamples=resamples, seed=seed)
    held = next((run for run in runs if run.contender.label == HELD), None)
    return SideBySide(
        rows=tuple(_row(run, runs[0], runs[1], held, picks) for run in runs),
        breaches=tuple(line for run in runs for line in _breaches(run)),
        control_error=control_error,
        control_float32=control_float32,
        tokens_per_step=sum(batch.rows * batch.tokens for batch in microbatches) // len(microbatches),
        rounds=rounds,
        threads=used_threads,
        microbatches=len(microbatches),
        resamples=resamples,
        seed=seed,
        gradients_exist=gradients_exist,
        times_ns={run.contender.label: tuple(run.times_ns) for run in distinct},
    )


def measure_peak(actor: Actor, policy: Policy, microbatch: Microbatch, *, gradients_exist: bool) -> int:
    """Peak bytes of one update of one microbatch under a policy (planner/stepping.py, peak_of_step)."""
    return peak_of_step(actor, policy, microbatch, idle_optimizer(actor), gradients_exist=gradients_exist)


@contextmanager
def fixed_conditions(threads: int | None) -> Iterator[None]:
    """So many threads, the random state restored after, freed memory kept (planner/steadyheap.py), and garbage
    collection spared what is there already."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    gc.collect()
    gc.freeze()
    try:
        with torch.random.fork_rng(), freed_memory_kept():
            yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(before)


def _refuse_doubles(labels: list[str]) -> None:
    doubles = sorted({label for label in labels if labels.count(label) > 1})
    if doubles:
        raise HiloreError(f"policy {doubles[0]!r}: there are {labels.count(doubles[0])} rows of this name; rename one")


def _row(run: Run, gc_run: Run, no_gc_run: Run, held: Run | None, picks: Picks) -> Measured:
    source, highest = run.source, run.highest
    held_ns = None if held is None else held.source.times_ns
    plan = highest.plan if highest is not None else None
    planned = [choice.plan for choice in run.choices if choice.plan is not None]
    return Measured(
        policy=run.contender.policy.name,
        ceiling=run.contender.ceiling,
        step_ns=round(median(source.times_ns)),
        gain=paired_gain(gc_run.times_ns, source.times_ns, picks),
        share=paired_share(gc_run.times_ns, source.times_ns, no_gc_run.source.times_ns, picks),
        peak_bytes=run.peak_bytes,
        budget_bytes=run.contender.budget_bytes,
        predicted_peak_bytes=_predicted_bytes(run),
        peak_event=plan.predicted.peak_event if plan is not None else "",
        exact=run.exact,
        error=run.error,
        native_error=run.native_error,
        regimes=tuple(dict.fromkeys(chosen.regime.label for chosen in planned)),
        modes=counts(plan.regions) if plan is not None else {},
        same_as="" if source is run else source.contender.label,
        share_of_held=None if held_ns is None else paired_share(gc_run.times_ns, source.times_ns, held_ns, picks),
    )


def _predicted_bytes(run: Run) -> int | None:
    plan = run.highest.plan if run.highest is not None else None
    if plan is None:
        return run.contender.predicted_peak_bytes
    # 0 in a plan that was made by hand: nothing was predicted.
    return plan.predicted.peak_bytes or None


def _breaches(run: Run) -> Iterator[str]:
    label, contender = run.contender.label, run.contender
    if not run.same_loss:
        yield f"{label}: the loss is not bitwise that of eager"
    if not run.exact and not any(choice.lossy for choice in run.choices):
        yield f"{label}: gradients are not bitwise those of eager although nothing is encoded ({run.native_error:.3g})"
    # Not "above": an error that is no number is above any limit.
    if contender.error_limit is not None and not run.error <= contender.error_limit:
        yield f"{label}: gradient error {run.error:.3%}, allowed {contender.error_limit:.3%}"
    for what, promised in (("budget", contender.budget_bytes), ("predicted peak", _predicted_bytes(run))):
        if promised is not None and run.peak_bytes > promised:
            over = run.peak_bytes - promised
            yield f"{label}: measured peak {run.peak_bytes:,} B is {over:,} B over the {what} of {promised:,} B"
