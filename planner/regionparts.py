"""What a region's bytes are made of under given modes: the sums of modecost.py taken apart (composition.py adds up)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hilore.planner.modecost import codec_workspace_bytes, region_cost
from hilore.planner.trace import KeepSet, RegionClass, UnitTrace
from hilore.runtime.errors import InternalError
from hilore.runtime.plan import RegionPlan

# Bytes by name.
Parts = dict[str, int]

BOUNDARIES, KEPT, PAYLOADS = "boundaries", "kept outputs (H)", "payloads (L)"
HELD, LEFT_GATHERED = "saved tensors of held regions", "parameters left gathered"
SO_FAR = "gradients so far"
WORKSPACE = "codec workspace"
FORWARD = "forward of the region"
GATHERED, REDUCED = "gathered parameters", "gradients being reduced"


@dataclass(frozen=True, slots=True)
class RegionParts:
    """``retained``: from its forward to its backward; ``forward``, ``backward``: the working sets of these events.

    ``frees_first``: the highest moment of its backward is the reduction of its gradients, when what it retained is
    gone; ``backward`` then stands beside what the other regions retain.
    """

    name: str
    held: bool
    retained: Parts
    forward: Parts
    backward: Parts
    gradient_bytes: int
    frees_first: bool

    def without_boundary(self, leaf_boundary_bytes: int, *, held_keeps: bool = False) -> RegionParts:
        """A first region whose boundary is counted before it already; ``held_keeps``: also where it is held."""
        retained, forward = dict(self.retained), dict(self.forward)
        if not self.held or held_keeps:
            retained[HELD if self.held else BOUNDARIES] -= leaf_boundary_bytes
        # Its forward was measured with a boundary of its own; a gather alone was not.
        own = FORWARD if forward[FORWARD] >= leaf_boundary_bytes else BOUNDARIES
        forward[own] = forward.get(own, 0) - leaf_boundary_bytes
        return replace(self, retained=retained, forward=forward)


def exact_parts(name: str, region_class: RegionClass, used: KeepSet, *, held: bool) -> RegionParts:
    """A region that keeps ``used`` and encodes nothing; ``held`` where autograd keeps all."""
    left = region_class.sharded.retained_bytes if region_class.sharded is not None else 0
    retained = {LEFT_GATHERED: left}
    if held:
        retained[HELD] = used.retained_bytes - left
    else:
        boundary = min(used.retained_bytes, _empty(region_class).retained_bytes) - left
        retained |= {BOUNDARIES: boundary, KEPT: used.retained_bytes - left - boundary}
    label = "backward of the region" if held else "replay and backward of the region"
    backward, frees_first = _backward(region_class, used, label)
    forward = _forward(region_class, used)
    return RegionParts(name, held, retained, forward, backward, region_class.gradient_bytes, frees_first)


def planned_parts(region: RegionPlan, region_class: RegionClass, *, demoted: bool = False) -> RegionParts:
    """A region under the modes of its plan. Raises InternalError where they are not of this class."""
    if region.hold:
        return exact_parts(region.name, region_class, region_class.hold, held=True)
    modes = {unit.name.removeprefix(region.name + "."): unit for unit in region.units}
    stored = {name for name, unit in modes.items() if unit.mode != "R"}
    used = _measured(region, region_class, stored)
    found = exact_parts(region.name, region_class, used, held=False)
    lossy = [unit for unit in region_class.units if modes[unit.name].mode == "L"]
    if not lossy:
        return found
    outputs = sum(unit.output_bytes for unit in lossy)
    payload = sum(_payload(unit, modes[unit.name].codec) for unit in lossy)
    # What autograd itself keeps of a unit at L stays beside its payload.
    rest = sum(unit.rest_bytes for unit in lossy)
    kept = max(found.retained[KEPT] - outputs - rest, 0)
    retained = found.retained | {KEPT: kept, PAYLOADS: found.retained[KEPT] - outputs + payload - kept}
    workspace = codec_workspace_bytes(lossy)
    forward = {PAYLOADS: payload} | found.forward | {WORKSPACE: workspace}
    cost = region_cost(region, region_class, 0)
    if not demoted:
        decoded = cost.backward_bytes - used.backward_bytes - workspace
        if found.frees_first:
            # The ledger takes off what is retained with payloads; `used` has the outputs in their place.
            decoded += payload - outputs
        backward = found.backward | {"decoded outputs": decoded, WORKSPACE: workspace}
        return replace(found, retained=retained, forward=forward, backward=backward)
    gathered = region_class.sharded.backward_bytes if region_class.sharded is not None else 0
    working = {
        GATHERED: gathered,
        "replay and backward with L units run": cost.demoted_backward_bytes - gathered,
    }
    return replace(found, retained=retained, forward=forward, backward=working, frees_first=False)


def _forward(region_class: RegionClass, used: KeepSet) -> Parts:
    sharded = region_class.sharded
    if sharded is None:
        return {FORWARD: used.forward_bytes}
    if used.forward_bytes == sharded.gathering_bytes:
        return {GATHERED: sharded.gathering_bytes, FORWARD: 0}
    own = used.forward_bytes - sharded.forward_bytes
    return {GATHERED: sharded.forward_bytes, FORWARD: own}


def _backward(region_class: RegionClass, used: KeepSet, label: str) -> tuple[Parts, bool]:
    """The working set, and whether it is the reduction's."""
    sharded, total = region_class.sharded, used.backward_bytes
    if sharded is None:
        return {label: total}, False
    if sharded.reducing_bytes and total == sharded.reducing_bytes + sharded.prefetched_bytes - used.retained_bytes:
        reduced = {GATHERED: sharded.prefetched_bytes, REDUCED: sharded.reducing_bytes}
        return reduced, True
    computing = total != sharded.opening_bytes + sharded.held_bytes
    gathered = sharded.backward_bytes if computing else sharded.opening_bytes
    own = total - gathered - sharded.held_bytes
    return {GATHERED: gathered, REDUCED: sharded.held_bytes, label: own}, False


def _measured(region: RegionPlan, region_class: RegionClass, stored: set[str]) -> KeepSet:
    for found in region_class.keep_sets:
        if set(found.kept) == stored and found.split == (region.split_at is not None):
            return found
    raise InternalError(f"{region.name}: the trace measured no keep set {sorted(stored)}")


def _empty(region_class: RegionClass) -> KeepSet:
    return next(found for found in region_class.keep_sets if not found.kept and not found.split)


def _payload(unit: UnitTrace, codec: str | None) -> int:
    return next(cost.payload_bytes for cost in unit.codecs if cost.codec == codec)
