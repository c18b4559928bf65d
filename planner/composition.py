"""What each event of an update is made of: parameters, boundaries, kept outputs, payloads, gradients, working set.

The same ledger as events.py, with every sum taken apart. Totals are compared with it, byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hilore.planner.budget import MIB
from hilore.planner.events import Event, RegionCost, events, without_boundary
from hilore.planner.modecost import exact_cost, region_cost
from hilore.planner.regionparts import (
    BOUNDARIES,
    GATHERED,
    HELD,
    KEPT,
    LEFT_GATHERED,
    PAYLOADS,
    SO_FAR,
    Parts,
    RegionParts,
    exact_parts,
    planned_parts,
)
from hilore.planner.trace import Bucket, LargestTensors, Outside, RegionClass, Trace
from hilore.planner.verify import surroundings
from hilore.runtime.errors import InternalError
from hilore.runtime.plan import RegionPlan

INPUTS = "inputs, masks, rotary tables"
CASTS = "weights cast by autocast"
# What stays for several events, in the order in which it is shown; an event's own working set follows.
STANDING = (
    "parameters",
    "gradient buffers",
    "optimizer state",
    "cuBLAS workspace",
    "reference model",
    "others (resident.other_mib)",
    INPUTS,
    BOUNDARIES,
    KEPT,
    PAYLOADS,
    HELD,
    LEFT_GATHERED,
    SO_FAR,
)


@dataclass(frozen=True, slots=True)
class Composition:
    """One event: its live bytes by part, in the order of a ledger. The parts add up to ``live_bytes`` exactly."""

    event: str
    live_bytes: int
    parts: tuple[tuple[str, int], ...]


def plan_compositions(
    trace: Trace, bucket: Bucket, regions: Sequence[RegionPlan], *, demoted: bool = False
) -> tuple[Composition, ...]:
    """Every event of an update under these modes, in order; ``demoted``: with the L units run as R.

    Raises InternalError where the parts do not add up to the verifier's figures, or the modes are not of this trace.
    """
    classes = _classes(bucket)
    parts = [planned_parts(region, known, demoted=demoted) for region, known in zip(regions, classes, strict=True)]
    costs = [region_cost(region, known, 0) for region, known in zip(regions, classes, strict=True)]
    keeps = _classes(bucket)[0].hold.keeps_boundary
    return _compositions(trace, bucket, parts, costs, demoted=demoted, held_keeps=keeps)


def reference_compositions(trace: Trace, bucket: Bucket, *, gc: bool) -> tuple[Composition, ...]:
    """The same for plain checkpointing (``gc``) or for none."""
    parts, costs = [], []
    for region, known in zip(bucket.regions, _classes(bucket), strict=True):
        used = known.gc if gc else known.without_checkpointing
        parts.append(exact_parts(region.name, known, used, held=not gc))
        costs.append(exact_cost(region.name, known, used, 0))
    keeps = _classes(bucket)[0].without_checkpointing.keeps_boundary
    return _compositions(trace, bucket, parts, costs, demoted=False, held_keeps=keeps)


def highest(compositions: Sequence[Composition]) -> Composition:
    """The event that sets the peak: the first of the highest."""
    return max(compositions, key=lambda found: found.live_bytes)


def composition_text(found: Composition) -> str:
    """``parameters 2,971.5 MiB + boundaries 576.0 MiB + ...``, largest first."""
    ordered = sorted(found.parts, key=lambda part: -part[1])
    return " + ".join(f"{name} {size / MIB:,.1f} MiB" for name, size in ordered)


def _classes(bucket: Bucket) -> list[RegionClass]:
    return [bucket.classes[region.class_index] for region in bucket.regions]


def _compositions(
    trace: Trace,
    bucket: Bucket,
    regions: list[RegionParts],
    costs: list[RegionCost],
    *,
    demoted: bool,
    held_keeps: bool,
) -> tuple[Composition, ...]:
    """``held_keeps``: whether the first region keeps its boundary where it is held."""
    leaf_bytes = bucket.outside.leaf_boundary_bytes
    costs[0] = without_boundary(costs[0], leaf_bytes, held=regions[0].held and not held_keeps)
    regions[0] = regions[0].without_boundary(leaf_bytes, held_keeps=held_keeps)
    expected = iter(events(surroundings(trace, bucket), costs, demoted=demoted))
    base, outside, found = _base(trace, bucket), bucket.outside, []

    def note(*groups: Parts) -> None:
        found.append(_added_up(next(expected), groups))

    live, casts = base, 0
    for region, cost in zip(regions, costs, strict=True):
        note(live, {CASTS: casts}, region.forward)
        live = _sum(live, region.retained)
        casts += cost.cast_bytes
    unframed = outside.frame_bytes if all(region.held for region in regions) else 0
    live = _sum(live, {INPUTS: -unframed})
    note(live, _head(trace, outside, casts))
    for region in reversed(regions):
        before = _sum(live, region.retained, sign=-1)
        note(before if region.frees_first else live, _head_left(outside), region.backward)
        live = _sum(before, {SO_FAR: region.gradient_bytes})
    note(live, _tail(outside))
    note(_sum(live, {INPUTS: unframed}), {"optimizer step": outside.optimizer_bytes})
    return tuple(found)


def _added_up(event: Event, groups: Sequence[Parts]) -> Composition:
    total: Parts = {}
    for group in groups:
        total = _sum(total, group)
    found = Composition(event.name, event.live_bytes, tuple((name, size) for name, size in total.items() if size))
    added = sum(size for _, size in found.parts)
    if added != event.live_bytes:
        raise InternalError(f"{event.name}: its parts add up to {added} bytes, the ledger has {event.live_bytes} bytes")
    return found


def _sum(first: Parts, second: Parts, *, sign: int = 1) -> Parts:
    result = dict(first)
    for name, size in second.items():
        result[name] = result.get(name, 0) + sign * size
    return result


def _base(trace: Trace, bucket: Bucket) -> Parts:
    fixed, outside = trace.fixed, bucket.outside
    before = {
        "parameters": fixed.parameter_bytes,
        "gradient buffers": fixed.gradient_bytes,
        "optimizer state": fixed.optimizer_state_bytes,
        "cuBLAS workspace": fixed.workspace_bytes,
        "reference model": fixed.reference_bytes,
        "others (resident.other_mib)": fixed.other_bytes - fixed.workspace_bytes - fixed.reference_bytes,
        INPUTS: outside.before_bytes - outside.leaf_boundary_bytes,
        BOUNDARIES: outside.leaf_boundary_bytes,
    }
    return {name: before.get(name, 0) for name in STANDING}


def _head(trace: Trace, outside: Outside, casts: int) -> Parts:
    """The head's highest moment: before its backward, beside autocast's casts, or in it."""
    head_bytes = outside.head_bytes
    if casts + outside.head_forward_bytes > head_bytes:
        head_bytes = outside.head_forward_bytes
    else:
        casts = 0
    if outside.parts is None:
        return {CASTS: casts, "head and loss": head_bytes}
    largest = outside.parts.head_largest
    named = {f"head: {_largest_name(trace, largest)}": sum(found.count * found.each_bytes for found in largest)}
    rest = head_bytes - outside.parts.head_fsdp_bytes - sum(named.values())
    return {CASTS: casts, GATHERED: outside.parts.head_fsdp_bytes, **named, "head: rest": rest}


def _largest_name(trace: Trace, largest: Sequence[LargestTensors]) -> str:
    sizes = " and ".join(f"{found.count} x {found.each_bytes / MIB:,.1f} MiB" for found in largest)
    # With the naive head nothing else comes near the logits, which are as wide as the vocabulary.
    naive = trace.spec.get("loss", {}).get("head") == "naive"
    return f"{'logits and their copies' if naive else 'largest tensors'} ({sizes})"


def _head_left(outside: Outside) -> Parts:
    gathered = outside.parts.head_left_fsdp_bytes if outside.parts is not None else 0
    return {GATHERED: gathered, "left by the head": outside.head_left_bytes - gathered}


def _tail(outside: Outside) -> Parts:
    gathered = outside.parts.tail_fsdp_bytes if outside.parts is not None else 0
    return {GATHERED: gathered, "backward before the regions": outside.tail_bytes - gathered}
