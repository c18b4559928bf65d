"""Exact search over partial choices, region by region, inside the window that the relaxation leaves open.

A label is the sum of what the first regions retain, risk and cost. Less of each is never worse for the rest, so
equal and beaten labels are dropped, and a label whose penalties pass the window cannot lead below the best plan
known. Identical regions reach equal sums in any order, which is why their symmetry costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hilore.planner.leastpeak import backtrack
from hilore.planner.relaxation import PRICE_BITS, Relaxation
from hilore.planner.tables import Integers, Tables

# Limits of one search: labels after a region, and pairs of label and configuration looked at in all.
MOST_LABELS = 100_000
MOST_WORK = 30_000_000
FIRST_WINDOW = 2**-18
WINDOW_GROWTH = 4
# Labels per region in the last, incomplete pass of a search that gave up.
BEAM = 1_500
# A label is compared with its neighbours at these distances in the sorted order: nearly all beaten ones are found.
STRIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Before that, many labels are compared through a grid of so many cells a side.
GRID = 400


@dataclass(frozen=True, slots=True)
class Found:
    """``choice``: the best one, None where no choice is cheaper than what was known; ``closed``: proven."""

    choice: tuple[int, ...] | None
    closed: bool


def search(tables: Tables, relaxation: Relaxation, *, known_cost: int, out_of_time: Callable[[], bool]) -> Found:
    """The cheapest choice that fits, if it is cheaper than ``known_cost``; exact where ``closed``.

    With a relaxation for so many held regions, only choices with as many are looked at.

    Windows of cost above the relaxation's bound grow until the best choice found lies inside its window: every choice
    that could cost less was in it too. Gives up, not closed, when labels or work pass their limits (the same on every
    machine) or time is out; one last pass then follows only the labels with the least penalties.
    """
    limit = relaxation.slack(known_cost - 1)
    window = max(1, int(known_cost * FIRST_WINDOW)) << PRICE_BITS
    best: tuple[int, ...] | None = None
    budget = _Budget(MOST_WORK, out_of_time)
    while limit >= 0:
        window = min(window, limit)
        try:
            found = _cheapest(tables, relaxation, window, budget)
        except _GivenUpError:
            return Found(_narrow(tables, relaxation, known_cost, out_of_time) or best, closed=False)
        if found is not None and (cost := tables.total_cost(found)) < known_cost:
            best, known_cost = found, cost
            limit = relaxation.slack(cost - 1)
        if limit <= window:
            break
        window *= WINDOW_GROWTH
    return Found(best, closed=True)


def _narrow(
    tables: Tables, relaxation: Relaxation, known_cost: int, out_of_time: Callable[[], bool]
) -> tuple[int, ...] | None:
    """A choice cheaper than ``known_cost`` from a pass that keeps BEAM labels per region, or None."""
    budget = _Budget(BEAM * tables.usable.size, out_of_time)
    try:
        found = _cheapest(tables, relaxation, relaxation.slack(known_cost - 1), budget, beam=BEAM)
    except _GivenUpError:
        return None
    return found if found is not None and tables.total_cost(found) < known_cost else None


class _GivenUpError(Exception):
    """Labels, work or time passed their limit."""


class _Budget:
    def __init__(self, work: int, out_of_time: Callable[[], bool]) -> None:
        self.work = work
        self.out_of_time = out_of_time

    def spend(self, labels: int, picks: int) -> None:
        self.work -= labels * picks
        if self.work < 0 or labels > MOST_LABELS or self.out_of_time():
            raise _GivenUpError


def _cheapest(
    tables: Tables, relaxation: Relaxation, window: int, budget: _Budget, *, beam: int | None = None
) -> tuple[int, ...] | None:
    """The cheapest choice that fits among those whose penalties sum to at most ``window``.

    With ``beam`` no more than so many labels go on from region to region, and the result may not be the cheapest.
    Raises _GivenUpError.
    """
    retained, risk, cost, paid, held = (np.zeros(1, dtype=np.int64) for _ in range(5))
    steps: list[tuple[Integers, Integers]] = []
    for r in range(tables.regions):
        picks = np.array(
            [k for k in np.flatnonzero(tables.usable[r]) if relaxation.penalty[r, k] <= window], dtype=np.int64
        )
        budget.spend(len(retained), len(picks))
        # Penalties in whole cost units, rounded down, cut nothing off that lies in the window.
        due = np.array([relaxation.penalty[r, k] >> PRICE_BITS for k in picks], dtype=np.int64)
        before = retained[:, None]
        allowed = (
            (paid[:, None] + due <= window >> PRICE_BITS)
            & (before + tables.forward[r, picks] <= tables.forward_room)
            & (before + tables.retained[r, picks] + tables.needed[r, picks] <= tables.later_room[r])
            & (before + tables.retained[r, picks] <= tables.head_room)
        )
        if tables.risk_room is not None:
            allowed &= risk[:, None] + tables.risk[r, picks] <= tables.risk_room
        if relaxation.held is not None:
            so_far = held[:, None] + tables.held[r, picks]
            allowed &= (so_far <= relaxation.held) & (so_far + tables.regions - 1 - r >= relaxation.held)
        parents, columns = np.nonzero(allowed)
        taken = picks[columns]
        retained = retained[parents] + tables.retained[r, taken]
        risk = risk[parents] + tables.risk[r, taken]
        cost = cost[parents] + tables.cost[r, taken]
        paid = paid[parents] + due[columns]
        held = held[parents]
        if relaxation.held is not None:
            held = held + tables.held[r, taken]
        if len(parents) == 0:
            return None
        kept = _unbeaten(retained, risk, cost, held, risky=tables.risk_room is not None)
        if beam is not None and len(kept) > beam:
            kept = kept[np.argsort(paid[kept], kind="stable")[:beam]]
        retained, risk, cost, paid = retained[kept], risk[kept], cost[kept], paid[kept]
        held = held[kept]
        steps.append((parents[kept].astype(np.int64), taken[kept]))
    return backtrack(steps, int(np.argmin(cost)))


def _unbeaten(retained: Integers, risk: Integers, cost: Integers, held: Integers, *, risky: bool) -> Integers:
    """Indices of labels without those that another one with as many held regions beats: all of them without risk,
    nearly all with it."""
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
