"""C-30: a plan for another configuration is refused by the name of what differs, with both values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hilore.runtime.attach import attach
from hilore.runtime.errors import FingerprintError, HiloreWarning, PlanFileError
from hilore.runtime.fingerprint import REFUSED, WARNED
from hilore.runtime.plan import Plan
from hilore.runtime.planfile import load_plans, plan_text
from tests import models
from tests.plans import assert_same_step, attach_plan, gradients, loss_of, plan_for, plan_set


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for(models.qwen2_tiny_lora(), "H")


def frozen(model: nn.Module) -> nn.Module:
    next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)
    return model


CHANGED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "num_layers": (lambda: models.qwen2_tiny_lora(num_hidden_layers=3), "2", "3"),
    "hidden_size": (lambda: models.qwen2_tiny_lora(hidden_size=64), "32", "64"),
    "intermediate_size": (lambda: models.qwen2_tiny_lora(intermediate_size=96), "64", "96"),
    "num_kv_heads": (lambda: models.qwen2_tiny_lora(num_key_value_heads=4), "2", "4"),
    "attention": (lambda: models.qwen2_tiny_lora(attention="eager"), "sdpa", "eager"),
    "architecture": (lambda: models.lora(models.llama_tiny()), "Qwen2ForCausalLM", "LlamaForCausalLM"),
}


@pytest.mark.parametrize("field", CHANGED)
def test_a_changed_model_is_refused_by_field(field: str, plan: Plan) -> None:
    make, planned, found = CHANGED[field]
    model = make()
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(FingerprintError) as caught:
        attach(model, plan_set(plan))
    assert str(caught.value).startswith(f"Plan field {field}={planned}, model has {found}. Make plans for this model")
    assert (caught.value.field, str(caught.value.planned), str(caught.value.found)) == (field, planned, found)
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("field", "make", "shown"),
    [
        ("parameter_dtypes", lambda: models.qwen2_tiny_lora(dtype=torch.bfloat16), "bfloat16"),
        ("adapter", lambda: models.lora(models.qwen2_tiny(), rank=8), "lora rank 8"),
        ("adapter", lambda: models.lora(models.qwen2_tiny(), dropout=0.0), "dropout 0.0"),
        ("adapter", models.qwen2_tiny, "none"),
        ("trainable_set", lambda: frozen(models.qwen2_tiny_lora()), "27 tensors"),
    ],
)
def test_dtype_rank_dropout_and_frozen_parameters(
    field: str, make: Callable[[], nn.Module], shown: str, plan: Plan
) -> None:
    accept = ("parameter_dtypes",) if field in ("adapter", "trainable_set") else ()
    with pytest.raises(FingerprintError) as caught:
        attach(make(), plan_set(plan), accept=accept)
    assert caught.value.field == field
    assert f"Plan field {field}=" in str(caught.value)
    assert shown in str(caught.value.found)


def stale(plan: Plan, **fields: Any) -> Plan:
    return replace(plan, fingerprint=plan.fingerprint | fields)


@pytest.mark.parametrize(("field", "planned"), [("torch", "2.12"), ("transformers", "5.23"), ("region_grain", "block")])
def test_minor_versions_and_grain(field: str, planned: str, plan: Plan) -> None:
    with pytest.raises(FingerprintError, match=f"Plan field {field}={planned}, model has ") as caught:
        attach(models.qwen2_tiny_lora(), plan_set(stale(plan, **{field: planned})))
    assert caught.value.field == field


def test_a_patch_version_only_warns(plan: Plan) -> None:
    model = models.qwen2_tiny_lora()
    old = stale(plan, torch_patch="2.13.99")
    with pytest.warns(HiloreWarning, match=r"Plan field torch_patch=2.13.99, model has 2\.13\.\d"):
        runtime = attach(model, plan_set(old))
    assert len(runtime.stats.accepted) == 1
    runtime.detach()


def test_what_is_accepted_by_name_warns_and_is_kept(plan: Plan) -> None:
    model = models.qwen2_tiny_lora()
    old = stale(plan, torch="2.12", transformers="5.23")
    with pytest.raises(FingerprintError, match='accept=\\("transformers",\\)'):
        attach(model, plan_set(old), accept=("torch",))
    with pytest.warns(HiloreWarning, match="Plan field (torch|transformers)=") as said:
        runtime = attach(model, plan_set(old), accept=("torch", "transformers"))
    assert len([w for w in said if w.category is HiloreWarning]) == len(runtime.stats.accepted) == 2
    runtime.detach()


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("accept", "message"),
    [
        (("toch",), "accept names the unknown field 'toch'; did you mean 'torch'?"),
        (("torch", "atention"), "accept names the unknown field 'atention'; did you mean 'attention'?"),
        ("torch", "accept is the string 'torch'; give a tuple of names: accept=(\"torch\",)"),
    ],
)
def test_a_misspelt_name_to_accept_is_refused(accept: Any, message: str, dry_run: Any, plan: Plan) -> None:
    with pytest.raises(FingerprintError) as caught:
        attach(models.qwen2_tiny_lora(), plan_set(plan), accept=accept, dry_run=dry_run)
    assert str(caught.value) == message


def test_whether_the_first_input_requires_grad_is_a_field(plan: Plan) -> None:
    model = models.qwen2_tiny_lora()
    batch = models.microbatch_for(model)
    runtime = attach_plan(model, plan)
    loss_of(model, batch)
    model.enable_input_require_grads()
    with pytest.raises(
        FingerprintError, match="Plan field first_input_requires_grad=False, the model's first"
    ) as caught:
        loss_of(model, batch)
    assert (caught.value.planned, caught.value.found) == (False, True)
    runtime.detach()
    runtime = attach(model, plan_set(stale(plan, first_input_requires_grad=True)))
    expected = gradients(model, batch)
    model.disable_input_require_grads()
    with pytest.raises(FingerprintError, match=r"Call model.enable_input_require_grads\(\)"):
        loss_of(model, batch)
    runtime.detach()
    model.enable_input_require_grads()
    assert_same_step(gradients(model, batch), expected)


def test_every_field_of_the_contract_is_checked() -> None:
    assert {
        "architecture",
        "hidden_size",
        "parameter_dtypes",
        "adapter",
        "attention",
        "layout",
        "trainable_set",
        "first_input_requires_grad",
        "parallel",
        "region_grain",
        "torch",
        "transformers",
    } <= set(REFUSED)
    assert set(WARNED) == {"torch_patch", "transformers_patch", "gpu", "world_size"}


def test_without_a_fingerprint_it_is_an_error(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="the plan has no fingerprint, so nothing says which model it is for"):
        attach(models.qwen2_tiny_lora(), plan_set(replace(plan, fingerprint={})))
    data = json.loads(plan_text(plan))
    del data["fingerprint"]
    path = tmp_path / "tiny.high.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFileError, match="has no fingerprint"):
        load_plans(str(path))


def test_another_schema_version_is_an_error(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "tiny.high.json"
    path.write_text(json.dumps(json.loads(plan_text(plan)) | {"schema_version": 2}))
    with pytest.raises(PlanFileError, match="schema_version is 2, this runtime reads 1; solve again"):
        load_plans(str(path))


def test_frozen_weights_save_less(plan: Plan) -> None:
    """Why the trainable set is a field: 73,728 bytes for mlp, 32,768 with its weights frozen."""
    saved: list[int] = []
    for frozen_weights in (False, True):
        model = models.mlp()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        for parameter in model.parameters():
            parameter.requires_grad_(not frozen_weights)
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor, own: set[int] = own, storages: dict[int, int] = storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                storages[storage._cdata] = storage.nbytes()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(x)
        saved.append(sum(storages.values()))
        del out
    assert saved[0] - saved[1] == 16 * 64 * 4 + 16 * 256 * 4
    assert saved[1] == 16 * 256 * 4
