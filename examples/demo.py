"""The whole way on one small model: trace, solve, a short GRPO training under plans, and what the plans are worth.

Run by ``python examples/grpo_smollm2.py --demo`` (``make demo``); takes some minutes on two cores.
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpo_smollm2 as training
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn import functional
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from hilore.planner.actor import Actor, build_actor
from hilore.planner.budget import MIB, mib
from hilore.planner.emit import solve_trace, write_plans
from hilore.planner.microbatch import Microbatch
from hilore.planner.rivals import PlanPolicy
from hilore.planner.sidebyside import Contender, SideBySide, measure_policies
from hilore.planner.sidebyside_view import plan_table, result_lines, result_table
from hilore.planner.spec import load_spec
from hilore.planner.stepping import at_exposure
from hilore.planner.tasks import TASKS
from hilore.planner.trace import Trace
from hilore.planner.tracefile import save_trace
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import reference_peaks
from hilore.planner.view import solve_table, trace_last_line
from hilore.runtime import PlanSet, load_plans
from hilore.runtime.meter import StorageMeter
from hilore.runtime.plan import Plan

COMPLETION_TOKENS = 32  # of the plans' 56, so that sampling on a CPU stays short
MEASURED_MICROBATCHES = 2
ROUNDS = 5
SOLVE_LIMIT_S = 20.0
BREACH = 6
PIPE_WIDTH = 160

Report = Callable[[str, int, int], None]


def run_demo(steps: int, seed: int) -> int:
    """Returns the exit code: 6 where a measurement broke a promise of a plan."""
    began = time.monotonic()
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    # One thread for tracing and for measuring: two that wait for each other on a busy machine measure the machine.
    torch.set_num_threads(1)
    with quiet_libraries(), bar(console) as report:
        spec = load_spec(training.SPEC)
        console.rule("trace", align="left")
        trace = trace_spec(spec, report)
        save_trace(trace, f"{spec.name}.trace.json")
        console.print(trace_last_line(trace))

        budget_mib = budget_between(*reference_peaks(trace))
        console.rule(f"solve --budget {budget_mib} --delta 1", align="left")
        exact, plans = solved(trace, budget_mib, report, console)

        console.rule(f"train: {steps} updates of TRL's GRPOTrainer under these plans", align="left")
        report("build the actor", 0, 1)
        actor = build_actor(spec, seed=seed)
        measured = replace(actor, model=copy.deepcopy(actor.model))  # before TRL changes its forward
        trainer = training.make_trainer(actor, TASKS, steps, seed, COMPLETION_TOKENS)
        peak_bytes = trained(trainer, plans, report, console)

        console.rule("side by side, on rollouts of this training", align="left")
        measured.model.load_state_dict(trainer.model.state_dict())
        result = compared(measured, rollouts_of(trainer, actor, trace), trace, exact, plans, report)
    for part in (result_table(result), plan_table(result), *result_lines(result)):
        console.print(part)
    console.print(margins(result, budget_mib, peak_bytes))
    console.print(f"{time.monotonic() - began:.0f} s in all")
    return BREACH if result.breaches or peak_bytes > budget_mib * MIB else 0


def budget_between(gc_bytes: int, no_gc_bytes: int) -> int:
    """MiB: an eighth of the way from GC's peak to No-GC's, where not every output can be kept as it is."""
    return -(-(gc_bytes + (no_gc_bytes - gc_bytes) // 8) // MIB)


def solved(trace: Trace, budget_mib: int, report: Report, console: Console) -> tuple[tuple[Plan, ...], PlanSet]:
    """Exact plans (delta 0), and the plans of delta 1, which go through their files."""
    found = []
    for done, delta in enumerate((0.0, 1.0)):
        report(f"solve, delta {delta:g}", done, 2)
        found.append(
            solve_trace(
                trace,
                budget_bytes=budget_mib * MIB,
                delta=delta,
                time_limit_s=SOLVE_LIMIT_S,
                command=f"hilore-plan solve --budget {budget_mib} --delta {delta:g}",
            )
        )
    exact, lossy = found
    console.print(solve_table(lossy, lossy.largest_bucket))
    write_plans(lossy, "plans")
    return exact.plans, load_plans(f"plans/{trace.name}.*.json")


def trained(trainer: Any, plans: PlanSet, report: Report, console: Console) -> int:
    """Train; returns the highest bytes of live storages over all of it, sampling and optimizer steps included."""
    trainer.add_callback(StepBar(report))
    with StorageMeter() as meter:
        meter.track([*trainer.model.parameters(), *trainer.model.buffers()])
        training.train(trainer, plans, console.print)
        peak: int = meter.peak_bytes
    return peak


class StepBar(TrainerCallback):
    """Moves the progress bar with every update."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report("updates", state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report("updates", state.global_step, state.max_steps)


def rollouts_of(trainer: Any, actor: Actor, trace: Trace) -> list[Microbatch]:
    """Microbatches of the last update whose advantages are not all 0, as wide as the plans' length bucket.

    Advantages are scaled to calibration's reference exposure: delta is a share of such an update's gradient.
    """
    batch = actor.spec.batch
    found = []
    for inputs in trainer._buffered_inputs:
        prompt, completion = inputs["prompt_ids"].shape[1], inputs["completion_ids"].shape[1]
        room = (batch.length_buckets[-1] - batch.response_tokens - prompt, batch.response_tokens - completion)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        padded = Microbatch(
            input_ids=functional.pad(ids, room, value=actor.tokenizer.pad_token_id),
            attention_mask=functional.pad(mask, room),
            completion_mask=functional.pad(inputs["completion_mask"], (0, room[1])),
            advantages=inputs["advantages"].clone(),  # a view of the whole update's, which a peak would count in full
        )
        if padded.advantages.any():
            found.append(at_exposure(actor, padded, trace.calibration.psi_reference))
    return found[:MEASURED_MICROBATCHES]


def compared(
    actor: Actor,
    microbatches: Sequence[Microbatch],
    trace: Trace,
    exact: tuple[Plan, ...],
    plans: PlanSet,
    report: Report,
) -> SideBySide:
    """GC, No-GC and both sets of plans: peak, time, gradients."""
    budget_bytes = plans.plans[0].budget_bytes
    limit = trace.calibration.delta_star
    return measure_policies(
        actor,
        microbatches,
        [
            Contender(PlanPolicy("plan delta 0", exact), "", budget_bytes, error_limit=0.0),
            Contender(PlanPolicy("plan delta 1", plans.plans), "", budget_bytes, error_limit=limit),
        ],
        gradients_exist=trace.fixed.gradient_bytes > 0,
        other_bytes=trace.fixed.other_bytes,
        reference_peaks=reference_peaks(trace),
        rounds=ROUNDS,
        progress=report,
    )


def margins(result: SideBySide, budget_mib: int, training_peak_bytes: int) -> str:
    """By how much measured peaks lie under what was promised."""
    under = [
        f"{row.policy}: measured peak {mib(row.peak_bytes)}, {mib(row.budget_bytes - row.peak_bytes)} under the budget "
        f"and {mib(row.predicted_peak_bytes - row.peak_bytes)} under the prediction"
        for row in result.rows
        if row.budget_bytes is not None and row.predicted_peak_bytes is not None
    ]
    under.append(
        f"the training itself, shorter rollouts: {mib(training_peak_bytes)}, "
        f"{mib(budget_mib * MIB - training_peak_bytes)} under the budget"
    )
    return "\n".join(under)


@contextmanager
def bar(console: Console) -> Iterator[Report]:
    """A progress bar where there is a terminal: ``report(step, done, total)``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def report(step: str, done: int, total: int) -> None:
            progress.update(task, description=step, completed=done, total=total)

        yield report


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without the bars and the deprecation notes of transformers, peft and trl."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"(transformers|peft|trl|torch)\..*")
        yield
    transformers_logging.set_verbosity(level)
