"""What the runtime itself costs: a plan that does what checkpointing does against it, and bookkeeping in real steps.

Full fine-tuning, every unit recomputed, nothing kept, no dead call left out: the same work as Hugging Face's
checkpointing, so that what is left of the difference is the runtime.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from hilore.planner.actor import Actor, build_actor
from hilore.planner.handmade import handmade_plan
from hilore.planner.microbatch import Microbatch
from hilore.planner.paired import Interval, median_interval, paired_ratio, resampled_rounds
from hilore.planner.rivals import PlanPolicy
from hilore.planner.sidebyside import Contender, SideBySide, fixed_conditions, measure_policies
from hilore.planner.sidebyside_model import Options, update_at_reference
from hilore.planner.sidebyside_runs import Progress
from hilore.planner.spec_types import Adapter, ModelSpec
from hilore.planner.stepping import prepare_gradients, run_step
from hilore.planner.tracing import trace_spec
from hilore.runtime.microbatch import Microbatch as PlannedMicrobatch
from hilore.runtime.plan import Plan, Regime
from hilore.runtime.runtime import Runtime

LARGEST_RATIO = 1.02
LARGEST_SHARE = 0.002
ALL_R = "all-R plan"
ALL_R_DEAD = "all-R plan, dead calls left out"
# Exposure, choice and switch: making and entering a microbatch, choosing, entering each region, leaving.
BOOKKEEPING = (
    (Runtime, "microbatch"),
    (PlannedMicrobatch, "__enter__"),
    (PlannedMicrobatch, "__exit__"),
    (Runtime, "choose"),
    (Runtime, "_enter_region"),
)


@dataclass(frozen=True, slots=True)
class OverheadReport:
    """``ratio``: all-R plan / Hugging Face GC; ``ratio_dead``: the same with dead calls left out, as plans do.

    ``bookkeeping_share``: of a step, with the plan switched by exposure from step to step; ``bookkeeping_ns``: median.
    """

    name: str
    tokens: int
    ratio: Interval
    ratio_dead: Interval
    bookkeeping_share: Interval
    bookkeeping_ns: int
    result: SideBySide


def measure_overhead(spec: ModelSpec, options: Options, progress: Progress) -> OverheadReport:
    """Full fine-tuning of the actor of ``spec``, whatever its adapter; no errors, as nothing is encoded."""
    spec = full_fine_tuning(spec)
    spec = replace(spec, calibration=replace(spec.calibration, source="prior"))
    with fixed_conditions(options.threads):
        trace = trace_spec(spec, progress)
    actor = build_actor(spec, seed=options.seed)
    microbatches = update_at_reference(actor, trace, options)
    plain = handmade_plan(trace, lambda _region, _unit: "R", dead_calls=False, name="all-R")
    dead = handmade_plan(trace, lambda _region, _unit: "R", name="all-R")
    result = measure_policies(
        actor,
        microbatches,
        [Contender(PlanPolicy(ALL_R, (plain,))), Contender(PlanPolicy(ALL_R_DEAD, (dead,)))],
        gradients_exist=trace.fixed.gradient_bytes > 0,
        rounds=options.rounds,
        warm_up_rounds=options.warm_up_rounds,
        resamples=options.resamples,
        seed=options.seed,
        threads=options.threads,
        progress=progress,
    )
    picks = resampled_rounds(options.rounds, resamples=options.resamples, seed=options.seed)
    times = result.times_ns
    with fixed_conditions(options.threads):
        steps = bookkeeping_of_steps(actor, by_exposure(plain), microbatches, options.rounds)
    return OverheadReport(
        name=spec.name,
        tokens=result.tokens_per_step,
        ratio=paired_ratio(times["GC"], times[ALL_R], picks),
        ratio_dead=paired_ratio(times["GC"], times.get(ALL_R_DEAD, times[ALL_R]), picks),
        bookkeeping_share=median_interval([spent / step for spent, step in steps], picks),
        bookkeeping_ns=sorted(spent for spent, _ in steps)[len(steps) // 2],
        result=result,
    )


def full_fine_tuning(spec: ModelSpec) -> ModelSpec:
    """The same actor without an adapter."""
    none = Adapter(kind="none", rank=0, alpha=0, dropout=0.0, targets=(), dtype="")
    return replace(spec, name=f"{spec.name}-full", adapter=none)


def by_exposure(plan: Plan) -> tuple[Plan, ...]:
    """A set of four regimes that all do what ``plan`` does, so that choosing and switching happen as in training."""
    regimes = (Regime("null", 0.0, 0.0, 0.25), Regime("low", 0.0, 0.5, 0.25), Regime("mid", 0.5, 1.0, 0.25))
    return tuple(replace(plan, regime=regime) for regime in (*regimes, Regime("high", 1.0, 1e9, 0.25)))


def bookkeeping_of_steps(
    actor: Actor, plans: tuple[Plan, ...], microbatches: Sequence[Microbatch], steps: int
) -> list[tuple[int, int]]:
    """(bookkeeping, whole step) in nanoseconds of ``steps`` real steps whose exposures differ from step to step."""
    found = []
    with PlanPolicy("bookkeeping", plans).applied(actor) as running, stopwatch() as watch:
        for turn in range(steps + 1):
            given = microbatches[turn % len(microbatches)]
            microbatch = replace(given, advantages=given.advantages * (0.3 + 0.4 * (turn % 4)))
            prepare_gradients(actor.model, exist=False)
            torch.manual_seed(turn)
            gc.collect()
            watch.spent_ns = 0
            began = time.perf_counter_ns()
            run_step(actor, running, microbatch)
            if turn:
                found.append((watch.spent_ns, time.perf_counter_ns() - began))
    prepare_gradients(actor.model, exist=False)
    return found


class Watch:
    """Time inside the outermost of the watched calls."""

    def __init__(self) -> None:
        self.spent_ns = 0
        self._depth = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.spent_ns += time.perf_counter_ns() - began

        return watched


@contextmanager
def stopwatch() -> Iterator[Watch]:
    """Watch the runtime's bookkeeping inside the block."""
    watch = Watch()
    originals = [(owner, name, owner.__dict__[name]) for owner, name in BOOKKEEPING]
    for owner, name, original in originals:
        setattr(owner, name, watch.around(original))
    try:
        yield watch
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
