"""Prices of memory and risk from the linear relaxation, and the exact lower bound that they prove.

The linear program (GLOP, floating point) only suggests the prices; the bound is recomputed from them in integers, so
that it holds whatever the linear program said.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

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
    2**-PRICE_BITS cost, ``risk_price`` is in these units per unit of risk. ``events``: priced rows.
    """

    exact_bound: int
    penalty: NDArray[np.object_]
    events: tuple[int, ...]
    risk_price: int

    @property
    def bound(self) -> int:
        return -((-self.exact_bound) >> PRICE_BITS)

    def slack(self, cost: int) -> int:
        """How much penalty a choice of at most this cost can have, in penalty units; negative: there is none."""
        return (cost << PRICE_BITS) - self.exact_bound


def relax(tables: Tables) -> Relaxation:
    """Solve the linear relaxation with rows added as they bind, and price the rows by its duals."""
    prices, risk_price = _prices(tables)
    objects = tables.cost.astype(object) << PRICE_BITS
    constant = 0
    for event, price in prices.items():
        objects = objects + tables.row(event).astype(object) * price
        constant += price * tables.room(event)
    if tables.risk_room is not None and risk_price:
        objects = objects + tables.risk.astype(object) * risk_price
        constant += risk_price * tables.risk_room
    lowest = [min(row[usable]) for row, usable in zip(objects, tables.usable, strict=True)]
    penalty = objects - np.array(lowest, dtype=object)[:, None]
    return Relaxation(sum(lowest) - constant, penalty, tuple(prices), risk_price)


def _prices(tables: Tables) -> tuple[dict[int, int], int]:
    """Non-negative integer prices of event rows and of risk; all zero where the linear program finds no optimum."""
    program = _Program(tables)
    events = [tables.regions, 2 * tables.regions]
    for event in events:
        program.add(event)
    for _ in range(MOST_ROUNDS):
        share = program.solve()
        if share is None:
            return {}, 0
        retained, forward, needed = (
            (share * field).sum(axis=1) for field in (tables.retained, tables.forward, tables.needed)
        )
        excess = used_bytes(retained, forward, needed) - tables.rooms()
        worst = [int(e) for e in np.argsort(-excess, kind="stable")[:ROWS_PER_ROUND] if excess[e] > 1.0]
        fresh = [event for event in worst if event not in events]
        if not fresh:
            break
        for event in fresh:
            program.add(event)
        events += fresh
    return program.prices()


class _Program:
    """The linear relaxation; bytes, risk and cost are scaled to about 1 for the floating-point solver."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.byte_scale = float(max(1, int(tables.retained.max())))
        self.cost_scale = float(max(1, int(tables.cost.max())))
        self.risk_scale = float(max(1, int(tables.risk.max())))
        self.rows: dict[int, object] = {}
        self.columns = [(int(r), int(k)) for r, k in np.argwhere(tables.usable)]
        self.variables = [self.solver.NumVar(0.0, self.solver.infinity(), "") for _ in self.columns]
        self.one = [self.solver.Constraint(1.0, 1.0) for _ in range(tables.regions)]
        objective = self.solver.Objective()
        self.risk = None
        if tables.risk_room is not None:
            self.risk = self.solver.Constraint(-self.solver.infinity(), tables.risk_room / self.risk_scale)
        for variable, (r, k) in zip(self.variables, self.columns, strict=True):
            self.one[r].SetCoefficient(variable, 1.0)
            objective.SetCoefficient(variable, float(tables.cost[r, k]) / self.cost_scale)
            if self.risk is not None:
                self.risk.SetCoefficient(variable, float(tables.risk[r, k]) / self.risk_scale)
        objective.SetMinimization()

    def add(self, event: int) -> None:
        row = self.solver.Constraint(-self.solver.infinity(), self.tables.room(event) / self.byte_scale)
        coefficients = self.tables.row(event) / self.byte_scale
        for variable, (r, k) in zip(self.variables, self.columns, strict=True):
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

    def prices(self) -> tuple[dict[int, int], int]:
        unit = self.cost_scale * 2.0**PRICE_BITS
        found = {event: round(-row.dual_value() * unit / self.byte_scale) for event, row in self.rows.items()}  # type: ignore[attr-defined]
        risk = round(-self.risk.dual_value() * unit / self.risk_scale) if self.risk is not None else 0
        return {event: price for event, price in found.items() if price > 0}, max(0, risk)
