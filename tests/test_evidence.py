"""Coverage and rankings against known values; held-out updates and single regions against gradients taken by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hilore.planner.actor import Actor, build_actor, policy_loss
from hilore.planner.calibration_plans import lossy_units
from hilore.planner.calibration_sources import recorded
from hilore.planner.calibration_state import CalibrationState
from hilore.planner.evidence import average_ranks, clopper_pearson_lower, coverage, ranking
from hilore.planner.evidence_view import (
    candidates_table,
    evidence_json,
    limits_table,
    rankings_table,
    regimes_table,
)
from hilore.planner.exposure_features import exposure_features, token_pulls
from hilore.planner.gradient_error import Instrument, backward
from hilore.planner.head import policy_logps
from hilore.planner.heldout import (
    Candidate,
    HeldOut,
    all_spearman,
    evidence,
    expected_by,
    measure_held_out,
    plan_candidates,
    random_candidates,
)
from hilore.planner.heldout_audit import audited
from hilore.planner.heldout_native import measure_native, native_errors
from hilore.planner.heldout_regimes import regime_rows
from hilore.planner.microbatch import Microbatch
from hilore.planner.region_errors import AT_REPLAY, FULL, measure_regions, rankings, region_plan, scores
from hilore.planner.region_watch import REPLAY, watched_units
from hilore.planner.rollouts import write_rollouts
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Trace
from hilore.planner.updates import Composer
from hilore.runtime.audit import LEAST_AUDITS
from hilore.runtime.codecs import get_codec
from hilore.runtime.exposure import token_coefficients
from hilore.runtime.naming import canonical_modules
from hilore.runtime.plan import Regime
from tests.calibration_fixtures import rollouts, tiny_calibrated

CODEC = "int4-g64"


def silent(_label: str, _done: int, _total: int) -> None:
    pass


@pytest.mark.parametrize(
    ("successes", "trials", "lower"),
    [(60, 60, 0.05 ** (1 / 60)), (0, 10, 0.0), (1, 1, 0.05), (9, 10, 0.60584)],
)
def test_lower_limits_of_clopper_and_pearson(successes: int, trials: int, lower: float) -> None:
    assert clopper_pearson_lower(successes, trials) == pytest.approx(lower, abs=2e-5)


def test_the_lower_limit_makes_what_was_seen_just_unlikely() -> None:
    lower = clopper_pearson_lower(57, 60)
    tail = sum(math.comb(60, k) * lower**k * (1 - lower) ** (60 - k) for k in range(57, 61))
    assert tail == pytest.approx(0.05)


def test_coverage_counts_what_is_within() -> None:
    found = coverage(np.array([0.0, 0.5, 1.0, 1.5]), 1.0)
    assert (found.updates, found.within, found.share, found.median_ratio, found.largest_ratio) == (
        4,
        3,
        0.75,
        0.75,
        1.5,
    )
    assert coverage(np.array([0.0, 0.1]), 0.0).within == 1
    assert coverage(np.array([1.0, 2.0]), np.array([0.5, 4.0])).within == 1


def test_rankings() -> None:
    measured = np.arange(20.0)
    assert asdict(ranking(measured**3, measured)) == pytest.approx({"spearman": 1, "recall": 1, "auroc": 1})
    assert asdict(ranking(-measured, measured)) == pytest.approx({"spearman": -1, "recall": 0, "auroc": 0})
    assert asdict(ranking(np.ones(20), measured)) == pytest.approx({"spearman": 0, "recall": 0.1, "auroc": 0.5})
    # Of the two largest (18, 19) one is in the top two of the score; 18 of 18 others lie below it, 15 below the other.
    score = measured.copy()
    score[18] = 15.5
    found = ranking(score, measured)
    assert (found.recall, found.auroc) == (0.5, pytest.approx((18 + 16) / 36))
    assert average_ranks(np.array([3.0, 1.0, 3.0])).tolist() == [2.5, 1.0, 2.5]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return tiny_calibrated().spec


@pytest.fixture(scope="module")
def trace() -> Trace:
    return tiny_calibrated().calibrated


@pytest.fixture(scope="module")
def batches(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> tuple[Microbatch, ...]:
    path: Path = tmp_path_factory.mktemp("held-out") / "held-out.jsonl"
    write_rollouts(path, rollouts(groups=6, seed=5))
    actor = build_actor(spec)
    return recorded(actor, path).microbatches


@pytest.fixture
def instrument(spec: ModelSpec, trace: Trace) -> Iterator[Instrument]:
    actor = build_actor(spec, live_adapters=True)
    with Instrument(actor, [region.name for region in trace.buckets[-1].regions]) as made:
        yield made


def candidates(trace: Trace) -> list[Candidate]:
    plan = region_plan(trace, "model.layers.1", CODEC)
    low = replace(plan, regime=Regime("low", 0.0, 0.6, 1.0), delta=2.0)
    high = replace(region_plan(trace, "model.layers.0", CODEC), regime=Regime("high", 0.6, 100.0, 1.0), delta=2.0)
    return [plan_candidates([high, low], "by exposure"), *random_candidates(trace, 2, seed=3)]


def held_out(instrument: Instrument, trace: Trace, batches: tuple[Microbatch, ...], store: CalibrationState) -> HeldOut:
    return measure_held_out(instrument, trace, batches, candidates(trace), store, silent)


def test_held_out_updates_are_those_of_gradients_added_up(
    instrument: Instrument, trace: Trace, batches: tuple[Microbatch, ...], tmp_path: Path
) -> None:
    store = CalibrationState(tmp_path / "state", {"a": 1})
    found = held_out(instrument, trace, batches, store)
    store.close()
    psi = [one.psi for one in found.measured]
    assert [one[0] for one in found.regimes] == ["low" if p <= 0.6 else "high" for p in psi]
    assert {one[0] for one in found.regimes} == {"low", "high"}
    everywhere = np.arange(len(batches))[None, :]
    # The whole file as one update, by hand.
    exact = [instrument.exact(batch).gradients for batch in batches]
    rule = found.candidates[0]
    under = [
        instrument.under(batch, plan).gradients if p and plan is not None else mine
        for batch, p, mine in zip(batches, psi, exact, strict=True)
        for plan in (rule.plan_for(p),)
    ]
    gradient = [sum(parts) for parts in zip(*exact, strict=True)]
    error = [sum(parts) - whole for parts, whole in zip(zip(*under, strict=True), gradient, strict=True)]
    by_hand = math.sqrt(sum(float(e.square().sum()) for e in error) / sum(float(g.square().sum()) for g in gradient))
    composed = Composer(found.measured, "grpo").squared_errors(everywhere, np.zeros_like(everywhere))
    assert math.sqrt(composed[0]) == pytest.approx(by_hand, rel=0.1)
    # And once more from the file: nothing is run again.
    passes = instrument.passes
    again = held_out(instrument, trace, batches, CalibrationState(tmp_path / "state", {"a": 1}))
    assert instrument.passes == passes
    assert np.array_equal(again.quadrature2, found.quadrature2)
    assert [one.gradient.square for one in again.measured] == [one.gradient.square for one in found.measured]


def test_evidence_of_held_out_updates(
    instrument: Instrument, trace: Trace, batches: tuple[Microbatch, ...], spec: ModelSpec
) -> None:
    found = held_out(instrument, trace, batches, CalibrationState(None, {}))
    rows = evidence(found, trace, accumulation=2, updates=60)
    assert [row.name for row in rows] == ["by exposure", "random plan 1", "random plan 2"]
    assert (rows[0].limit, rows[1].limit) == (0.02, None)
    for row in rows:
        assert 0 < row.measured <= row.worst_region
        assert row.predicted > 0
        assert 0.2 < row.over_quadrature < 5
        assert row.over_linear <= row.over_quadrature * 1.01
        assert 40 < row.coverage.updates <= 60
    assert rows[1].coverage == rows[1].bound_coverage
    spearman = all_spearman(found, trace, accumulation=2, updates=60)
    assert -1 <= spearman <= 1
    regimes = regime_rows(found, 0)
    assert [row.kind for row in regimes[:2]] == ["low |A|", "high |A|"]
    assert sum(row.microbatches for row in regimes[:2]) == sum(one.psi > 0 for one in found.measured)
    assert all(row.lossy > 0 and row.drift > 0 for row in regimes)
    assert candidates_table(rows, "t").row_count == 3
    assert regimes_table(regimes, "t").row_count == len(regimes)
    assert evidence_json(rows, {"a": regimes}, spearman)["plans"][0]["coverage"]["updates"] == rows[0].coverage.updates
    native = measure_native(instrument, batches[2:6], found.candidates[:2], CalibrationState(None, {}), silent)
    errors = native_errors(native, spec.loss.kind, accumulation=2, updates=20)
    assert len(errors) == 2
    assert 0 < errors[0].control < 1e-4 < errors[0].plans  # this actor's own dtype is float32


def test_certainty_comes_from_microbatches_not_from_updates_composed(
    instrument: Instrument, trace: Trace, batches: tuple[Microbatch, ...]
) -> None:
    found = held_out(instrument, trace, batches, CalibrationState(None, {}))
    exposed = sum(one.psi > 0 for one in found.measured)
    row = evidence(found, trace, accumulation=2, updates=60)[0]
    assert (row.alone.updates, row.disjoint.updates) == (exposed, exposed // 2)
    single = [one.squared_error(0) for one in found.measured if one.psi > 0]
    assert row.alone.within == sum(error <= 0.02**2 for error in single)
    # An update of microbatches of which each is within the limit is within it: the worst of them bounds it.
    assert row.coverage.largest_ratio <= row.alone.largest_ratio * 1.05
    assert limits_table([row], "t").row_count == 1


def test_the_audit_of_the_runtime_raises_its_alarm_where_a_limit_is_not_kept(
    instrument: Instrument, trace: Trace, batches: tuple[Microbatch, ...]
) -> None:
    found = held_out(instrument, trace, batches, CalibrationState(None, {}))
    exposed = sum(one.psi > 0 for one in found.measured)
    kept = audited(found.measured, 0, [1.0] * len(found.measured))
    broken = audited(found.measured, 0, [kept.error / 2] * len(found.measured))
    assert (kept.audits, kept.alarm_after) == (exposed, None)
    assert (broken.alarm_after, broken.error) == (LEAST_AUDITS, kept.error)
    pooled = sum(one.errors[0].square for one in found.measured) / sum(one.gradient.square for one in found.measured)
    assert kept.error == pytest.approx(math.sqrt(pooled))


def test_what_calibration_expects_of_a_unit(trace: Trace) -> None:
    expected = expected_by(trace)
    plan = region_plan(trace, "model.layers.1", CODEC)
    units = lossy_units(trace.buckets[-1], plan.regions)
    assert len(units) > 1
    known = {(r.region, r.unit, r.codec, r.tainted): r.kappa2 for r in trace.calibration.risks}
    for unit in units:
        assert expected(unit) == known["model.layers.1", unit.unit, CODEC, unit.tainted]


def test_single_regions_and_their_scores(
    instrument: Instrument, trace: Trace, batches: tuple[Microbatch, ...], tmp_path: Path
) -> None:
    exposed = [batch for batch in batches if bool(batch.advantages.any())]
    store = CalibrationState(tmp_path / "state", {})
    found = measure_regions(instrument, trace, exposed, CODEC, store, silent)
    assert found.absolute.shape == found.encoded.shape == (len(exposed), 2)
    exact = instrument.exact(exposed[1])
    under = instrument.under(exposed[1], region_plan(trace, "model.layers.0", CODEC))
    by_hand = math.sqrt(sum(float(part.double().square().sum()) for part in under.distance(exact)))
    assert found.absolute[1, 0] == pytest.approx(by_hand, rel=1e-6)
    # int4 on Gaussian-like values: about a tenth per unit.
    units = len(lossy_units(trace.buckets[-1], region_plan(trace, "model.layers.0", CODEC).regions))
    assert (found.encoded > 0.05 * math.sqrt(units)).all()
    assert (found.encoded < 0.4 * math.sqrt(units)).all()
    made = scores(found, trace)
    assert all(score.shape == found.absolute.shape and np.isfinite(score).all() for score in made.values())
    assert np.array_equal(made["without KL"], made[FULL])  # this loss has none
    by_name = rankings(found, trace)
    assert by_name[FULL].spearman > 0.5
    assert rankings_table({CODEC: by_name}, "t").row_count == len(by_name)
    passes = instrument.passes
    measure_regions(instrument, trace, exposed, CODEC, store, silent)
    last = measure_regions(instrument, trace, exposed, CODEC, store, silent, every=2)
    assert instrument.passes == passes
    assert last.places == (1,)
    assert np.array_equal(last.absolute, found.absolute[:, 1:])
    assert all(score.shape == last.absolute.shape for score in scores(last, trace).values())


def test_pairs_of_microbatches_without_a_gradient(
    instrument: Instrument, trace: Trace, batches: tuple[Microbatch, ...]
) -> None:
    """Their errors are 0 without a run, and a score that knows the exposure knows that; one of the region does not."""
    exposed = [batch for batch in batches if bool(batch.advantages.any())]
    nulls = [batch for batch in batches if not bool(batch.advantages.any())]
    assert nulls
    passes = instrument.passes
    found = measure_regions(instrument, trace, [*exposed, *nulls], CODEC, CalibrationState(None, {}), silent)
    assert instrument.passes - passes == 3 * len(exposed) + len(nulls)
    assert (found.absolute[: len(exposed)] > 0).all()
    assert not found.absolute[len(exposed) :].any()
    assert not found.gradient2[len(exposed) :].any()
    # The run that was left out would have said the same.
    under = instrument.under(nulls[0], region_plan(trace, "model.layers.0", CODEC))
    assert not any(bool(part.any()) for part in under.distance(instrument.exact(nulls[0])))
    made = scores(found, trace)
    assert not made[FULL][len(exposed) :].any()
    assert made["GACT-style sensitivity"][len(exposed) :].all()
    alone = measure_regions(instrument, trace, exposed, CODEC, CalibrationState(None, {}), silent)
    assert rankings(found, trace, exposed=True) == rankings(alone, trace)
    assert rankings(found, trace)[FULL].spearman > rankings(alone, trace)[FULL].spearman


def test_watching_units_changes_nothing(instrument: Instrument, trace: Trace, batches: tuple[Microbatch, ...]) -> None:
    plain = instrument.exact(batches[3])
    with watched_units(instrument.actor.model, trace, CODEC):
        watched = instrument.exact(batches[3])
    assert all(torch.equal(a, b) for a, b in zip(plain.gradients, watched.gradients, strict=True))


def into_the_regions(actor: Actor, batch: Microbatch, region: str = "model.layers.1") -> torch.Tensor:
    """The loss's gradient by what a region gives, [B, T, d], by autograd."""
    seen: list[torch.Tensor] = []

    def watch(_module: object, _arguments: object, output: torch.Tensor) -> None:
        output.register_hook(seen.append)

    handle = canonical_modules(actor.model)[region].register_forward_hook(watch)
    policy_loss(actor, batch).backward()  # type: ignore[no-untyped-call]
    handle.remove()
    actor.model.zero_grad(set_to_none=True)
    return seen[0].double()


def test_couplings_are_sums_over_tokens(
    instrument: Instrument, trace: Trace, batches: tuple[Microbatch, ...], spec: ModelSpec
) -> None:
    batch = next(batch for batch in batches if bool(batch.advantages.any()))
    outputs: dict[str, torch.Tensor] = {}
    module = canonical_modules(instrument.actor.model)["model.layers.0.mlp.up_proj"]
    with watched_units(instrument.actor.model, trace, CODEC) as watch:
        handle = module.register_forward_hook(lambda _module, _args, output: outputs.update(up=output.detach()))
        exact = instrument.exact(batch)
        handle.remove()
    pulls = token_pulls(spec.loss, batch, exact.logps, instrument.leverage(batch))
    found = watch.coupled(batch, pulls)
    assert set(found) == {*pulls, REPLAY}
    codec = get_codec(CODEC)
    errors = (codec.decode(codec.encode(outputs["up"])) - outputs["up"]).double().square().sum(-1)
    columns = batch.completion_mask.shape[1]
    by_hand = float((pulls["full"].square() * errors[:, -columns - 1 : -1]).sum())
    assert found["full"]["model.layers.0"]["mlp.up_proj"] == pytest.approx(by_hand, rel=1e-6)
    for region in ("model.layers.0", "model.layers.1"):
        assert set(found["full"][region]) == set(found[REPLAY][region]) == {unit for _, unit, _ in watch.units()}
    own = into_the_regions(instrument.actor, batch, "model.layers.0").square().sum(-1)
    assert found[REPLAY]["model.layers.0"]["mlp.up_proj"] == pytest.approx(float((own * errors).sum()), rel=1e-4)


def test_references_say_what_coupling_is_usual(
    instrument: Instrument, trace: Trace, batches: tuple[Microbatch, ...]
) -> None:
    exposed = [batch for batch in batches if bool(batch.advantages.any())]
    found = measure_regions(instrument, trace, exposed, CODEC, CalibrationState(None, {}), silent, references=3)
    assert np.isfinite(found.absolute).all()
    expected = expected_by(trace)
    units = [lossy_units(trace.buckets[-1], region_plan(trace, f"model.layers.{n}", CODEC).regions) for n in (0, 1)]
    for name in (FULL, AT_REPLAY, "without the head's leverage"):
        relative2 = scores(found, trace)[name][:3] ** 2 / found.gradient2[:3, None]
        assert relative2.mean(0) == pytest.approx([sum(map(expected, each)) for each in units])
    for name in ("susceptibility measured", f"{AT_REPLAY}, susceptibility measured"):
        score2 = scores(found, trace)[name][:3] ** 2
        assert score2.sum(0) == pytest.approx((found.absolute[:3] ** 2).sum(0))
    assert all(math.isfinite(one.spearman) for one in rankings(found, trace).values())


def test_features_of_a_later_inner_epoch(spec: ModelSpec, batches: tuple[Microbatch, ...]) -> None:
    actor = build_actor(spec, live_adapters=True)
    batch = next(batch for batch in batches if bool(batch.advantages.any()))
    with torch.no_grad():
        logps = policy_logps(actor.model, batch, "naive")
    regions = ["model.layers.0", "model.layers.1"]
    with Instrument(actor, regions) as instrument:
        pull = instrument.leverage(batch)
    by_trl = replace(actor, spec=replace(spec, loss=replace(spec.loss, head="trl")))
    assert torch.equal(Instrument(by_trl, regions).leverage(batch), pull)
    assert exposure_features(spec.loss, batch, logps).clipped == 0
    fresh = token_pulls(spec.loss, batch, logps, pull)
    assert torch.allclose(fresh["full"], fresh["without_ratio"])
    later = replace(batch, old_logps=logps - torch.linspace(-0.5, 0.5, logps.shape[1]))
    found = exposure_features(spec.loss, later, logps)
    assert 0 < found.clipped < 1
    moved = token_pulls(spec.loss, later, logps, pull)
    assert torch.equal(moved["without_ratio"], fresh["without_ratio"])
    assert not torch.equal(moved["full"], fresh["full"])
    omega = token_coefficients("grpo", batch.advantages, batch.completion_mask, logps, later.old_logps)
    assert torch.equal(moved["without_leverage"], omega)
    assert torch.allclose(moved["by_probability"].float(), omega * (1 - logps.exp()), rtol=1e-4, atol=1e-9)
    assert float(moved["full"].norm()) == pytest.approx(
        float(into_the_regions(actor, later).norm()) * spec.batch.accumulation, rel=1e-4
    )
    # The instrument's own gradient is that of the loss of training.
    exact = backward(actor, later, seed=0)
    actor.model.zero_grad(set_to_none=True)
    policy_loss(actor, later).backward()  # type: ignore[no-untyped-call]
    grads = [parameter.grad for parameter in actor.model.parameters() if parameter.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(exact.gradients, grads, strict=True) if b is not None)
    assert exact.exposure == found.psi
    assert 0 < exact.log_move < 0.5
