"""Closing one branch: from its relaxation's bound to its cheapest choice, or as far as the effort goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from hilore.planner import labels
from hilore.planner.cpsat import Model
from hilore.planner.labels import Effort, Rest
from hilore.planner.listing import Listing
from hilore.planner.relaxation import Relaxation, Relaxer
from hilore.planner.rounding import rounded
from hilore.planner.suffixes import Suffixes, memory_suffixes, risk_suffixes
from hilore.planner.tables import Integers, Tables
from hilore.runtime.errors import InternalError

# Labels after a region and pairs of label and configuration that the label searches of one problem may look at.
MOST_LABELS = 60_000
MOST_PAIRS = 40_000_000
# The same for the bounds of one branch, each try included.
MOST_SUFFIX_PAIRS = 2_000_000
# Configurations that one menu may write out for one window.
MOST_LISTED = 1_500
# Shares of the step's cost: the first window of configurations, of suffixes, and the first step of the target.
FIRST_LISTED = 2e-4
FIRST_SUFFIXES = 1e-5
FIRST_TARGET = 1e-5
# CP-SAT over classes of regions, before anything else is searched: at most so many classes, for so much of its
# deterministic time (about seconds).
MOST_CLASSES = 12
CLASS_EFFORT = 1.0
# Branches whose relaxation is rounded to a plan before any is searched.
MOST_ROUNDED = 4
# Labels per region in the pass that looks for a good plan before anything is proven.
BEAM = 300


class Best:
    """The best choice so far and the highest proven bound, in cost units (time, then L units)."""

    def __init__(self, listing: Listing, choice: tuple[int, ...]) -> None:
        self.listing = listing
        self.choice = choice
        self.cost = listing.tables.total_cost(choice)
        self.bound = 0

    @property
    def tables(self) -> Tables:
        return self.listing.tables

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


class Search:
    """``allowed``: the gap that was asked for, in cost units. ``step_cost``: a step's worth of cost units."""

    def __init__(
        self, relaxer: Relaxer, best: Best, *, allowed: int, step_cost: int, deadline: float, clock: Callable[[], float]
    ) -> None:
        self.relaxer = relaxer
        self.best = best
        self.allowed = allowed
        self.step_cost = step_cost
        self.deadline = deadline
        self.clock = clock
        self.effort = Effort(MOST_PAIRS, MOST_LABELS, lambda: clock() >= deadline)

    def round(self, relaxations: Iterable[Relaxation], start: tuple[int, ...]) -> None:
        """Offer what the relaxations' own solutions come to in whole regions, from the lowest bound on."""
        lowest = sorted((one for one in relaxations if one.bound < self.best.cost), key=lambda one: one.bound)
        for relaxation in lowest[:MOST_ROUNDED]:
            if relaxation.bound < self.best.cost and self.clock() < self.deadline:
                self.best.offer(rounded(self.best.tables, *relaxation.suggested, start))

    def classes(self, root: Relaxation) -> None:
        """CP-SAT until the gap is the allowed one, where regions fall into few classes: there it is quick."""
        if len(self.relaxer.groups(self.relaxer.events)) <= MOST_CLASSES and self.clock() < self.deadline:
            self.best.raise_bound(self.cp_sat(root, self.deadline, gap=self.allowed, effort=CLASS_EFFORT))

    def branches(self, relaxations: tuple[Relaxation, ...]) -> None:
        """Search the branches, which together hold every choice cheaper than the best, from the lowest bound on.

        Label search goes on until the cheapest choice is proven, within its effort: so a larger budget or delta never
        makes a plan slower. CP-SAT only goes on until the gap is the one asked for.
        """
        best = self.best
        bounds = {at: relaxation.bound for at, relaxation in enumerate(relaxations)}
        for at in sorted(bounds, key=lambda at: bounds[at]):
            bounds[at] = self.close(relaxations[at])
        for at in sorted(bounds, key=lambda at: bounds[at]):
            left = self.deadline - self.clock()
            waiting = sum(best.cost - bound > self.allowed for bound in bounds.values())
            if best.cost - bounds[at] > self.allowed and left > 0:
                bounds[at] = max(
                    bounds[at], self.cp_sat(relaxations[at], self.clock() + left / waiting, gap=self.allowed)
                )
        best.raise_bound(min([best.cost, *bounds.values()]))

    def close(self, relaxation: Relaxation) -> int:
        """A proven bound of the branch's choices, no higher than the best choice's cost, which it is where closed."""
        best, bits = self.best, relaxation.bits
        if relaxation.bound >= best.cost or self.effort.spent(0, 0):
            return min(relaxation.bound, best.cost)
        unit = max(1, self.step_cost) << bits
        listed = self._list(relaxation, min(int(unit * FIRST_LISTED), relaxation.slack(best.cost - 1)))
        penalty = self.relaxer.penalty(relaxation)
        rest = self._rest(relaxation, penalty, int(unit * FIRST_SUFFIXES), listed)
        if rest is None:
            return min(relaxation.bound, best.cost)
        self._beam(relaxation, penalty, rest, listed)
        lower = self._lower(relaxation, rest)
        step = max(1, int(unit * FIRST_TARGET))
        while lower <= (limit := (best.cost - 1) << bits):
            target = min(limit, lower + step)
            if (window := target - relaxation.exact_bound) > listed:
                listed = self._list(relaxation, max(window, min(2 * listed, relaxation.slack(best.cost - 1))))
                penalty = self.relaxer.penalty(relaxation)
                target = min(target, relaxation.exact_bound + listed)
                if target < lower:
                    break
            found = labels.search(best.tables, relaxation, penalty, rest, target=target, effort=self.effort)
            if found.choice is not None:
                best.offer(found.choice)
            if not found.closed:
                break
            lower = target + 1
            step *= 2
        return min(best.cost, -(-lower >> bits))

    def cp_sat(self, relaxation: Relaxation, deadline: float, *, gap: int, effort: float = math.inf) -> int:
        """CP-SAT until the gap is ``gap`` cost units; event rows are added as choices break them.

        Returns a proven bound of this relaxation's choices; no choice that is worse than the best one counts.
        """
        best = self.best
        listed = self._list(relaxation, relaxation.slack(best.cost - 1))
        # A choice with anything that is not written out costs at least this.
        beyond = (relaxation.exact_bound + listed >> relaxation.bits) + 1
        tables, penalty = best.tables, self.relaxer.penalty(relaxation)
        bound = relaxation.bound
        events = [*self.relaxer.events]
        while best.cost - bound > gap and (left := deadline - self.clock()) > 0 and effort > 0:
            model = Model(tables, self.relaxer.groups(events), events, relaxation, penalty, best.cost)
            run = model.run(best.choice, gap=gap, limit_s=left, effort=effort)
            effort -= run.effort
            if run.empty:
                if relaxation.held is None:
                    raise InternalError("CP-SAT finds no choice where one is known to fit")
                return min(best.cost, beyond)
            proven = bound if run.bound is None else min(run.bound, beyond)
            bound = max(bound, min(best.cost, proven))
            if run.choice is None:
                return bound
            broken = [int(event) for event in np.flatnonzero(tables.excess(run.choice) > 0)]
            if not broken:
                best.offer(run.choice)
                return min(bound, best.cost)
            if set(broken) & set(events):
                raise InternalError(f"CP-SAT broke its own row of event {min(set(broken) & set(events))}")
            events += broken
        return bound

    def _list(self, relaxation: Relaxation, window: int) -> int:
        """Write out all configurations within a window of penalty, or within a smaller one where there are too many.

        Returns the window, -1 where even those without penalty are too many.
        """
        while not self.relaxer.complete(relaxation, window, MOST_LISTED):
            window = window // 2 if window else -1
        return window

    def _rest(self, relaxation: Relaxation, penalty: Integers, window: int, listed: int) -> Rest | None:
        """Bounds of what later regions cost, each as wide as its effort allows."""
        memory = self._widest(memory_suffixes, relaxation, penalty, window, listed)
        if memory is None:
            return None
        if self.best.tables.risk_room is None:
            return Rest(memory, None)
        return Rest(memory, self._widest(risk_suffixes, relaxation, penalty, window, listed))

    def _widest(
        self, make: Callable[..., Suffixes | None], relaxation: Relaxation, penalty: Integers, window: int, listed: int
    ) -> Suffixes | None:
        """By doubling."""
        found = None
        most = min(listed, relaxation.slack(self.best.cost - 1))
        window = min(window, most)
        limits = {"most_work": MOST_SUFFIX_PAIRS, "late": self.effort.out_of_time}
        while (wider := make(self.best.tables, relaxation, penalty, window=window, **limits)) is not None:
            found = wider
            if window >= most:
                break
            window = min(2 * window, most) if window > 0 else most
        return found

    def _lower(self, relaxation: Relaxation, rest: Rest) -> int:
        """The bound of the branch from what all regions cost at least, in units of 2**-bits."""
        prices, tables = relaxation.prices, self.best.tables
        held, nothing = np.array([relaxation.held or 0], dtype=np.int64), np.zeros(1, dtype=np.int64)
        worth = [prices.risk * (tables.risk_room or 0)]
        worth.append(sum(price * tables.room(event) for event, price in prices.events.items()))
        bound = relaxation.exact_bound
        for suffixes, constant in zip((rest.memory, rest.risk), worth, strict=True):
            if suffixes is not None:
                least = int(suffixes.least(0, nothing, held)[0]) - constant
                bound = max(bound, min(relaxation.exact_bound + suffixes.window, least))
        return bound

    def _beam(self, relaxation: Relaxation, penalty: Integers, rest: Rest, listed: int) -> None:
        """One pass that follows few labels: a good plan early makes everything after it smaller."""
        found = labels.search(
            self.best.tables,
            relaxation,
            penalty,
            rest,
            target=(self.best.cost - 1) << relaxation.bits,
            effort=self.effort,
            beam=BEAM,
            window=listed,
        )
        if found.choice is not None:
            self.best.offer(found.choice)
