"""The verifier: events against a replay of allocations, modes against configurations, references, refusals."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hilore.planner.build import build_problem
from hilore.planner.composition import Composition, highest, plan_compositions
from hilore.planner.configure import configurations
from hilore.planner.events import RegionCost, Surroundings, events
from hilore.planner.modecost import region_cost
from hilore.planner.problem import Problem, RegionProblem
from hilore.planner.trace import RegionClass
from hilore.planner.verify import (
    binding_event,
    largest_bucket,
    reference_peaks,
    reference_times,
    verify,
    verify_modes,
)
from hilore.runtime.errors import InternalError
from hilore.runtime.plan import RegionPlan
from tests.solver_fixtures import (
    assignments,
    configuration,
    problem,
    qwen_trace,
    random_class,
    random_problem,
    region_plan,
)


def peak_of_allocations(p: Problem, choice: list[int], *, demoted: bool) -> tuple[int, str]:
    """Every byte is taken and given back one event at a time, in the order of an update."""
    log: list[tuple[str, int]] = [("base", p.base_bytes)]

    def during(event: str, size: int) -> None:
        log.extend([(event, size), (event, -size)])

    chosen = [region.configurations[k] for region, k in zip(p.regions, choice, strict=True)]
    for region, c in zip(p.regions, chosen, strict=True):
        during(f"forward of {region.name}", c.forward_bytes)
        log.append(("keep", c.retained_bytes))
    during("head", p.head_bytes)
    for region, c in reversed(list(zip(p.regions, chosen, strict=True))):
        working = c.demoted_backward_bytes if demoted else c.backward_bytes
        during(f"backward of {region.name}", p.head_left_bytes + working)
        log.append(("gradient", region.gradient_bytes))
        log.append(("free", -c.retained_bytes))
    during("tail", p.tail_bytes)
    during("optimizer", p.optimizer_bytes)
    live, peak, at = 0, -1, ""
    for event, size in log:
        live += size
        if live > peak:
            peak, at = live, event
    return peak, at


@pytest.mark.parametrize("block", range(5))
def test_peak_is_that_of_a_replay_of_allocations(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        rng = random.Random(seed)
        p = random_problem(rng, rng.randint(1, 6), rng.randint(1, 4))
        choice = [rng.randrange(len(region.configurations)) for region in p.regions]
        found = verify(p, choice)
        peak, _ = peak_of_allocations(p, choice, demoted=False)
        assert found.peak_bytes == peak, seed
        assert found.demoted_peak_bytes == peak_of_allocations(p, choice, demoted=True)[0], seed
        binding = binding_event(p, choice)
        assert binding.live_bytes == max(found.peak_bytes, found.demoted_peak_bytes), seed
        chosen = [(r, r.configurations[k], r.risk[k]) for r, k in zip(p.regions, choice, strict=True)]
        assert found.extra_ns == sum(c.extra_ns for _, c, _ in chosen)
        assert found.step_ns == p.constant_ns + found.extra_ns
        assert found.risk == sum(risk for _, _, risk in chosen)


def test_events_come_in_the_order_of_an_update_and_name_what_binds() -> None:
    around = Surroundings(100, 7, 3, 5, 11, 0)
    costs = [RegionCost("a", 10, 40, 20, 60, 1, 0, 0, 0), RegionCost("b", 20, 30, 50, 2, 2, 0, 0, 0)]
    assert [(e.name, e.live_bytes) for e in events(around, costs)] == [
        ("forward of a", 140),
        ("forward of b", 140),
        ("head", 137),
        ("backward of b", 183),
        ("backward of a", 135),
        ("tail", 108),
        ("optimizer", 114),
    ]
    assert [e.live_bytes for e in events(around, costs, demoted=True)][3:5] == [135, 175]


def test_the_first_of_equal_events_is_named() -> None:
    region = RegionProblem("r", (configuration(retained=10, backward=5, extra=1),), (0,), 0)
    p = problem([region, region], budget=0, head=5)
    assert verify(p, [0, 0]).peak_event == "head"
    assert verify(replace(p, head_bytes=4), [0, 0]).peak_event == "backward of r"


def test_a_binding_event_says_when_only_demotion_reaches_it() -> None:
    region = RegionProblem("r", (configuration(retained=10, backward=5, extra=1, demoted=9),), (0,), 0)
    event = binding_event(problem([region], budget=0), [0])
    assert (event.name, event.live_bytes) == ("backward of r with its L units recomputed", 19)


@pytest.mark.parametrize("seed", range(80))
def test_modes_and_configurations_are_two_readings_of_one_trace(seed: int) -> None:
    region_class = random_class(seed, split=seed % 2 == 1)
    for c in configurations(region_class, lossy=True):
        if c.hold:
            continue
        modes = {u.name: u.codec or u.mode for u in c.units}
        plan = region_plan(region_class, modes, split=bool(c.split_at))
        assert [(u.dead, u.dead_if_demoted, u.dead_late, u.dead_late_if_demoted) for u in plan.units] == [
            (u.dead, u.dead_if_demoted, u.dead_late, u.dead_late_if_demoted) for u in c.units
        ]
        cost = region_cost(plan, region_class, 0)
        assert (cost.retained_bytes, cost.forward_bytes) == (c.retained_bytes, c.forward_bytes)
        assert (cost.backward_bytes, cost.demoted_backward_bytes) == (c.backward_bytes, c.demoted_backward_bytes)
        assert (cost.extra_ns, cost.demoted_extra_ns) == (c.extra_ns, c.demoted_extra_ns)


@pytest.mark.parametrize("seed", range(40))
def test_a_wrong_dead_flag_is_found(seed: int) -> None:
    region_class = random_class(seed, split=True)
    modes, split = random.Random(seed).choice(assignments(region_class))
    plan = region_plan(region_class, modes, split=split)
    for at, unit in enumerate(plan.units):
        for flag in ("dead", "dead_if_demoted", "dead_late", "dead_late_if_demoted"):
            units = list(plan.units)
            units[at] = replace(unit, **{flag: not getattr(unit, flag)})
            with pytest.raises(InternalError, match=f"{unit.name}: planned {flag}="):
                region_cost(replace(plan, units=tuple(units)), region_class, 0)


def test_references_are_gc_and_held_regions() -> None:
    trace = qwen_trace(layers=3, buckets=(512, 1024))
    bucket = largest_bucket(trace)
    assert bucket.tokens == 1024
    layer = bucket.classes[0]
    base = trace.fixed.total_bytes + bucket.outside.before_bytes
    gc, no_gc = reference_peaks(trace)
    assert gc == base + 3 * layer.gc.retained_bytes + bucket.outside.head_bytes
    assert no_gc == base + 3 * layer.hold.retained_bytes + bucket.outside.head_bytes
    gc_ns, no_gc_ns = reference_times(trace)
    assert gc_ns - no_gc_ns == 3 * layer.gc_replay_ns
    small = trace.buckets[0]
    assert reference_peaks(trace, small)[0] < gc
    assert reference_times(trace, small)[1] < no_gc_ns


@pytest.mark.parametrize("extra_ns", [700, -300])
def test_what_forward_takes_more_under_a_plan_is_in_plans_and_not_in_references(extra_ns: int) -> None:
    plain = qwen_trace(layers=3)
    bucket = plain.buckets[0]
    layer = bucket.classes[0]
    # A held region needs less under a plan than No-GC does.
    held = replace(layer.hold, retained_bytes=layer.hold.retained_bytes - 64)
    changed = replace(layer, plan_extra_ns=extra_ns, hold=held, no_gc=layer.hold)
    trace = replace(plain, buckets=(replace(bucket, classes=(changed,)),))
    assert reference_times(trace) == reference_times(plain)
    assert reference_peaks(trace) == reference_peaks(plain)
    modes = {unit.name: "R" for unit in layer.units}
    regions = tuple(region_plan(layer, modes, name=region.name) for region in bucket.regions)
    before, after = (verify_modes(t, t.buckets[0], regions) for t in (plain, trace))
    assert after.step_ns - before.step_ns == 3 * extra_ns
    built = [
        build_problem(t, t.buckets[0], budget_bytes=10**12, delta=0.0, psi_high=1.0, granularity="unit")
        for t in (plain, trace)
    ]
    assert built[1].constant_ns - built[0].constant_ns == 3 * extra_ns
    assert built[1].constant_ns + after.extra_ns == after.step_ns


def plan_of(trace_layers: int = 2) -> tuple[RegionPlan, ...]:
    trace = qwen_trace(layers=trace_layers)
    layer = trace.buckets[0].classes[0]
    modes = {u.name: "R" for u in layer.units}
    return tuple(region_plan(layer, modes, name=region.name) for region in trace.buckets[0].regions)


def test_a_plan_of_other_regions_or_units_is_no_plan_of_the_trace() -> None:
    trace = qwen_trace(layers=2)
    bucket = trace.buckets[0]
    plan = plan_of()
    assert verify_modes(trace, bucket, plan).risk == 0
    with pytest.raises(InternalError, match="the plan has 1 regions, not the 2 of the trace"):
        verify_modes(trace, bucket, plan[:1])
    with pytest.raises(InternalError, match="the plan's units are not those of class decoder"):
        verify_modes(trace, bucket, (plan[0], replace(plan[1], units=plan[1].units[:-1])))
    with pytest.raises(InternalError, match="the trace splits at ''"):
        verify_modes(trace, bucket, (plan[0], replace(plan[1], split_at="model.layers.1.mlp.gate_proj")))


def test_risk_counts_l_units_and_needs_an_entry_for_each() -> None:
    trace = qwen_trace(layers=2, seed=None)
    bucket = trace.buckets[0]
    layer = bucket.classes[0]
    modes = {u.name: "int8-g128" if u.kind == "gate" else "R" for u in layer.units}
    lossy = (region_plan(layer, modes, name="model.layers.0"), plan_of()[1])
    # 2.4e-6 * 1.05^2 is 2,646,000e-12; as binary fractions the two lie a little above, and risk is rounded up.
    assert {r.kappa2 for r in trace.calibration.risks if r.unit == "mlp.gate_proj"} == {2.4e-6, 2.4e-6 * 6}
    assert verify_modes(trace, bucket, lossy).risk == 2_646_001
    assert verify_modes(trace, bucket, lossy, risk_free=True).risk == 0
    bare = replace(trace, calibration=replace(trace.calibration, risks=()))
    with pytest.raises(InternalError, match=r"layers\.0\.mlp\.gate_proj: at L with int8-g128, for which there is no"):
        verify_modes(bare, bucket, lossy)


@pytest.mark.parametrize(("choice", "message"), [([0], "1 choices for 2 regions"), ([0, 9], "no configuration 9")])
def test_a_choice_has_one_configuration_per_region(choice: list[int], message: str) -> None:
    region = RegionProblem("r", (configuration(retained=1, backward=1, extra=1),), (0,), 0)
    with pytest.raises(InternalError, match=message):
        verify(problem([region, region], budget=1), choice)


def test_codec_workspace_is_in_forward_and_backward_and_decides_the_peak() -> None:
    trace = qwen_trace(layers=2)
    bucket = trace.buckets[0]
    plain = bucket.classes[0]
    mib = 2**20

    def with_workspace(size: int) -> RegionClass:
        units = tuple(replace(u, codecs=tuple(replace(c, workspace_bytes=size) for c in u.codecs)) for u in plain.units)
        return replace(plain, units=units)

    def peaks(size: int) -> tuple[RegionCost, int, tuple[Composition, ...]]:
        region_class = with_workspace(size)
        here = replace(bucket, classes=(region_class, *bucket.classes[1:]))
        modes = {u.name: "int8-g128" if u.kind == "gate" else "R" for u in region_class.units}
        plan = (region_plan(region_class, modes, name="model.layers.0"), plan_of()[1])
        cost = region_cost(plan[0], region_class, 0)
        return cost, verify_modes(trace, here, plan).peak_bytes, plan_compositions(trace, here, plan)

    none, _, _ = peaks(0)
    size = 64 * 1024 * mib
    cost, peak, compositions = peaks(size)
    assert cost.forward_bytes == none.forward_bytes + size
    assert cost.backward_bytes == none.backward_bytes + size
    assert (cost.retained_bytes, cost.demoted_backward_bytes) == (none.retained_bytes, none.demoted_backward_bytes)
    first = highest(compositions)
    assert first.live_bytes == peak
    assert dict(first.parts)["codec workspace"] == size
    assert peaks(size + 7)[1] == peak + 7
