"""Prices of event rows and risk, and what they make a byte of each region cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hilore.planner.tables import Floats, Integers, Number


@dataclass(frozen=True, slots=True)
class Prices:
    """``events``: of each priced row. ``held``: of one held region more, of either sign. Integers, in units of
    2**-``bits`` cost units per byte (or per unit of risk)."""

    events: dict[int, int]
    risk: int
    held: int
    bits: int


def by_region(events: Mapping[int, float], regions: int) -> tuple[Floats, Floats, Floats]:
    """What a byte retained, in forward and in backward costs in each region, from the prices of event rows."""
    return _spread(events, np.zeros(regions), np.zeros(regions), np.zeros(regions))


def whole_by_region(events: Mapping[int, int], regions: int) -> tuple[Integers, Integers, Integers]:
    """The same in integers."""
    retained, forward, needed = (np.zeros(regions, dtype=np.int64) for _ in range(3))
    return _spread(events, retained, forward, needed)


def _spread(
    events: Mapping[int, Any], retained: NDArray[Number], forward: NDArray[Number], needed: NDArray[Number]
) -> tuple[NDArray[Number], NDArray[Number], NDArray[Number]]:
    regions = len(retained)
    for event, price in events.items():
        if event < regions:
            retained[:event] += price
            forward[event] += price
        elif event == regions:
            retained += price
        else:
            at = event - regions - 1
            retained[: at + 1] += price
            needed[at] += price
    return retained, forward, needed
