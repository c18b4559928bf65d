"""Exact search over partial choices, region by region, for choices that cost at most a target.

A label is the sum of what the first regions retain, risk and cost. Less of each is never worse for the rest, so
equal and beaten labels are dropped, and a label that cannot be completed below the target is too (suffixes.py).
Identical regions reach equal sums in any order, which is why their symmetry costs little here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hilore.planner.leastpeak import backtrack
from hilore.planner.relaxation import Relaxation
from hilore.planner.suffixes import Suffixes, pairs
from hilore.planner.tables import Integers, Tables

# A label is compared with its neighbours at these distances in the sorted order: nearly all beaten ones are found.
STRIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Before that, many labels are compared through a grid of so many cells a side.
GRID = 400


@dataclass(frozen=True, slots=True)
class Found:
    """``choice``: the cheapest that was found, None where none fits; it may cost more than the target. ``closed``:
    nothing cheaper, or up to the target, was left out."""

    choice: tuple[int, ...] | None
    closed: bool


class Effort:
    """Pairs of a label and a configuration that may still be looked at: the same on every machine."""

    def __init__(self, pairs_left: int, most_labels: int, out_of_time: Callable[[], bool]) -> None:
        self.pairs_left = pairs_left
        self.most_labels = most_labels
        self.out_of_time = out_of_time

    def spent(self, pairs_looked_at: int, labels: int) -> bool:
        """Count them; whether that was too much."""
        self.pairs_left -= pairs_looked_at
        return self.pairs_left < 0 or labels > self.most_labels or self.out_of_time()


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """Bounds of what the later regions cost (suffixes.py); ``risk`` None where there is no risk row."""

    memory: Suffixes
    risk: Suffixes | None


def search(
    tables: Tables,
    relaxation: Relaxation,
    penalty: Integers,
    rest: Rest,
    *,
    target: int,
    effort: Effort,
    beam: int | None = None,
    window: int | None = None,
) -> Found:
    """The cheapest choice that fits among those that cost at most ``target`` (in units of 2**-bits).

    With a relaxation for so many held regions, only choices with as many are looked at. With ``beam`` only so many
    labels go on from region to region, those with the lowest bounds, and only configurations with a penalty within
    ``window`` are taken; then nothing is proven.
    """
    n = tables.regions
    margin = target - relaxation.exact_bound
    bounds = _Bounds(tables, relaxation, rest)
    retained, risk, cost, paid, held = (np.zeros(1, dtype=np.int64) for _ in range(5))
    steps: list[tuple[Integers, Integers]] = []
    for r in range(n):
        picks = np.flatnonzero(penalty[r] <= (margin if window is None else min(margin, window)))
        picks = picks[np.argsort(penalty[r, picks], kind="stable")]
        due = penalty[r, picks]
        count = np.searchsorted(due, margin - paid, side="right")
        if effort.spent(int(count.sum()), len(paid)):
            return Found(None, closed=False)
        rows, at = pairs(count)
        k = picks[at]
        before, retained = retained[rows], retained[rows] + tables.retained[r, k]
        allowed = (
            (before + tables.forward[r, k] <= tables.forward_room)
            & (retained + tables.needed[r, k] <= tables.later_room[r])
            & (retained <= tables.head_room)
        )
        risk = risk[rows] + tables.risk[r, k]
        if tables.risk_room is not None:
            allowed &= risk <= tables.risk_room
        cost, paid = cost[rows] + tables.cost[r, k], paid[rows] + due[at]
        held = held[rows]
        if relaxation.held is not None:
            held = held + tables.held[r, k]
            allowed &= (held <= relaxation.held) & (held + n - 1 - r >= relaxation.held)
        kept = np.flatnonzero(allowed)
        bound = bounds.least(r, retained[kept], risk[kept], cost[kept], paid[kept], held[kept])
        within = bound <= target
        kept, bound = kept[within], bound[within]
        fresh = _unbeaten(retained[kept], risk[kept], cost[kept], held[kept], risky=tables.risk_room is not None)
        if beam is not None and len(fresh) > beam:
            fresh = fresh[np.argsort(bound[fresh], kind="stable")[:beam]]
        kept = kept[fresh]
        if len(kept) == 0:
            return Found(None, closed=beam is None)
        retained, risk, cost, paid, held = retained[kept], risk[kept], cost[kept], paid[kept], held[kept]
        steps.append((rows[kept], k[kept]))
    return Found(backtrack(steps, int(np.argmin(cost))), closed=beam is None)


class _Bounds:
    """The least that a choice costs which begins with a label, in units of 2**-bits."""

    def __init__(self, tables: Tables, relaxation: Relaxation, rest: Rest) -> None:
        self.relaxation = relaxation
        self.rest = rest
        prices = relaxation.prices
        self.risk_worth = prices.risk * (tables.risk_room or 0)
        self.memory_worth = sum(price * tables.room(event) for event, price in prices.events.items())
        self.lowest = np.cumsum(relaxation.lowest)

    def least(
        self, r: int, retained: Integers, risk: Integers, cost: Integers, paid: Integers, held: Integers
    ) -> Integers:
        """For labels after region ``r``. What is not among the suffixes costs more by more than their window."""
        relaxation, rest = self.relaxation, self.rest
        prices = relaxation.prices
        left = held if relaxation.held is None else relaxation.held - held
        priced = relaxation.exact_bound + paid
        later = rest.memory.least(r + 1, retained, left)
        bound = np.minimum(
            (cost << prices.bits) + risk * prices.risk - self.risk_worth + later, priced + rest.memory.window
        )
        if rest.risk is not None:
            # The label's cost with its bytes at their prices.
            own = paid + self.lowest[r] - risk * prices.risk - held * prices.held
            exact = own - self.memory_worth + rest.risk.least(r + 1, risk, left)
            bound = np.maximum(bound, np.minimum(exact, priced + rest.risk.window))
        result: Integers = np.maximum(bound, priced)
        return result


def _unbeaten(retained: Integers, risk: Integers, cost: Integers, held: Integers, *, risky: bool) -> Integers:
    """Indices of labels without those that another one with as many held regions beats: all of them without risk,
    nearly all with it."""
    if len(held) == 0:
        return np.zeros(0, dtype=np.int64)
    groups = [np.flatnonzero(held == count) for count in np.unique(held)]
    return np.concatenate([group[_unbeaten_in(retained[group], risk[group], cost[group], risky)] for group in groups])


def _unbeaten_in(retained: Integers, risk: Integers, cost: Integers, risky: bool) -> Integers:
    left = _not_clearly_beaten(retained, risk, cost) if risky and len(cost) > GRID else np.arange(len(cost))
    order = left[np.lexsort((risk[left], cost[left], retained[left]))]
    c, k = cost[order], risk[order]
    kept = np.ones(len(order), dtype=np.bool_)
    if risky:
        for stride in STRIDES:
            kept[stride:] &= ~((c[:-stride] <= c[stride:]) & (k[:-stride] <= k[stride:]))
    else:
        kept[1:] = c[1:] < np.minimum.accumulate(c)[:-1]
    return order[kept].astype(np.int64)


def _not_clearly_beaten(retained: Integers, risk: Integers, cost: Integers) -> Integers:
    """Indices of labels that none in a cell before theirs, by retained bytes and by risk, undercuts in cost.

    Cells are runs of the ranks, so that a cell before holds nothing larger in either.
    """
    count = len(cost)
    cell_of_rank = np.arange(count) * GRID // count
    row, column = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    row[np.argsort(retained, kind="stable")] = cell_of_rank
    column[np.argsort(risk, kind="stable")] = cell_of_rank
    lowest = np.full((GRID + 1, GRID + 1), np.iinfo(np.int64).max)
    np.minimum.at(lowest, (row + 1, column + 1), cost)
    lowest = np.minimum.accumulate(np.minimum.accumulate(lowest, axis=0), axis=1)
    return np.flatnonzero(lowest[row, column] > cost)
