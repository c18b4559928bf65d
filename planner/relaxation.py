"""Prices of memory and risk from the linear relaxation, and the exact lower bound that they prove.

The linear program (GLOP, floating point) only suggests the prices; the bound is recomputed from them in integers, so
that it holds whatever the linear program said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from hilore.planner.leastpeak import possible_held
from hilore.planner.tables import Floats, Tables, used_bytes

# Prices are integers in units of 2**-PRICE_BITS cost units per byte (or per unit of risk).
PRICE_BITS = 30
MOST_ROUNDS = 12
ROWS_PER_ROUND = 4


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """``bound``: no choice that fits costs less (in ``Tables.cost`` units).

    ``penalty[r, k]``: a choice that takes configuration k in region r costs at least this much more than the bound,
    and the penalties of a choice add up. ``exact_bound`` and ``penalty`` are Python integers in units of
    2**-PRICE_BITS cost. ``events``: priced rows. ``held``: all of this is about choices with so many held regions;
    None: about all choices. One more held region moves ``exact_bound`` by ``-held_price``, at these prices.
    """

    exact_bound: int
    penalty: NDArray[np.object_]
    events: tuple[int, ...]
    held: int | None = None
    held_price: int = 0

    @property
    def bound(self) -> int:
        return -((-self.exact_bound) >> PRICE_BITS)

    def slack(self, cost: int) -> int:
        """How much penalty a choice of at most this cost can have, in penalty units; negative: there is none."""
        return (cost << PRICE_BITS) - self.exact_bound


class Relaxer:
    """The linear relaxation of one problem, with rows added as they bind; its duals are the prices."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.program = _Program(tables)
        for event in (tables.regions, 2 * tables.regions):
            self.program.add(event)
        self._objects = {name: field.astype(object) for name, field in (("cost", tables.cost), ("risk", tables.risk))}

    def relax(self) -> Relaxation:
        """The relaxation of the whole problem."""
        return self._relaxation(None)

    def branches(self, root: Relaxation, most_cost: int) -> tuple[Relaxation, ...]:
        """The relaxation of each number of held regions that a choice of at most ``most_cost`` may have.

        Holding a region saves its whole replay at once, so that a fractional number of held regions makes the whole
        problem's bound weak, and a whole one mends it. Where no region can be held this is ``root`` alone.
        """
        if not (self.tables.held & self.tables.usable).any() or root.bound > most_cost:
            return (root,)
        middle = self._held_share(root)
        possible = possible_held(self.tables)
        below = self._side(range(middle, -1, -1), possible, most_cost)
        return (*reversed(below), *self._side(range(middle + 1, self.tables.regions + 1), possible, most_cost))

    def _side(self, counts: range, possible: frozenset[int], most_cost: int) -> list[Relaxation]:
        """Branches in the order of ``counts``, until one proves that it and all further ones cost too much."""
        found = []
        for held in counts:
            if held not in possible:
                continue
            relaxation = self._relaxation(held)
            if relaxation.bound <= most_cost:
                found.append(relaxation)
            elif -relaxation.held_price * counts.step >= 0:
                break
        return found

    def _held_share(self, root: Relaxation) -> int:
        """Whole number of held regions in the relaxation, rounded down."""
        self.program.hold(None)
        share = self.program.solve()
        return 0 if share is None else int(float((share * self.tables.held).sum()) + 1e-6)

    def _relaxation(self, held: int | None) -> Relaxation:
        self.program.hold(held)
        prices = self._prices()
        tables = self.tables
        objects = self._objects["cost"] << PRICE_BITS
        constant = 0
        for event, price in prices.events.items():
            objects = objects + tables.row(event).astype(object) * price
            constant += price * tables.room(event)
        if tables.risk_room is not None and prices.risk:
            objects = objects + self._objects["risk"] * prices.risk
            constant += prices.risk * tables.risk_room
        if held is not None:
            objects = objects + tables.held.astype(object) * prices.held
            constant += prices.held * held
        lowest = [min(row[usable]) for row, usable in zip(objects, tables.usable, strict=True)]
        penalty = objects - np.array(lowest, dtype=object)[:, None]
        held_price = 0 if held is None else prices.held
        return Relaxation(sum(lowest) - constant, penalty, tuple(prices.events), held, held_price)

    def _prices(self) -> _Prices:
        """All zero where the linear program finds no optimum: any price proves a bound, only a weaker one."""
        tables = self.tables
        for _ in range(MOST_ROUNDS):
            share = self.program.solve()
            if share is None:
                return _Prices({}, 0, 0)
            retained, forward, needed = (
                (share * field).sum(axis=1) for field in (tables.retained, tables.forward, tables.needed)
            )
            excess = used_bytes(retained, forward, needed) - tables.rooms()
            worst = [int(e) for e in np.argsort(-excess, kind="stable")[:ROWS_PER_ROUND] if excess[e] > 1.0]
            fresh = [event for event in worst if event not in self.program.rows]
            if not fresh:
                break
            for event in fresh:
                self.program.add(event)
        return self.program.prices()


@dataclass(frozen=True, slots=True)
class _Prices:
    """Integer prices: of event rows and of risk at least 0, of one held region more of either sign."""

    events: dict[int, int]
    risk: int
    held: int


class _Program:
    """The linear program; bytes, risk and cost are scaled to about 1 for the floating-point solver."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.infinity = self.solver.infinity()
        self.byte_scale = float(max(1, int(tables.retained.max())))
        self.cost_scale = float(max(1, int(tables.cost.max())))
        self.risk_scale = float(max(1, int(tables.risk.max())))
        self.rows: dict[int, Any] = {}
        self.columns = [(int(r), int(k)) for r, k in np.argwhere(tables.usable)]
        self.variables = [self.solver.NumVar(0.0, self.infinity, "") for _ in self.columns]
        self.one = [self.solver.Constraint(1.0, 1.0) for _ in range(tables.regions)]
        self.held = self.solver.Constraint(-self.infinity, self.infinity)
        self.risk = None
        if tables.risk_room is not None:
            self.risk = self.solver.Constraint(-self.infinity, tables.risk_room / self.risk_scale)
        objective = self.solver.Objective()
        for variable, (r, k) in zip(self.variables, self.columns, strict=True):
            self.one[r].SetCoefficient(variable, 1.0)
            objective.SetCoefficient(variable, float(tables.cost[r, k]) / self.cost_scale)
            if tables.held[r, k]:
                self.held.SetCoefficient(variable, 1.0)
            if self.risk is not None:
                self.risk.SetCoefficient(variable, float(tables.risk[r, k]) / self.risk_scale)
        objective.SetMinimization()

    def hold(self, held: int | None) -> None:
        """Ask for exactly so many held regions, or for any number."""
        low, high = (-self.infinity, self.infinity) if held is None else (float(held), float(held))
        self.held.SetBounds(low, high)

    def add(self, event: int) -> None:
        row = self.solver.Constraint(-self.infinity, self.tables.room(event) / self.byte_scale)
        coefficients = self.tables.row(event) / self.byte_scale
        for variable, (r, k) in zip(self.variables, self.columns, strict=True):
            if coefficients[r, k]:
                row.SetCoefficient(variable, float(coefficients[r, k]))
        self.rows[event] = row

    def solve(self) -> Floats | None:
        """The share of each configuration, shape [regions, configurations]; None unless optimal."""
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        share = np.zeros(self.tables.retained.shape)
        for variable, (r, k) in zip(self.variables, self.columns, strict=True):
            share[r, k] = variable.solution_value()
        return share

    def prices(self) -> _Prices:
        unit = self.cost_scale * 2.0**PRICE_BITS
        events = {event: round(-row.dual_value() * unit / self.byte_scale) for event, row in self.rows.items()}
        risk = round(-self.risk.dual_value() * unit / self.risk_scale) if self.risk is not None else 0
        held = round(-self.held.dual_value() * unit)
        return _Prices({event: price for event, price in events.items() if price > 0}, max(0, risk), held)
