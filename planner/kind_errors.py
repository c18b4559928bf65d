"""What compressing one kind of unit costs, one kind and codec at a time: how the table of planner/prior.py is made.

Of one kind all layers' units are at L, the others kept exactly, or recomputed from what is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hilore.planner.actor import Actor
from hilore.planner.gradient_error import Backward, Instrument
from hilore.planner.handmade import handmade_plan
from hilore.planner.microbatch import Microbatch
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Trace, UnitTrace

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class KindError:
    """Relative L2 errors in percent, with the other units at H (``kept``) and at R (``recomputed``)."""

    kind: str
    codec: str
    kept_percent: float
    recomputed_percent: float


def measure_kinds(
    actor: Actor, microbatch: Microbatch, trace: Trace, pairs: tuple[tuple[str, str], ...], progress: Progress
) -> Iterator[KindError]:
    """The gradient error of each pair of unit kind and codec on one microbatch. ``actor``: in float32."""
    with Instrument(actor, [region.name for region in trace.buckets[-1].regions]) as instrument:
        exact = instrument.exact(microbatch)
        for done, (kind, codec) in enumerate(pairs):
            progress(f"risk: {kind} {codec}", done, len(pairs))
            kept, recomputed = (_percent(instrument, microbatch, trace, kind, codec, others, exact) for others in "HR")
            yield KindError(kind, codec, kept, recomputed)
    progress("risk", len(pairs), len(pairs))


def in_float32(spec: ModelSpec) -> ModelSpec:
    """The same actor with float32 weights, adapters and compute."""
    precision = replace(spec.precision, params="float32", compute="float32", autocast=False)
    adapter = replace(spec.adapter, dtype="float32" if spec.adapter.dtype else "")
    return replace(spec, precision=precision, adapter=adapter)


def _percent(
    instrument: Instrument,
    microbatch: Microbatch,
    trace: Trace,
    kind: str,
    codec: str,
    others: str,
    exact: Backward,
) -> float:
    """Percent of the exact gradient's norm."""

    def mode_of(_region: str, unit: UnitTrace) -> str:
        if unit.kind == kind and codec in {cost.codec for cost in unit.codecs}:
            return codec
        return others if unit.keepable else "R"

    error = instrument.error(microbatch, handmade_plan(trace, mode_of), exact)
    square = float(sum(gradient.double().square().sum() for gradient in exact.gradients))
    return 100 * float((error.square / square) ** 0.5)
