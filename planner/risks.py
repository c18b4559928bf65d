"""The risks of one region's L units in integers that add up exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from hilore.planner.problem import Configuration

# Unit, codec, tainted units (None: whatever they are).
Triple = tuple[str, str, tuple[str, ...] | None]


class RiskTable:
    """Squared relative error of each unit, codec and set of tainted units, times ``factor``.

    ``whole``: parts of the problem's risk unit (see problem.py) that every entry is a whole number of.
    """

    def __init__(self, kappa2: Mapping[Triple, Fraction], factor: Fraction) -> None:
        risks = {triple: value * factor for triple, value in kappa2.items()}
        self.whole = math.lcm(*(risk.denominator for risk in risks.values()))
        self._parts = {t: risk.numerator * (self.whole // risk.denominator) for t, risk in risks.items()}

    def part(self, unit: str, codec: str, tainted: tuple[str, ...]) -> int | None:
        """One L unit's risk in parts; None where it is not known."""
        found = self._parts.get((unit, codec, tainted))
        return self._parts.get((unit, codec, None)) if found is None else found

    def rounded_up(self, parts: int) -> int:
        return -(-parts // self.whole)

    def of(self, configuration: Configuration) -> int | None:
        """A configuration's risk; None where that of one of its L units is not known."""
        total = 0
        for unit in configuration.units:
            if unit.mode == "L":
                part = self.part(unit.name, unit.codec or "", unit.tainted)
                if part is None:
                    return None
                total += part
        return self.rounded_up(total)
