"""The smallest budget that a problem has a plan for, exact to the byte; and with it, whether a budget has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hilore.planner.problem import Problem
from hilore.planner.tables import Integers, Tables, make_tables, with_budget
from hilore.planner.verify import verify
from hilore.runtime.errors import InternalError

# Far above what occurs: an L unit retains more than R at more risk, so that it survives only where it is forced.
LABEL_LIMIT = 500_000


@dataclass(frozen=True, slots=True)
class LeastPeak:
    """``choice`` reaches ``peak_bytes``, and no other within the risk limit stays below it, demoted or not."""

    peak_bytes: int
    choice: tuple[int, ...]


def smallest_budget(problem: Problem) -> int:
    """The smallest budget in bytes that has a plan within the problem's risk limit. Exact."""
    return least_peak(problem).peak_bytes


def least_peak(problem: Problem) -> LeastPeak:
    """Bisection on the budget over the exact test of `fitting_choice`.

    Raises InternalError if not even all-R, which has no risk, is within the risk limit.
    """
    tables = make_tables(problem)
    low, high = -1, _peak(problem, (0,) * len(problem.regions))
    best = fitting_choice(with_budget(tables, high - problem.budget_bytes))
    if best is None:
        raise InternalError("all-R does not fit its own peak")
    high = _peak(problem, best)
    while high - low > 1:
        middle = (low + high) // 2
        found = fitting_choice(with_budget(tables, middle - problem.budget_bytes))
        if found is None:
            low = middle
        else:
            best, high = found, _peak(problem, found)
    return LeastPeak(high, best)


def fitting_choice(tables: Tables) -> tuple[int, ...] | None:
    """Some choice that keeps every memory and risk row, or None if there is none. Exact.

    Region by region, only what the earlier regions retain and risk matters to the later ones, and less of either is
    never worse: the Pareto set of these two sums decides. Among the survivors the least retained one is taken.
    """
    if tables.constant_room < 0:
        return None
    retained = np.zeros(1, dtype=np.int64)
    risk = np.zeros(1, dtype=np.int64)
    steps: list[tuple[Integers, Integers]] = []
    for r in range(tables.regions):
        parents, picks = _allowed(tables, r, retained, risk)
        retained = retained[parents] + tables.retained[r, picks]
        risk = risk[parents] + tables.risk[r, picks]
        kept = _skyline(retained, risk)
        if len(kept) > LABEL_LIMIT:
            raise InternalError(f"least peak: more than {LABEL_LIMIT} partial choices at region {r}")
        retained, risk = retained[kept], risk[kept]
        steps.append((parents[kept], picks[kept]))
    last = np.flatnonzero(retained <= tables.head_room)
    return backtrack(steps, int(last[0])) if len(last) else None


def possible_held(tables: Tables) -> frozenset[int]:
    """How many regions can be held by a choice that keeps every memory row, whatever its risk. Exact.

    For each number, only the least that the earlier regions can retain matters to the later ones.
    """
    never = np.iinfo(np.int64).max // 4
    least = np.full(tables.regions + 2, never)
    least[0] = 0
    for r in range(tables.regions):
        before = least[:-1, None]
        fits = (
            tables.usable[r]
            & (before + tables.forward[r] <= tables.forward_room)
            & (before + tables.retained[r] + tables.needed[r] <= tables.later_room[r])
        )
        after = np.where(fits, before + tables.retained[r], never)
        free = np.where(tables.held[r], never, after).min(axis=1)
        held = np.where(tables.held[r], after, never).min(axis=1)
        least = np.minimum(np.append(free, never), np.concatenate(([never], held)))
    return frozenset(int(count) for count in np.flatnonzero(least <= tables.head_room))


def backtrack(steps: Sequence[tuple[Integers, Integers]], label: int) -> tuple[int, ...]:
    """The choice that ends in ``label``; each step holds the labels' parents and picks."""
    choice = []
    for parents, picks in reversed(steps):
        choice.append(int(picks[label]))
        label = int(parents[label])
    return tuple(reversed(choice))


def _peak(problem: Problem, choice: tuple[int, ...]) -> int:
    verified = verify(problem, choice)
    return max(verified.peak_bytes, verified.demoted_peak_bytes)


def _allowed(tables: Tables, r: int, retained: Integers, risk: Integers) -> tuple[Integers, Integers]:
    """Pairs (label, configuration of region r) that keep the region's own events and the risk row."""
    before = retained[:, None]
    allowed = (
        tables.usable[r][None, :]
        & (before + tables.forward[r] <= tables.forward_room)
        & (before + tables.retained[r] + tables.needed[r] <= tables.later_room[r])
    )
    if tables.risk_room is not None:
        allowed &= risk[:, None] + tables.risk[r] <= tables.risk_room
    parents, picks = np.nonzero(allowed)
    return parents.astype(np.int64), picks.astype(np.int64)


def _skyline(first: Integers, second: Integers) -> Integers:
    """Indices of the pairs that no other pair beats in both, by ascending ``first``."""
    order = np.lexsort((second, first))
    if len(order) == 0:
        return order.astype(np.int64)
    lowest = np.minimum.accumulate(second[order])
    kept = np.ones(len(order), dtype=np.bool_)
    kept[1:] = second[order][1:] < lowest[:-1]
    return order[kept].astype(np.int64)
