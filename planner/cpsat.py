"""CP-SAT over classes: how many regions of each group take each configuration that a bound leaves open."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.init.python.init import OrToolsVersion
from ortools.sat.python import cp_model

from hilore.planner.relaxation import Relaxation
from hilore.planner.tables import Integers, Tables
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
    """The program with the rows of some events only, so that its bound is a bound of the whole one.

    Regions of a group are alike in these rows: a solution is expanded with the roomiest replays first.
    """

    def __init__(
        self,
        tables: Tables,
        groups: Sequence[tuple[int, ...]],
        events: Iterable[int],
        relaxation: Relaxation,
        penalty: Integers,
        most_cost: int,
    ) -> None:
        """Configurations that no choice of at most ``most_cost`` can take are left out."""
        self.tables = tables
        self.groups = groups
        allowed = tables.usable & (penalty <= relaxation.slack(most_cost))
        self.columns = [(at, int(k)) for at, group in enumerate(groups) for k in np.flatnonzero(allowed[group[0]])]
        self.model = cp_model.CpModel()
        self.variables = [self.model.new_int_var(0, len(groups[at]), f"{at}:{k}") for at, k in self.columns]
        by_group: list[list[cp_model.IntVar]] = [[] for _ in groups]
        for variable, (at, _) in zip(self.variables, self.columns, strict=True):
            by_group[at].append(variable)
        for options, group in zip(by_group, groups, strict=True):
            self.model.add(cp_model.LinearExpr.sum(options) == len(group))
        if tables.risk_room is not None:
            self._row(self._weights(tables.risk), tables.risk_room)
        self.model.minimize(self._sum(self._weights(tables.cost)))
        if relaxation.held is not None:
            held = [v for v, (at, k) in zip(self.variables, self.columns, strict=True) if tables.held[groups[at][0], k]]
            self.model.add(cp_model.LinearExpr.sum(held) == relaxation.held)
        for event in sorted(set(events)):
            self._row(self._weights(tables.row(event)), tables.room(event))

    def run(self, hint: Sequence[int], *, gap: int, limit_s: float, effort: float) -> Run:
        """Search until the gap is at most ``gap`` cost units, or time or deterministic time is over."""
        self.model.clear_hints()  # type: ignore[no-untyped-call]
        for variable, (at, k) in zip(self.variables, self.columns, strict=True):
            self.model.add_hint(variable, sum(hint[r] == k for r in self.groups[at]))
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
                counts = [solver.value(variable) for variable in self.variables]
                # The integer bound; the float beside it would round above 2**53.
                bound = int(solver.response_proto.inner_objective_lower_bound)
                return Run(False, self._expanded(counts), bound, solver.deterministic_time)
            case cp_model.UNKNOWN:
                return Run(False, None, None, solver.deterministic_time)
            case cp_model.INFEASIBLE:
                return Run(True, None, None, solver.deterministic_time)
            case _:
                raise InternalError(f"CP-SAT refused its model: {solver.status_name(status)}")

    def _expanded(self, counts: Sequence[int]) -> tuple[int, ...]:
        picks: list[list[int]] = [[] for _ in self.groups]
        for count, (at, k) in zip(counts, self.columns, strict=True):
            picks[at] += [k] * count
        choice = [0] * self.tables.regions
        for group, taken in zip(self.groups, picks, strict=True):
            r = group[0]
            taken.sort(key=lambda k, r=r: (-self.tables.needed[r, k], self.tables.retained[r, k], k))  # type: ignore[misc]
            for region, k in zip(group, taken, strict=True):
                choice[region] = k
        return tuple(choice)

    def _weights(self, table: Integers) -> list[int]:
        return [int(table[self.groups[at][0], k]) for at, k in self.columns]

    def _row(self, weights: list[int], room: int) -> None:
        divisor = max(1, math.gcd(*weights))
        self.model.add(self._sum([weight // divisor for weight in weights]) <= room // divisor)

    def _sum(self, weights: list[int]) -> cp_model.LinearExprT:
        return cp_model.LinearExpr.weighted_sum(self.variables, weights)
