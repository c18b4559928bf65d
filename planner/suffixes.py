"""What the regions from some region on cost at least: exact in memory with risk at its price, or the other way round.

All event rows are about what earlier regions retain, so that without the risk row a partial choice of the last
regions is told by two numbers: the most that the regions before it may retain, and its cost with its risk at the
relaxation's price. Without the event rows it is told by the most risk that the regions before it may have, and its
cost with its bytes at their prices. The Pareto set of such pairs, per number of held regions, gives a bound that
knows about whole regions, where the relaxation's prices only know about shares of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hilore.planner.prices import whole_by_region
from hilore.planner.relaxation import Relaxation
from hilore.planner.tables import Integers, Tables
from hilore.runtime.errors import InternalError

# Above every sum of priced costs.
FAR = 2**61


@dataclass(frozen=True, slots=True, eq=False)
class Suffixes:
    """``window``: partial choices whose penalties pass it are not in here, and cost more than their regions' least
    by more than it. ``keys[r]``: ascending ``held * span + most used before region r``, where used are bytes retained,
    or risk; ``costs[r]`` beside.
    """

    window: int
    span: int
    keys: tuple[Integers, ...]
    costs: tuple[Integers, ...]

    def least(self, r: int, used: Integers, held_left: Integers) -> Integers:
        """What regions ``r`` and later cost at least, in units of 2**-bits, when the earlier ones use so much and so
        many are left to hold; FAR where no partial choice within the window is possible."""
        keys, costs = self.keys[r], self.costs[r]
        if len(keys) == 0:
            return np.full(used.shape, FAR, dtype=np.int64)
        at = np.searchsorted(keys, held_left * self.span + used, side="left")
        inside = np.minimum(at, len(keys) - 1)
        found = (at < len(keys)) & (keys[inside] // self.span == held_left)
        result: Integers = np.where(found, costs[inside], FAR)
        return result


def memory_suffixes(
    tables: Tables, relaxation: Relaxation, penalty: Integers, *, window: int, most_work: int, late: Callable[[], bool]
) -> Suffixes | None:
    """Exact in memory. None where it takes more than ``most_work`` pairs of a partial choice and a configuration, or is
    ``late``."""
    prices = relaxation.prices
    priced = (tables.cost << prices.bits) + tables.risk * prices.risk

    def room_before(r: int, k: Integers, room: Integers) -> Integers:
        own = np.minimum(
            tables.forward_room - tables.forward[r, k],
            tables.later_room[r] - tables.retained[r, k] - tables.needed[r, k],
        )
        result: Integers = np.minimum(own, room - tables.retained[r, k])
        return result

    least = np.where(tables.usable, tables.retained, tables.retained.max()).min(axis=1)
    most = max(tables.forward_room, tables.head_room, int(tables.later_room.max()))
    return _suffixes(
        tables, relaxation, penalty, priced, tables.head_room, most, least, room_before, window, most_work, late
    )


def risk_suffixes(
    tables: Tables, relaxation: Relaxation, penalty: Integers, *, window: int, most_work: int, late: Callable[[], bool]
) -> Suffixes | None:
    """Exact in risk, as `memory_suffixes`; for problems with a risk row."""
    prices = relaxation.prices
    retained, forward, needed = (p[:, None] for p in whole_by_region(prices.events, tables.regions))
    priced = (tables.cost << prices.bits) + tables.retained * retained
    priced = priced + tables.forward * forward + tables.needed * needed

    def room_before(r: int, k: Integers, room: Integers) -> Integers:
        result: Integers = room - tables.risk[r, k]
        return result

    most = tables.risk_room or 0
    least = np.zeros(tables.regions, dtype=np.int64)
    return _suffixes(tables, relaxation, penalty, priced, most, most, least, room_before, window, most_work, late)


def pairs(count: Integers) -> tuple[Integers, Integers]:
    """For each row i the pairs (i, 0), (i, 1), ... (i, count[i] - 1), as two arrays."""
    rows = np.repeat(np.arange(len(count)), count)
    firsts = np.cumsum(count) - count
    return rows, np.arange(len(rows)) - firsts[rows]


def _suffixes(
    tables: Tables,
    relaxation: Relaxation,
    penalty: Integers,
    priced: Integers,
    last_room: int,
    most_room: int,
    least_used: Integers,
    room_before: Callable[[int, Integers, Integers], Integers],
    window: int,
    most_work: int,
    late: Callable[[], bool],
) -> Suffixes | None:
    """With a relaxation for so many held regions, numbers of held regions are told apart."""
    n, work = tables.regions, 0
    span = max(most_room, last_room, 0) + 2
    if span * (n + 1) >= FAR:
        raise InternalError(f"rooms of {span} in {n} regions are too large for the label search")
    before = np.concatenate(([0], np.cumsum(least_used)))
    room, cost, paid, held = (np.array([value], dtype=np.int64) for value in (last_room, 0, 0, 0))
    keys, costs = [room + held * span], [cost]
    for r in range(n - 1, -1, -1):
        picks = np.flatnonzero(penalty[r] <= window)
        picks = picks[np.argsort(penalty[r, picks], kind="stable")]
        due = penalty[r, picks]
        count = np.searchsorted(due, window - paid, side="right")
        work += int(count.sum())
        if work > most_work or late():
            return None
        rows, at = pairs(count)
        k = picks[at]
        room = room_before(r, k, room[rows])
        cost, paid = cost[rows] + priced[r, k], paid[rows] + due[at]
        held = held[rows] if relaxation.held is None else held[rows] + tables.held[r, k]
        possible = room >= before[r]
        if relaxation.held is not None:
            possible &= (held <= relaxation.held) & (held + r >= relaxation.held)
        chosen = np.flatnonzero(possible)
        chosen = chosen[np.lexsort((cost[chosen], -room[chosen], held[chosen]))]
        lower = _lowest_so_far(held[chosen], cost[chosen])
        # What takes a beaten one's place must not leave the window before it would have.
        least_paid = np.minimum.reduceat(paid[chosen], lower) if len(lower) else lower
        chosen = chosen[lower]
        room, cost, paid, held = room[chosen], cost[chosen], least_paid, held[chosen]
        key = held * span + room
        order = np.argsort(key)
        keys.append(key[order])
        costs.append(cost[order])
    return Suffixes(window, span, tuple(reversed(keys)), tuple(reversed(costs)))


def _lowest_so_far(group: Integers, value: Integers) -> Integers:
    """Indices where a value is lower than all before it in its group; groups are runs."""
    starts = [0, *(np.flatnonzero(np.diff(group)) + 1), len(group)]
    kept = []
    for begin, end in itertools.pairwise(starts):
        part = value[begin:end]
        lower = np.ones(len(part), dtype=np.bool_)
        lower[1:] = part[1:] < np.minimum.accumulate(part)[:-1]
        kept.append(np.flatnonzero(lower) + begin)
    result: Integers = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    return result
