"""Which units of a replay compute on what comes from a decoded value.

Autograd saves what units and glue computed in forward from exact values; a replay makes it again, and behind an L
unit it does so from the decoded value. How much of a layer is made again that way depends on what else is kept:
measured, an o_proj in int8 costs 0.25 % of the update's gradient where gate and up are kept, 0.83 % where they run
again; v_proj costs more beside a kept attention, whose output belongs to the exact v.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hilore.planner.liveness import LiveUnit, running_units


def tainted_units(units: Sequence[LiveUnit], lossy: str, running: Collection[str]) -> tuple[str, ...]:
    """Names of the ``running`` units that the output of the L unit ``lossy`` reaches through glue and running units.

    ``units`` in forward order; so is the answer.
    """
    fed = {unit.name: unit.feeds for unit in units}
    reached: set[str] = set()
    front = [lossy]
    while front:
        for name in fed[front.pop()]:
            if name in running and name not in reached:
                reached.add(name)
                front.append(name)
    return tuple(unit.name for unit in units if unit.name in reached)


def contexts_of(
    units: Sequence[LiveUnit], kept_sets: Iterable[Collection[str]], lossy: str
) -> tuple[tuple[str, ...], ...]:
    """Every tainted set that the unit can have at L in one of the kept sets, sorted."""
    found = {tainted_units(units, lossy, running_units(units, kept)[0]) for kept in kept_sets if lossy in kept}
    return tuple(sorted(found))
