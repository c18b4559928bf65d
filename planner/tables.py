"""A Problem as integer arrays: what greedy, relaxation, label search and CP-SAT share. The verifier does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hilore.planner.pareto import needed_backward_bytes
from hilore.planner.problem import Configuration, Problem

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Number = TypeVar("Number", np.int64, np.float64)

# Sums of costs stay below this, so that no int64 arithmetic on them overflows.
LARGEST_SUM = 2**60


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Arrays of shape [regions, most configurations of a region], padded where ``usable`` is False.

    ``held``: whether a configuration is a held region.
    ``cost`` is ``extra_ns * cost_scale + lossy_units * lossy_cost``: ties in time go to fewer L units, in the same
    proof.
    ``needed`` is the room of a region's backward, demoted or not. Rooms are what is left for a plan at each event,
    in bytes; ``later_room`` holds one per region's backward. ``risk_room`` None: risk cannot bind.
    """

    retained: Integers
    forward: Integers
    needed: Integers
    extra: Integers
    cost: Integers
    risk: Integers
    held: NDArray[np.bool_]
    usable: NDArray[np.bool_]
    cost_scale: int
    lossy_cost: int
    forward_room: int
    head_room: int
    later_room: Integers
    constant_room: int
    risk_room: int | None

    @property
    def regions(self) -> int:
        return int(self.retained.shape[0])

    @property
    def events(self) -> int:
        """Forward of each region, head, backward of each region."""
        return 2 * self.regions + 1

    def room(self, event: int) -> int:
        n = self.regions
        if event < n:
            return self.forward_room
        return self.head_room if event == n else int(self.later_room[event - n - 1])

    def rooms(self) -> Integers:
        """The room of every event, in order."""
        fixed = [self.forward_room] * self.regions + [self.head_room]
        return np.concatenate((np.array(fixed, dtype=np.int64), self.later_room))

    def row(self, event: int) -> Integers:
        """What each configuration adds to an event's live bytes."""
        n = self.regions
        if event == n:
            return self.retained
        at = event if event < n else event - n - 1
        result = np.zeros_like(self.retained)
        result[:at] = self.retained[:at]
        result[at] = self.forward[at] if event < n else self.retained[at] + self.needed[at]
        return result

    def excess(self, choice: Sequence[int]) -> Integers:
        """Bytes by which each event of a choice passes its room (negative: room left)."""
        index = np.asarray(choice, dtype=np.int64)
        every = np.arange(self.regions)
        retained = self.retained[every, index]
        return used_bytes(retained, self.forward[every, index], self.needed[every, index]) - self.rooms()

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether a choice keeps every row. The verifier has the last word."""
        index = np.asarray(choice, dtype=np.int64)
        every = np.arange(self.regions)
        if self.constant_room < 0 or not self.usable[every, index].all() or bool((self.excess(choice) > 0).any()):
            return False
        return self.risk_room is None or int(self.risk[every, index].sum()) <= self.risk_room

    def total_cost(self, choice: Sequence[int]) -> int:
        return int(self.cost[np.arange(self.regions), np.asarray(choice, dtype=np.int64)].sum())

    def total_extra(self, choice: Sequence[int]) -> int:
        return int(self.extra[np.arange(self.regions), np.asarray(choice, dtype=np.int64)].sum())


def used_bytes(retained: NDArray[Number], forward: NDArray[Number], needed: NDArray[Number]) -> NDArray[Number]:
    """Bytes that a choice takes at every event, from each region's bytes."""
    upto = np.cumsum(retained)
    return np.concatenate((upto - retained + forward, upto[-1:], upto + needed))


def with_budget(tables: Tables, more_bytes: int) -> Tables:
    """The same problem with ``more_bytes`` more room at every event."""
    return replace(
        tables,
        forward_room=tables.forward_room + more_bytes,
        head_room=tables.head_room + more_bytes,
        later_room=tables.later_room + more_bytes,
        constant_room=tables.constant_room + more_bytes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The configurations of one region as arrays, in order."""

    retained: Integers
    forward: Integers
    needed: Integers
    extra: Integers
    lossy: Integers
    risk: Integers
    held: NDArray[np.bool_]


def columns_of(configurations: Sequence[Configuration], risk: Sequence[int]) -> Columns:
    rows = [
        (c.retained_bytes, c.forward_bytes, needed_backward_bytes(c), c.extra_ns, c.lossy_units, c.hold)
        for c in configurations
    ]
    retained, forward, needed, extra, lossy, held = np.array(rows, dtype=np.int64).T
    return Columns(retained, forward, needed, extra, lossy, np.array(risk, dtype=np.int64), held.astype(np.bool_))


def make_tables(problem: Problem, columns: Sequence[Columns] | None = None, *, like: Tables | None = None) -> Tables:
    """The arrays of a problem. ``columns``: those of each region, where they are known already.

    ``like``: the tables of the same problem with fewer configurations written out, whose units of cost are kept.
    """
    regions = problem.regions
    if columns is None:
        made: dict[tuple[int, tuple[int, ...]], Columns] = {}
        for region in regions:
            if (key := (id(region.configurations), region.risk)) not in made:
                made[key] = columns_of(region.configurations, region.risk)
        columns = [made[id(region.configurations), region.risk] for region in regions]
    width = max(len(column.retained) for column in columns)
    shape = (len(regions), width)
    retained, forward, needed, extra, lossy, risk = (np.zeros(shape, dtype=np.int64) for _ in range(6))
    usable, held = np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
    bound = sum(region.most_risk for region in regions) > problem.risk_limit
    if like is not None:
        bound = like.risk_room is not None
    casts = 0
    for r, column in enumerate(columns):
        k = len(column.retained)
        retained[r, :k], forward[r, :k], needed[r, :k] = column.retained, column.forward + casts, column.needed
        # A held region has none of its own: rows ask for a little too much there, never for too little.
        casts += regions[r].configurations[0].cast_bytes
        extra[r, :k], lossy[r, :k], held[r, :k] = column.extra, column.lossy, column.held
        usable[r, :k] = not bound or column.risk <= problem.risk_limit
        if bound:
            risk[r, :k] = np.where(usable[r, :k], column.risk, 0)
    if like is None:
        scale = 1 + sum(region.most_lossy for region in regions)
        menus = (region.menu for region in regions if region.menu is not None)
        most_extra = int(extra.max(axis=1).sum()) + sum(menu.most_extra for menu in menus)
        tie_break = most_extra < LARGEST_SUM // scale
        scale = scale if tie_break else 1
    else:
        scale, tie_break = like.cost_scale, bool(like.lossy_cost)
    room = problem.budget_bytes - problem.base_bytes
    gradients = np.array([region.gradient_bytes for region in regions], dtype=np.int64)
    total = int(gradients.sum())
    return Tables(
        retained=retained,
        forward=forward,
        needed=needed,
        extra=extra,
        cost=extra * scale + (lossy if tie_break else 0),
        risk=risk,
        held=held,
        usable=usable,
        cost_scale=scale,
        lossy_cost=int(tie_break),
        forward_room=room,
        head_room=room - max(problem.head_bytes, problem.head_forward_bytes + casts),
        later_room=room - problem.head_left_bytes - (total - np.cumsum(gradients)),
        constant_room=room - total - max(problem.tail_bytes, problem.optimizer_bytes),
        risk_room=problem.risk_limit if bound else None,
    )
