"""Configurations against their rules: liveness, bytes, time, and that nothing better is left out."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from hilore.planner.build import UNLIMITED_RISK, build_problem, build_regions, risk_limit
from hilore.planner.configure import configurations, replayed_units
from hilore.planner.modecost import region_cost
from hilore.planner.pareto import needed_backward_bytes, pareto_indices
from hilore.planner.problem import RISK_SCALE, Configuration
from hilore.planner.trace import CodecCost, KeepSet, RegionClass, UnitRisk, UnitTrace
from hilore.runtime.errors import HiloreError
from tests.solver_fixtures import (
    assignments,
    configuration,
    qwen_class,
    qwen_trace,
    random_class,
    region_plan,
    unit,
)

CODEC = CodecCost("int8-g128", 5, 3, 2, 0)


def tiny_class(*, split: bool = False) -> RegionClass:
    """a -> b -> (glue saves it) ; c reads b and ends the region: c is dead."""
    units = (
        unit("a", "q", 100, 10, ["b"]),
        unit("b", "gate", 50, 20, ["c"], feeds_saved=True, rest_bytes=1, codecs=[CODEC]),
        unit("c", "down", 70, 30),
    )
    sets = [
        KeepSet((), 7, 60, 40),
        KeepSet(("a",), 17, 62, 35),
        KeepSet(("b",), 28, 63, 22),
        KeepSet(("a", "b"), 38, 65, 20),
    ]
    if split:
        sets += [KeepSet(k.kept, k.retained_bytes, k.forward_bytes, k.backward_bytes - 9, split=True) for k in sets]
    return RegionClass(
        name="tiny",
        units=units,
        keep_sets=tuple(sets),
        hold=KeepSet(("a", "b", "c"), 90, 95, 12),
        gc=KeepSet((), 7, 60, 48),
        forward_ns=300,
        backward_ns=500,
        replay_fixed_ns=11,
        gc_replay_ns=240,
        gradient_bytes=0,
        split_at="b" if split else "",
        early_fixed_ns=4 if split else 0,
    )


def modes(found: Configuration) -> str:
    return "hold" if found.hold else "".join(u.mode for u in found.units) + ("/" if found.split_at else "")


def by_modes(found: tuple[Configuration, ...]) -> dict[str, Configuration]:
    assert len({modes(c) for c in found}) == len(found)
    return {modes(c): c for c in found}


def test_bytes_time_and_dead_calls_of_each_configuration() -> None:
    found = by_modes(configurations(tiny_class(), lossy=True))
    assert list(found) == ["RRR", "hold", "HRR", "RHR", "RLR", "HHR", "HLR"]
    nothing, kept, encoded, hold = found["RRR"], found["RHR"], found["RLR"], found["hold"]
    assert [(u.dead, u.dead_if_demoted) for u in nothing.units] == [(False, False), (False, False), (True, True)]
    assert (nothing.retained_bytes, nothing.forward_bytes, nothing.backward_bytes) == (7, 60, 40)
    assert nothing.extra_ns == nothing.demoted_extra_ns == 11 + 100 + 50
    assert [u.dead for u in kept.units] == [True, False, True]
    assert (kept.retained_bytes, kept.forward_bytes, kept.backward_bytes) == (28, 63, 22)
    assert kept.extra_ns == 11
    assert [(u.dead, u.dead_if_demoted) for u in encoded.units] == [(True, False), (False, False), (True, True)]
    assert encoded.units[1].codec == "int8-g128"
    assert (encoded.retained_bytes, encoded.forward_bytes) == (28 - 20 + 5, 63 + 5)
    assert encoded.backward_bytes == 22 + 20
    # Demoted: the all-R replay's 7 + 40 bytes, with payload 5 and rest 1 beside them.
    assert encoded.retained_bytes + encoded.demoted_backward_bytes == 7 + 40 + 5 + 1
    assert (encoded.extra_ns, encoded.demoted_extra_ns) == (11 + 3 + 2, 11 + 150 + 3)
    assert (encoded.lossy_units, nothing.lossy_units) == (1, 0)
    assert (hold.retained_bytes, hold.forward_bytes, hold.backward_bytes, hold.extra_ns) == (90, 95, 12, 0)
    assert [u.mode for u in hold.units] == ["H", "H", "H"]


def test_a_split_replay_runs_what_its_late_stage_needs_and_then_the_early_part() -> None:
    found = by_modes(configurations(tiny_class(split=True), lossy=True))
    whole, split = found["RRR"], found["RRR/"]
    # Late stage: b is saved after the split and needs a; the early stage runs a again for nobody: it is not dead.
    assert split.extra_ns == whole.extra_ns + 4 + 100
    assert (split.split_at, whole.split_at) == ("b", "")
    assert split.backward_bytes == whole.backward_bytes - 9
    assert [u.dead_late for u in split.units] == [False, False, False]
    kept = found["RHR/"]
    assert [u.dead_late for u in kept.units] == [True, False, False]
    assert kept.extra_ns == 11 + 4
    encoded = found["RLR/"]
    assert [u.dead_late for u in encoded.units] == [True, False, False]
    assert [u.dead_late_if_demoted for u in encoded.units] == [False, False, False]
    assert encoded.extra_ns == 11 + 4 + 3 + 2


def test_an_early_lossy_unit_is_decoded_in_both_stages() -> None:
    one = tiny_class(split=True)
    units = (unit("a", "v", 100, 10, ["b"], codecs=[CODEC], feeds_saved=True), *one.units[1:])
    found = by_modes(configurations(replace(one, units=units), lossy=True))
    assert found["LHR"].extra_ns == 11 + 3 + 2
    assert found["LHR/"].extra_ns == 11 + 4 + 3 + 2 * 2


def test_qwen_all_r_leaves_down_out_and_attention_pins_q_k_v() -> None:
    layer = qwen_class()
    names = [u.name for u in layer.units]
    assert set(names) - replayed_units(layer.units, ()) == {"mlp.down_proj"}
    kept = {"self_attn:attention"}
    assert replayed_units(layer.units, kept) == set(names) - kept - {"mlp.down_proj"}
    frozen = [replace(u, saves_inputs=False) if u.kind == "attention" else u for u in layer.units]
    assert replayed_units(tuple(frozen), kept) == {"self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"}


def test_lossless_only_and_codecs_by_pair() -> None:
    layer = qwen_class(codecs=("int8-g128", "int4-g64"))
    assert all(c.lossy_units == 0 for c in configurations(layer, lossy=False))
    pairs = {("mlp.gate_proj", "int4-g64")}
    used = {
        (u.name, u.codec) for c in configurations(layer, lossy=True, codecs=pairs) for u in c.units if u.mode == "L"
    }
    assert used == pairs


def test_q_and_k_are_never_lossy_whatever_the_trace_offers() -> None:
    layer = qwen_class(kept_names=("q", "k", "v"))
    units = tuple(replace(u, codecs=(CodecCost("int8-g128", 1, 0, 0, 0),)) for u in layer.units)
    used = {u.name for c in configurations(replace(layer, units=units), lossy=True) for u in c.units if u.mode == "L"}
    assert used == {"self_attn.v_proj"}


def test_units_that_cannot_be_kept_are_r_outside_of_held_regions() -> None:
    layer = qwen_class(kept_names=("attention", "gate"))
    units = tuple(replace(u, keepable=u.kind in ("attention", "gate")) for u in layer.units)
    for found in configurations(replace(layer, units=units), lossy=True):
        if not found.hold:
            assert {u.name for u in found.units if u.mode != "R"} <= {"self_attn:attention", "mlp.gate_proj"}


def test_layer_granularity_is_hold_all_r_and_one_codec_at_a_time() -> None:
    layer = qwen_class(codecs=("int8-g128", "int4-g64"), split=True)
    found = configurations(layer, lossy=True, granularity="layer")
    assert [modes(c) for c in found] == ["RRRRRRRR", "hold", "HHLLLLLR", "HHLLLLLR"]
    assert [{u.codec for u in c.units} - {None} for c in found[2:]] == [{"int8-g128"}, {"int4-g64"}]
    assert [modes(c) for c in configurations(layer, lossy=False, granularity="layer")] == ["RRRRRRRR", "hold"]


@pytest.mark.parametrize("seed", range(80))
def test_pruning_drops_only_what_another_one_beats(seed: int) -> None:
    region_class = random_class(seed, split=seed % 2 == 1)
    kept = configurations(region_class, lossy=True)

    def key(c: Configuration) -> tuple[int, ...]:
        return c.retained_bytes, c.forward_bytes, needed_backward_bytes(c), c.extra_ns

    def lossy(c: Configuration) -> set[tuple[str, str | None]]:
        return {(u.name, u.codec) for u in c.units if u.mode == "L"}

    for modes, split in assignments(region_class):
        cost = region_cost(region_plan(region_class, modes, split=split), region_class, 0)
        needs = (
            cost.retained_bytes,
            cost.forward_bytes,
            max(cost.backward_bytes, cost.demoted_backward_bytes),
            cost.extra_ns,
        )
        encoded = {(name, mode) for name, mode in modes.items() if mode not in ("H", "R")}
        assert any(all(x <= y for x, y in zip(key(c), needs, strict=True)) and lossy(c) <= encoded for c in kept)
    for a, b in itertools.permutations(kept[1:], 2):
        assert not (all(x <= y for x, y in zip(key(a), key(b), strict=True)) and lossy(a) <= lossy(b))


def test_pareto_blocks_agree_with_the_plain_rule() -> None:
    rng = random.Random(5)
    pool = tuple(
        configuration(retained=rng.randint(0, 30), backward=rng.randint(0, 30), extra=rng.randint(0, 30))
        for _ in range(700)
    )
    risk = tuple(rng.randint(0, 6) for _ in pool)

    def key(i: int) -> tuple[int, ...]:
        return pool[i].retained_bytes, pool[i].backward_bytes, pool[i].extra_ns, risk[i]

    plain = [
        i
        for i in range(len(pool))
        if i == 0
        or not any(
            all(x <= y for x, y in zip(key(j), key(i), strict=True)) and (key(j) != key(i) or j < i)
            for j in range(len(pool))
            if j != i
        )
    ]
    assert list(pareto_indices(pool, risk)) == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": (unit("a", "q", 1, 1, ["z"]),)}, "tiny.a: feeds z, which is no later unit"),
        ({"units": (unit("a", "q", 1, 1), unit("a", "q", 1, 1))}, "tiny.a: there are two units of this name"),
        ({"keep_sets": (KeepSet((), 1, 1, 1), KeepSet(("z",), 1, 1, 1))}, "tiny.z: in a keep set, but not a keepable"),
        ({"keep_sets": (KeepSet(("a",), 1, 1, 1),)}, r"tiny: no keep set without units \(split=False\)"),
        ({"keep_sets": (KeepSet((), 1, 1, 1), KeepSet((), 1, 1, 1, split=True))}, "tiny: split at '', which"),
    ],
)
def test_a_class_that_contradicts_itself_is_refused(change: dict[str, tuple[UnitTrace, ...]], message: str) -> None:
    with pytest.raises(HiloreError, match=message):
        configurations(replace(tiny_class(), **change), lossy=True)  # type: ignore[arg-type]


def test_an_unknown_granularity_is_refused() -> None:
    with pytest.raises(HiloreError, match="granularity 'block': one of unit, layer"):
        configurations(tiny_class(), lossy=True, granularity="block")


def test_risk_is_the_quadrature_times_interaction_rounded_up() -> None:
    trace = qwen_trace(layers=3, seed=None)
    kappa2 = {(r.region, r.unit): r.kappa2 for r in trace.calibration.risks}
    assert trace.calibration.interaction == 1.05
    for region in build_regions(trace, trace.buckets[0], lossy=True, risk_free=False, granularity="unit"):
        for chosen, risk in zip(region.configurations, region.risk, strict=True):
            exact = 1.05**2 * sum(kappa2[region.name, u.name] for u in chosen.units if u.mode == "L") * RISK_SCALE
            assert exact <= risk * (1 + 1e-12)
            assert risk < exact * (1 + 1e-12) + 1


def test_risk_limit_is_the_allowance_of_the_contract_rounded_down() -> None:
    calibration = qwen_trace(layers=1).calibration
    assert risk_limit(calibration, delta=1.0, psi_high=0.0) == UNLIMITED_RISK
    # Whatever the exposure: a microbatch's relative error does not depend on it.
    assert [risk_limit(calibration, delta=0.5, psi_high=psi) for psi in (1e-3, 0.6, 2.0)] == [25_000_000] * 3
    assert risk_limit(calibration, delta=1.0, psi_high=1.0, allowance=1 / 3) == 33_333_333
    assert risk_limit(calibration, delta=0.0, psi_high=1.0) == 0


@pytest.mark.parametrize("psi_high", [0.0, 0.6, 2.0])
def test_delta_zero_has_no_lossy_configuration_in_any_regime(psi_high: float) -> None:
    trace = qwen_trace(layers=2)
    p = build_problem(trace, trace.buckets[0], budget_bytes=1, delta=0.0, psi_high=psi_high)
    assert all(c.lossy_units == 0 for region in p.regions for c in region.configurations)


def test_a_unit_without_risk_entry_is_not_offered_there() -> None:
    trace = qwen_trace(layers=2)
    risks = tuple(
        r for r in trace.calibration.risks if not (r.region == "model.layers.1" and r.unit == "mlp.gate_proj")
    )
    partial = replace(trace, calibration=replace(trace.calibration, risks=risks))
    p = build_problem(partial, trace.buckets[0], budget_bytes=1, delta=1.0, psi_high=1.0)
    lossy = [{u.name for c in region.configurations for u in c.units if u.mode == "L"} for region in p.regions]
    assert lossy[0] - lossy[1] == {"mlp.gate_proj"}
    assert "mlp.up_proj" in lossy[1]


@pytest.mark.parametrize("kappa2", [-1e-9, float("nan"), float("inf")])
def test_a_risk_that_is_no_number_is_refused(kappa2: float) -> None:
    trace = qwen_trace(layers=1)
    risks = (UnitRisk("model.layers.0", "mlp.gate_proj", "int8-g128", kappa2),)
    wrong = replace(trace, calibration=replace(trace.calibration, risks=risks))
    with pytest.raises(HiloreError, match=r"model\.layers\.0\.mlp\.gate_proj: kappa2 .* of int8-g128 is no risk"):
        build_problem(wrong, trace.buckets[0], budget_bytes=1, delta=1.0, psi_high=1.0)


@pytest.mark.parametrize(("delta", "psi_high"), [(-1.0, 1.0), (float("nan"), 1.0), (1.0, -1.0), (1.0, float("inf"))])
def test_limits_that_are_no_numbers_are_refused(delta: float, psi_high: float) -> None:
    trace = qwen_trace(layers=1)
    with pytest.raises(HiloreError, match="must be a finite number, 0 or more"):
        build_problem(trace, trace.buckets[0], budget_bytes=1, delta=delta, psi_high=psi_high)
