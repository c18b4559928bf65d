"""A plan from given modes instead of from a solver: for calibration, baselines and tests.

Dead calls follow from liveness as in any plan; nothing is predicted and no budget is promised.
"""

from __future__ import annotations

from collections.abc import Callable

from hilore.planner.liveness import running_units
from hilore.planner.trace import Trace, UnitTrace
from hilore.runtime.plan import SCHEMA_VERSION, Plan, Predicted, Regime, RegionPlan, SolverReport, UnitPlan

# (region name, unit) -> "H", "R" or a codec's name.
ModeOf = Callable[[str, UnitTrace], str]


def handmade_plan(
    trace: Trace,
    mode_of: ModeOf,
    *,
    held: Callable[[str], bool] = lambda _region: False,
    dead_calls: bool = True,
    name: str = "handmade",
) -> Plan:
    """A plan for the largest length bucket of ``trace``, for every exposure.

    ``dead_calls`` False: a replay runs every unit that is not kept, as plain checkpointing does.
    """
    bucket = trace.buckets[-1]
    regions = []
    for region in bucket.regions:
        units = bucket.classes[region.class_index].units
        if region.hold_only or held(region.name):
            plans = tuple(UnitPlan(f"{region.name}.{u.name}", "H", None, False, False) for u in units)
            regions.append(RegionPlan(region.name, True, plans))
            continue
        modes = {unit.name: mode_of(region.name, unit) for unit in units}
        kept = frozenset(n for n, mode in modes.items() if mode != "R")
        exact = frozenset(n for n, mode in modes.items() if mode == "H")
        dead = running_units(units, kept)[1] if dead_calls else ()
        demoted = running_units(units, exact)[1] if dead_calls else ()
        plans = tuple(_unit(f"{region.name}.{n}", mode, n in dead, n in demoted) for n, mode in modes.items())
        regions.append(RegionPlan(region.name, False, plans))
    return Plan(
        schema_version=SCHEMA_VERSION,
        set_id=name,
        name=name,
        loss=dict(trace.spec["loss"]),
        regime=Regime("high", 0.0, 1e9, 1.0),
        budget_bytes=0,
        margin_bytes=0,
        delta=0.0,
        delta_star=trace.calibration.delta_star,
        calibrated=False,
        predicted=Predicted(0, "not predicted", 1, 1, 0, 1, 0, 0.0),
        length_bucket=bucket.tokens,
        regions=tuple(regions),
        solver=SolverReport("handmade", "unsolved", 0, 0, 0.0, 0.0, 0),
        fingerprint=trace.fingerprint,
        provenance={},
    )


def _unit(name: str, mode: str, dead: bool, demoted: bool) -> UnitPlan:
    if mode in ("H", "R"):
        return UnitPlan(name, mode, None, dead, demoted)  # type: ignore[arg-type]
    return UnitPlan(name, "L", mode, dead, demoted)
