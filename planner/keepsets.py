"""Which sets of kept units are worth measuring: the Pareto sets of time saved against bytes kept.

Two weightings of the bytes, one with exact outputs and one with the smallest payloads, because a unit at L is kept
for liveness at the price of its payload.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from hilore.planner.liveness import LiveUnit, running_units


def worthwhile_sets(
    units: Sequence[LiveUnit],
    run_ns: Mapping[str, int],
    weights: Sequence[Mapping[str, int]],
    keepable: Collection[str],
) -> tuple[tuple[str, ...], ...]:
    """Subsets of ``keepable`` that no other beats in both time and bytes under at least one weighting.

    Always among them: the empty set, each unit alone, and all units that are not dead. Sets are given in forward
    order, smallest first.
    """
    names = [unit.name for unit in units if unit.name in keepable]
    subsets = [subset for size in range(len(names) + 1) for subset in combinations(names, size)]
    times = {subset: sum(run_ns[name] for name in running_units(units, frozenset(subset))[0]) for subset in subsets}
    chosen = {subset for subset in subsets if len(subset) <= 1}
    for weight in weights:
        chosen |= _front(subsets, times, {s: sum(weight[name] for name in s) for s in subsets})
    _, dead = running_units(units, frozenset(names))
    needed = tuple(name for name in names if _saves_time(units, name))
    chosen.add(needed if not dead else tuple(name for name in needed if name not in dead))
    return tuple(sorted(chosen, key=lambda subset: (len(subset), [names.index(name) for name in subset])))


def split_unit(units: Sequence[LiveUnit]) -> str:
    """The unit before which a replay is best split: the first one of the region's last part (its MLP).

    Parts are the region's children. '' where all units lie in one part.
    """
    parts = [unit.name.partition(".")[0].partition(":")[0] for unit in units]
    if len(set(parts)) < 2:
        return ""
    return next(unit.name for unit, part in zip(units, parts, strict=True) if part == parts[-1])


def _saves_time(units: Sequence[LiveUnit], name: str) -> bool:
    """Whether a replay that keeps nothing runs this unit at all."""
    return name in running_units(units, frozenset())[0]


def _front(
    subsets: Sequence[tuple[str, ...]],
    times: Mapping[tuple[str, ...], int],
    sizes: Mapping[tuple[str, ...], int],
) -> set[tuple[str, ...]]:
    best: int | None = None
    front = set()
    for subset in sorted(subsets, key=lambda s: (sizes[s], times[s], len(s))):
        if best is None or times[subset] < best:
            best = times[subset]
            front.add(subset)
    return front
