"""One device, one actor: GC, No-GC and solved plans under it; peaks, times, gradients, and the estimate's bias."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.device_bias import Bias, biases
from bench.device_card import DevicePeaks, described, deterministic, estimate_of_this_device, peaks_of, require_device
from bench.device_rows import DeviceRow, Traces, device_rows, row_breaches
from hilore.planner.actor import Actor, build_actor, microbatch_of
from hilore.planner.emit import solve_trace
from hilore.planner.microbatch import Microbatch
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
from hilore.planner.verify import largest_bucket, reference_peaks
from hilore.runtime.errors import HiloreError

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
    rows = tuple(device_rows(runs, peaks, float32, Traces(here, elsewhere), rounds))
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
        breaches=tuple(row_breaches(rows, max(run_to_run, layout or 0.0))),
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
