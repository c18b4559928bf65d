"""What each exposure regime may have: the contract on complete updates, on simulated ones, under every rule."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from hilore.planner.emit import solve_trace
from hilore.planner.regimes import (
    ALLOWANCES,
    HEADROOM,
    RegimeInterval,
    edges_and_frequencies,
    joint_regimes,
    plan_limit,
    regimes,
)
from hilore.planner.trace import Calibration, ExposureSample, Trace
from hilore.planner.verify import reference_peaks
from hilore.runtime.errors import HiloreError
from tests.solver_fixtures import qwen_trace

ACCUMULATION = 8
LIMIT = 0.01  # delta * delta_star
# Step times that fall with the allowance, ever less.
TIMES = tuple((x, round(1000 + 400 / (1 + math.sqrt(x)))) for x in ALLOWANCES)


def exposures(draw: np.random.Generator, count: int) -> np.ndarray:
    """Microbatches of two rows in the order of training: whole groups of eight, one right answer or none."""
    made: list[float] = []
    while len(made) < count:
        group = [1.79, 0.353, 0.353, 0.353] if draw.random() < 0.8 else [0.0] * 4
        made += draw.permutation(group).tolist()
    return np.array(made[:count])


def calibration(samples: int, *, seed: int = 0) -> Calibration:
    draw = np.random.default_rng(seed)
    psi = exposures(draw, samples)
    made = tuple(
        ExposureSample(float(p), float(p**2 * draw.uniform(0.8, 1.25)), float(draw.uniform(0.8, 1.25) * (p > 0)))
        for p in psi
    )
    edges, frequencies = edges_and_frequencies([sample.psi for sample in made])
    empty = qwen_trace(layers=1).calibration
    return replace(
        empty,
        calibrated=True,
        confidence=0.9,
        psi_edges=edges,
        frequencies=frequencies,
        psi_reference=float(np.sqrt((psi**2).mean())),
        samples=made,
    )


def error_of_update(
    psi: np.ndarray, allowance_of: dict[float, float], draw: np.random.Generator, size: int = 64
) -> float:
    """Relative error of an update whose microbatches use all that they may, every vector in a random direction."""
    gradient, error = np.zeros(size), np.zeros(size)
    for p in psi:
        if p == 0:
            continue
        g, e = draw.normal(size=size), draw.normal(size=size)
        g *= p / np.linalg.norm(g)
        gradient += g
        error += e / np.linalg.norm(e) * LIMIT * math.sqrt(allowance_of[p]) * p
    norm = float(np.linalg.norm(gradient))
    return float(np.linalg.norm(error)) / norm if norm else 0.0


def allowances(intervals: tuple[RegimeInterval, ...]) -> dict[float, float]:
    found = {}
    for psi in (0.353, 1.79):
        found[psi] = next(i.allowance for i in intervals if i.low < psi <= i.high)
    return found


def share_within(rule: dict[float, float], mixture: list[np.ndarray], slack: float = 1.0) -> float:
    draw = np.random.default_rng(9)
    return float(np.mean([error_of_update(psi, rule, draw) <= LIMIT * slack for psi in mixture]))


def test_the_rule_each_holds_for_every_update_and_the_rule_of_absolute_error_does_not() -> None:
    made = calibration(60)
    each = allowances(regimes(made))
    assert each == {0.353: 1.0, 1.79: 1.0}
    absolute = {psi: (made.psi_reference / psi) ** 2 for psi in each}
    assert absolute[0.353] > 2
    assert absolute[1.79] < 0.4
    little = [np.full(ACCUMULATION, 0.353)] * 200
    much = [np.full(ACCUMULATION, 1.79)] * 200
    mixed = [np.array([0.353] * 7 + [1.79])] * 200
    # Directions are random, so that quadrature holds on average: a quarter of slack stands for the interaction factor.
    for mixture in (little, much, mixed):
        assert share_within(each, mixture, slack=1.25) > 0.9
    assert share_within(absolute, little) == 0
    assert share_within(absolute, much, slack=0.7) > 0.9  # what it gives away


def test_the_joint_rule_spends_where_it_is_cheap_and_keeps_the_contract_on_updates_like_those_seen() -> None:
    made = calibration(60)
    joint = joint_regimes(made, TIMES, accumulation=ACCUMULATION)
    assert [interval.label for interval in joint] == ["null", "low", "mid", "high"]
    found = allowances(joint)
    assert found[0.353] > 1.5 > 1 > found[1.79]
    time_of = dict(TIMES)

    def expected_ns(intervals: tuple[RegimeInterval, ...]) -> float:
        return sum(i.frequency * time_of[i.allowance] for i in intervals[1:])

    assert expected_ns(joint) < expected_ns(regimes(made)) * sum(i.frequency for i in joint)
    draw = np.random.default_rng(77)
    fresh = [exposures(draw, ACCUMULATION) for _ in range(400)]
    fresh = [psi for psi in fresh if psi.any()]
    # The same slack as above for the directions; the mixture itself is what the confidence of 0.9 is about.
    assert share_within(found, fresh, slack=1.25) > 0.88
    # And what the docstring says of updates made up otherwise:
    assert share_within(found, [np.full(ACCUMULATION, 0.353)] * 50) == 0


def test_joint_allowances_fall_with_exposure_and_intervals_touch() -> None:
    for seed in range(5):
        joint = joint_regimes(calibration(40, seed=seed), TIMES, accumulation=4)
        assert all(a.high == b.low for a, b in itertools.pairwise(joint))
        assert joint[1].allowance >= joint[2].allowance >= joint[3].allowance
        assert sum(interval.frequency for interval in joint) == pytest.approx(1)
        assert joint_regimes(calibration(40, seed=seed), TIMES, accumulation=4) == joint


def test_where_time_does_not_fall_the_joint_rule_is_the_rule_each() -> None:
    made = calibration(40)
    flat = tuple((x, 1000) for x in ALLOWANCES)
    assert joint_regimes(made, flat, accumulation=4) == regimes(made)


def test_a_trace_that_saw_no_rollouts_has_no_joint_rule() -> None:
    trace = qwen_trace(layers=2)
    with pytest.raises(HiloreError, match="the rule joint weighs exposures that calibration saw, and this trace has"):
        joint_regimes(trace.calibration, TIMES, accumulation=4)
    with pytest.raises(HiloreError, match="rule 'both': one of each, joint"):
        solve_trace(trace, budget_bytes=2**50, delta=1.0, rule="both")


def solvable(rule_samples: int = 40) -> Trace:
    trace = qwen_trace(layers=6, kept_names=("attention", "o", "gate", "up"))
    made = calibration(rule_samples)
    risks = tuple(replace(risk, kappa2=risk.kappa2 * 8) for risk in trace.calibration.risks)
    spec = trace.spec | {"batch": {"accumulation": ACCUMULATION}}
    return replace(trace, spec=spec, calibration=replace(made, risks=risks))


def test_plans_of_the_joint_rule() -> None:
    trace = solvable()
    low, high = reference_peaks(trace)
    budget = int(low + 0.35 * (high - low))
    each = solve_trace(trace, budget_bytes=budget, delta=1.0).plans
    joint = solve_trace(trace, budget_bytes=budget, delta=1.0, rule="joint").plans
    assert {plan.regime.allowance for plan in each} == {1.0}
    assert joint[1].regime.allowance > 1 > joint[3].regime.allowance
    assert joint[1].predicted.step_ns < each[1].predicted.step_ns
    for plan in joint[1:]:
        limit = plan_limit(plan)
        assert limit is not None
        assert plan.predicted.risk <= limit * (1 + 1e-9)
    assert plan_limit(joint[0]) is None
    assert joint[0].set_id != each[0].set_id
    exact = solve_trace(trace, budget_bytes=budget, delta=0.0, rule="joint").plans
    assert {plan.regime.allowance for plan in exact} == {1.0}
    with pytest.raises(HiloreError, match="infeasible"):
        solve_trace(trace, budget_bytes=low // 2, delta=1.0, rule="joint")


def test_edges_cut_what_was_seen_into_thirds() -> None:
    edges, frequencies = edges_and_frequencies([0.0, 0.0, 0.1234, 0.5, 0.9, 1.0, 1.5, 2.0])
    assert edges == (0.5, 1.0, 2.0 * HEADROOM)
    assert frequencies == (0.25, 0.25, 0.25, 0.25)
    assert edges_and_frequencies([0.12345])[0] == (0.124, 0.124, 0.247)
    with pytest.raises(HiloreError, match="every microbatch has exposure 0"):
        edges_and_frequencies([0.0, 0.0])
