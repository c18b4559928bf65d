"""Which units a replay runs on a decoded value, found by two ways that share no code, and what risk follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hilore.planner.verify as verifying
from hilore.planner.build import build_problem, build_regions
from hilore.planner.emit import solve_trace
from hilore.planner.explain import explain_unit
from hilore.planner.explain_view import explanation_lines
from hilore.planner.problem import RISK_SCALE
from hilore.planner.taint import contexts_of
from hilore.planner.trace import Trace, UnitRisk
from hilore.planner.verify import linear_risk, reference_peaks, verify_modes
from hilore.runtime.errors import InternalError
from hilore.runtime.plan import RegionPlan
from tests.solver_fixtures import assignments, qwen_trace, random_class, region_plan

FEW = ("v", "attention", "o", "gate", "up")


def by_context(trace: Trace) -> Trace:
    """The trace with another risk for every tainted set of a unit: the more units, the higher."""
    region_class = trace.buckets[0].classes[0]
    risks = []
    for risk in trace.calibration.risks:
        kept_sets = [keep_set.kept for keep_set in region_class.keep_sets]
        for tainted in contexts_of(region_class.units, kept_sets, risk.unit):
            risks.append(replace(risk, kappa2=risk.kappa2 * (1 + len(tainted)), tainted=tainted))
    return replace(trace, calibration=replace(trace.calibration, risks=tuple(risks)))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return by_context(qwen_trace(layers=3, kept_names=FEW))


@pytest.mark.parametrize("seed", range(40))
def test_planner_and_verifier_agree_on_what_is_tainted(seed: int) -> None:
    region_class = random_class(seed, split=seed % 2 == 1)
    kept_sets = [keep_set.kept for keep_set in region_class.keep_sets]
    for modes, split in assignments(region_class):
        plan = region_plan(region_class, modes, split=split)
        for name, mode in modes.items():
            if mode not in ("H", "R"):
                tainted = verifying._tainted(plan, region_class, name)
                assert tainted in contexts_of(region_class.units, kept_sets, name)
                kept = [[unit for unit, at in modes.items() if at != "R"]]
                assert contexts_of(region_class.units, kept, name) == (tainted,)


def test_a_layers_contexts(trace: Trace) -> None:
    units = trace.buckets[0].classes[0].units
    kept_sets = [keep_set.kept for keep_set in trace.buckets[0].classes[0].keep_sets]
    names = {unit.kind: unit.name for unit in units}
    o, gate, up = names["o"], names["gate"], names["up"]
    assert contexts_of(units, kept_sets, o) == ((), (gate,), (gate, up), (up,))
    assert contexts_of(units, kept_sets, gate) == ((),)
    attention = contexts_of(units, kept_sets, names["v"])
    assert () in attention
    assert all(names["attention"] in tainted for tainted in attention if tainted)


def test_the_risk_of_a_plan_is_that_of_its_contexts(trace: Trace) -> None:
    p = build_problem(trace, trace.buckets[0], budget_bytes=2**50, delta=1.0, psi_high=1.0)
    base = {(r.region, r.unit): r.kappa2 for r in qwen_trace(layers=3, kept_names=FEW).calibration.risks}
    seen = set()
    for region in p.regions:
        for configuration, risk in zip(region.configurations, region.risk, strict=True):
            lossy = [unit for unit in configuration.units if unit.mode == "L"]
            exact = sum(base[region.name, unit.name] * (1 + len(unit.tainted)) for unit in lossy)
            assert abs(risk - 1.05**2 * exact * RISK_SCALE) <= 1 + 1e-9 * risk
            seen |= {(unit.name, unit.tainted) for unit in lossy}
    assert len({tainted for name, tainted in seen if name == "self_attn.o_proj"}) > 1


def test_solver_and_verifier_agree_and_the_linear_sum_stands_beside(trace: Trace) -> None:
    low, high = reference_peaks(trace)
    result = solve_trace(trace, budget_bytes=int(low + 0.3 * (high - low)), delta=1.0)
    plan = result.plans[-1]
    assert plan.count("L") > 1
    found = linear_risk(trace, trace.buckets[0], plan.regions)
    assert plan.predicted.linear_risk == found > plan.predicted.risk > 0
    assert result.plans[0].predicted.linear_risk == 0
    assert result.plans[0].predicted.risk == 0


def test_contexts_without_a_risk_are_not_offered(trace: Trace) -> None:
    risks = tuple(r for r in trace.calibration.risks if r.unit != "self_attn.o_proj" or r.tainted == ())
    partial = replace(trace, calibration=replace(trace.calibration, risks=risks))
    for region in build_regions(partial, trace.buckets[0], lossy=True, risk_free=False, granularity="unit"):
        tainted = {u.tainted for c in region.configurations for u in c.units if u.name == "self_attn.o_proj"}
        assert tainted == {()}


def test_an_entry_for_any_context_serves_those_without_one(trace: Trace) -> None:
    anyhow = UnitRisk("model.layers.0", "self_attn.o_proj", "int8-g128", 2.0**-40)
    risks = tuple(r for r in trace.calibration.risks if r.unit != "self_attn.o_proj" or r.tainted == ())
    some = replace(trace, calibration=replace(trace.calibration, risks=(*risks, anyhow), interaction=1.0))
    first = build_regions(some, trace.buckets[0], lossy=True, risk_free=False, granularity="unit")[0]
    alone = [
        (u.tainted, risk)
        for c, risk in zip(first.configurations, first.risk, strict=True)
        for u in c.units
        if u.name == "self_attn.o_proj" and u.mode == "L" and c.lossy_units == 1
    ]
    assert {risk for tainted, risk in alone if tainted} == {1}
    assert all(risk > 1 for tainted, risk in alone if not tainted)


def held_only(trace: Trace, place: int) -> Trace:
    bucket = trace.buckets[0]
    regions = list(bucket.regions)
    regions[place] = replace(regions[place], hold_only="its forward does not repeat itself")
    return replace(trace, buckets=(replace(bucket, regions=tuple(regions)),))


@pytest.mark.parametrize("granularity", ["unit", "layer"])
def test_a_region_that_does_not_repeat_itself_is_held(granularity: str) -> None:
    trace = held_only(qwen_trace(layers=4, kept_names=FEW), 1)
    low, high = reference_peaks(trace)
    budget = int(low + 0.5 * (high - low))
    result = solve_trace(trace, budget_bytes=budget, delta=1.0, granularity=granularity)
    assert all(plan.regions[1].hold for plan in result.plans)
    assert not all(region.hold for region in result.plans[-1].regions)
    if granularity == "unit":
        found = explain_unit(result.plans[-1], trace, "model.layers.1.mlp.up_proj")
        assert found.alternatives == ()
        assert "its region can only be held: its forward does not repeat itself" in explanation_lines(found)


def test_the_verifier_refuses_its_replay() -> None:
    trace = qwen_trace(layers=2)
    modes = {unit.name: "R" for unit in trace.buckets[0].classes[0].units}
    plans = [region_plan(trace.buckets[0].classes[0], modes, name=region.name) for region in trace.buckets[0].regions]
    verify_modes(trace, trace.buckets[0], plans)
    changed = held_only(trace, 1)
    message = r"model\.layers\.1: is replayed, but its forward does not repeat itself"
    with pytest.raises(InternalError, match=message):
        verify_modes(changed, changed.buckets[0], plans)


def test_regions_that_are_held_anyway_pass() -> None:
    trace = held_only(qwen_trace(layers=1), 0)
    units = region_plan(trace.buckets[0].classes[0], {u.name: "H" for u in trace.buckets[0].classes[0].units}).units
    named = tuple(replace(unit, name=f"model.layers.0.{unit.name[2:]}") for unit in units)
    verify_modes(trace, trace.buckets[0], [RegionPlan("model.layers.0", True, named)])
