"""The plan file's schema (version 1).

A plan says, for one exposure regime and one length bucket, what each unit of each region does. pydantic validates the
file; the runtime works with the frozen dataclasses below.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict

from hilore.runtime.codecs import loses

SCHEMA_VERSION = 1
REGIME_LABELS = ("null", "low", "mid", "high")

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """One unit's mode. ``codec`` is set exactly when ``mode`` is ``"L"``.

    ``dead``: no dropped saved tensor needs this call in a replay under this plan, so a replay leaves it out.
    ``dead_if_demoted``: the same when every L unit of the plan runs as R. ``dead_late`` (and ``..._if_demoted``): no
    tensor saved after the region's ``split_at`` needs it, so the first stage of a split replay leaves it out.
    """

    __pydantic_config__ = _STRICT

    name: str
    mode: Literal["H", "L", "R"]
    codec: str | None
    dead: bool
    dead_if_demoted: bool
    dead_late: bool = False
    dead_late_if_demoted: bool = False


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """One region; ``hold`` means no replay at all (then every unit is H).

    ``split_at``: the unit before which the replay is split. Backward first needs what was saved from that unit on; a
    first stage makes only that, a second one the rest, so that both are never alive at once. None: one replay.
    """

    __pydantic_config__ = _STRICT

    name: str
    hold: bool
    units: tuple[UnitPlan, ...]
    split_at: str | None = None


@dataclass(frozen=True, slots=True)
class Regime:
    """An interval of normalised exposure: ``exposure_low < psi <= exposure_high`` (``null``: psi = 0).

    ``allowance``: the squared error that its plan may cause, over (delta * delta_star)^2 (of no meaning at psi = 0).
    """

    __pydantic_config__ = _STRICT

    label: Literal["null", "low", "mid", "high"]
    exposure_low: float
    exposure_high: float
    frequency: float
    allowance: float = 1.0


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the verifier recomputed from the modes.

    ``risk``: relative error of an update whose microbatches all run under this plan, at most: quadrature over the L
    units times the interaction factor; ``linear_risk``: the plain sum of what they cost alone. ``estimated``: times are
    arithmetic on a card's data sheet, not measured. ``interaction``: that factor (0 in files of earlier versions).
    """

    __pydantic_config__ = _STRICT

    peak_bytes: int
    peak_event: str
    step_ns: int
    gc_step_ns: int
    gc_peak_bytes: int
    no_gc_step_ns: int
    no_gc_peak_bytes: int
    risk: float
    linear_risk: float = 0.0
    estimated: bool = False
    interaction: float = 0.0


@dataclass(frozen=True, slots=True)
class MeasuredError:
    """What the relative error of an update stays within under the plans of one set, with ``confidence``.

    Measured on ``microbatches`` of recorded rollouts, each under the plan that its exposure chooses.
    """

    __pydantic_config__ = _STRICT

    error: float
    confidence: float
    microbatches: int


@dataclass(frozen=True, slots=True)
class PlannedMicrobatch:
    """The microbatch that a plan's peak was predicted for: one that is larger in any respect may need more.

    ``rows`` [of ``length_bucket`` tokens]; ``completions``: loss columns of all rows together, which the logits have;
    ``masked``: attention was given a mask [B, 1, T, T].
    """

    __pydantic_config__ = _STRICT

    rows: int
    completions: int
    masked: bool


@dataclass(frozen=True, slots=True)
class SolverReport:
    """How the plan was found. ``gap`` = (objective - bound) / predicted step time."""

    __pydantic_config__ = _STRICT

    name: str
    status: str
    objective_ns: int
    bound_ns: int
    gap: float
    wall_s: float
    greedy_ns: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One plan file. ``loss`` holds the loss's kind and options; ``length_bucket`` is tokens per row.

    ``microbatch``: None in files of earlier versions. ``confidence``: with which an update stays within its limit (0:
    none is stated). ``measured``: None where it rests on other plans alone.
    ``budget_bytes`` is the memory that was given, ``margin_bytes`` the part of it that allocations leave free (CUDA
    context, NCCL's buffers, fragmentation): the peak stays under their difference, ``ceiling_bytes``.
    """

    __pydantic_config__ = _STRICT

    schema_version: int
    set_id: str
    name: str
    loss: dict[str, Any]
    regime: Regime
    budget_bytes: int
    margin_bytes: int
    delta: float
    delta_star: float
    calibrated: bool
    predicted: Predicted
    length_bucket: int
    regions: tuple[RegionPlan, ...]
    solver: SolverReport
    fingerprint: dict[str, Any]
    provenance: dict[str, Any]
    confidence: float = 0.0
    microbatch: PlannedMicrobatch | None = None
    measured: MeasuredError | None = None
    path: str = field(default="", compare=False)

    @property
    def ceiling_bytes(self) -> int:
        """What the allocated peak may reach."""
        return self.budget_bytes - self.margin_bytes

    def covers(self, rows: int, tokens: int, completions: int | None = None, masked: bool | None = None) -> bool:
        """Whether the predicted peak holds for ``rows`` of ``tokens`` tokens with so many loss columns in all.

        What is None is not looked at; a plan without ``microbatch`` knows rows and tokens alone.
        """
        planned = self.microbatch
        if tokens > self.length_bucket or rows * tokens > self.rows * self.length_bucket:
            return False
        if planned is None:
            return True
        return (completions or 0) <= planned.completions and (planned.masked or not masked)

    @property
    def rows(self) -> int:
        """Rows of the microbatch that it was made for."""
        return self.microbatch.rows if self.microbatch is not None else int(self.fingerprint.get("rows", 1))

    @property
    def unit_names(self) -> tuple[str, ...]:
        return tuple(unit.name for region in self.regions for unit in region.units)

    @property
    def lossy(self) -> bool:
        """Whether a unit is at L with a codec that changes values."""
        return any(loses(unit.codec) for region in self.regions for unit in region.units)

    def count(self, mode: str) -> int:
        """How many units have ``mode`` ("H", "L" or "R")."""
        return sum(unit.mode == mode for region in self.regions for unit in region.units)
