"""Trace + Calibration -> Problem (types in problem.py): one regime of one length bucket, all integers."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from hilore.planner.configure import Offer, offer
from hilore.planner.pareto import needed_backward_bytes, pareto_indices
from hilore.planner.problem import RISK_SCALE, Configuration, Problem, RegionProblem
from hilore.planner.regionmenu import RegionMenu
from hilore.planner.risks import RiskTable, Triple
from hilore.planner.trace import Bucket, Calibration, RegionClass, Trace, UnitRisk
from hilore.runtime.codecs import loses
from hilore.runtime.errors import HiloreError, InternalError

# Above every sum of risks: the null regime, where no gradient passes and any plan is exact.
UNLIMITED_RISK = 2**62


def risk_limit(calibration: Calibration, *, delta: float, psi_high: float, allowance: float = 1.0) -> int:
    """``allowance * (delta * delta_star)^2`` in units of 1e-12, rounded down; see planner/regimes.py.

    Unlimited where ``psi_high`` is 0: gradients are linear in exposure, so that no error can pass.
    """
    if psi_high == 0:
        return UNLIMITED_RISK
    kappa = Fraction(delta) * Fraction(calibration.delta_star)
    return min(UNLIMITED_RISK, math.floor(Fraction(allowance) * kappa**2 * RISK_SCALE))


def build_problem(
    trace: Trace,
    bucket: Bucket,
    *,
    budget_bytes: int,
    delta: float,
    psi_high: float,
    granularity: str = "unit",
) -> Problem:
    """The problem of one regime, whose exposures go up to ``psi_high`` (0: the null regime), at allowance 1.

    ``budget_bytes`` is what the allocated peak may reach, less any margin already. ``delta`` is in units of
    ``delta_star``; at 0 no configuration has an L unit whose codec changes values, in any regime. Raises HiloreError
    for a negative ``delta`` or a trace that contradicts itself.
    """
    if not (math.isfinite(delta) and delta >= 0):
        raise HiloreError(f"delta {delta}: must be a finite number, 0 or more", delta=delta)
    if not (math.isfinite(psi_high) and psi_high >= 0):
        raise HiloreError(f"exposure {psi_high}: must be a finite number, 0 or more", psi_high=psi_high)
    regions = build_regions(trace, bucket, lossy=delta > 0, risk_free=psi_high == 0, granularity=granularity)
    limit = risk_limit(trace.calibration, delta=delta, psi_high=psi_high)
    return assemble(trace, bucket, regions, budget_bytes=budget_bytes, limit=limit)


def assemble(
    trace: Trace, bucket: Bucket, regions: tuple[RegionProblem, ...], *, budget_bytes: int, limit: int
) -> Problem:
    """Regions, what lies outside them, and the two limits."""
    outside = bucket.outside
    classes = [bucket.classes[region.class_index] for region in bucket.regions]
    return Problem(
        regions=regions,
        base_bytes=trace.fixed.total_bytes + outside.before_bytes,
        head_bytes=outside.head_bytes,
        head_left_bytes=outside.head_left_bytes,
        tail_bytes=outside.tail_bytes,
        optimizer_bytes=outside.optimizer_bytes,
        constant_ns=outside.forward_ns
        + outside.backward_ns
        + outside.optimizer_ns
        + sum(each.forward_ns + each.backward_ns + each.plan_extra_ns for each in classes),
        budget_bytes=budget_bytes,
        risk_limit=limit,
        head_forward_bytes=outside.head_forward_bytes,
        frame_bytes=outside.frame_bytes,
    )


# What a class is offered for given pairs of unit and codec.
Offered = dict[tuple[int, frozenset[tuple[str, str]]], Offer]


def build_regions(
    trace: Trace,
    bucket: Bucket,
    *,
    lossy: bool,
    risk_free: bool,
    granularity: str,
    offered: Offered | None = None,
) -> tuple[RegionProblem, ...]:
    """Each region's configurations with their risk; regions with equal class and equal risks get equal ones.

    ``risk_free`` sets every risk to 0 (exposure 0). A unit and codec without an entry in the calibration for a region
    is not offered at L there; lossless codecs always are. ``offered`` remembers configurations between calls for the
    same bucket, ``lossy`` and granularity.
    """
    risks = _risks_by_region(trace.calibration) if lossy else {}
    contexts = any(risk.tainted is not None for risk in trace.calibration.risks)
    factor = Fraction(trace.calibration.interaction) ** 2 * RISK_SCALE
    ready: dict[tuple[int, tuple[tuple[Triple, Fraction], ...]], RegionProblem] = {}
    offered = {} if offered is None else offered
    result = []
    for region in bucket.regions:
        region_class = bucket.classes[region.class_index]
        profile = _profile(region_class, risks.get(region.name, {}), risk_free)
        key = (region.class_index, tuple(profile.items()))
        if key not in ready:
            pairs = (region.class_index, frozenset((unit, codec) for unit, codec, _ in profile))
            if pairs not in offered:
                offered[pairs] = offer(
                    region_class, codecs=pairs[1], lossy=lossy, granularity=granularity, contexts=contexts
                )
            ready[key] = _region_problem(region_class, offered[pairs], profile, factor)
        made = _held_alone(ready[key]) if region.hold_only else ready[key]
        result.append(replace(made, name=region.name))
    if bucket.outside.leaf_boundary_bytes:
        held = bucket.classes[bucket.regions[0].class_index].hold
        result[0] = _without_boundary(result[0], bucket.outside.leaf_boundary_bytes, held.keeps_boundary)
    return tuple(result)


def _without_boundary(first: RegionProblem, leaf_boundary_bytes: int, held_keeps: bool) -> RegionProblem:
    """The first region where its boundary is counted before it already (trace.Outside)."""

    def counted_twice(configuration: Configuration) -> int:
        return leaf_boundary_bytes if held_keeps or not configuration.hold else 0

    return replace(
        first,
        configurations=tuple(
            replace(
                configuration,
                retained_bytes=configuration.retained_bytes - counted_twice(configuration),
                forward_bytes=configuration.forward_bytes - leaf_boundary_bytes,
            )
            for configuration in first.configurations
        ),
        menu=None if first.menu is None else first.menu.moved(leaf_boundary_bytes),
    )


def _held_alone(region: RegionProblem) -> RegionProblem:
    """The region that may not be replayed."""
    places = [place for place, configuration in enumerate(region.configurations) if configuration.hold]
    if not places:
        raise InternalError("a region without a held configuration")
    return replace(
        region,
        configurations=tuple(region.configurations[place] for place in places),
        risk=tuple(region.risk[place] for place in places),
        menu=None,
    )


def _risks_by_region(calibration: Calibration) -> dict[str, dict[Triple, UnitRisk]]:
    result: dict[str, dict[Triple, UnitRisk]] = {}
    for risk in calibration.risks:
        if not (math.isfinite(risk.kappa2) and risk.kappa2 >= 0):
            raise HiloreError(f"{risk.region}.{risk.unit}: kappa2 {risk.kappa2} of {risk.codec} is no risk; calibrate")
        entries = result.setdefault(risk.region, {})
        if (risk.unit, risk.codec, risk.tainted) in entries:
            raise HiloreError(f"{risk.region}.{risk.unit}: two risk entries for {risk.codec}; run calibrate again")
        entries[risk.unit, risk.codec, risk.tainted] = risk
    return result


def _profile(region_class: RegionClass, entries: dict[Triple, UnitRisk], risk_free: bool) -> dict[Triple, Fraction]:
    """kappa2 of each unit, codec and tainted set that may be at L in a region, units in order; 0 of lossless codecs,
    which no calibration measures."""
    known: dict[tuple[str, str], list[UnitRisk]] = {}
    for risk in entries.values():
        known.setdefault((risk.unit, risk.codec), []).append(risk)
    profile: dict[Triple, Fraction] = {}
    for unit in region_class.units:
        for cost in unit.codecs:
            if not loses(cost.codec):
                profile[unit.name, cost.codec, None] = Fraction(0)
                continue
            for risk in known.get((unit.name, cost.codec), ()):
                profile[risk.unit, risk.codec, risk.tainted] = Fraction(0) if risk_free else Fraction(risk.kappa2)
    return profile


def _region_problem(
    region_class: RegionClass, offered: Offer, profile: dict[Triple, Fraction], factor: Fraction
) -> RegionProblem:
    """What is offered less what is beaten once its risk in this region is known, and less what has no known risk.

    Beside a menu whatever may need less memory than what is listed is written out too, so that what fits a budget can
    be told from the list. The name is filled in by the caller.
    """
    risks = RiskTable(profile, factor)
    found = [(configuration, risks.of(configuration)) for configuration in offered.listed]
    known = [(configuration, risk) for configuration, risk in found if risk is not None]
    kept = pareto_indices(tuple(c for c, _ in known), tuple(risk for _, risk in known))
    listed = [known[index] for index in kept]
    menu = None
    if offered.menu is not None:
        menu = RegionMenu(offered.menu, risks)
        safe = [(c.retained_bytes, c.forward_bytes, needed_backward_bytes(c)) for c, risk in listed if risk == 0]
        listed += [(menu.build(recipe), menu.risk(recipe)) for recipe in menu.roomiest(safe)]
    return RegionProblem(
        name="",
        configurations=tuple(configuration for configuration, _ in listed),
        risk=tuple(risk for _, risk in listed),
        gradient_bytes=region_class.gradient_bytes,
        menu=menu,
    )
