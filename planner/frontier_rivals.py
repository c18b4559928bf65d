"""The policies of others as the trace predicts them: what each would take in memory and in time.

A candidate is one setting of one policy, the same at every budget; under a budget a policy runs its fastest candidate
that fits. What replays cost and hold is what the trace measured, so that no rival is charged for its implementation:
selective checkpointing's dispatch per operator and Rockmate's own runtime are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from hilore.planner.events import RegionCost
from hilore.planner.modecost import exact_cost
from hilore.planner.trace import Bucket, KeepSet, RegionClass, Trace, UnitTrace
from hilore.planner.verify import verify_costs

GC, NO_GC = "GC", "No-GC"
EVERY_N, BLOCK, SAC = "every n layers", "best block held", "SAC"
ATTENTION = "attention"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One setting of a policy. ``risk`` as in Verified; ``peak_bytes`` the higher of both peaks where L units may be
    demoted."""

    detail: str
    peak_bytes: int
    peak_event: str
    step_ns: int
    risk: int = 0


def rival_candidates(trace: Trace, bucket: Bucket) -> dict[str, tuple[Candidate, ...]]:
    """Every exact policy that does not depend on the budget, with all of its settings."""
    layers = len(bucket.regions)
    families: dict[str, Iterator[tuple[str, list[RegionCost]]]] = {
        GC: iter([("", _costs(bucket, _replayed, range(0)))]),
        NO_GC: iter([("", _costs(bucket, _replayed, range(layers)))]),
        EVERY_N: _every_n(bucket),
        BLOCK: _blocks(bucket),
        SAC: _selective(trace, bucket),
    }
    return {name: tuple(_candidate(trace, bucket, *made) for made in family) for name, family in families.items()}


# Name and class of a region -> what a replayed one costs.
Replayed = Callable[[str, RegionClass], RegionCost]


def _candidate(trace: Trace, bucket: Bucket, detail: str, costs: Sequence[RegionCost]) -> Candidate:
    found = verify_costs(trace, bucket, costs)
    return Candidate(detail, found.peak_bytes, found.peak_event, found.step_ns)


def _costs(bucket: Bucket, replayed: Replayed, held: Collection[int]) -> list[RegionCost]:
    """Regions at the places ``held`` without a replay, the others as ``replayed`` says."""
    costs = []
    for place, region in enumerate(bucket.regions):
        region_class = bucket.classes[region.class_index]
        if place in held:
            costs.append(exact_cost(region.name, region_class, region_class.without_checkpointing, 0))
        else:
            costs.append(replayed(region.name, region_class))
    return costs


def _replayed(name: str, region_class: RegionClass) -> RegionCost:
    return exact_cost(name, region_class, region_class.gc, region_class.gc_replay_ns)


def _every_n(bucket: Bucket) -> Iterator[tuple[str, list[RegionCost]]]:
    """transformers' ``every_n_layers``: layer i is replayed where n divides i, the others are held."""
    layers = len(bucket.regions)
    for n in range(2, layers + 1):
        yield f"n = {n}", _costs(bucket, _replayed, [place for place in range(layers) if place % n])


def _blocks(bucket: Bucket) -> Iterator[tuple[str, list[RegionCost]]]:
    """Megatron's block method: a block of layers at one end of the model is held."""
    layers = len(bucket.regions)
    for count in range(1, layers):
        yield f"last {count} held", _costs(bucket, _replayed, range(layers - count, layers))
        yield f"first {count} held", _costs(bucket, _replayed, range(count))


def _selective(trace: Trace, bucket: Bucket) -> Iterator[tuple[str, list[RegionCost]]]:
    """PyTorch's selective activation checkpointing: operators whose outputs are saved, in all layers or in even ones.

    The other layers are replayed as by GC. Of a linear with an adapter two products of the output's size are saved
    (base and adapter; their sum is recomputed), also of calls that no replay needs.
    """
    saves: dict[str, Callable[[UnitTrace], bool]] = {
        "attention": lambda unit: unit.kind == ATTENTION,
        "GEMMs": lambda unit: unit.kind != ATTENTION,
        "attention and GEMMs": lambda _unit: True,
    }
    adapted = _adapted(trace)
    for label, saved in saves.items():
        for where, step in (("all layers", 1), ("even layers", 2)):
            costs = []
            for place, region in enumerate(bucket.regions):
                region_class = bucket.classes[region.class_index]
                if place % step:
                    costs.append(_replayed(region.name, region_class))
                    continue
                kept = [unit for unit in region_class.units if saved(unit)]
                again = sum(unit.output_bytes for unit in kept if adapted(unit))
                replay_ns = max(region_class.gc_replay_ns - sum(unit.run_ns for unit in kept), 0)
                used = _kept_at_most(region_class, {unit.name for unit in kept}, again)
                costs.append(exact_cost(region.name, region_class, used, replay_ns))
            yield f"{label} saved in {where}", costs


def _kept_at_most(region_class: RegionClass, names: set[str], besides: int) -> KeepSet:
    """A keep set that takes what keeping ``names`` takes at most, and ``besides``: the measured one, or the largest
    measured one inside of it with the missing outputs on top."""
    size = {unit.name: unit.output_bytes + unit.rest_bytes for unit in region_class.units}
    inside = [found for found in region_class.keep_sets if not found.split and names.issuperset(found.kept)]
    best = max(inside, key=lambda found: sum(size[name] for name in found.kept))
    more = sum(size[name] for name in names.difference(best.kept)) + besides
    kept = tuple(unit.name for unit in region_class.units if unit.name in names)
    return replace(best, kept=kept, retained_bytes=best.retained_bytes + more, forward_bytes=best.forward_bytes + more)


def _adapted(trace: Trace) -> Callable[[UnitTrace], bool]:
    """Whether a unit is a linear with a LoRA adapter."""
    adapter = trace.spec.get("adapter", {})
    targets = adapter.get("targets")
    if adapter.get("kind") != "lora":
        return lambda _unit: False
    return lambda unit: (
        unit.kind != ATTENTION and (targets == "all-linear" or unit.name.rpartition(".")[2] in (targets or ()))
    )
