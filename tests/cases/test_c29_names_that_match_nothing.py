"""C-29: a plan binds all its units or none, and a failed bind says what is missing and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn
from transformers.modeling_utils import AttentionInterface

from hilore.runtime.attach import attach
from hilore.runtime.errors import BindError, CodecError
from hilore.runtime.plan import Plan
from tests import models
from tests.plans import attach_plan, plan_for, plan_set

UNCHECKED = {"world_size": 1}


def with_unit(plan: Plan, old: str, new: str) -> Plan:
    regions = tuple(
        replace(r, units=tuple(replace(u, name=new) if u.name == old else u for u in r.units)) for r in plan.regions
    )
    return replace(plan, regions=regions, fingerprint=UNCHECKED)


def refused(model: nn.Module, plan: Plan) -> str:
    """The message; the model and transformers' attention interface are untouched."""
    before = [dict(vars(module)) for module in model.modules()]
    hooks = [{k: dict(v) for k, v in vars(m).items() if isinstance(v, dict)} for m in model.modules()]
    attention = dict(AttentionInterface._global_mapping)
    with pytest.raises(BindError) as caught:
        attach(model, plan_set(plan))
    assert [dict(vars(module)) for module in model.modules()] == before
    assert [{k: dict(v) for k, v in vars(m).items() if isinstance(v, dict)} for m in model.modules()] == hooks
    assert dict(AttentionInterface._global_mapping) == attention
    assert type(caught.value) is BindError
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_36_regions_for_a_model_of_28() -> None:
    small = models.qwen2_tiny(num_hidden_layers=28)
    plan = plan_for(models.qwen2_tiny(num_hidden_layers=36))
    message = refused(small, replace(plan, fingerprint=UNCHECKED))
    assert message.startswith(
        "the plan has 36 regions, the model 28; first missing: model.layers.28; closest name in the model: model"
    )
    assert message.endswith(
        "Nothing was installed. Make plans for this model with `hilore-plan trace` and `hilore-plan solve`"
    )


def test_fewer_regions_than_the_model_has() -> None:
    plan = plan_for(models.qwen2_tiny())
    message = refused(models.qwen2_tiny(num_hidden_layers=3), replace(plan, fingerprint=UNCHECKED))
    assert message.startswith("the plan has 2 regions, the model 3; first extra: model.layers.2. Nothing was installed")


def test_regions_in_another_order() -> None:
    plan = plan_for(models.qwen2_tiny())
    turned = replace(plan, regions=plan.regions[::-1], fingerprint=UNCHECKED)
    message = refused(models.qwen2_tiny(), turned)
    assert (
        message == "the plan's regions are those of the model in another order: model.layers.1.. and model.layers.0.."
    )


@pytest.mark.parametrize(
    ("new", "closest"),
    [
        ("model.layers.1.mlp.gate_prj", "model.layers.1.mlp.gate_proj"),
        ("model.layers.1.foobar_proj", "model.layers.1"),
        ("model.layers.1.self_attn:atention", "model.layers.1.self_attn:attention"),
    ],
)
def test_one_misspelt_unit(new: str, closest: str) -> None:
    model = models.qwen2_tiny()
    message = refused(model, with_unit(plan_for(model, "H"), "model.layers.1.mlp.gate_proj", new))
    assert message.startswith(f"the plan has 16 units; first missing: {new}; closest name in the model: {closest}")


def test_a_unit_of_another_region() -> None:
    """model.layers.10 begins with model.layers.1 and is none of it."""
    model = models.qwen2_tiny(num_hidden_layers=11)
    plan = with_unit(plan_for(model), "model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj")
    assert "first missing: model.layers.10.mlp.up_proj" in refused(model, plan)


def test_a_unit_inside_another() -> None:
    model = models.qwen2_tiny()
    message = refused(model, with_unit(plan_for(model), "model.layers.1.mlp.up_proj", "model.layers.1.mlp"))
    assert message == (
        "unit model.layers.1.mlp.gate_proj lies inside unit model.layers.1.mlp; a call can belong to one unit only"
    )


@pytest.mark.parametrize("make", [models.qwen2_tiny, models.qwen2_tiny_lora])
def test_after_a_failed_bind_the_right_plan_binds(make: Callable[[], nn.Module]) -> None:
    model = make()
    plan = plan_for(model, "H")
    refused(model, with_unit(plan, "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.gate"))
    runtime = attach_plan(model, plan)
    assert len([name for region in runtime.regions for name in region.units]) == 16
    runtime.detach()


def test_a_codec_that_this_version_does_not_know_is_refused_before_training() -> None:
    model = models.qwen2_tiny()
    before = [dict(vars(module)) for module in model.modules()]
    plans = plan_set(plan_for(model, "L", codec="int8_g128"))
    with pytest.raises(CodecError, match="Unknown codec 'int8_g128'; did you mean 'int8-g128'"):
        attach(model, plans)
    assert "Unknown codec 'int8_g128'" in attach(model, plans, dry_run=True).refused[0]
    assert [dict(vars(module)) for module in model.modules()] == before
