"""What a trace knows of risk and exposure, measured on rollouts or from the prior."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitRisk:
    """Squared relative error of the complete update's gradient when this unit of this region alone is at L.

    ``tainted``: the units that a replay then runs on what comes from the decoded value (planner/taint.py), in unit
    order: what compression costs depends on them. None: for every such set that has no entry of its own.
    """

    region: str
    unit: str
    codec: str
    kappa2: float
    tainted: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ExposureSample:
    """One microbatch that calibration saw, in the order of the file.

    ``psi``: its exact exposure. ``weight``: squared norm of its exact gradient, as it enters the update's sum.
    ``score2``: measured over predicted squared error, the mean over the plans that every microbatch ran under.
    """

    psi: float
    weight: float
    score2: float


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The plans of one budget and delta, measured on ``microbatches`` with exposure (planner/confirm.py).

    ``interaction``: the factor that they are solved with. ``error``: what an update's relative error stays within
    under them, with ``confidence``; ``drift`` times as much is within delta. ``plans``: digests of the largest
    bucket's, by ascending exposure.
    """

    budget_bytes: int
    margin_bytes: int
    delta: float
    interaction: float
    error: float
    drift: float
    confidence: float
    microbatches: int
    plans: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for what no measurement gives: traces can be edited, and plans say this was measured."""
        lowest = {"interaction": 0, "delta": 0, "error": 0, "drift": 1, "microbatches": 1}
        for name, low in lowest.items():
            value = getattr(self, name)
            if not low <= value < math.inf:
                raise ValueError(f"{name} {value:g}: must be a finite number, {low} or more")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence {self.confidence:g}: must be between 0 and 1")

    def is_for(self, budget_bytes: int, margin_bytes: int, delta: float) -> bool:
        """Whether these are the plans of that budget and delta."""
        return (self.budget_bytes, self.margin_bytes, self.delta) == (budget_bytes, margin_bytes, delta)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Risk and exposure, measured (``calibrated``) or from the prior of planner/prior.py.

    ``psi_reference``: root mean square of microbatch exposures in one update. ``psi_edges``: upper ends of the regimes
    low, mid, high; ``frequencies``: how often calibration saw null, low, mid, high. How much error each regime may
    cause follows from planner/regimes.py.
    ``interaction``: factor on the quadrature sum (of errors, not of squares) that an update's error stays within with
    ``confidence``; ``mean_interaction``: what it was on average. ``noise_floor``: relative error of float32 gradients
    between two layouts of the same rollouts; ``native_noise``: the same in the actor's own dtypes (None: not
    measured). ``samples``: empty where nothing was measured on rollouts. ``confirmed``: plans that were measured too.
    """

    calibrated: bool
    source: str
    delta_star: float
    confidence: float
    psi_reference: float
    psi_edges: tuple[float, float, float]
    frequencies: tuple[float, float, float, float]
    interaction: float
    risks: tuple[UnitRisk, ...]
    mean_interaction: float = 1.0
    noise_floor: float | None = None
    native_noise: float | None = None
    samples: tuple[ExposureSample, ...] = ()
    confirmed: tuple[Confirmed, ...] = ()

    def risks_of(self, region: str) -> tuple[UnitRisk, ...]:
        return tuple(risk for risk in self.risks if risk.region == region)
