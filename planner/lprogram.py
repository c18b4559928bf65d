"""The linear program over groups of regions and their configurations, solved by GLOP in floating point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.linear_solver import pywraplp

from hilore.planner.tables import Floats, Tables

# What breaking a row by its own unit costs, in units of the largest cost, so that the program always has a solution.
ELASTIC = 1e4


@dataclass(frozen=True, slots=True)
class RealPrices:
    """Cost units per byte of each event row, per unit of risk, and per held region (of either sign)."""

    events: dict[int, float]
    risk: float
    held: float


class LinearProgram:
    """Minimise the cost of all regions; variables say how many regions of a group take a configuration.

    Bytes, risk and cost are scaled to about 1 for the floating-point solver.
    """

    def __init__(self, tables: Tables, groups: Sequence[tuple[int, ...]], events: Sequence[int]) -> None:
        """``groups``: regions that do the same in every one of the ``events``' rows."""
        self.tables = tables
        self.groups = groups
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.infinity = self.solver.infinity()
        self.byte_scale = float(max(1, int(tables.retained.max())))
        self.cost_scale = float(max(1, int(tables.cost.max())))
        self.risk_scale = float(max(1, int(tables.risk.max())))
        self.objective = self.solver.Objective()
        self.objective.SetMinimization()
        self.variables: dict[tuple[int, int], Any] = {}
        self.all_taken = [self.solver.Constraint(float(len(group)), float(len(group))) for group in groups]
        self.rows = {event: self._row(tables.room(event) / self.byte_scale) for event in events}
        # Without room for any risk no usable configuration has some: such a row is empty, and has any price at all.
        self.risk = self._row(tables.risk_room / self.risk_scale) if tables.risk_room else None
        self.held = self.solver.Constraint(-self.infinity, self.infinity)
        for sign in (-1.0, 1.0):
            self._slack(self.held, sign)

    def has(self, group: int, k: int) -> bool:
        return (group, k) in self.variables

    def add(self, group: int, k: int, risk: int) -> None:
        """Let a group take configuration ``k``, whose ``risk`` may be more than a whole choice may have."""
        tables, r = self.tables, self.groups[group][0]
        variable = self.solver.NumVar(0.0, self.infinity, "")
        self.variables[group, k] = variable
        self.objective.SetCoefficient(variable, float(tables.cost[r, k]) / self.cost_scale)
        self.all_taken[group].SetCoefficient(variable, 1.0)
        for event, row in self.rows.items():
            size = self._bytes(event, r, k)
            if size:
                row.SetCoefficient(variable, size / self.byte_scale)
        if self.risk is not None:
            self.risk.SetCoefficient(variable, float(risk) / self.risk_scale)
        if tables.held[r, k]:
            self.held.SetCoefficient(variable, 1.0)

    def hold(self, held: int | None) -> None:
        """Ask for exactly so many held regions, or for any number."""
        low, high = (-self.infinity, self.infinity) if held is None else (float(held), float(held))
        self.held.SetBounds(low, high)

    def solve(self) -> float | None:
        """The least cost, None unless GLOP found it."""
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        return float(self.objective.Value()) * self.cost_scale

    def prices(self) -> RealPrices:
        """What the last solution says that a byte, risk and a held region are worth."""
        events = {event: -row.dual_value() * self.cost_scale / self.byte_scale for event, row in self.rows.items()}
        risk = 0.0 if self.risk is None else -self.risk.dual_value() * self.cost_scale / self.risk_scale
        return RealPrices(
            {event: price for event, price in events.items() if price > 0},
            max(0.0, risk),
            -self.held.dual_value() * self.cost_scale,
        )

    def shares(self) -> dict[tuple[int, int], float]:
        """How many regions of a group (first key) take a configuration (second) in the last solution, where any do."""
        values = ((at, k, float(variable.solution_value())) for (at, k), variable in self.variables.items())
        return {(at, k): value for at, k, value in values if value > 0}

    def average_bytes(self) -> tuple[Floats, Floats, Floats]:
        """Retained, forward and needed bytes of each region where those of a group share alike."""
        tables = self.tables
        result = tuple(np.zeros(tables.regions) for _ in range(3))
        for (at, k), variable in self.variables.items():
            group = list(self.groups[at])
            share = variable.solution_value() / len(group)
            for field, table in zip(result, (tables.retained, tables.forward, tables.needed), strict=True):
                field[group] += share * float(table[group[0], k])
        retained, forward, needed = result
        return retained, forward, needed

    def held_share(self) -> float:
        holding = (v for (at, k), v in self.variables.items() if self.tables.held[self.groups[at][0], k])
        return sum(float(variable.solution_value()) for variable in holding)

    def _bytes(self, event: int, r: int, k: int) -> float:
        """What configuration ``k`` of region ``r`` adds to an event's live bytes."""
        tables, n = self.tables, self.tables.regions
        at = event if event < n else event - n - 1
        if event == n or r < at:
            return float(tables.retained[r, k])
        if r > at:
            return 0.0
        return float(tables.forward[r, k] if event < n else tables.retained[r, k] + tables.needed[r, k])

    def _row(self, room: float) -> Any:
        row = self.solver.Constraint(-self.infinity, room)
        self._slack(row, -1.0)
        return row

    def _slack(self, row: Any, sign: float) -> None:
        slack = self.solver.NumVar(0.0, self.infinity, "")
        row.SetCoefficient(slack, sign)
        self.objective.SetCoefficient(slack, ELASTIC)
