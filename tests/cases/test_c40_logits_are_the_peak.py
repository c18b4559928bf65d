"""C-40: the logits are the peak. They are traced outside of regions, in their own event, and a chunked head shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hilore.planner.actor import Actor, build_actor
from hilore.planner.microbatch import Microbatch, synthetic_microbatch
from hilore.planner.outside import OuterRegion, OutsideCosts, measure_outside
from hilore.planner.spec_types import ModelSpec
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import reference_peaks
from hilore.runtime.naming import canonical_modules
from tests.specs import spec_of

VOCABULARY, RESPONSE = 151_936, 2048
LOGITS = RESPONSE * VOCABULARY * 2
MIB = 2**20
QWEN = (
    "{source: hf-config, config: {model_type: qwen2, hidden_size: 2048, intermediate_size: 11008, "
    "num_hidden_layers: 4, num_attention_heads: 16, num_key_value_heads: 2, vocab_size: 151936, "
    "tie_word_embeddings: true}}"
)


def qwen_shape(head: str) -> ModelSpec:
    return spec_of(
        model=QWEN,  # four of its layers: what lies outside of them is the same
        adapter="{kind: lora, rank: 16}",
        precision="{params: bfloat16}",
        batch=f"{{microbatch: 1, prompt_tokens: 1, response_tokens: {RESPONSE}}}",
        loss=f"{{kind: grpo, beta: 0.0, head: {head}}}",
    )


def outside(head: str, *, dtype: torch.dtype | None = None) -> OutsideCosts:
    actor = build_actor(qwen_shape(head), fake=True)
    with actor.faked():
        if dtype is not None:
            actor.model.get_output_embeddings().register_forward_hook(  # type: ignore[operator]
                lambda _module, _args, logits: logits.to(dtype)
            )
        return measure_outside(actor, microbatch(actor), regions(actor), gradients_exist=True)


def microbatch(actor: Actor) -> Microbatch:
    return synthetic_microbatch(actor.spec, 1 + RESPONSE, vocabulary=VOCABULARY)


def regions(actor: Actor) -> tuple[OuterRegion, ...]:
    modules = canonical_modules(actor.model)
    return tuple(OuterRegion(f"model.layers.{i}", modules[f"model.layers.{i}"], 0) for i in range(4))


def test_logits_of_qwen_are_593_mib_and_the_head_holds_three_of_them() -> None:
    assert pytest.approx(593.5 * MIB, rel=1e-4) == LOGITS
    found = outside("naive")
    row = VOCABULARY * 2  # one more position than the completion has is scored, and dropped
    hidden = (1 + RESPONSE) * 2048 * 2
    rest = found.head_bytes - (3 * LOGITS + row)
    assert 0 <= rest <= 4 * hidden, "log-probabilities, their gradient and the logits' gradient are alive at once"
    largest = sum(tensors.count * tensors.each_bytes for tensors in found.parts.head_largest)
    assert 3 * LOGITS <= largest <= 3 * LOGITS + 3 * row, "what `show` calls logits and their copies"
    assert found.head_left_bytes < 2 * hidden, "when the last region's backward begins, they are gone"


def test_float32_logits_take_more_than_twice() -> None:
    bfloat16, float32 = outside("naive"), outside("naive", dtype=torch.float32)
    assert float32.head_bytes > 2 * bfloat16.head_bytes


def test_a_chunked_head_is_another_number_and_another_fingerprint() -> None:
    naive, chunked = outside("naive"), outside("chunked")
    chunk = 128 * VOCABULARY * 4
    assert chunked.head_bytes < LOGITS
    assert 2 * chunk <= chunked.head_bytes <= 5 * chunk
    assert naive.before_bytes == chunked.before_bytes


def test_the_head_is_an_event_of_its_own_before_any_backward() -> None:
    sections = {
        "batch": "{microbatch: 1, prompt_tokens: 8, response_tokens: 56}",
        "device": "{kind: cuda, gpu: a100-80gb}",
    }
    model = QWEN.replace("hidden_size: 2048", "hidden_size: 64")
    traces = {
        head: trace_spec(spec_of(model=model.replace("intermediate_size: 11008", "intermediate_size: 128"),
                                 loss=f"{{kind: grpo, head: {head}}}", **sections))
        for head in ("naive", "chunked")
    }  # fmt: skip
    naive, chunked = traces["naive"], traces["chunked"]
    assert naive.fingerprint["head"] == "naive"
    assert chunked.fingerprint["head"] == "chunked"
    bucket = naive.buckets[0]
    least = naive.fixed.total_bytes + bucket.outside.before_bytes + bucket.outside.head_bytes
    gc_peak, no_gc_peak = reference_peaks(naive)
    assert no_gc_peak > gc_peak > least, "boundaries stand beside the logits, held regions all the more"
    without_head = replace(naive, buckets=(replace(bucket, outside=replace(bucket.outside, head_bytes=0)),))
    assert reference_peaks(without_head)[0] < gc_peak
