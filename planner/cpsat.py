"""CP-SAT over the configurations that a bound leaves open: one binary per region and configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.init.python.init import OrToolsVersion
from ortools.sat.python import cp_model

from hilore.planner.relaxation import Relaxation
from hilore.planner.tables import Tables
from hilore.runtime.errors import InternalError

ORTOOLS_VERSION: str = OrToolsVersion.version_string()
SEED = 20_260_101


@dataclass(frozen=True, slots=True)
class Run:
    """``choice``: None where none was found; ``bound``: proven, in cost units, None where none was; ``empty``: proven
    that there is no choice; ``effort``: the deterministic time it took."""

    empty: bool
    choice: tuple[int, ...] | None
    bound: int | None
    effort: float


class Model:
    """The program without the event rows that have not been added yet, so its bound is a bound of the whole one."""

    def __init__(self, tables: Tables, relaxation: Relaxation, most_cost: int, events: Iterable[int]) -> None:
        """Configurations that no choice of at most ``most_cost`` can take are left out."""
        window = relaxation.slack(most_cost)
        self.tables = tables
        self.events: set[int] = set()
        self.columns = [(int(r), int(k)) for r, k in np.argwhere(tables.usable) if relaxation.penalty[r, k] <= window]
        self.model = cp_model.CpModel()
        self.variables = [self.model.new_bool_var(f"{r}:{k}") for r, k in self.columns]
        by_region: list[list[cp_model.IntVar]] = [[] for _ in range(tables.regions)]
        for variable, (r, _) in zip(self.variables, self.columns, strict=True):
            by_region[r].append(variable)
        for options in by_region:
            self.model.add_exactly_one(options)
        if tables.risk_room is not None:
            self.model.add(self._sum([int(tables.risk[at]) for at in self.columns]) <= tables.risk_room)
        self.model.minimize(self._sum([int(tables.cost[at]) for at in self.columns]))
        if relaxation.held is not None:
            held = [variable for variable, at in zip(self.variables, self.columns, strict=True) if tables.held[at]]
            self.model.add(cp_model.LinearExpr.sum(held) == relaxation.held)
        for event in sorted(events):
            self.add(event)

    def add(self, event: int) -> None:
        """Add an event's row. Raises InternalError if it is there already: then CP-SAT broke it."""
        if event in self.events:
            raise InternalError(f"CP-SAT broke its own row of event {event}")
        self.events.add(event)
        row = self.tables.row(event)
        weights = [int(row[at]) for at in self.columns]
        divisor = max(1, math.gcd(*weights))
        self.model.add(self._sum([weight // divisor for weight in weights]) <= self.tables.room(event) // divisor)

    def run(self, hint: Sequence[int], *, gap: int, limit_s: float, effort: float) -> Run:
        """Search until the gap is at most ``gap`` cost units, or time or deterministic time is over."""
        self.model.clear_hints()  # type: ignore[no-untyped-call]
        for variable, (r, k) in zip(self.variables, self.columns, strict=True):
            self.model.add_hint(variable, hint[r] == k)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = SEED
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.max_deterministic_time = effort
        solver.parameters.absolute_gap_limit = float(gap)
        solver.parameters.relative_gap_limit = 0.0
        status = solver.solve(self.model)
        match status:
            case cp_model.OPTIMAL | cp_model.FEASIBLE:
                pairs = zip(self.variables, self.columns, strict=True)
                choice = tuple(k for variable, (_, k) in pairs if solver.value(variable))
                # The integer bound; the float beside it would round above 2**53.
                bound = int(solver.response_proto.inner_objective_lower_bound)
                return Run(False, choice, bound, solver.deterministic_time)
            case cp_model.UNKNOWN:
                return Run(False, None, None, solver.deterministic_time)
            case cp_model.INFEASIBLE:
                return Run(True, None, None, solver.deterministic_time)
            case _:
                raise InternalError(f"CP-SAT refused its model: {solver.status_name(status)}")

    def _sum(self, weights: list[int]) -> cp_model.LinearExprT:
        return cp_model.LinearExpr.weighted_sum(self.variables, weights)
