"""Problem -> Solution: the mixed-integer program, its proof, and which of the possible answers it is.

Order: does any plan fit (exact, before any solver); greedy; relaxation and its exact bound; CP-SAT on what the bound
leaves open, until the gap asked for is proven; label search, which closes the rest of the gap where it can, so that
plans of a larger budget or delta are never slower. A status is read before any value is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from ortools.init.python.init import OrToolsVersion
from ortools.sat.python import cp_model

from hilore.planner import labels
from hilore.planner.greedy import greedy
from hilore.planner.leastpeak import fitting_choice, smallest_budget
from hilore.planner.problem import Problem, Solution, Verified
from hilore.planner.relaxation import Relaxation, relax
from hilore.planner.tables import Tables, make_tables
from hilore.planner.verify import verify
from hilore.runtime.errors import InternalError

ORTOOLS_VERSION: str = OrToolsVersion.version_string()
SOLVER_NAME = f"cp-sat {ORTOOLS_VERSION} and label search"
SEED = 20_260_101

# CP-SAT leaves this share of the time to the label search.
CP_SAT_SHARE = 0.6


def solve(
    problem: Problem,
    *,
    time_limit_s: float,
    gap_percent: float = 0.1,
    hints: Sequence[Sequence[int]] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Solution:
    """The fastest plan of a problem within its budget and risk limit.

    ``hints``: choices that may fit; the solution is never slower than one that does. Status: ``optimal`` when
    ``extra_ns - bound_ns`` is proven to be at most ``gap_percent`` of the step; ``feasible`` when time ran out before
    that; ``infeasible``, with the smallest budget that works, decided exactly before any search; ``unknown`` when the
    time was over before the search began and no hint fits. Deterministic unless the time limit cuts it short.
    Raises InternalError where two of its parts disagree.
    """
    began = clock()
    deadline = began + time_limit_s
    tables = make_tables(problem)
    start = fitting_choice(tables)
    if start is None:
        return _without_plan("infeasible", smallest_budget(problem), clock() - began)
    fitting = [tuple(hint) for hint in hints if tables.fits(hint)]
    late = clock() >= deadline
    if late and not fitting:
        return _without_plan("unknown", 0, clock() - began)
    baseline = greedy(tables, start)
    best = _Best(tables, min([baseline, *fitting], key=tables.total_cost))
    if late:
        return _solution(problem, tables, best, baseline, gap_percent, clock() - began)
    relaxation = relax(tables)
    best.raise_bound(relaxation.bound)
    allowed = _allowed_gap(problem, best.bound_ns, gap_percent)
    if not best.closed and clock() < deadline:
        _cp_sat(tables, relaxation, best, allowed, clock, clock() + CP_SAT_SHARE * (deadline - clock()))
    if not best.closed and clock() < deadline:
        found = labels.search(
            tables, relaxation, known_cost=best.cost, out_of_time=lambda: clock() >= deadline
        )
        if found.choice is not None:
            best.offer(found.choice)
        if found.closed:
            best.raise_bound(best.cost)
    return _solution(problem, tables, best, baseline, gap_percent, clock() - began)


def within_gap(verified: Verified, bound_ns: int, gap_percent: float) -> bool:
    """Whether ``extra_ns - bound_ns`` is at most ``gap_percent`` of the step, exactly."""
    return verified.extra_ns - bound_ns <= Fraction(gap_percent) / 100 * verified.step_ns


class _Best:
    """The best choice so far and the highest proven bound, in cost units (time, then L units)."""

    def __init__(self, tables: Tables, choice: tuple[int, ...]) -> None:
        self.tables = tables
        self.choice = choice
        self.cost = tables.total_cost(choice)
        self.bound = 0

    @property
    def closed(self) -> bool:
        return self.bound >= self.cost

    @property
    def bound_ns(self) -> int:
        """A bound of the time alone: less than one nanosecond's worth of cost units goes to counting L units."""
        return self.bound // self.tables.cost_scale

    def offer(self, choice: tuple[int, ...]) -> None:
        if not self.tables.fits(choice):
            raise InternalError(f"a search returned a choice that does not fit: {choice}")
        cost = self.tables.total_cost(choice)
        if cost < self.bound:
            raise InternalError(f"a choice of cost {cost} lies below the proven bound {self.bound}")
        if cost < self.cost:
            self.choice, self.cost = choice, cost

    def raise_bound(self, bound: int) -> None:
        if bound > self.cost:
            raise InternalError(f"the bound {bound} lies above a choice of cost {self.cost}")
        self.bound = max(self.bound, bound)


def _allowed_gap(problem: Problem, bound_ns: int, gap_percent: float) -> int:
    """Largest gap in nanoseconds that is surely within ``gap_percent`` of the step."""
    return math.floor(Fraction(gap_percent) / 100 * (problem.constant_ns + bound_ns))


def _without_plan(status: str, smallest: int, wall_s: float) -> Solution:
    return Solution(status, (), 0, 0, (), 0, smallest, wall_s, SOLVER_NAME)


def _solution(
    problem: Problem,
    tables: Tables,
    best: _Best,
    baseline: tuple[int, ...],
    gap_percent: float,
    wall_s: float,
) -> Solution:
    choice = canonical(problem, tables, best.choice)
    verified, verified_greedy = verify(problem, choice), verify(problem, baseline)
    check(problem, choice, verified, tables.total_extra(choice))
    check(problem, baseline, verified_greedy, tables.total_extra(baseline))
    bound_ns = best.bound_ns
    if verified.extra_ns < bound_ns or verified_greedy.extra_ns < bound_ns:
        raise InternalError(
            f"bound {bound_ns} ns above a plan: optimum {verified.extra_ns} ns, greedy {verified_greedy.extra_ns} ns"
        )
    return Solution(
        status="optimal" if within_gap(verified, bound_ns, gap_percent) else "feasible",
        choice=choice,
        extra_ns=verified.extra_ns,
        bound_ns=bound_ns,
        greedy_choice=baseline,
        greedy_extra_ns=verified_greedy.extra_ns,
        smallest_budget_bytes=0,
        wall_s=wall_s,
        solver=SOLVER_NAME,
    )


def check(problem: Problem, choice: Sequence[int], verified: Verified, extra_ns: int) -> None:
    """Raises InternalError unless the verifier finds the solver's time, a peak in the budget and risk in its limit."""
    peak = max(verified.peak_bytes, verified.demoted_peak_bytes)
    if verified.extra_ns != extra_ns:
        raise InternalError(f"solver says {extra_ns} ns, the verifier {verified.extra_ns} ns, for {tuple(choice)}")
    if peak > problem.budget_bytes:
        raise InternalError(f"verified peak {peak} bytes, budget {problem.budget_bytes} bytes, for {tuple(choice)}")
    if verified.risk > problem.risk_limit:
        raise InternalError(f"verified risk {verified.risk}, limit {problem.risk_limit}, for {tuple(choice)}")


def canonical(problem: Problem, tables: Tables, choice: tuple[int, ...]) -> tuple[int, ...]:
    """The same configurations in one order: among interchangeable regions, the roomiest replays come first.

    Regions are interchangeable when they share their configurations, risks and gradients. Returned as it was where
    the order would not fit.
    """
    groups: dict[tuple[int, tuple[int, ...], int], list[int]] = {}
    for r, region in enumerate(problem.regions):
        groups.setdefault((id(region.configurations), region.risk, region.gradient_bytes), []).append(r)
    result = list(choice)
    for members in groups.values():
        r = members[0]
        picks = sorted((choice[m] for m in members), key=lambda k: (-tables.needed[r, k], tables.retained[r, k], k))
        for member, pick in zip(members, picks, strict=True):
            result[member] = pick
    return tuple(result) if tables.fits(result) else choice


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    """``columns``: the (region, configuration) of each variable."""

    model: cp_model.CpModel
    variables: list[cp_model.IntVar]
    columns: list[tuple[int, int]]


def _cp_sat(
    tables: Tables,
    relaxation: Relaxation,
    best: _Best,
    allowed_ns: int,
    clock: Callable[[], float],
    deadline: float,
) -> None:
    """CP-SAT over the configurations that could still beat ``best``; event rows are added as choices break them."""
    built = _model(tables, relaxation, best)
    events = set(relaxation.events) | {tables.regions, 2 * tables.regions}
    for event in sorted(events):
        _add_row(built, tables, event)
    gap = allowed_ns * tables.cost_scale
    while best.cost - best.bound > gap and (left := deadline - clock()) > 0:
        choice, bound = _run(built, best, gap, left)
        if bound is not None:
            best.raise_bound(min(bound, best.cost))
        if choice is None:
            return
        broken = [int(event) for event in np.flatnonzero(tables.excess(choice) > 0)]
        if not broken:
            best.offer(choice)
            return
        if events >= set(broken):
            raise InternalError(f"CP-SAT broke its own rows of events {broken}")
        for event in broken:
            if event not in events:
                _add_row(built, tables, event)
        events |= set(broken)


def _model(tables: Tables, relaxation: Relaxation, best: _Best) -> _Model:
    window = relaxation.slack(best.cost)
    columns = [(int(r), int(k)) for r, k in np.argwhere(tables.usable) if relaxation.penalty[r, k] <= window]
    model = cp_model.CpModel()
    variables = [model.new_bool_var(f"{r}:{k}") for r, k in columns]
    by_region: list[list[cp_model.IntVar]] = [[] for _ in range(tables.regions)]
    for variable, (r, _) in zip(variables, columns, strict=True):
        by_region[r].append(variable)
    for options in by_region:
        model.add_exactly_one(options)
    if tables.risk_room is not None:
        model.add(_weighted(variables, [int(tables.risk[at]) for at in columns]) <= tables.risk_room)
    model.minimize(_weighted(variables, [int(tables.cost[at]) for at in columns]))
    return _Model(model, variables, columns)


def _weighted(variables: list[cp_model.IntVar], weights: list[int]) -> cp_model.LinearExprT:
    return cp_model.LinearExpr.weighted_sum(variables, weights)


def _add_row(built: _Model, tables: Tables, event: int) -> None:
    row = tables.row(event)
    weights = [int(row[at]) for at in built.columns]
    divisor = max(1, math.gcd(*weights))
    scaled = _weighted(built.variables, [weight // divisor for weight in weights])
    built.model.add(scaled <= tables.room(event) // divisor)


def _run(built: _Model, best: _Best, gap: int, limit_s: float) -> tuple[tuple[int, ...] | None, int | None]:
    """One run: its choice, if it found one, and its proven bound, if it has one."""
    built.model.clear_hints()  # type: ignore[no-untyped-call]
    for variable, (r, k) in zip(built.variables, built.columns, strict=True):
        built.model.add_hint(variable, best.choice[r] == k)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.absolute_gap_limit = float(gap)
    solver.parameters.relative_gap_limit = 0.0
    status = solver.solve(built.model)
    match status:
        case cp_model.OPTIMAL | cp_model.FEASIBLE:
            chosen = [at for variable, at in zip(built.variables, built.columns, strict=True) if solver.value(variable)]
            return tuple(k for _, k in chosen), _bound(solver)
        case cp_model.UNKNOWN:
            return None, None
        case cp_model.INFEASIBLE:
            raise InternalError("CP-SAT finds no choice where one is known to fit")
        case _:
            raise InternalError(f"CP-SAT refused its model: {solver.status_name(status)}")


def _bound(solver: cp_model.CpSolver) -> int:
    """The integer bound of the response; the float beside it would round above 2**53."""
    return int(solver.response_proto.inner_objective_lower_bound)
