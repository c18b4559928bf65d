"""Prices of memory and risk from the linear relaxation, and the exact lower bound that they prove.

Regions that do the same in every row are one group: the linear program (lprogram.py) has a variable per group and
configuration, and is given the configurations that the menus find at its own prices (column generation), and rows as
they bind. It works in floating point and only suggests the prices; the bound is recomputed from them in integers over
every configuration, written out or not, so that it holds whatever the linear program said.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hilore.planner.leastpeak import possible_held
from hilore.planner.listing import Kind, Listing
from hilore.planner.lprogram import LinearProgram, RealPrices
from hilore.planner.prices import Prices, by_region, whole_by_region
from hilore.planner.regionmenu import NEVER, UnitPrices
from hilore.planner.rounding import Shares
from hilore.planner.tables import Integers, used_bytes

# Prices are integers in units of 2**-bits cost units per byte (or per unit of risk); sums stay below 2**SUM_BITS.
MOST_BITS = 30
SUM_BITS = 60
MOST_ROUNDS = 80
ROWS_PER_ROUND = 4
# No more configurations are asked for when the program's optimum and the bound are so close, as a share of the cost.
CLOSE = 1e-7


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """``exact_bound``: no choice costs less, in units of 2**-bits cost. ``lowest[r]``: the least that region r costs
    at the prices. ``held``: all of this is about choices with so many held regions; None: about all choices. One more
    held region moves ``exact_bound`` by ``-prices.held``, at these prices. ``suggested``: the linear program's last
    solution, groups of regions and shares of them (rounding.py); it may lie beside the best bound.
    """

    exact_bound: int
    prices: Prices
    lowest: Integers
    held: int | None = None
    suggested: tuple[Sequence[tuple[int, ...]], Shares] = ((), {})

    @property
    def bits(self) -> int:
        return self.prices.bits

    @property
    def bound(self) -> int:
        """In cost units."""
        return -((-self.exact_bound) >> self.bits)

    def slack(self, cost: int) -> int:
        """How much penalty a choice of at most this cost can have, in units of 2**-bits; negative: there is none."""
        return (cost << self.bits) - self.exact_bound


class Relaxer:
    """The relaxations of one problem. ``events``: the rows that the program has by now."""

    def __init__(self, listing: Listing, start: tuple[int, ...], *, late: Callable[[], bool] = lambda: False) -> None:
        """``start``: some choice that fits, where the program begins. ``late``: whether to stop with what there is."""
        self.listing = listing
        self.late = late
        tables = listing.tables
        self.events = [tables.regions, 2 * tables.regions]
        self._active: list[set[int]] = [_corners(kind, tables.risk_room) for kind in listing.kinds]
        for r, k in enumerate(start):
            self._active[listing.kind_of[r]].add(k)
        self._program: LinearProgram | None = None

    def relax(self) -> Relaxation:
        """The relaxation of the whole problem."""
        return self._relaxation(None)

    def branches(self, root: Relaxation, most_cost: int) -> tuple[Relaxation, ...]:
        """The relaxation of each number of held regions that a choice of at most ``most_cost`` may have.

        Holding a region saves its whole replay at once, so that a fractional number of held regions makes the whole
        problem's bound weak, and a whole one mends it. Where no region can be held this is ``root`` alone.
        """
        tables = self.listing.tables
        if not (tables.held & tables.usable).any() or root.bound > most_cost:
            return (root,)
        middle = self._held_share()
        possible = possible_held(tables)
        below = self._side(range(middle, -1, -1), possible, most_cost)
        return (*reversed(below), *self._side(range(middle + 1, tables.regions + 1), possible, most_cost))

    def penalty(self, relaxation: Relaxation) -> Integers:
        """What a choice costs at least above the bound for taking a configuration, shape [regions, configurations].

        The penalties of a choice add up. Only what is written out has one here; see `complete`.
        """
        tables, prices = self.listing.tables, relaxation.prices
        retained, forward, needed = (price[:, None] for price in whole_by_region(prices.events, tables.regions))
        value = (tables.cost << prices.bits) + tables.risk * prices.risk + tables.held * prices.held
        value = value + tables.retained * retained + tables.forward * forward + tables.needed * needed
        result: Integers = np.where(tables.usable, value - relaxation.lowest[:, None], NEVER)
        return result

    def complete(self, relaxation: Relaxation, window: int, most: int) -> bool:
        """Write out every configuration with a penalty of at most ``window``.

        False where a menu has more than ``most`` of them; then not all are.
        """
        if window < 0:
            return True
        for group in self.groups(relaxation.prices.events):
            kind = self.listing.kinds[self.listing.kind_of[group[0]]]
            if kind.menu is None:
                continue
            limit = int(relaxation.lowest[group[0]]) + window
            found = kind.menu.within(self._unit_prices(relaxation.prices, group[0]), limit, most)
            if found is None:
                return False
            self.listing.add(kind, found)
        return True

    def _side(self, counts: range, possible: frozenset[int], most_cost: int) -> list[Relaxation]:
        """Branches in the order of ``counts``, until one proves that it and all further ones cost too much."""
        found = []
        for held in counts:
            if held not in possible:
                continue
            relaxation = self._relaxation(held)
            if relaxation.bound <= most_cost:
                found.append(relaxation)
            elif -relaxation.prices.held * counts.step >= 0:
                break
        return found

    def _held_share(self) -> int:
        """Whole number of held regions in the relaxation, rounded down."""
        program = self._current()
        program.hold(None)
        return 0 if program.solve() is None else int(program.held_share() + 1e-6)

    def _relaxation(self, held: int | None) -> Relaxation:
        """Solve, ask at the prices found, and again, until neither configurations nor rows are missing.

        The best bound on the way is the answer; without prices (the program failed) it is a weak one.
        """
        best, suggested = self._bounded(RealPrices({}, 0.0, 0.0), held)[0], None
        for _ in range(MOST_ROUNDS):
            if self.late():
                break
            program = self._current()
            program.hold(held)
            optimum = program.solve()
            if optimum is None:
                break
            suggested = (program.groups, program.shares())
            found, asked = self._bounded(program.prices(), held)
            if found.exact_bound / 2.0**found.bits > best.exact_bound / 2.0**best.bits:
                best = found
            if optimum - found.exact_bound / 2.0**found.bits > CLOSE * optimum and self._give(program, asked):
                continue
            broken = self._broken(program)
            if not broken:
                break
            self.events += broken
            self._program = None
        return best if suggested is None else replace(best, suggested=suggested)

    def _current(self) -> LinearProgram:
        if self._program is None:
            groups = self.groups(self.events)
            self._program = LinearProgram(self.listing.tables, groups, self.events)
            for at, group in enumerate(groups):
                kind = self.listing.kind_of[group[0]]
                for k in sorted(self._active[kind]):
                    self._program.add(at, k, int(self.listing.kinds[kind].columns.risk[k]))
        return self._program

    def _give(self, program: LinearProgram, asked: list[tuple[int, int]]) -> bool:
        """Give the program what it asked for; False if it had it all."""
        fresh = [(at, k) for at, k in asked if not program.has(at, k)]
        program.tables = self.listing.tables
        for at, k in fresh:
            kind = self.listing.kind_of[program.groups[at][0]]
            program.add(at, k, int(self.listing.kinds[kind].columns.risk[k]))
            self._active[kind].add(k)
        return bool(fresh)

    def _broken(self, program: LinearProgram) -> list[int]:
        """The rows that the solution breaks most, of those that the program does not have."""
        excess = used_bytes(*program.average_bytes()) - self.listing.tables.rooms()
        worst = [int(e) for e in np.argsort(-excess, kind="stable")[:ROWS_PER_ROUND] if excess[e] > 1.0]
        return [event for event in worst if event not in self.events]

    def _bounded(self, real: RealPrices, held: int | None) -> tuple[Relaxation, list[tuple[int, int]]]:
        """The exact bound at these prices, and the cheapest configuration of each group: its place and index."""
        tables, prices = self.listing.tables, self._whole(real)
        lowest = np.zeros(tables.regions, dtype=np.int64)
        total, asked = 0, []
        for at, group in enumerate(self.groups(self.events)):
            kind = self.listing.kinds[self.listing.kind_of[group[0]]]
            unit = self._unit_prices(prices, group[0])
            values = self._values(kind, unit, prices.held)
            k = int(np.argmin(values))
            least = int(values[k])
            asked.append((at, k))
            if kind.menu is not None:
                value, recipe = kind.menu.cheapest(unit)
                if value < least:
                    least = value
                    asked += [(at, added) for added in self.listing.add(kind, [recipe])]
            lowest[list(group)] = least
            total += least * len(group)
        constant = sum(price * tables.room(event) for event, price in prices.events.items())
        constant += prices.risk * (tables.risk_room or 0) + prices.held * (held or 0)
        return Relaxation(total - constant, prices, lowest, held), asked

    def _values(self, kind: Kind, unit: UnitPrices, held_price: int) -> Integers:
        """What each configuration of a kind that is written out costs."""
        columns, room = kind.columns, self.listing.tables.risk_room
        value = columns.retained * unit.retained + columns.forward * unit.forward + columns.needed * unit.needed
        value = value + columns.extra * unit.time + columns.lossy * unit.lossy + columns.held * held_price
        if room is None:
            return value
        allowed = columns.risk <= room
        result: Integers = np.where(allowed, value + np.where(allowed, columns.risk, 0) * unit.risk, NEVER)
        return result

    def _unit_prices(self, prices: Prices, region: int) -> UnitPrices:
        tables = self.listing.tables
        retained, forward, needed = whole_by_region(prices.events, tables.regions)
        return UnitPrices(
            retained=int(retained[region]),
            forward=int(forward[region]),
            needed=int(needed[region]),
            risk=prices.risk,
            time=tables.cost_scale << prices.bits,
            lossy=tables.lossy_cost << prices.bits,
            risk_room=tables.risk_room,
        )

    def groups(self, events: Iterable[int]) -> list[tuple[int, ...]]:
        """Regions of one kind that every event sees alike: before it, at it or after it."""
        n = self.listing.tables.regions
        places = sorted({event if event < n else event - n - 1 for event in events if event != n})
        groups: dict[tuple[int, int, bool], list[int]] = {}
        for r, kind in enumerate(self.listing.kind_of):
            segment = bisect_left(places, r)
            groups.setdefault((kind, segment, segment < len(places) and places[segment] == r), []).append(r)
        return [tuple(group) for group in groups.values()]

    def _whole(self, real: RealPrices) -> Prices:
        """As integers, with as many bits as leave every sum of priced costs below 2**SUM_BITS."""
        tables, kinds = self.listing.tables, self.listing.kinds
        listed = [tables.retained.max(), tables.forward.max(), tables.needed.max(), tables.cost.max()]
        largest = [kind.menu.largest for kind in kinds if kind.menu is not None]
        bytes_of = [max(float(listed[at]), *(float(menu[at]) for menu in largest), 0.0) for at in range(3)]
        extra = max((menu[3] for menu in largest), default=0)
        cost = max(float(listed[3]), (extra + 1.0) * tables.cost_scale)
        prices = by_region(real.events, tables.regions)
        dearest = sum(float(price.max()) * size for price, size in zip(prices, bytes_of, strict=True))
        dearest += cost + max(float(tables.risk.max()), float(tables.risk_room or 0)) * real.risk
        # Any price of a held region proves a bound; this much decides whether to hold one at all.
        held = min(max(real.held, -dearest), dearest)
        worth = tables.regions * 2 * dearest
        bits = max(0, min(MOST_BITS, math.floor(SUM_BITS - math.log2(max(1.0, worth)))))
        events = {event: round(price * 2.0**bits) for event, price in real.events.items()}
        return Prices(
            {event: price for event, price in events.items() if price > 0},
            max(0, round(real.risk * 2.0**bits)),
            round(held * 2.0**bits),
            bits,
        )


def _corners(kind: Kind, risk_room: int | None) -> set[int]:
    """The least of what is written out and within the risk, in each field, where the program begins."""
    columns = kind.columns
    every = np.arange(len(columns.risk))
    allowed = every if risk_room is None else np.flatnonzero(columns.risk <= risk_room)
    fields = (columns.retained, columns.needed, columns.extra, columns.risk)
    return {int(allowed[np.argmin(field[allowed])]) for field in fields} | {
        int(k) for k in np.flatnonzero(columns.held)[:1]
    }
