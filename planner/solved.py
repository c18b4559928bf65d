"""What `solve` answers: a set of plans with their figures, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan


class InfeasibleError(HiloreError):
    """No plan fits the budget. Attributes: ``smallest_budget_bytes``, ``event``, ``tokens``."""

    exit_code = 4


class NoPlanError(HiloreError):
    """Nothing was found in time. Attributes: ``all_r_fits``, and of the all-R plan its peak and step."""

    exit_code = 5


@dataclass(frozen=True, slots=True)
class SolveRow:
    """One plan in figures. ``kept``, ``lossy``, ``replayed``: units at H, L and R; ``held``: regions without replay.

    ``gain``: tokens per second over plain checkpointing's, less 1. ``risk``: predicted relative error of the update's
    gradient. ``gap``: (objective - bound) / step.
    """

    tokens: int
    regime: str
    kept: int
    lossy: int
    replayed: int
    held: int
    peak_bytes: int
    peak_event: str
    step_ns: int
    gain: float
    risk: float
    greedy_step_ns: int
    status: str
    gap: float
    greedy_peak_bytes: int


@dataclass(frozen=True, slots=True)
class SolveResult:
    """A whole set of plans. ``largest_bucket``: the tokens whose files carry no length in their name.

    ``estimated``: step times are of planner/roofline.py, not measured. ``notes``: what the user should know.
    """

    name: str
    set_id: str
    largest_bucket: int
    plans: tuple[Plan, ...]
    rows: tuple[SolveRow, ...]
    estimated: bool = False
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0, or 3 where a plan's gap was not closed in time."""
        return 0 if all(row.status == "optimal" for row in self.rows) else 3
