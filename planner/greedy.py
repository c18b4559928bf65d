"""A deterministic density heuristic: the baseline that is printed beside the optimum, and the solver's first plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hilore.planner.tables import Floats, Integers, Tables


def greedy(tables: Tables, start: tuple[int, ...]) -> tuple[int, ...]:
    """From ``start``, which must fit, switch one region at a time to the best other configuration that fits.

    Best: most time spared per room taken, where room is what is left at the tightest later event and of the risk;
    a switch that takes no room goes first, then the earliest region. Ends when no switch spares anything.
    """
    choice = np.array(start, dtype=np.int64)
    every = np.arange(tables.regions)
    while True:
        at = choice[:, None]
        spared = np.take_along_axis(tables.cost, at, axis=1) - tables.cost
        more = tables.retained - np.take_along_axis(tables.retained, at, axis=1)
        riskier = tables.risk - np.take_along_axis(tables.risk, at, axis=1)
        room = -tables.excess(choice.tolist())
        later = _later_room(room, tables.regions)
        allowed = tables.usable & (spared > 0) & _fits(tables, choice, more, room, later)
        left = _risk_left(tables, choice, every)
        if left is not None:
            allowed &= riskier <= left
        if not allowed.any():
            return tuple(choice.tolist())
        taken = np.maximum(more, 0) / (later[:, None] + 1.0)
        if left is not None:
            taken = taken + np.maximum(riskier, 0) / (left + 1.0)
        density: Floats = np.where(allowed, spared / (taken + 1e-12), -1.0)
        region, pick = np.unravel_index(int(np.argmax(density)), density.shape)
        choice[region] = pick


def _later_room(room: Integers, regions: int) -> Integers:
    """Room left for more retained bytes of each region: at later forwards, the head and its and later backwards."""
    forward, head, backward = room[:regions], room[regions], room[regions + 1 :]
    lowest = np.minimum.accumulate(backward[::-1])[::-1]
    later_forward = np.append(np.minimum.accumulate(forward[::-1])[::-1][1:], head)
    later_backward = np.append(lowest[1:], head)
    result: Integers = np.minimum(np.minimum(later_forward, later_backward), head)
    return result


def _fits(tables: Tables, choice: Integers, more: Integers, room: Integers, later: Integers) -> NDArray[np.bool_]:
    """Which switches keep every event's room, shape [regions, configurations]."""
    n, at = tables.regions, choice[:, None]
    working = tables.needed - np.take_along_axis(tables.needed, at, axis=1)
    ahead = tables.forward - np.take_along_axis(tables.forward, at, axis=1)
    return (more <= later[:, None]) & (ahead <= room[:n, None]) & (more + working <= room[n + 1 :, None])


def _risk_left(tables: Tables, choice: Integers, every: Integers) -> int | None:
    if tables.risk_room is None:
        return None
    return tables.risk_room - int(tables.risk[every, choice].sum())
