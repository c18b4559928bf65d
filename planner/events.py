"""One update as a ledger of live bytes, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RegionCost:
    """What one region costs under its modes: ``demoted_*`` when its L units run as R; the rest as in trace.KeepSet."""

    name: str
    retained_bytes: int
    forward_bytes: int
    backward_bytes: int
    demoted_backward_bytes: int
    gradient_bytes: int
    extra_ns: int
    demoted_extra_ns: int
    risk: int
    cast_bytes: int = 0
    held: bool = False


def without_boundary(cost: RegionCost, leaf_boundary_bytes: int, *, held: bool) -> RegionCost:
    """A first region whose boundary is counted before it already; ``held``: without keeping it itself."""
    return replace(
        cost,
        retained_bytes=cost.retained_bytes - (0 if held else leaf_boundary_bytes),
        forward_bytes=cost.forward_bytes - leaf_boundary_bytes,
    )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is the same for every choice, as in trace.Outside."""

    base_bytes: int
    head_bytes: int
    head_left_bytes: int
    tail_bytes: int
    optimizer_bytes: int
    constant_ns: int
    head_forward_bytes: int = 0
    frame_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """Live bytes at one moment of an update: ``name`` like "head" or "backward of model.layers.35"."""

    name: str
    live_bytes: int


def events(around: Surroundings, costs: Sequence[RegionCost], *, demoted: bool = False) -> tuple[Event, ...]:
    """One update in order, as a ledger of live bytes: each event's highest moment."""
    live, casts = around.base_bytes, 0
    result = []
    for cost in costs:
        result.append(Event(f"forward of {cost.name}", live + casts + cost.forward_bytes))
        live += cost.retained_bytes
        casts += cost.cast_bytes
    # Once the forward has let go of its arguments.
    unframed = around.frame_bytes if all(cost.held for cost in costs) else 0
    live -= unframed
    result.append(Event("head", live + max(around.head_bytes, casts + around.head_forward_bytes)))
    for cost in reversed(costs):
        working = cost.demoted_backward_bytes if demoted else cost.backward_bytes
        result.append(Event(f"backward of {cost.name}", live + around.head_left_bytes + working))
        live += cost.gradient_bytes - cost.retained_bytes
    result.append(Event("tail", live + around.tail_bytes))
    result.append(Event("optimizer", live + unframed + around.optimizer_bytes))
    return tuple(result)
