"""Problem -> Solution: the mixed-integer program, its proof, and which of the possible answers it is.

Order: does any plan fit (exact, before any solver); greedy; the linear relaxation over classes of regions and its exact
bound, over every configuration; its solution rounded to whole regions; one branch per number of held regions, each
closed by label search where its effort suffices, so that plans of a larger budget or delta are never slower; CP-SAT
where the gap asked for is still open. A status is read before any value is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from fractions import Fraction

from hilore.planner.cpsat import ORTOOLS_VERSION
from hilore.planner.greedy import greedy
from hilore.planner.leastpeak import fitting_choice, smallest_budget
from hilore.planner.listing import Listing
from hilore.planner.problem import Configuration, Problem, Solution, Verified
from hilore.planner.relaxation import Relaxer
from hilore.planner.search import Best, Search
from hilore.planner.tables import Tables, make_tables
from hilore.planner.verify import verify
from hilore.runtime.errors import InternalError

SOLVER_NAME = f"cp-sat {ORTOOLS_VERSION} and label search"


def solve(
    problem: Problem,
    *,
    time_limit_s: float,
    gap_percent: float = 0.1,
    hints: Sequence[Sequence[Configuration]] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Solution:
    """The fastest plan of a problem within its budget and risk limit.

    ``hints``: choices that may fit, a configuration per region; the solution is never slower than one that does.
    Status: ``optimal`` when ``extra_ns - bound_ns`` is proven to be at most ``gap_percent`` of the step; ``feasible``
    when time ran out before that; ``infeasible``, with the smallest budget that works, decided exactly before any
    search; ``unknown`` when the time was over before the search began and no hint fits. Deterministic unless the time
    limit cuts it short.
    Raises InternalError where two of its parts disagree.
    """
    began = clock()
    deadline = began + time_limit_s
    tables = make_tables(problem)
    start = fitting_choice(tables)
    if start is None:
        return _without_plan(problem, "infeasible", smallest_budget(problem), clock() - began)
    listing = Listing(problem, tables)
    placed = [listing.place(hint) for hint in hints]
    fitting = [choice for choice in placed if choice is not None and listing.tables.fits(choice)]
    late = clock() >= deadline
    if late and not fitting:
        return _without_plan(problem, "unknown", 0, clock() - began)
    baseline = greedy(tables, start)
    best = Best(listing, min([baseline, *fitting], key=listing.tables.total_cost))
    if not late:
        relaxer = Relaxer(listing, start, late=lambda: clock() >= deadline)
        root = relaxer.relax()
        best.raise_bound(root.bound)
        search = Search(
            relaxer,
            best,
            allowed=_allowed_gap(problem, best.bound_ns, gap_percent) * tables.cost_scale,
            step_cost=problem.constant_ns * tables.cost_scale,
            deadline=deadline,
            clock=clock,
        )
        search.round([root], start)
        search.classes(root)
        if not best.closed and clock() < deadline:
            branches = relaxer.branches(root, best.cost - 1)
            search.round(branches, start)
            search.branches(branches)
    return _solution(best, baseline, gap_percent, clock() - began)


def within_gap(verified: Verified, bound_ns: int, gap_percent: float) -> bool:
    """Whether ``extra_ns - bound_ns`` is at most ``gap_percent`` of the step, exactly."""
    return verified.extra_ns - bound_ns <= Fraction(gap_percent) / 100 * verified.step_ns


def _allowed_gap(problem: Problem, bound_ns: int, gap_percent: float) -> int:
    """Largest gap in nanoseconds that is surely within ``gap_percent`` of the step."""
    return math.floor(Fraction(gap_percent) / 100 * (problem.constant_ns + bound_ns))


def _without_plan(problem: Problem, status: str, smallest: int, wall_s: float) -> Solution:
    return Solution(status, (), 0, 0, (), 0, smallest, wall_s, SOLVER_NAME, problem)


def _solution(best: Best, baseline: tuple[int, ...], gap_percent: float, wall_s: float) -> Solution:
    problem, tables = best.listing.problem, best.tables
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
        problem=problem,
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
