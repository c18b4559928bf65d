"""Problem -> Solution: the mixed-integer program, its proof, and which of the possible answers it is.

Order: does any plan fit (exact, before any solver); greedy; relaxation and its exact bound; a short run of CP-SAT on
what the bound leaves open; one branch per number of held regions, each closed by label search where it can be, so that
plans of a larger budget or delta are never slower, and else by CP-SAT until the gap asked for is proven. A status is
read before any value is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from hilore.planner import labels
from hilore.planner.cpsat import ORTOOLS_VERSION, Model
from hilore.planner.greedy import greedy
from hilore.planner.leastpeak import fitting_choice, smallest_budget
from hilore.planner.problem import Problem, Solution, Verified
from hilore.planner.relaxation import Relaxation, Relaxer
from hilore.planner.tables import Tables, make_tables
from hilore.planner.verify import verify
from hilore.runtime.errors import InternalError

SOLVER_NAME = f"cp-sat {ORTOOLS_VERSION} and label search"

# CP-SAT's first run stops after so much of its deterministic time (about seconds) and at this share of the time left:
# what symmetry makes slow there, the label search may close at once.
FIRST_EFFORT = 0.3
FIRST_SHARE = 0.5


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
    relaxer = Relaxer(tables)
    root = relaxer.relax()
    best.raise_bound(root.bound)
    search = _Search(tables, best, _allowed_gap(problem, best.bound_ns, gap_percent), clock)
    search.cp_sat(root, clock() + FIRST_SHARE * (deadline - clock()), effort=FIRST_EFFORT)
    if not best.closed and clock() < deadline:
        search.branches(relaxer.branches(root, best.cost - 1), deadline)
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


class _Search:
    """The searches over what a relaxation leaves open; each one starts from the best choice so far."""

    def __init__(self, tables: Tables, best: _Best, allowed_ns: int, clock: Callable[[], float]) -> None:
        self.tables = tables
        self.best = best
        self.allowed = allowed_ns * tables.cost_scale
        self.clock = clock

    def branches(self, relaxations: Sequence[Relaxation], deadline: float) -> None:
        """Search the branches, which together hold every choice cheaper than the best, from the lowest bound on."""
        best = self.best
        bounds = {at: relaxation.bound for at, relaxation in enumerate(relaxations)}
        for at in sorted(bounds, key=lambda at: bounds[at]):
            if bounds[at] < best.cost and self.labels(relaxations[at], deadline):
                bounds[at] = best.cost
        for at in sorted(bounds, key=lambda at: bounds[at]):
            left = deadline - self.clock()
            waiting = sum(best.cost - bound > self.allowed for bound in bounds.values())
            if best.cost - bounds[at] > self.allowed and left > 0:
                bounds[at] = max(bounds[at], self.cp_sat(relaxations[at], self.clock() + left / waiting))
        best.raise_bound(min([best.cost, *bounds.values()]))

    def labels(self, relaxation: Relaxation, deadline: float) -> bool:
        """Whether the label search proved that no choice of this relaxation is cheaper than the best one now is."""
        best, clock = self.best, self.clock
        if clock() >= deadline:
            return False
        found = labels.search(self.tables, relaxation, known_cost=best.cost, out_of_time=lambda: clock() >= deadline)
        if found.choice is not None:
            best.offer(found.choice)
        return found.closed

    def cp_sat(self, relaxation: Relaxation, deadline: float, *, effort: float = math.inf) -> int:
        """CP-SAT until the gap is the allowed one; event rows are added as choices break them.

        Returns a proven bound of this relaxation's choices; no choice that is worse than the best one counts.
        """
        best, tables = self.best, self.tables
        bound = relaxation.bound
        if best.cost - bound <= self.allowed or self.clock() >= deadline:
            return bound
        model = Model(tables, relaxation, best.cost, {*relaxation.events, tables.regions, 2 * tables.regions})
        while best.cost - bound > self.allowed and (left := deadline - self.clock()) > 0 and effort > 0:
            run = model.run(best.choice, gap=self.allowed, limit_s=left, effort=effort)
            effort -= run.effort
            if run.empty:
                if relaxation.held is None:
                    raise InternalError("CP-SAT finds no choice where one is known to fit")
                return best.cost
            bound = max(bound, min(best.cost, bound if run.bound is None else run.bound))
            if relaxation.held is None:
                best.raise_bound(bound)
            if run.choice is None:
                return bound
            broken = [int(event) for event in np.flatnonzero(tables.excess(run.choice) > 0)]
            if not broken:
                best.offer(run.choice)
                return bound
            for event in broken:
                model.add(event)
        return bound
