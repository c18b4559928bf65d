"""Risk measured on the actor itself with the runtime as instrument: what compressing one kind of unit costs.

Float32 compute on the actor's own weights (a live lora_B, since a zero one hides most of the gradient) and a synthetic
microbatch of the longest bucket. For every kind and codec all layers' units of that kind are at L, the others kept
exactly or recomputed from what is decoded; the worse of the two counts. The spread over layers and the margin
are the prior's (planner/prior.py). One microbatch carries no confidence: plans still say ``calibrated: false``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from hilore.planner.actor import Actor, build_actor, microbatch_of, policy_loss
from hilore.planner.handmade import handmade_plan
from hilore.planner.microbatch import Microbatch
from hilore.planner.prior import calibration_from_errors
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Calibration, Trace, UnitTrace
from hilore.runtime.attach import attach
from hilore.runtime.errors import HiloreWarning, UnsupportedModelError

Progress = Callable[[str, int, int], None]

# The same actor in float32: what a plan's fingerprint then disagrees about.
FLOAT32_DIFFERS = ("parameter_dtypes", "adapter", "trainable_set")


@dataclass(frozen=True, slots=True)
class KindError:
    """Relative L2 errors in percent, with the other units at H (``kept``) and at R (``recomputed``)."""

    kind: str
    codec: str
    kept_percent: float
    recomputed_percent: float


def calibrate_synthetic(spec: ModelSpec, trace: Trace, progress: Progress, *, seed: int = 0) -> Calibration:
    """The trace's calibration from errors measured on a synthetic microbatch of this actor."""
    actor = build_actor(in_float32(spec), device=torch.device(spec.device.kind), live_adapters=True, seed=seed)
    microbatch = microbatch_of(actor, trace.buckets[-1].tokens, seed=seed)
    pairs = offered_pairs(trace)
    errors: dict[str, dict[str, float]] = {}
    for found in measure_kinds(actor, microbatch, trace, pairs, progress):
        errors.setdefault(found.kind, {})[found.codec] = max(found.kept_percent, found.recomputed_percent)
    return calibration_from_errors(spec, trace.buckets[-1], errors, source="synthetic")


def refuse_calibration(spec: ModelSpec, *, estimated: bool) -> None:
    """Raise UnsupportedModelError for a ``calibration.source`` that this trace cannot carry out."""
    source = spec.calibration.source
    if source in ("rollouts", "generate"):
        raise UnsupportedModelError(
            f"calibration.source: {source} is not measured by this version; use `source: synthetic` (one synthetic "
            "microbatch of this actor) or `source: prior`",
            unit="calibration.source",
        )
    if source == "synthetic" and estimated:
        raise UnsupportedModelError(
            "calibration.source: synthetic runs the actor, and its device is not here; use `source: prior`, or trace "
            "on the machine that will train",
            unit="calibration.source",
        )


def measure_kinds(
    actor: Actor, microbatch: Microbatch, trace: Trace, pairs: tuple[tuple[str, str], ...], progress: Progress
) -> Iterator[KindError]:
    """The gradient error of each pair of unit kind and codec on one microbatch."""
    exact = gradient(actor, microbatch)
    for done, (kind, codec) in enumerate(pairs):
        progress(f"risk: {kind} {codec}", done, len(pairs))
        kept, recomputed = (_error(actor, microbatch, trace, kind, codec, others, exact) for others in "HR")
        yield KindError(kind, codec, kept, recomputed)
    progress("risk", len(pairs), len(pairs))


def offered_pairs(trace: Trace) -> tuple[tuple[str, str], ...]:
    """Every pair of unit kind and codec that the trace offers, sorted."""
    classes = trace.buckets[-1].classes
    return tuple(sorted({(unit.kind, cost.codec) for c in classes for unit in c.units for cost in unit.codecs}))


def in_float32(spec: ModelSpec) -> ModelSpec:
    """The same actor with float32 weights, adapters and compute."""
    precision = replace(spec.precision, params="float32", compute="float32", autocast=False)
    adapter = replace(spec.adapter, dtype="float32" if spec.adapter.dtype else "")
    return replace(spec, precision=precision, adapter=adapter)


def gradient(actor: Actor, microbatch: Microbatch) -> torch.Tensor:
    """All trainable gradients of one microbatch, flat, float64."""
    actor.model.zero_grad(set_to_none=True)
    policy_loss(actor, microbatch).backward()  # type: ignore[no-untyped-call]
    parts = [p.grad.flatten().double() for p in actor.model.parameters() if p.grad is not None]
    actor.model.zero_grad(set_to_none=True)
    return torch.cat(parts)


def _error(
    actor: Actor, microbatch: Microbatch, trace: Trace, kind: str, codec: str, others: str, exact: torch.Tensor
) -> float:
    """Percent of the exact gradient's norm."""

    def mode_of(_region: str, unit: UnitTrace) -> str:
        if unit.kind == kind and codec in {cost.codec for cost in unit.codecs}:
            return codec
        return others if unit.keepable else "R"

    with warnings.catch_warnings():
        # That the weights are float32 here is the point of it.
        warnings.simplefilter("ignore", HiloreWarning)
        runtime = attach(actor.model, [handmade_plan(trace, mode_of)], accept=FLOAT32_DIFFERS)
    try:
        runtime.use(runtime.plans.plans[0])
        found = gradient(actor, microbatch)
    finally:
        runtime.detach()
    return 100 * float((found - exact).norm() / exact.norm())
