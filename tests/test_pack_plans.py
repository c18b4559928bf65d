"""Plans that keep units in pack-bf16: solved at delta 0, with the predicted peak, exact when they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.memory import measure_case, reproducible_target
from bench.memory_cases import Case
from bench.memory_cases import spec_of as case_spec
from hilore.planner.check import verify_plans
from hilore.planner.emit import InfeasibleError, solve_trace
from hilore.planner.prior import codec_notes
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Trace, UnitTrace
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import reference_peaks
from hilore.runtime.codecs import loses
from hilore.runtime.plan import Plan
from tests.specs import spec_of

NAME = "pack-bf16"
WIDE = (
    "{model_type: qwen2, vocab_size: 128, hidden_size: 128, intermediate_size: 512, num_hidden_layers: 3, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512}"
)


def spec_with(codecs: str, params: str = "bfloat16") -> ModelSpec:
    return spec_of(
        model=f"{{source: hf-config, config: {WIDE}}}",
        adapter="{kind: lora, rank: 4, alpha: 8}",
        precision=f"{{params: {params}}}",
        batch="{microbatch: 2, prompt_tokens: 32, response_tokens: 96}",
        codecs=codecs,
    )


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_with(f"[{NAME}, int8-g64]")


@pytest.fixture(scope="module")
def trace(spec: ModelSpec) -> Trace:
    """Calls take a hundred times as long as on the card whose times stand in: at this width packing pays for none."""
    made = trace_spec(spec, target=reproducible_target())
    return each_unit(made, lambda unit: replace(unit, run_ns=100 * unit.run_ns))


def each_unit(trace: Trace, change: Callable[[UnitTrace], UnitTrace]) -> Trace:
    buckets = tuple(
        replace(b, classes=tuple(replace(one, units=tuple(map(change, one.units))) for one in b.classes))
        for b in trace.buckets
    )
    return replace(trace, buckets=buckets)


def without(trace: Trace, name: str) -> Trace:
    return each_unit(
        trace, lambda unit: replace(unit, codecs=tuple(cost for cost in unit.codecs if cost.codec != name))
    )


_LEAST_BYTES: list[int] = []


def solved(trace: Trace, share: float, delta: float) -> Plan:
    """Under a budget that lies ``share`` of the way from the smallest there is to No-GC's peak."""
    if not _LEAST_BYTES:
        with pytest.raises(InfeasibleError) as found:
            solve_trace(trace, budget_bytes=2**20, delta=0.0)
        _LEAST_BYTES.append(found.value.smallest_budget_bytes)
    least = _LEAST_BYTES[0]
    budget = least + int(share * (reference_peaks(trace)[1] - least))
    return solve_trace(trace, budget_bytes=budget, delta=delta).plans[-1]


def codecs_of(plan: Plan) -> set[str]:
    return {unit.codec for region in plan.regions for unit in region.units if unit.codec is not None}


def test_a_lossless_codec_is_offered_to_every_kind(trace: Trace) -> None:
    units = trace.buckets[0].classes[0].units
    offered = {unit.kind: [cost.codec for cost in unit.codecs] for unit in units if unit.keepable}
    assert offered["q"] == offered["k"] == [NAME]
    assert offered["gate"] == [NAME, "int8-g64"]


def test_delta_0_keeps_more_in_fewer_bytes(trace: Trace) -> None:
    """Only what loses nothing is at L, and the step is faster than without it."""
    for share in (0.06, 0.15):
        plan = solved(trace, share, 0.0)
        assert codecs_of(plan) == {NAME}
        assert not plan.lossy
        assert plan.predicted.risk == 0.0
        assert plan.predicted.step_ns < solved(without(trace, NAME), share, 0.0).predicted.step_ns


def test_with_room_for_error_q_and_k_are_still_exact(trace: Trace) -> None:
    plan = solved(trace, 0.1, 4.0)
    assert plan.lossy
    assert plan.predicted.risk > 0
    for region in plan.regions:
        for unit in region.units:
            if unit.name.endswith(("q_proj", "k_proj")):
                assert not loses(unit.codec)


def test_a_solved_plan_is_exact_and_within_its_peak(spec: ModelSpec, trace: Trace) -> None:
    plan = solved(trace, 0.1, 0.0)
    assert codecs_of(plan) == {NAME}
    found = verify_plans([plan], spec, trace=trace, rounds=1, microbatches=1)
    (one,) = found.checks
    assert found.breaches == ()
    assert (one.exact, one.error, one.error_limit) == (True, 0.0, None)


@pytest.mark.parametrize("case", [Case("qwen2", "LoRA bf16", "naive", 2), Case("gemma", "LoRA dropout", "chunked", 1)])
def test_peaks_are_predicted_to_the_byte(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two microbatches and the optimizer step: solved plans, all that can be packed packed, and that demoted."""
    monkeypatch.setattr("bench.memory.CODEC", NAME)
    monkeypatch.setattr(
        "bench.memory.spec_of", lambda case, folder: replace(case_spec(case, folder, (32,), 2), codecs=(NAME,))
    )
    rows = list(measure_case(case, tmp_path, fake=case.training == "LoRA bf16"))
    assert any(" L" in row.policy and row.policy.startswith("delta 0") for row in rows)
    assert any(row.policy.startswith("encoded") for row in rows)
    for row in rows:
        assert row.holds, row
        # The highest moment of a forward may come before all of its payloads are there.
        loose = " L" in row.policy and row.event.startswith("forward")
        if not loose and "demoted" not in row.policy and "split" not in row.policy:
            assert row.measured_bytes == row.counted_bytes, row


def test_what_cannot_hold_a_unit_is_said_so() -> None:
    spec = spec_with(f"[{NAME}]", params="float32")
    bucket = trace_spec(spec, target=reproducible_target()).buckets[0]
    assert all(not unit.codecs for one in bucket.classes for unit in one.units)
    (note,) = codec_notes(spec, bucket)
    assert note.startswith(f"codecs: {NAME} offered to no unit: no unit's output is what they can hold")
