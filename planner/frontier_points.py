"""What a frontier is made of: points, curves, and the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hilore.planner.budget import mib


@dataclass(frozen=True, slots=True)
class Point:
    """One policy under one budget.

    ``step_ns``: expected over regimes, by how often calibration saw each; ``regime_ns``: of null, low, mid and high.
    ``peak_bytes``: the highest over regimes, in the event ``peak_event``. ``error``: highest predicted error of an
    update, None where it is not known (greedy). ``status``: the solver's, else "predicted". ``detail``: the setting;
    ``carried``: under which smaller budget or delta it was found, where nothing faster was found under this one.
    """

    budget_bytes: int
    peak_bytes: int
    peak_event: str
    step_ns: int
    regime_ns: tuple[int, ...]
    error: float | None
    status: str = "predicted"
    gap: float = 0.0
    detail: str = ""
    carried: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy, one point per budget; None where it has nothing that fits. ``delta`` None: exact, knows no delta."""

    policy: str
    delta: float | None
    points: tuple[Point | None, ...]

    @property
    def label(self) -> str:
        return self.policy if self.delta is None else f"{self.policy}, delta {self.delta:g}"


@dataclass(frozen=True, slots=True)
class Frontier:
    """All curves of the largest length bucket. ``smallest_bytes``: the smallest feasible budget at the largest delta,
    exact."""

    name: str
    tokens: int
    estimated: bool
    time_spread: float
    calibrated: bool
    budgets: tuple[int, ...]
    deltas: tuple[float, ...]
    smallest_bytes: int
    gc_peak_bytes: int
    gc_step_ns: int
    no_gc_peak_bytes: int
    no_gc_step_ns: int
    curves: tuple[Curve, ...]

    def gain(self, point: Point) -> float:
        """Share by which more tokens are trained in a second than under GC."""
        return self.gc_step_ns / point.step_ns - 1

    def share(self, point: Point) -> float | None:
        """Part of No-GC's gain; None where it has none."""
        best = self.gc_step_ns / self.no_gc_step_ns - 1
        return self.gain(point) / best if best > 0 else None


def running_best(
    budgets: Sequence[int], found: Sequence[Point | None], below: Sequence[Point | None] = (), below_name: str = ""
) -> tuple[Point | None, ...]:
    """At each budget (ascending) the fastest of ``found`` there, of what is taken under smaller budgets, and of
    ``below`` there: the curve of a smaller delta, whose plans may run under the larger one too."""
    taken: Point | None = None
    result: list[Point | None] = []
    for place, budget in enumerate(budgets):
        if taken is not None:
            taken = replace(
                taken, budget_bytes=budget, carried=taken.carried or f"found under {mib(taken.budget_bytes)}"
            )
        own = found[place]
        if own is not None and (taken is None or own.step_ns <= taken.step_ns):
            taken = own
        other = below[place] if below else None
        if other is not None and (taken is None or other.step_ns < taken.step_ns):
            taken = replace(other, carried=below_name)
        result.append(taken)
    return tuple(result)
