"""Installing and taking out: all or nothing, no name changes, plain copies, and refusals that name the setting."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_utils import AttentionInterface

from hilore.runtime.attach import attach
from hilore.runtime.errors import BindError, HiloreWarning, UnsupportedModelError
from hilore.runtime.huggingface import AttentionCall
from hilore.runtime.install import install
from tests import models
from tests.plans import (
    assert_same_step,
    attach_plan,
    forget,
    gradients,
    keepable,
    loss_of,
    plan_for,
    plan_set,
    units_of,
)


def snapshot(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Everything that an installation could leave behind: attributes of every module, the attention interface."""
    state: dict[str, dict[str, Any]] = {}
    for path, module in model.named_modules():
        state[path] = {
            name: {key: id(item) for key, item in value.items()} if isinstance(value, dict) else id(value)
            for name, value in vars(module).items()
            if name != "training"
        }
    state[":attention"] = {name: id(function) for name, function in AttentionInterface._global_mapping.items()}
    config = getattr(model, "config", None)
    state[":config"] = {"use_cache": getattr(config, "use_cache", None)}
    return state


def mlp_model(seed: int = 0) -> nn.Sequential:
    """Two regions, "0" and "1", that are not Hugging Face's."""
    return nn.Sequential(models.mlp(seed), models.mlp(seed + 1)).train()


def drop_model(seed: int = 0) -> nn.Sequential:
    return nn.Sequential(models.drop(seed), models.drop(seed + 1)).train()


MLP_INPUT = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
DROP_INPUT = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
TINY: dict[str, tuple[Callable[[], nn.Module], Any, tuple[str, ...] | None]] = {
    "qwen2": (models.qwen2_tiny, None, None),
    "lora": (models.qwen2_tiny_lora, None, None),
    "mlp": (mlp_model, MLP_INPUT, ("0", "1")),
    "drop": (drop_model, DROP_INPUT, ("0", "1")),
}


def tiny(kind: str) -> tuple[nn.Module, Any]:
    make, batch, regions = TINY[kind]
    model = make()
    batch = models.microbatch_for(model) if batch is None else batch
    units_of(model, batch, regions=regions)
    return model, batch


@pytest.mark.parametrize("kind", TINY)
def test_names_and_state_dict_stay_and_detach_restores_everything(kind: str) -> None:
    model, _ = tiny(kind)
    before, keys = snapshot(model), list(model.state_dict())
    names = [name for name, _ in model.named_modules()]
    runtime = attach_plan(model, plan_for(model, "R"))
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    assert snapshot(model) != before
    runtime.detach()
    assert snapshot(model) == before
    runtime.detach()
    assert snapshot(model) == before


@pytest.mark.parametrize("kind", TINY)
def test_models_of_all_kinds_are_exact(kind: str) -> None:
    model, batch = tiny(kind)
    expected = gradients(model, batch)
    for modes in ("R", "H"):
        runtime = attach_plan(model, plan_for(model, modes))
        assert_same_step(gradients(model, batch), expected)
        assert (runtime.stats.frames, runtime.stats.replays) == (2, 2)
        runtime.detach()


def test_a_dry_run_names_what_binds_and_touches_nothing() -> None:
    model, _ = tiny("qwen2")
    before = snapshot(model)
    report = attach(model, plan_set(plan_for(model, "H")), dry_run=True)
    assert report.regions == ("model.layers.0", "model.layers.1")
    assert len(report.units) == 16
    assert report.refused == ()
    assert snapshot(model) == before


def test_a_dry_run_names_what_is_refused() -> None:
    model, _ = tiny("qwen2")
    plan = plan_for(model, "H")
    model.model.layers[1].gradient_checkpointing = True
    model.model.layers[1]._gradient_checkpointing_func = reentrant()
    before = snapshot(model)
    report = attach(model, plan_set(plan), dry_run=True)
    assert report.refused[0].startswith("model.layers.1: reentrant gradient checkpointing is on")
    assert snapshot(model) == before


def reentrant() -> Any:
    return functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)


# --- switching off and on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "lora", "mlp"])
def test_off_is_plain_eager_and_on_is_the_plan(kind: str) -> None:
    model, batch = tiny(kind)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, "R"))
    runtime.disable()
    assert_same_step(gradients(model, batch), expected)
    assert runtime.stats.frames == 0
    runtime.enable()
    assert_same_step(gradients(model, batch), expected)
    assert runtime.stats.frames == 2
    runtime.detach()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("api", ["gradient_checkpointing", "activation_checkpointing"])
@pytest.mark.parametrize("kind", ["qwen2", "lora"])
def test_both_api_names_switch_the_plan(kind: str, api: str) -> None:
    model, batch = tiny(kind)
    model.enable_input_require_grads()
    forget(model)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, "R"))
    for cycle in range(2):
        getattr(model, f"{api}_disable")()
        assert not runtime.enabled
        assert not model.is_gradient_checkpointing
        model.enable_input_require_grads()
        assert_same_step(gradients(model, batch), expected)
        assert runtime.stats.frames == 2 * cycle
        getattr(model, f"{api}_enable")()
        assert runtime.enabled
        assert model.is_gradient_checkpointing
        assert_same_step(gradients(model, batch), expected)
        assert runtime.stats.frames == 2 * (cycle + 1)
    runtime.detach()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trl_switches_it_around_a_generation() -> None:
    from trl.models.utils import disable_gradient_checkpointing

    model, batch = tiny("lora")
    model.enable_input_require_grads()
    forget(model)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, "H"))
    for _ in range(2):
        with disable_gradient_checkpointing(model, {"use_reentrant": False}), torch.no_grad():
            assert not runtime.enabled
            model(input_ids=batch.input_ids)
        assert_same_step(gradients(model, batch), expected)
    assert (runtime.stats.frames, runtime.stats.replays) == (4, 4)
    runtime.detach()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"activation_checkpointing_kwargs": {"use_reentrant": True}}, 'Set gradient_checkpointing_kwargs={"use_reent'),
        ({"offload": True}, "Call activation_checkpointing_enable\\(\\) without offload"),
        ({"every_n_layers": 2}, "every_n_layers=2 was asked for"),
    ],
)
def test_turning_on_another_kind_of_checkpointing_is_refused(kwargs: dict[str, Any], named: str) -> None:
    model, _ = tiny("qwen2")
    runtime = attach_plan(model, plan_for(model, "R"))
    with pytest.raises(UnsupportedModelError, match=named):
        model.activation_checkpointing_enable(**kwargs)
    assert runtime.enabled
    runtime.detach()


@pytest.mark.parametrize("kind", TINY)
def test_inert_in_eval_and_without_gradients(kind: str) -> None:
    model, batch = tiny(kind)
    runtime = attach_plan(model, plan_for(model, "H"))
    with torch.no_grad():
        loss_of(model, batch)
    with torch.inference_mode():
        loss_of(model, batch)
    model.eval()
    expected = gradients(model, batch)
    model.train()
    runtime.detach()
    model.eval()
    assert_same_step(gradients(model, batch), expected)
    assert (runtime.stats.frames, runtime.stats.held) == (0, 0)


# --- copies ---------------------------------------------------------------------------------------------------------


def pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    pickle.dump(model, buffer)
    assert b"hilore" not in buffer.getvalue()
    buffer.seek(0)
    restored: nn.Module = pickle.load(buffer)
    return restored


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("kind", TINY)
def test_copies_of_an_attached_model_are_plain(kind: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model, batch = tiny(kind)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, "H"))
    twin = copied(model)
    for module in twin.modules():
        ours = [name for name, value in vars(module).items() if type(value).__module__.startswith("hilore")]
        assert ours == []
    again = copied(twin)
    for other in (twin, again):
        assert_same_step(gradients(other, batch), expected)
    assert runtime.stats.frames == 0
    if kind in ("qwen2", "lora"):
        twin.activation_checkpointing_disable()
        assert not twin.is_gradient_checkpointing
        assert runtime.enabled
    runtime.detach()
    assert_same_step(gradients(twin, batch), expected)


# --- failures leave nothing -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = snapshot(model)
    yield
    assert snapshot(model) == before


def test_a_second_attach_is_refused() -> None:
    for kind in TINY:
        model, _ = tiny(kind)
        plan = plan_for(model, "H")
        runtime = attach_plan(model, plan)
        with unchanged(model), pytest.raises(BindError, match=r"attached to this model already; call runtime.detach"):
            attach(model, plan_set(plan))
        runtime.detach()


def test_an_installation_that_fails_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny("lora")
    plan = plan_for(model, "H")

    def broken(runtime: Any) -> None:
        install(runtime)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, unchanged(model):
        patched.setattr(sys.modules["hilore.runtime.attach"], "install", broken)
        with pytest.raises(KeyboardInterrupt):
            attach(model, plan_set(plan))


def test_attention_as_a_unit_needs_the_attention_interface() -> None:
    model, _ = tiny("qwen2")
    plan = plan_for(model, "H")
    model.config._attn_implementation = "eager"
    with unchanged(model), pytest.warns(HiloreWarning, match="Plan field attention=sdpa, model has eager"):  # noqa: SIM117
        with pytest.raises(UnsupportedModelError, match="attention implementation 'eager' has no function"):
            attach(model, plan_set(plan), accept=("attention",))


def test_two_models_share_the_wrapped_attention_function(monkeypatch: pytest.MonkeyPatch) -> None:
    original = AttentionInterface._global_mapping["sdpa"]
    if isinstance(original, AttentionCall):  # another test left its model attached
        monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", original.original)
        original = original.original
    runtimes = []
    for _ in range(2):
        model, _ = tiny("qwen2")
        runtimes.append(attach_plan(model, plan_for(model, "H")))
    wrapped = AttentionInterface._global_mapping["sdpa"]
    assert wrapped is not original
    runtimes[0].detach()
    assert AttentionInterface._global_mapping["sdpa"] is wrapped
    runtimes[1].detach()
    assert AttentionInterface._global_mapping["sdpa"] is original


# --- refusals by name -----------------------------------------------------------------------------------------------


def test_foreign_hooks_are_refused_at_attach_and_in_a_forward() -> None:
    model, batch = tiny("qwen2")
    plan = plan_for(model, "H")
    named = "Qwen2ForCausalLM: saved_tensors_hooks of something else"
    with torch.autograd.graph.save_on_cpu(), unchanged(model), pytest.raises(UnsupportedModelError, match=named):
        attach(model, plan_set(plan))
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan)
    named = r"model.layers.0: saved_tensors_hooks of something else"
    with torch.autograd.graph.save_on_cpu(), pytest.raises(UnsupportedModelError, match=named):
        loss_of(model, batch)
    assert_same_step(gradients(model, batch), expected)
    runtime.detach()


def test_compiled_models_and_layers_are_refused() -> None:
    model, _ = tiny("qwen2")
    plan = plan_for(model, "H")
    compiled = torch.compile(model)
    with unchanged(model), pytest.raises(UnsupportedModelError, match=r"it is compiled \(torch.compile\)"):
        attach(compiled, plan_set(plan))
    model.model.layers[1].compile()
    with unchanged(model), pytest.raises(UnsupportedModelError, match=r"^model.layers.1: it is compiled"):
        attach(model, plan_set(plan))


def test_an_explicit_cache_in_a_training_forward_is_refused() -> None:
    model, batch = tiny("qwen2")
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, "R"))
    named = r"model.layers.0: a training forward got a key-value cache.*without use_cache=True and without past_key"
    with pytest.raises(UnsupportedModelError, match=named):
        model(input_ids=batch.input_ids, use_cache=True)
    with pytest.raises(UnsupportedModelError, match=named):
        model(input_ids=batch.input_ids, past_key_values=DynamicCache(config=model.config))
    with torch.no_grad():
        out = model(input_ids=batch.input_ids, use_cache=True)
    assert out.past_key_values.get_seq_length() == 16
    assert_same_step(gradients(model, batch), expected)
    runtime.detach()


def test_a_config_default_of_use_cache_is_set_off_and_said_once() -> None:
    model = models.qwen2_tiny(use_cache=True)
    batch = models.microbatch_for(model)
    plan = plan_for(model, "R")
    expected = gradients(model, batch)
    with pytest.warns(HiloreWarning, match=r"config.use_cache was on and is set off") as said:
        runtime = attach_plan(model, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error", HiloreWarning)
        assert_same_step(gradients(model, batch), expected)
    assert [w.filename for w in said if w.category is HiloreWarning] == [__file__.replace("test_install", "plans")]
    assert model.config.use_cache is False
    runtime.detach()
    assert model.config.use_cache is True


def test_the_default_of_an_inner_config_is_set_off_too() -> None:
    """Composite models keep it in the config of their text model."""
    model = models.qwen2_tiny()
    model.model.config = copy.deepcopy(model.config)
    batch = models.microbatch_for(model)
    plan = plan_for(model, "R")
    expected = gradients(model, batch)
    model.model.config.use_cache = True
    with pytest.warns(HiloreWarning, match=r"Qwen2ForCausalLM: config.use_cache was on and is set off"):
        runtime = attach_plan(model, plan)
    assert_same_step(gradients(model, batch), expected)
    runtime.detach()
    assert (model.config.use_cache, model.model.config.use_cache) == (False, True)


def test_liger_kernels_are_refused() -> None:
    model, _ = tiny("qwen2")
    plan = plan_for(model, "H")
    norm = model.model.layers[0].input_layernorm

    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    norm.forward = types.MethodType(forward, norm)
    named = r"model.layers.0.input_layernorm: its forward is a Liger kernel.*\(use_liger_kernel=False\)"
    with unchanged(model), pytest.raises(UnsupportedModelError, match=named):
        attach(model, plan_set(plan))


def test_hub_kernels_are_refused() -> None:
    model, _ = tiny("qwen2")
    plan = plan_for(model, "H")
    norm = model.model.layers[0].input_layernorm

    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    norm.forward = types.MethodType(forward, norm)
    type(norm).kernel_layer_name = "RMSNorm"
    try:
        named = r"model.layers.0.input_layernorm: its forward is the hub kernel RMSNorm.*\(use_kernels=False\)"
        with unchanged(model), pytest.raises(UnsupportedModelError, match=named):
            attach(model, plan_set(plan))
    finally:
        del type(norm).kernel_layer_name


def test_alora_is_refused() -> None:
    model, _ = tiny("lora")
    plan = plan_for(model, "H")
    model.peft_config["default"].alora_invocation_tokens = [1, 2]
    with unchanged(model), pytest.raises(UnsupportedModelError, match="adapter default: aLoRA decides per token"):
        attach(model, plan_set(plan))
    with pytest.raises(UnsupportedModelError, match="adapter default: aLoRA decides per token"):
        attach(nn.ModuleDict({"actor": model}), plan_set(replace(plan, fingerprint={"world_size": 1})))


def test_a_unit_that_runs_twice_in_a_forward_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(torch.relu(self.linear(x)))
            return out

    with models.seeded(0):
        model = nn.Sequential(models.drop(), Twice()).train()
    plan = plan_for(model, "H", units=units_of(drop_model(), DROP_INPUT, regions=("0", "1")))
    regions = list(plan.regions)
    unit = regions[1].units[0]
    regions[1] = replace(regions[1], units=(replace(unit, name="1.linear"),))
    plan = replace(plan, regions=tuple(regions), fingerprint={"world_size": 1})
    expected = gradients(model, DROP_INPUT)
    runtime = attach_plan(model, plan)
    with pytest.raises(UnsupportedModelError, match=r"1.linear: called twice in one forward of 1"):
        loss_of(model, DROP_INPUT)
    replayed = replace(regions[1], units=(replace(unit, name="1.linear", mode="R"),))
    runtime.use(replace(plan, regions=(regions[0], replayed)))
    assert_same_step(gradients(model, DROP_INPUT), expected)
    runtime.detach()


def test_a_unit_that_did_not_run_is_named() -> None:
    model, batch = tiny("qwen2")
    runtime = attach_plan(model, plan_for(model, "H"))
    model.config._attn_implementation = "eager"
    with pytest.raises(
        UnsupportedModelError, match=r"model.layers.0.self_attn:attention: planned to be kept, but it did not run"
    ):
        loss_of(model, batch)
    model.config._attn_implementation = "sdpa"
    loss_of(model, batch)
    runtime.detach()


def test_regions_out_of_order_are_refused() -> None:
    model, _ = tiny("mlp")
    runtime = attach_plan(model, plan_for(model, "R"))
    with pytest.raises(UnsupportedModelError, match="1: ran as region 1 where region 0 was due"):
        model[1](MLP_INPUT)
    runtime.detach()


def test_every_keepable_unit_binds() -> None:
    model, _ = tiny("qwen2")
    assert set(keepable(units_of(model)).values()) == {"H"}


def test_warnings_of_hugging_face_are_not_ours() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HiloreWarning)
        model, _ = tiny("qwen2")
        attach_plan(model, plan_for(model, "R")).detach()


@pytest.mark.parametrize("kind", ["qwen2", "mlp"])
@pytest.mark.parametrize("modes", ["R", "H", "L"])
def test_an_error_inside_a_regions_forward_leaves_the_runtime_usable(kind: str, modes: str) -> None:
    model, batch = tiny(kind)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, modes))
    clean = snapshot(model)
    module = model[1][1] if kind == "mlp" else model.model.layers[1].mlp.act_fn

    def fail(*_: Any) -> None:
        raise ArithmeticError("inside a region")

    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="inside a region"):
        loss_of(model, batch)
    handle.remove()
    assert snapshot(model) == clean
    assert runtime.stats.live_saved_bytes == 0
    assert len(runtime.stats._frames) == 0
    runtime.use(plan_for(model, "R"))
    assert_same_step(gradients(model, batch), expected)
    runtime.detach()
