"""The fit of kappa2 on simulated plans, the bound on simulated updates, sketches, order statistics."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hilore.planner.calibration_bound import ScoredPlan, bound_errors, cross_fitted, folds_of
from hilore.planner.calibration_fit import Observation, expected_model, fit, reconstruction_error
from hilore.planner.calibration_plans import LossyUnit, every_lossy_unit, lossy_units, random_plans
from hilore.planner.conformal import (
    ConfidenceError,
    consecutive_updates,
    needed_samples,
    resampled_updates,
    upper_bound,
)
from hilore.planner.sketch import Sketch, Sketcher, gram, squares_of_sums
from hilore.planner.trace import Trace
from hilore.planner.updates import Composer, MeasuredMicrobatch
from tests import models
from tests.solver_fixtures import qwen_trace

LAYERS = 12
KINDS = ("v", "attention", "o", "gate", "up")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return qwen_trace(layers=LAYERS, kept_names=KINDS, codecs=("int8-g128", "fp8-e4m3", "int4-g64"))


def truth(unit: LossyUnit) -> float:
    """Another world than the one that is expected: five times less error, another profile, other codecs' ratios."""
    level = {"v": 3.0, "attention": 1.0, "o": 0.1, "gate": 2.0, "up": 1.0}[unit.kind] * 4e-7
    codec = {"int8-g128": 1.0, "fp8-e4m3": 9.0, "int4-g64": 350.0}[unit.codec]
    return level * codec * (1 + len(unit.tainted)) * (1 + unit.place / LAYERS)


def simulated(trace: Trace, microbatches: int, each: int, noise: float, alone: int = 0) -> list[Observation]:
    draw = random.Random(5)
    expected = expected_model(LAYERS).kappa2
    found = []
    for place in range(microbatches):
        for plan in random_plans(trace, each, expected, seed=place, name="p", alone=alone):
            units = lossy_units(trace.buckets[0], plan.regions)
            squared = sum(map(truth, units)) * math.exp(draw.gauss(0, noise))
            found.append(Observation(place, units, squared))
    return found


def test_the_fit_finds_what_plans_cost(trace: Trace) -> None:
    model = fit(simulated(trace, microbatches=24, each=8, noise=0.1), LAYERS)
    others = random_plans(trace, 60, model.kappa2, seed=99, name="other")
    ratios = []
    for plan in others:
        units = lossy_units(trace.buckets[0], plan.regions)
        ratios.append(model.plan_kappa2(units) / sum(map(truth, units)))
    assert 0.9 < float(np.median(ratios)) < 1.1
    assert float(np.quantile(np.abs(np.log(ratios)), 0.9)) < 0.25
    every = every_lossy_unit(trace.buckets[0])
    assert all(model.kappa2(unit) > 0 for unit in every)
    errors = np.array([abs(math.log(model.kappa2(u) / truth(u))) for u in every if u.kind in ("gate", "up")])
    assert float(np.median(errors)) < 0.3


def test_a_kind_that_costs_little_is_seen_where_it_is_alone(trace: Trace) -> None:
    """o costs a hundredth of what gate does, and plans' errors are spread by much more than that."""
    model = fit(simulated(trace, microbatches=24, each=8, noise=0.5, alone=4), LAYERS)
    units = [unit for unit in every_lossy_unit(trace.buckets[0]) if unit.kind == "o" and not unit.tainted]
    assert sum(map(model.kappa2, units)) == pytest.approx(sum(map(truth, units)), rel=0.3)


def test_random_plans_of_one_kind(trace: Trace) -> None:
    expected = expected_model(LAYERS).kappa2
    plans = random_plans(trace, 14, expected, seed=1, name="p", alone=10)
    assert plans[:4] == random_plans(trace, 14, expected, seed=1, name="p")[:4]
    kinds = [{unit.kind for unit in lossy_units(trace.buckets[0], plan.regions)} for plan in plans[4:]]
    assert all(len(found) == 1 for found in kinds)
    assert all(sorted(next(iter(found)) for found in kinds[turn : turn + 5]) == sorted(KINDS) for turn in (0, 5))


def test_the_fit_is_the_same_every_time_and_nothing_measured_is_what_is_expected(trace: Trace) -> None:
    observations = simulated(trace, microbatches=4, each=6, noise=0.1)
    unit = every_lossy_unit(trace.buckets[0])[7]
    assert fit(observations, LAYERS).kappa2(unit) == fit(observations, LAYERS).kappa2(unit)
    assert fit([], LAYERS).kappa2(unit) == expected_model(LAYERS).kappa2(unit)


def test_codecs_are_expected_to_compare_as_on_gaussian_values() -> None:
    assert 10 < reconstruction_error("int4-g64") / reconstruction_error("int8-g64") < 25
    assert reconstruction_error("int8-g64") < reconstruction_error("int8-g128") < reconstruction_error("fp8-e4m3")


def test_random_plans(trace: Trace) -> None:
    expected = expected_model(LAYERS).kappa2
    plans = random_plans(trace, 30, expected, seed=1, name="p")
    assert plans == random_plans(trace, 30, expected, seed=1, name="p")
    assert plans != random_plans(trace, 30, expected, seed=2, name="p")
    codecs = set()
    for plan in plans:
        units = lossy_units(trace.buckets[0], plan.regions)
        assert units
        error = math.sqrt(sum(map(expected, units))) / trace.calibration.delta_star
        assert error < 4.01 or len(units) == 1
        least = {codec: min(expected(u) for u in units if u.codec == codec) for codec in {u.codec for u in units}}
        assert max(least.values()) / min(least.values()) < 100
        codecs |= set(least)
    assert codecs == {"int8-g128", "fp8-e4m3", "int4-g64"}
    assert random_plans(qwen_trace(layers=2, codecs=()), 3, expected, seed=0, name="p") == ()


def test_every_lossy_unit_is_what_plans_can_have(trace: Trace) -> None:
    known = set(every_lossy_unit(trace.buckets[0]))
    plans = random_plans(trace, 40, expected_model(LAYERS).kappa2, seed=3, name="p")
    assert all(unit in known for plan in plans for unit in lossy_units(trace.buckets[0], plan.regions))
    assert {unit.kind for unit in known} == set(KINDS)


def sketches(vectors: Sequence[np.ndarray]) -> list[Sketch]:
    """Exact ones: a single group whose sums are the vector itself."""
    return [Sketch(np.array([float((v**2).sum())]), v[None, :].astype(np.float32)) for v in vectors]


def test_updates_are_composed_as_they_add_up() -> None:
    draw = np.random.default_rng(0)
    gradients = draw.normal(size=(6, 40)).astype(np.float32)
    errors = 0.01 * draw.normal(size=(6, 2, 40)).astype(np.float32)
    tokens = [10, 20, 30, 40, 50, 60]
    measured = [
        MeasuredMicrobatch(1.0, tokens[i], sketches([gradients[i]])[0], tuple(sketches(errors[i]))) for i in range(6)
    ]
    picks, plans = np.array([[0, 1, 5], [2, 3, 4]]), np.array([[0, 0, 1], [1, 0, 1]])
    for kind in ("grpo", "dapo"):
        found = Composer(measured, kind).squared_errors(picks, plans)
        for row in range(2):
            share = np.array([tokens[i] for i in picks[row]], dtype=float)
            weight = 3 * share / share.sum() if kind == "dapo" else np.ones(3)
            g = sum(w * gradients[i] for w, i in zip(weight, picks[row], strict=True))
            e = sum(w * errors[i, p] for w, i, p in zip(weight, picks[row], plans[row], strict=True))
            assert found[row] == pytest.approx(float((e**2).sum() / (g**2).sum()), rel=1e-5)
        shares = Composer(measured, kind).shares(picks)
        assert shares.sum(axis=1) == pytest.approx([1, 1])


def test_microbatches_without_a_gradient_add_nothing() -> None:
    nothing = Sketch(np.zeros(1), np.zeros((1, 4), dtype=np.float32))
    some = sketches([np.array([1.0, 0, 0, 0]), np.array([0.1, 0, 0, 0])])
    measured = [MeasuredMicrobatch(0.0, 5, nothing, (nothing,)), MeasuredMicrobatch(1.0, 5, some[0], (some[1],))]
    found = Composer(measured, "grpo").squared_errors(np.array([[0, 1], [0, 0]]), np.zeros((2, 2), dtype=np.int64))
    assert found == pytest.approx([0.01, 0.0])


def test_sketches_keep_norms_exactly_and_inner_products_nearly() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    sketcher = Sketcher(model, ["model.layers.0", "model.layers.1"], width=512)
    draw = torch.Generator().manual_seed(0)
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    one, other = ([torch.randn(shape, generator=draw) for shape in shapes] for _ in range(2))
    both = [a + 2 * b for a, b in zip(one, other, strict=True)]
    made = [sketcher.sketch(vector) for vector in (one, other)]
    assert made[0].squares.sum() == pytest.approx(sum(float(a.double().square().sum()) for a in one), rel=1e-12)
    assert made[0].squares[2] == 0  # no adapter outside of layers
    exact = sum(float(v.double().square().sum()) for v in both)
    composed = squares_of_sums(gram(made), np.array([[0, 1]]), np.array([[1.0, 2.0]])).sum()
    assert composed == pytest.approx(exact, rel=0.1)
    assert np.array_equal(sketcher.sketch(one).sums, made[0].sums)


@pytest.mark.parametrize(("confidence", "needed"), [(0.5, 1), (0.9, 9), (0.95, 19), (0.99, 99)])
def test_a_confidence_needs_so_many_samples(confidence: float, needed: int) -> None:
    assert needed_samples(confidence) == needed
    scores = np.arange(1.0, needed + 1)
    assert upper_bound(scores, needed, confidence) == needed
    if needed > 1:
        text = rf"{needed - 1} samples carry a confidence of at most {needed - 1}/{needed}, not {confidence}; it needs"
        with pytest.raises(ConfidenceError, match=text) as caught:
            upper_bound(scores, needed - 1, confidence)
        assert (caught.value.needed, caught.value.exit_code) == (needed, 2)


def test_resampled_scores_are_taken_at_the_level_that_their_samples_carry() -> None:
    scores = np.arange(1.0, 1001.0)
    # 0.95 of 33 / 32, not the next whole one of 32 ranks, which is the largest score.
    assert upper_bound(scores, 32, 0.95) == 980
    assert upper_bound(scores, 19, 0.95) == 1000
    assert upper_bound(np.arange(1.0, 33.0), 32, 0.95) == 32


def test_split_conformal_covers() -> None:
    draw = np.random.default_rng(1)
    covered = sum(draw.normal() <= upper_bound(draw.normal(size=24), 24, 0.9) for _ in range(4000))
    assert 0.89 < covered / 4000 < 0.94


def test_resampled_updates_are_of_distinct_microbatches_and_differ() -> None:
    picks = resampled_updates(10, 8, updates=50)
    assert picks.shape == (50, 5)
    assert all(len(set(row)) == 5 for row in picks.tolist())
    assert len({tuple(sorted(row)) for row in picks.tolist()}) > 10
    assert resampled_updates(1, 4, updates=3).tolist() == [[0], [0], [0]]
    assert np.array_equal(resampled_updates(10, 3), resampled_updates(10, 3))
    assert consecutive_updates(5, 2).tolist() == [[0, 1], [1, 2], [2, 3], [3, 4], [4, 0]]
    assert consecutive_updates(6, 8).shape == (6, 3)


def test_the_bound_holds_for_new_updates_and_is_no_wider_than_it_must(trace: Trace) -> None:
    """Simulated microbatches whose errors lie anywhere about the predicted ones; new updates of new ones."""
    observations = simulated(trace, microbatches=24, each=7, noise=0.3)
    plans = [
        lossy_units(trace.buckets[0], plan.regions)
        for plan in random_plans(trace, 2, expected_model(LAYERS).kappa2, seed=77, name="s")
    ]
    draw = np.random.default_rng(3)

    def microbatch() -> MeasuredMicrobatch:
        gradient = draw.normal(size=200) * draw.choice([0.3, 1.0, 2.0])
        errors = []
        for units in plans:
            direction = draw.normal(size=200)
            size = math.sqrt(sum(map(truth, units)) * math.exp(draw.normal(0, 0.3)))
            errors.append(size * np.linalg.norm(gradient) * direction / np.linalg.norm(direction))
        return MeasuredMicrobatch(1.0, 10, sketches([gradient])[0], tuple(sketches(errors)))

    folds = folds_of(range(24))
    models_ = cross_fitted(observations, LAYERS, folds)
    scored = [ScoredPlan(row, units) for row, units in enumerate(plans)]
    options = {"loss_kind": "grpo", "accumulation": 4, "confidence": 0.95}
    bound = bound_errors([microbatch() for _ in range(24)], scored, models_, folds, **options)  # type: ignore[arg-type]
    assert 0.8 < bound.mean < 1.25
    assert bound.mean < bound.interaction < 1.6
    fresh = [microbatch() for _ in range(400)]
    model = fit(observations, LAYERS)
    picks = np.arange(400).reshape(100, 4)
    for row, units in enumerate(plans):
        errors = np.sqrt(Composer(fresh, "grpo").squared_errors(picks, np.full(picks.shape, row)))
        limit = bound.interaction * math.sqrt(model.plan_kappa2(units))
        assert float((errors <= limit).mean()) >= 0.93
        assert float(np.median(errors)) > 0.5 * limit
