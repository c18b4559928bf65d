"""One model.yaml -> its policies side by side at the three ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hilore.planner.actor import Actor, build_actor, microbatch_of
from hilore.planner.estimate import Target, target_of
from hilore.planner.head import base_model
from hilore.planner.microbatch import Microbatch
from hilore.planner.rivals import checkpointed_layers
from hilore.planner.sidebyside import SideBySide, fixed_conditions, measure_peak, measure_policies
from hilore.planner.sidebyside_policies import (
    DELTAS,
    GRAINS,
    Ceiling,
    Solved,
    all_held,
    best_blocks,
    ceilings,
    every_n_layers,
    solved_plans,
)
from hilore.planner.sidebyside_runs import GC, Progress
from hilore.planner.spec_types import ModelSpec
from hilore.planner.stepping import at_exposure
from hilore.planner.trace import Trace
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import largest_bucket, reference_peaks
from hilore.runtime.errors import HiloreError

ROUNDS, QUICK_ROUNDS = 15, 3


@dataclass(frozen=True, slots=True)
class Options:
    """``microbatches`` make one update; every one has calibration's reference exposure, so one regime serves all.

    ``grains`` of the plans; None: both with the naive head, calls alone with the chunked one, to save the minutes.
    """

    rounds: int = ROUNDS
    warm_up_rounds: int = 1
    microbatches: int = 2
    resamples: int = 2000
    seed: int = 0
    threads: int = 1
    time_limit_s: float = 20.0
    grains: tuple[str, ...] | None = None
    deltas: tuple[float, ...] = DELTAS
    command: str = ""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """``hidden_tensor_bytes``: tokens x d x 2, "1 d" of the ceilings' names."""

    name: str
    head: str
    layers: int
    hidden: int
    tokens: int
    hidden_tensor_bytes: int
    exposure: float
    ceilings: tuple[Ceiling, ...]
    solved: tuple[Solved, ...]
    result: SideBySide
    trace_notes: tuple[str, ...]


def measure_model(spec: ModelSpec, options: Options, progress: Progress) -> ModelReport:
    """Trace, solve and measure one actor on the device that is here, in one process.

    Raises HiloreError where the actor is meant for another device or for several ranks, and what tracing, solving and
    attaching raise.
    """
    target = target_of(spec)
    _refuse_elsewhere(spec, target)
    with fixed_conditions(options.threads):
        trace = trace_spec(spec, progress)
        actor = build_actor(spec, device=target.device, live_adapters=True, seed=options.seed)
        microbatches = update_at_reference(actor, trace, options)
        exist = trace.fixed.gradient_bytes > 0
        other_bytes = trace.fixed.other_bytes
        limits = _ceilings(actor, microbatches[0], exist, other_bytes)
        blocks = best_blocks(actor, microbatches[0], limits, gradients_exist=exist, other_bytes=other_bytes)
        plans, solved = solved_plans(
            trace,
            limits,
            grains=_grains(spec, options),
            deltas=options.deltas,
            time_limit_s=options.time_limit_s,
            command=options.command,
        )
    layers = len(checkpointed_layers(actor.model))
    contenders = [all_held(trace), *every_n_layers(layers)]
    for limit in limits:
        contenders += [entry for entry in (*blocks, *plans) if entry.ceiling == limit.label]
    result = measure_policies(
        actor,
        microbatches,
        contenders,
        gradients_exist=exist,
        other_bytes=other_bytes,
        reference_peaks=reference_peaks(trace),
        rounds=options.rounds,
        warm_up_rounds=options.warm_up_rounds,
        resamples=options.resamples,
        seed=options.seed,
        threads=options.threads,
        progress=progress,
    )
    hidden = _hidden(actor)
    return ModelReport(
        name=spec.name,
        head=spec.loss.head,
        layers=layers,
        hidden=hidden,
        tokens=result.tokens_per_step,
        hidden_tensor_bytes=2 * hidden * result.tokens_per_step,
        exposure=trace.calibration.psi_reference,
        ceilings=limits,
        solved=tuple(solved),
        result=result,
        trace_notes=trace.notes,
    )


def _refuse_elsewhere(spec: ModelSpec, target: Target) -> None:
    where = spec.path or spec.name
    if target.estimated:
        raise HiloreError(
            f"{where}: device is {target.label}, which is not here, and policies are measured where they run; set "
            "device: {kind: cpu} in a copy of it, or predict: hilore-plan frontier"
        )
    if spec.parallel.kind != "none":
        raise HiloreError(
            f"{where}: parallel.kind is {spec.parallel.kind}, and policies are measured in one process, whose memory "
            "is not that of a rank; use a model.yaml with parallel: {kind: none}, or predict: hilore-plan frontier"
        )


def update_at_reference(actor: Actor, trace: Trace, options: Options) -> list[Microbatch]:
    """Synthetic microbatches of the largest bucket, their advantages scaled to the reference exposure."""
    tokens = largest_bucket(trace).tokens
    found = [microbatch_of(actor, tokens, seed=options.seed + place) for place in range(options.microbatches)]
    return [at_exposure(actor, microbatch, trace.calibration.psi_reference) for microbatch in found]


def tiny(spec: ModelSpec) -> ModelSpec:
    """The same proportions at a width, depth and length that take seconds. Raises HiloreError unless hf-config."""
    if spec.model.source != "hf-config":
        raise HiloreError(
            f"{spec.path or spec.name}: model.source is {spec.model.source}; a tiny model of its shape can be made of "
            "hf-config alone"
        )
    config = spec.model.config | {
        "hidden_size": 64,
        "intermediate_size": 344,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "vocab_size": 512,
    }
    batch = replace(spec.batch, prompt_tokens=8, response_tokens=56, length_buckets=(64,))
    return replace(spec, name=f"{spec.name}-tiny", model=replace(spec.model, config=config), batch=batch)


def _grains(spec: ModelSpec, options: Options) -> tuple[str, ...]:
    if options.grains is not None:
        return options.grains
    return GRAINS if spec.loss.head == "naive" else GRAINS[1:]


def _ceilings(actor: Actor, microbatch: Microbatch, exist: bool, other_bytes: int) -> tuple[Ceiling, ...]:
    gc_peak = other_bytes + measure_peak(actor, GC, microbatch, gradients_exist=exist)
    return ceilings(
        gc_peak,
        hidden=_hidden(actor),
        tokens=microbatch.rows * microbatch.tokens,
        layers=len(checkpointed_layers(actor.model)),
    )


def _hidden(actor: Actor) -> int:
    return int(base_model(actor.model).config.get_text_config().hidden_size)


def all_breaches(reports: Sequence[ModelReport]) -> list[str]:
    return [f"{report.name}: {line}" for report in reports for line in report.result.breaches]
