"""Layout packed: several sequences in one row, kept apart by their positions; planned, run and measured like padded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilore.planner.actor import Actor, build_actor, microbatch_of, policy_loss
from hilore.planner.cudakernels import cuda_attention
from hilore.planner.emit import solve_trace
from hilore.planner.head import policy_logps
from hilore.planner.instrument import measure_held
from hilore.planner.microbatch import Microbatch, packed_microbatch, synthetic_microbatch
from hilore.planner.packing import pack, packed_lengths, reversed_sequences
from hilore.planner.regionrun import RegionRunner, region_inputs
from hilore.planner.rivals import PlanPolicy
from hilore.planner.rollouts import Rollout, from_rollouts
from hilore.planner.sidebyside import measure_peak
from hilore.planner.sidebyside_runs import GC, NO_GC
from hilore.planner.spec import SpecError
from hilore.planner.spec_types import ModelSpec
from hilore.planner.stepping import gradients_of
from hilore.planner.trace import Trace
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import reference_peaks
from hilore.runtime.ambient import takes_mask, tensors_in
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.naming import canonical_modules
from tests.specs import spec_of

PACKED = "{microbatch: 3, prompt_tokens: 16, response_tokens: 32, length_buckets: [96], layout: packed}"
CONFIG = (
    "{model_type: %s, vocab_size: 512, hidden_size: 64, intermediate_size: 192, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512, pad_token_id: 0}"
)


def packed_spec(family: str = "qwen2", *, head: str = "naive", batch: str = PACKED, **sections: str) -> ModelSpec:
    return spec_of(
        model=f"{{source: hf-config, config: {CONFIG % family}}}", batch=batch, loss=f"{{head: {head}}}", **sections
    )


def test_sequences_follow_one_another_and_places_point_at_predictions() -> None:
    row = pack([([5, 6, 7], [8, 9]), ([4], [3])])
    assert row.input_ids.tolist() == [[5, 6, 7, 8, 9, 4, 3]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert row.completion_mask.tolist() == [[1, 1], [1, 0]]
    assert row.places.tolist() == [[2, 3], [5, 0]]


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 40), st.data())
def test_lengths_fill_the_row_within_their_limits(rows: int, prompt: int, response: int, data: st.DataObject) -> None:
    spec = spec_of(
        batch=f"{{microbatch: {rows}, prompt_tokens: {prompt}, response_tokens: {response}, layout: packed}}"
    )
    tokens = data.draw(st.integers(2 * rows, rows * (prompt + response)))
    lengths = packed_lengths(spec.batch, tokens)
    assert len(lengths) == rows
    assert sum(map(sum, lengths)) == tokens
    assert all(1 <= before <= prompt and 1 <= after <= response for before, after in lengths)
    assert lengths[0][1] == max(after for _, after in lengths) == min(response, tokens - 2 * rows + 1)


@pytest.mark.parametrize("head", ["naive", "chunked"])
@pytest.mark.parametrize("family", ["qwen2", "llama", "phi3"])
def test_packed_sequences_do_not_see_each_other(family: str, head: str) -> None:
    actor = build_actor(packed_spec(family, head=head))
    rows = [([5, 6, 7], [8, 9, 11, 12]), ([4] * 9, [3]), ([21, 22], [23, 24])]
    together = packed_microbatch(pack(rows), torch.ones(3))
    found = policy_logps(actor.model, together, head)
    assert found.shape == (3, 4)
    for place, (prompt, completion) in enumerate(rows):
        ids = torch.tensor([[*prompt, *completion]])
        mask = torch.ones(1, len(completion), dtype=torch.int64)
        alone = Microbatch(ids, torch.ones_like(ids), mask, torch.ones(1), padded=False)
        expected = policy_logps(actor.model, alone, head)[0]
        torch.testing.assert_close(found[place, : len(completion)], expected, rtol=1e-5, atol=1e-5)


def test_synthetic_rows_are_full_and_the_same_from_the_same_seed() -> None:
    spec = packed_spec()
    one, same, other = (synthetic_microbatch(spec, 96, seed=seed) for seed in (0, 0, 1))
    assert (one.rows, one.tokens, one.padded, one.packed) == (1, 96, False, True)
    assert one.completion_mask.shape == (3, 32)
    assert one.position_ids is not None
    assert (one.position_ids == 0).sum() == 3
    assert torch.equal(one.input_ids, same.input_ids)
    assert not torch.equal(one.input_ids, other.input_ids)
    assert one.to("meta").places.device.type == "meta"  # type: ignore[union-attr]


def test_another_order_of_the_sequences_has_the_same_log_probabilities() -> None:
    actor = build_actor(packed_spec())
    microbatch = microbatch_of(actor, 96)
    other = reversed_sequences(microbatch)
    assert not torch.equal(other.input_ids, microbatch.input_ids)
    found, expected = (policy_logps(actor.model, one) for one in (other, microbatch))
    mask = microbatch.completion_mask.bool()
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_rollouts_share_rows_as_long_as_they_fit() -> None:
    rollouts = [
        Rollout(place, (1, 2), tuple(range(5, 5 + length)), 1.0) for place, length in enumerate((30, 30, 31, 1))
    ]
    spec = packed_spec(batch=PACKED.replace("[96]", "[66]"))
    found = from_rollouts(rollouts, spec)
    assert [(one.tokens, one.completion_mask.shape[0]) for one in found] == [(64, 2), (36, 2)]
    assert all(one.packed for one in found)
    everything = from_rollouts(rollouts, packed_spec(batch=PACKED.replace("[96]", "[144]")))
    assert [(one.tokens, one.completion_mask.shape[0]) for one in everything] == [(97, 3), (3, 1)]


@pytest.mark.parametrize(
    ("batch", "loss", "expected"),
    [
        ("length_buckets: [40]", "{}", "the last of batch.length_buckets is 40; with layout: packed it must hold the "
         "longest sequence (48 tokens) and no more than all 3 of a microbatch (144)"),
        ("length_buckets: [150]", "{}", "the last of batch.length_buckets is 150; with layout: packed it must hold the "
         "longest sequence (48 tokens) and no more than all 3 of a microbatch (144)"),
        ("length_buckets: [5, 96]", "{}", "batch.length_buckets begins with 5 tokens, which do not hold 3 sequences of "
         "at least 2 tokens"),
        ("length_buckets: [96]", "{head: trl}", "loss.head: trl is the head of TRL's trainer, which pads; with "
         "layout: packed use naive or chunked"),
    ],
)  # fmt: skip
def test_what_a_packed_row_cannot_be(batch: str, loss: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(batch=f"{{microbatch: 3, prompt_tokens: 16, response_tokens: 32, {batch}, layout: packed}}", loss=loss)
    assert [line.split(": ", 1)[1] for line in caught.value.problems] == [expected]


def test_without_buckets_a_row_holds_all_sequences() -> None:
    spec = spec_of(batch="{microbatch: 3, prompt_tokens: 16, response_tokens: 32, layout: packed}")
    assert spec.batch.length_buckets == (144,)


def test_a_model_without_positions_is_refused() -> None:
    class Bare(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(UnsupportedModelError, match=r"packed gives position_ids, which Bare does not take"):
        policy_logps(Bare(), packed_microbatch(pack([([1], [2])]), torch.ones(1)))


LORA = "{kind: lora, rank: 4, alpha: 8}"


@pytest.fixture(scope="module", params=["naive", "chunked"])
def planned(request: pytest.FixtureRequest) -> tuple[ModelSpec, Trace, Actor]:
    spec = packed_spec(head=request.param, adapter=LORA, codecs="[]")
    return spec, trace_spec(spec), build_actor(spec, live_adapters=True)


def test_updates_are_exact_and_peaks_as_predicted(planned: tuple[ModelSpec, Trace, Actor]) -> None:
    _, trace, actor = planned
    assert trace.buckets[0].masked
    assert (trace.buckets[0].rows, trace.buckets[0].completions, trace.fingerprint["rows"]) == (1, 96, 1)
    microbatch = microbatch_of(actor, 96)
    with NO_GC.applied(actor) as running:
        expected = gradients_of(actor, running, microbatch)
    gc_peak, no_gc_peak = reference_peaks(trace)
    for policy, predicted in ((GC, gc_peak), (NO_GC, no_gc_peak)):
        peak = measure_peak(actor, policy, microbatch, gradients_exist=False)
        assert peak <= predicted <= 1.02 * peak
    for part in (0.0, 0.4, 0.8):
        budget = int(gc_peak + part * (no_gc_peak - gc_peak))
        plan = solve_trace(trace, budget_bytes=budget, delta=0.0).plans[-1]
        chosen = PlanPolicy("plan", (plan,))
        with chosen.applied(actor) as running:
            found = gradients_of(actor, running, microbatch)
            assert running.choice.plan == plan
        assert found.same_loss(expected)
        assert found.same_gradients(expected)
        peak = measure_peak(actor, chosen, microbatch, gradients_exist=False)
        assert peak <= plan.predicted.peak_bytes <= 1.02 * peak


def test_other_mixtures_of_sequences_stay_within_the_prediction(planned: tuple[ModelSpec, Trace, Actor]) -> None:
    _, trace, actor = planned
    budget = sum(reference_peaks(trace)) // 2
    plan = solve_trace(trace, budget_bytes=budget, delta=0.0).plans[-1]
    policy = PlanPolicy("plan", (plan,))
    for lengths in ([(16, 32), (16, 32)], [(1, 1), (16, 32), (2, 31)], [(16, 16), (16, 16), (16, 16)], [(3, 32)]):
        rows = [([7] * prompt, list(range(9, 9 + completion))) for prompt, completion in lengths]
        microbatch = packed_microbatch(pack(rows), torch.linspace(1, -1, len(rows)))
        with policy.applied(actor) as running:
            gradients_of(actor, running, microbatch)
            assert running.choice.plan == plan
        assert measure_peak(actor, policy, microbatch, gradients_exist=False) <= plan.predicted.peak_bytes


def held_on_cuda(batch: str) -> tuple[int, bool]:
    """What a held layer keeps with CUDA's kernels, and whether it was given a mask."""
    actor = build_actor(packed_spec(batch=batch, precision="{params: bfloat16}"), fake=True)
    microbatch, modules = microbatch_of(actor, 96), canonical_modules(actor.model)
    name = "model.layers.0"
    with actor.faked():
        inputs = region_inputs(lambda: policy_logps(actor.model, microbatch), modules, [name])[name]
        runner = RegionRunner.of(name, modules[name], inputs, {})
        with cuda_attention():
            held = measure_held(runner, gradients_exist=False)
    masked = takes_mask([inputs.boundary, *tensors_in(inputs.args, inputs.kwargs)])
    return held.retained_bytes, masked


def test_for_a_card_the_mask_takes_the_kernel_that_has_one() -> None:
    packed, masked = held_on_cuda(PACKED)
    padded, padded_masked = held_on_cuda("{microbatch: 1, prompt_tokens: 64, response_tokens: 32}")
    assert (masked, padded_masked) == (True, False)
    mask = 96 * 96 * 2
    expanded = 2 * 96 * (4 - 2) * 16 * 2
    seed = 8
    assert packed - padded == mask + expanded - seed, "the additive mask of this call, k and v for every head"


def test_the_loss_of_a_packed_row_is_that_of_its_padded_rows() -> None:
    actor = build_actor(packed_spec())
    rollouts = [Rollout(0, (5, 6, 7), tuple(range(8, 8 + length)), float(length % 2)) for length in (4, 9, 32)]
    packed = from_rollouts(rollouts, actor.spec)
    padded = from_rollouts(rollouts, replace(actor.spec, batch=replace(actor.spec.batch, layout="padded")))
    losses = [policy_loss(actor, one[0]) for one in (packed, padded)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
