"""The menu of one region: the cheapest configuration at given prices, and all within a margin of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hilore.planner.menu import Integers, Menu, Recipe
from hilore.planner.problem import Configuration
from hilore.planner.risks import RiskTable
from hilore.runtime.errors import InternalError

# The cost of what is not offered: beyond what any other sum can reach (relaxation.SUM_BITS).
NEVER = 2**61
# Cost and place of a unit's codecs, cheapest first, by context and number of decode calls less 1; and of each unit's.
UnitCosts = list[list[list[tuple[int, int]]]]
CodecCosts = list[UnitCosts]


@dataclass(frozen=True, slots=True)
class UnitPrices:
    """What a region's bytes, risk and time cost: integers in one unit of account.

    Codecs with more risk than ``risk_room`` are left out; None: none are.
    """

    retained: int
    forward: int
    needed: int
    risk: int
    time: int
    lossy: int
    risk_room: int | None


class RegionMenu:
    """A menu with the risks of one region. Risks add up exactly, and are rounded up once per configuration.

    What has no known risk is not offered. ``boundary_bytes``: kept less by every configuration (see
    trace.Outside.leaf_boundary_bytes).
    """

    def __init__(self, menu: Menu, risks: RiskTable, *, boundary_bytes: int = 0) -> None:
        self.menu = menu
        self.boundary_bytes = boundary_bytes
        self._risks = risks
        self._parts = [
            [[risks.part(unit, cost.codec, tainted) for cost in costs] for tainted in contexts]
            for unit, costs, contexts in zip(menu.units, menu.offers, menu.contexts, strict=True)
        ]
        lossy = menu.calls > 0
        offered = np.ones(len(lossy), dtype=np.bool_)
        for u, parts in enumerate(self._parts):
            known = np.array([any(part is not None for part in row) for row in parts] or [False])
            offered &= ~lossy[:, u] | known[menu.context[:, u]]
        self.shapes: Integers = np.flatnonzero(offered).astype(np.int64)

    @property
    def most_lossy(self) -> int:
        return self.menu.most_lossy

    @property
    def most_extra(self) -> int:
        return int(self.largest[3])

    @property
    def largest(self) -> tuple[int, int, int, int]:
        """At least the retained, forward and needed bytes and the extra nanoseconds of every configuration."""
        return self.menu.largest

    @property
    def most_risk(self) -> int:
        """At least the risk of every configuration."""
        return self._risks.rounded_up(
            sum(max((part for row in rows for part in row if part is not None), default=0) for rows in self._parts)
        )

    def moved(self, boundary_bytes: int) -> RegionMenu:
        """The same for a region that keeps ``boundary_bytes`` less."""
        result = object.__new__(RegionMenu)
        result.__dict__.update(self.__dict__, boundary_bytes=boundary_bytes)
        return result

    def build(self, recipe: Recipe) -> Configuration:
        built, less = self.menu.build(recipe), self.boundary_bytes
        if not less:
            return built
        return replace(built, retained_bytes=built.retained_bytes - less, forward_bytes=built.forward_bytes - less)

    def risk(self, recipe: Recipe) -> int:
        total = 0
        for u, at in enumerate(recipe.codecs):
            if at >= 0:
                part = self._parts[u][self.menu.context[recipe.shape, u]][at]
                if part is None:
                    raise InternalError(f"{self.menu.units[u]}: at L with a codec that has no risk here")
                total += part
        return self._risks.rounded_up(total)

    def risk_of(self, configuration: Configuration) -> int | None:
        """None where the risk of one of its L units is not known here."""
        return self._risks.of(configuration)

    def figures(self, recipe: Recipe) -> tuple[int, int, int, int]:
        retained, forward, needed, extra = self.menu.figures(recipe)
        return retained - self.boundary_bytes, forward - self.boundary_bytes, needed, extra

    def cheapest(self, prices: UnitPrices) -> tuple[int, Recipe]:
        """The least that any configuration of the menu costs at these prices, and one that costs it.

        Risks count rounded down here, so that no configuration costs less.
        """
        costs = [self._codec_costs(u, prices) for u in range(len(self.menu.units))]
        values = self._shape_values(costs, prices)
        at = int(np.argmin(values))
        return int(values[at]), self._cheapest_of(int(self.shapes[at]), costs)

    def within(self, prices: UnitPrices, limit: int, most: int) -> list[Recipe] | None:
        """Every configuration that costs at most ``limit`` at these prices; None where there are more than ``most``."""
        costs = [self._codec_costs(u, prices) for u in range(len(self.menu.units))]
        values = self._shape_values(costs, prices)
        found: list[Recipe] = []
        for at in np.flatnonzero(values <= limit):
            found += self._combinations(int(self.shapes[at]), limit - int(values[at]), costs, most)
            if len(found) > most:
                return None
        return found

    def roomiest(self, exact: Sequence[tuple[int, int, int]]) -> list[Recipe]:
        """Configurations that may need less memory than ``exact`` ones do (retained, forward and needed bytes).

        Whatever configuration the menu has, one of ``exact`` or of these needs no more at any event and has no more
        risk.
        """
        menu, found = self.menu, []
        smallest = np.array([sizes.min() for sizes in menu.payload], dtype=np.int64)
        table = np.array([(r, f, r + n) for r, f, n in exact], dtype=np.int64)
        for shape in self.shapes:
            lossy = np.flatnonzero(menu.calls[shape])
            if len(lossy) == 0:
                continue
            payloads = int(smallest[lossy].sum()) - self.boundary_bytes
            retained, forward = menu.retained[shape] + payloads, menu.forward[shape] + payloads
            # No codecs retain less, nor have less alive in the region's own backward.
            least = np.array([retained, forward, retained + menu.needed[shape]], dtype=np.int64)
            if not (table <= least).all(axis=1).any():
                found += self._all_of(int(shape))
        return found

    def _all_of(self, shape: int) -> list[Recipe]:
        """Every choice of codecs for a shape that no other one beats in payloads, unit by unit, and in risk."""
        options = []
        for u, contexts in enumerate(self._parts):
            if not self.menu.calls[shape, u]:
                options.append([-1])
                continue
            parts = contexts[self.menu.context[shape, u]]
            every = sorted(
                (int(self.menu.payload[u][at]), part, at) for at, part in enumerate(parts) if part is not None
            )
            kept: list[tuple[int, int]] = []
            for _, part, at in every:
                if not kept or part < kept[-1][0]:
                    kept.append((part, at))
            options.append([at for _, at in kept])
        return [Recipe(shape, codecs) for codecs in itertools.product(*options)]

    def _codec_costs(self, unit: int, prices: UnitPrices) -> UnitCosts:
        """Cost and place of a unit's codecs, cheapest first, by context and decode calls (1 or 2)."""
        menu = self.menu
        per_byte = prices.retained + prices.forward
        result = []
        for parts in self._parts[unit]:
            by_calls: list[list[tuple[int, int]]] = []
            for calls in (1, 2):
                costs = []
                for at, (cost, part) in enumerate(zip(menu.offers[unit], parts, strict=True)):
                    if part is None:
                        continue
                    risk = part // self._risks.whole
                    if prices.risk_room is not None and risk > prices.risk_room:
                        continue
                    spent = cost.encode_ns + cost.decode_ns * calls
                    value = spent * prices.time + prices.lossy + cost.payload_bytes * per_byte
                    costs.append((value + risk * prices.risk, at))
                by_calls.append(sorted(costs))
            result.append(by_calls)
        return result

    def _shape_values(self, costs: CodecCosts, prices: UnitPrices) -> Integers:
        """The cheapest configuration's cost of every shape."""
        menu, shapes = self.menu, self.shapes
        values: Integers = (
            (menu.retained[shapes] - self.boundary_bytes) * prices.retained
            + (menu.forward[shapes] - self.boundary_bytes) * prices.forward
            + menu.needed[shapes] * prices.needed
            + menu.extra[shapes] * prices.time
        )
        never = np.zeros(len(shapes), dtype=np.bool_)
        for u, by_context in enumerate(costs):
            least = np.zeros((max(1, len(by_context)), 3), dtype=np.int64)
            none = np.zeros_like(least, dtype=np.bool_)
            for context, by_calls in enumerate(by_context):
                for calls, sorted_costs in enumerate(by_calls, start=1):
                    least[context, calls] = sorted_costs[0][0] if sorted_costs else 0
                    none[context, calls] = not sorted_costs
            at = (menu.context[shapes, u], menu.calls[shapes, u])
            values = values + least[at]
            never |= none[at]
        values[never] = NEVER
        return values

    def _cheapest_of(self, shape: int, costs: CodecCosts) -> Recipe:
        codecs = [-1] * len(self.menu.units)
        for u in np.flatnonzero(self.menu.calls[shape]):
            codecs[u] = self._sorted_costs(shape, int(u), costs)[0][1]
        return Recipe(shape, tuple(codecs))

    def _sorted_costs(self, shape: int, unit: int, costs: CodecCosts) -> list[tuple[int, int]]:
        by_calls = costs[unit][int(self.menu.context[shape, unit])]
        return by_calls[int(self.menu.calls[shape, unit]) - 1]

    def _combinations(self, shape: int, margin: int, costs: CodecCosts, most: int) -> list[Recipe]:
        """The shape's codecs that cost at most ``margin`` more than its cheapest; ``most`` and one are enough."""
        found: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        for u in range(len(self.menu.units)):
            if not self.menu.calls[shape, u]:
                found = [(more, (*codecs, -1)) for more, codecs in found]
                continue
            offers = self._sorted_costs(shape, u, costs)
            least = offers[0][0]
            grown: list[tuple[int, tuple[int, ...]]] = []
            for more, codecs in found:
                for value, at in offers:
                    if more + value - least > margin:
                        break
                    grown.append((more + value - least, (*codecs, at)))
                    if len(grown) > most:
                        break
            found = grown[: most + 1]
        return [Recipe(shape, codecs) for _, codecs in found]
