"""One device, one actor: GC, No-GC and solved plans under it; peaks, times, gradients, and the estimate's bias."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from bench.device_bias import Bias, biases
from bench.device_card import DevicePeaks, described, deterministic, estimate_of_this_device, peaks_of, require_device
from hilore.planner.actor import Actor, build_actor, microbatch_of
from hilore.planner.emit import solve_trace
from hilore.planner.microbatch import Microbatch
from hilore.planner.paired import Interval, paired_gain, paired_share, resampled_rounds
from hilore.planner.profile import device_clock
from hilore.planner.rivals import PlanPolicy, Policy
from hilore.planner.sidebyside import fixed_conditions
from hilore.planner.sidebyside_runs import (
    GC,
    NO_GC,
    TWIN_ACCEPTS,
    Contender,
    Progress,
    Run,
    Setting,
    compare_gradients,
    measure_times,
)
from hilore.planner.spec_types import ModelSpec, Parallel
from hilore.planner.stepping import (
    Gradients,
    at_exposure,
    float32_twin,
    gradients_of,
    idle_optimizer,
    peak_of_step,
    prepare_gradients,
    relative_error,
    run_step,
)
from hilore.planner.trace import Trace
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import largest_bucket, reference_peaks, reference_times, verify_modes
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan

# In float32 attention of grouped heads has no kernel of its own on CUDA and keeps T x T scores: short rows are enough.
TWIN_TOKENS = 1024
RESAMPLES = 2000
LEAST_ROUNDS = 3
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Options:
    """``ceilings``: budgets as multiples of GC's predicted peak. ``seconds``: no timed round begins after so many."""

    device: str = "cuda"
    rounds: int = 15
    ceilings: tuple[float, ...] = (1.05,)
    seconds: float = 420.0
    time_limit_s: float = 15.0
    seed: int = 0


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
class DeviceReport:
    """``run_to_run``, ``layout``: relative L2 between two runs of plain eager, the same and in another layout: the
    floor of every gradient error. ``stages``: seconds that each stage took."""

    name: str
    device: dict[str, Any]
    tokens: int
    rounds: int
    rows: tuple[DeviceRow, ...]
    bias: tuple[Bias, ...]
    run_to_run: float
    layout: float | None
    stages: dict[str, float]
    notes: tuple[str, ...]
    breaches: tuple[str, ...]


def one_device(spec: ModelSpec, kind: str) -> ModelSpec:
    """The actor of a model.yaml on one device, whole, in bfloat16, without a reference model's term in the loss."""
    return replace(
        spec,
        name=f"{spec.name}-one-{'gpu' if kind == 'cuda' else 'cpu'}",
        parallel=Parallel("none", 1, False),
        precision=replace(spec.precision, params="bfloat16", compute="bfloat16", grads="bfloat16"),
        adapter=replace(spec.adapter, dtype="bfloat16") if spec.adapter.kind == "lora" else spec.adapter,
        device=replace(spec.device, kind="cuda" if kind == "cuda" else "cpu", gpu=""),
        loss=replace(spec.loss, beta=0.0),
        batch=replace(spec.batch, length_buckets=spec.batch.length_buckets[-1:]),
        calibration=replace(spec.calibration, source="prior"),
    )


def measure_device(spec: ModelSpec, options: Options, tell: Progress) -> DeviceReport:
    """Everything of one actor on the device of ``options``. Raises HiloreError where it is not here or too small."""
    require_device(options.device)
    watch = _Watch(tell)
    with fixed_conditions(None):
        actor = build_actor(spec, device=options.device, live_adapters=True, seed=options.seed)
        watch.done("build the actor")
        here = trace_spec(spec, tell, actor=actor)
        watch.done("trace, measured")
        target = estimate_of_this_device(spec)
        elsewhere = None if target is None else trace_spec(spec, tell, target=target)
        watch.done("trace, estimated")
        plans = list(_plans(here, elsewhere, options))
        watch.done("solve")
        runs = [Run(Contender(GC)), Run(Contender(NO_GC)), *map(Run, plans)]
        setting = _setting(actor, here, options, tell)
        try:
            layout, run_to_run = _gradient_floors(setting, runs)
            watch.done("gradients")
            float32, notes = _float32_errors(setting, runs, here.calibration.psi_reference)
            watch.done("gradients in float32")
            peaks = [_peaks(setting, run.contender.policy) for run in runs]
            watch.done("peaks")
            rounds = _times(setting, runs, options, watch)
        except torch.OutOfMemoryError as error:
            raise HiloreError(
                f"{spec.name}: No-GC or a plan does not fit on this device ({error}); use a card with more memory, or "
                "--model with a smaller actor"
            ) from error
        watch.done("times")
    rows = tuple(_rows(runs, peaks, float32, _Traces(here, elsewhere), rounds))
    if elsewhere is None:
        notes.append("the table of GPUs does not have this card: nothing estimated to compare with")
    return DeviceReport(
        name=spec.name,
        device=described(options.device),
        tokens=setting.microbatches[0].tokens,
        rounds=rounds,
        rows=rows,
        bias=() if elsewhere is None else biases(here, elsewhere),
        run_to_run=run_to_run,
        layout=layout,
        stages=watch.stages,
        notes=tuple(notes),
        breaches=tuple(_breaches(rows, max(run_to_run, layout or 0.0))),
    )


class _Watch:
    """Seconds of each stage since the last one was done."""

    def __init__(self, tell: Progress) -> None:
        self.began = self._last = time.monotonic()
        self.stages: dict[str, float] = {}
        self._tell = tell

    def done(self, stage: str) -> None:
        now = time.monotonic()
        self.stages[stage] = round(now - self._last, 2)
        self._last = now
        self._tell(stage, 1, 1)


def _plans(here: Trace, elsewhere: Trace | None, options: Options) -> Iterator[Contender]:
    """Plans of measured and of estimated times, delta 0 and 1, under each ceiling."""
    for ceiling in options.ceilings:
        budget = int(ceiling * reference_peaks(here)[0])
        for label, trace in (("measured", here), ("estimated", elsewhere)):
            for delta in (0.0, 1.0):
                if trace is None:
                    continue
                result = solve_trace(
                    trace,
                    budget_bytes=budget,
                    delta=delta,
                    time_limit_s=options.time_limit_s,
                    command="python -m bench.device",
                )
                policy = PlanPolicy(f"delta {delta:g}, {label} times", result.plans)
                yield Contender(policy, f"{ceiling:g} x GC", budget)


def _setting(actor: Actor, trace: Trace, options: Options, tell: Progress) -> Setting:
    microbatch = _at_reference(actor, trace.calibration.psi_reference, largest_bucket(trace).tokens, options.seed)
    exist = trace.fixed.gradient_bytes > 0
    return Setting(actor, (microbatch,), exist, options.seed, device_clock(actor.device), tell)


def _at_reference(actor: Actor, psi: float, tokens: int, seed: int) -> Microbatch:
    return at_exposure(actor, microbatch_of(actor, tokens, seed=seed), psi)


def _gradient_floors(setting: Setting, runs: Sequence[Run]) -> tuple[float | None, float]:
    """Fill every run's choices and errors; returns what another layout and a second run alone change."""
    with deterministic():
        layout = compare_gradients(setting, runs)
    first, second = (_gradients(setting, NO_GC) for _ in range(2))
    return layout, relative_error([second], [first])


def _gradients(setting: Setting, policy: Policy) -> Gradients:
    with policy.applied(setting.actor) as running:
        return gradients_of(setting.actor, running, setting.microbatches[0], exist=setting.exist, seed=setting.seed)


def _float32_errors(setting: Setting, runs: Sequence[Run], psi: float) -> tuple[dict[str, float], list[str]]:
    """Errors of the runs that encode, on a twin in float32 and a short row; by label, and what is to be said of it."""
    lossy = [run for run in runs if any(choice.lossy for choice in run.choices)]
    if not lossy:
        return {}, ["no plan encodes anything: no gradient error to measure in float32"]
    actor = float32_twin(setting.actor)
    tokens = min(TWIN_TOKENS, setting.microbatches[0].tokens)
    twin = replace(setting, actor=actor, microbatches=(_at_reference(actor, psi, tokens, setting.seed),))
    errors = {}
    with deterministic():
        reference = _gradients(twin, GC)
        for run in lossy:
            policy = run.contender.policy
            assert isinstance(policy, PlanPolicy)
            accepting = PlanPolicy(policy.name, policy.plans, (*policy.accept, *TWIN_ACCEPTS))
            errors[run.contender.label] = relative_error([_gradients(twin, accepting)], [reference])
    return errors, [f"gradient errors in float32 are of a row of {tokens} tokens"]


def _peaks(setting: Setting, policy: Policy) -> tuple[int, DevicePeaks]:
    """The counter's peak of one update, then the allocator's, after a step that settles what is learnt once."""
    actor, microbatch, optimizer = setting.actor, setting.microbatches[0], idle_optimizer(setting.actor)
    counted = peak_of_step(actor, policy, microbatch, optimizer, gradients_exist=setting.exist)
    with policy.applied(actor) as running:

        def update() -> None:
            run_step(actor, running, microbatch)
            optimizer.step()

        prepare_gradients(actor.model, exist=setting.exist)
        update()
        prepare_gradients(actor.model, exist=setting.exist)
        gc.collect()
        found = peaks_of(update)
    prepare_gradients(actor.model, exist=False)
    return counted, found


def _times(setting: Setting, runs: Sequence[Run], options: Options, watch: _Watch) -> int:
    """Timed rounds of all runs, as many as were asked for or as fit the time (but LEAST_ROUNDS); how many."""
    began = time.monotonic()
    measure_times(setting, runs, rounds=1, warm_up_rounds=1)
    now = time.monotonic()
    fitting = int((watch.began + options.seconds - now) / ((now - began) / 2))
    for run in runs:
        run.times_ns.clear()
    rounds = min(options.rounds, max(fitting, LEAST_ROUNDS))
    measure_times(setting, runs, rounds=rounds, warm_up_rounds=0)
    return rounds


@dataclass(frozen=True, slots=True)
class _Traces:
    """``here``: measured on the device; ``elsewhere``: estimated without it, None where that cannot be."""

    here: Trace
    elsewhere: Trace | None


def _rows(
    runs: Sequence[Run],
    peaks: Sequence[tuple[int, DevicePeaks]],
    float32: dict[str, float],
    traces: _Traces,
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


def _breaches(rows: Iterable[DeviceRow], floor: float) -> Iterator[str]:
    """A line for each promise that did not hold. ``floor``: gradients that differ by less differ by rounding alone."""
    for row in rows:
        measured = row.counted_bytes if row.device.requested is None else row.device.requested
        for what, promised in (("predicted peak", row.predicted_bytes), ("budget", row.budget_bytes)):
            if promised is not None and measured > promised:
                over = (measured - promised) / MIB
                yield f"{row.policy}: measured peak {measured / MIB:,.1f} MiB is {over:,.2f} MiB over the {what}"
        if not row.exact and row.float32_error is None and row.error > floor:
            yield f"{row.policy}: gradients differ from eager's by {row.error:.3%} although nothing is encoded"
