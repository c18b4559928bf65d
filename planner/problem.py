"""Trace + Calibration -> Problem: the integers that the solver works with.

A region takes exactly one configuration. Risk is an integer in units of 1e-12 (squared relative error of the
complete update's gradient), rounded up, so that the solver's row and the verifier agree exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hilore.planner.regionmenu import RegionMenu

RISK_SCALE = 10**12


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """A unit's mode inside a configuration. ``name`` is relative to its region; the rest as in plan.UnitPlan.

    ``tainted``: of an L unit, see trace.UnitRisk.
    """

    name: str
    mode: str
    codec: str | None
    dead: bool
    dead_if_demoted: bool
    dead_late: bool = False
    dead_late_if_demoted: bool = False
    tainted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Configuration:
    """An assignment of modes to all units of a region, with everything that follows from it.

    ``retained_bytes``, ``forward_bytes``, ``backward_bytes`` as in trace.KeepSet, L included.
    ``demoted_backward_bytes``: ``backward_bytes`` when every L unit runs as R.
    ``extra_ns``: replay, encode and decode time (0 for a held region); ``demoted_extra_ns`` when demoted.
    ``lossy_units``: how many units are at L (ties are broken towards fewer). ``split_at``: the unit (relative) at
    which the replay is split into two stages, '' for one replay. ``cast_bytes`` as in trace.KeepSet.
    """

    hold: bool
    units: tuple[UnitChoice, ...]
    retained_bytes: int
    forward_bytes: int
    backward_bytes: int
    demoted_backward_bytes: int
    extra_ns: int
    demoted_extra_ns: int
    lossy_units: int
    split_at: str = ""
    cast_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RegionProblem:
    """One region's choices. ``risk[k]`` belongs to ``configurations[k]``; ``gradient_bytes`` appear in backward.

    ``menu``: further configurations, which are not written out; None where there are none.
    """

    name: str
    configurations: tuple[Configuration, ...]
    risk: tuple[int, ...]
    gradient_bytes: int
    menu: RegionMenu | None = field(default=None, compare=False, repr=False)

    @property
    def most_lossy(self) -> int:
        """At least how many units are at L in each of its configurations, written out or not."""
        return max(*(c.lossy_units for c in self.configurations), 0, 0 if self.menu is None else self.menu.most_lossy)

    @property
    def most_risk(self) -> int:
        """At least the risk of each of its configurations, written out or not."""
        return max(*self.risk, 0, 0 if self.menu is None else self.menu.most_risk)


@dataclass(frozen=True, slots=True)
class Problem:
    """One regime of one length bucket.

    Memory events, in order: forward of region i; head; backward of region i from last to first; tail; optimizer.
    ``base_bytes`` = fixed + what is live before the first region. ``constant_ns`` = forward + head + backward +
    optimizer: the step time without replays and codecs, under a plan.
    """

    regions: tuple[RegionProblem, ...]
    base_bytes: int
    head_bytes: int
    head_left_bytes: int
    tail_bytes: int
    optimizer_bytes: int
    constant_ns: int
    budget_bytes: int
    risk_limit: int
    head_forward_bytes: int = 0
    frame_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Solution:
    """``status``: optimal | feasible | infeasible | unknown. ``choice[r]`` indexes region r's configurations.

    ``problem``: the one that was solved, with every configuration written out that a choice needs; choices index it.
    ``bound_ns``: proven lower bound of ``extra_ns``, over all configurations. ``smallest_budget_bytes``: exact, where
    infeasible.
    """

    status: str
    choice: tuple[int, ...]
    extra_ns: int
    bound_ns: int
    greedy_choice: tuple[int, ...]
    greedy_extra_ns: int
    smallest_budget_bytes: int
    wall_s: float
    solver: str
    problem: Problem = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Verified:
    """What the event simulator found for one choice, in plain integers."""

    peak_bytes: int
    peak_event: str
    extra_ns: int
    step_ns: int
    risk: int
    demoted_peak_bytes: int
    demoted_step_ns: int
