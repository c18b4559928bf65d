"""C-28: a plan made on the plain model binds to the wrapped one: the same units, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hilore.runtime.attach import attach
from hilore.runtime.bind import bind_regions
from hilore.runtime.errors import BindError, UnsupportedModelError
from hilore.runtime.plan import Plan
from tests import models
from tests.plans import assert_same_step, attach_plan, gradients, plan_for, plan_set, units_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for(models.qwen2_tiny(), {"self_attn:attention": "H", "mlp.gate_proj": "H"})


def peft(model: nn.Module) -> nn.Module:
    return models.lora(model, targets=["q_proj", "gate_proj"])


def wrapped_layers(model: nn.Module) -> nn.Module:
    layers = model.model.layers
    for place in range(len(layers)):
        layers[place] = checkpoint_wrapper(layers[place])
    return model


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "peft": peft,
    "compile": torch.compile,
    "checkpoint_wrapper": wrapped_layers,
    "ddp": DistributedDataParallel,
    "fsdp1": fsdp1,
    "ddp of peft": lambda model: DistributedDataParallel(peft(model)),
    "compile of ddp of peft": lambda model: torch.compile(DistributedDataParallel(peft(model))),
    "peft of checkpoint_wrapper in DataParallel": lambda model: nn.DataParallel(peft(wrapped_layers(model))),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_same_units_in_the_same_order(wrapper: str, plan: Plan) -> None:
    model = models.qwen2_tiny()
    linears = [model.model.layers[place].mlp.gate_proj for place in range(2)]
    regions = bind_regions(WRAPPERS[wrapper](model), plan)
    assert [region.name for region in regions] == ["model.layers.0", "model.layers.1"]
    assert tuple(name for region in regions for name in region.units) == plan.unit_names
    for region, linear in zip(regions, linears, strict=True):
        module = region.units[f"{region.name}.mlp.gate_proj"].module
        assert getattr(module, "base_layer", module) is linear, "the linear, or the adapter layer around it"


@pytest.mark.parametrize("wrapper", ["compile", "checkpoint_wrapper", "compile of ddp of peft"])
def test_names_strip_and_then_it_is_refused(wrapper: str, plan: Plan) -> None:
    model = WRAPPERS[wrapper](models.qwen2_tiny())
    with pytest.raises(UnsupportedModelError, match=r"it is compiled|it checkpoints itself"):
        attach(model, plan_set(plan), accept=("adapter", "trainable_set", "parameter_dtypes"))


@pytest.mark.parametrize("wrapper", ["plain", "ddp"])
def test_it_runs_in_the_wrapper(wrapper: str, plan: Plan) -> None:
    model = WRAPPERS[wrapper](models.qwen2_tiny())
    batch = models.microbatch_for(model.module if wrapper == "ddp" else model)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan)
    assert_same_step(gradients(model, batch), expected)
    assert runtime.stats.units["model.layers.1.mlp.gate_proj"].answered == 1
    runtime.detach()


def test_a_module_that_is_truly_called_module_survives() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = models.mlp(0)

        def forward(self, x: torch.Tensor) -> Any:
            return self.module(x)

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    model = Holder().train()
    units_of(model, x, regions=("module",))
    expected = gradients(model, x)
    plan = plan_for(model, "H")
    assert plan.unit_names == ("module.0", "module.2")
    wrapped = nn.DataParallel(model)
    assert [region.name for region in bind_regions(wrapped, plan)] == ["module"]
    runtime = attach_plan(model, plan)
    assert_same_step(gradients(model, x), expected)
    runtime.detach()


def test_an_unknown_prefix_names_one_expected_and_one_found(plan: Plan) -> None:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = models.qwen2_tiny()

    unchecked = replace(plan, fingerprint={"world_size": 1})
    with pytest.raises(BindError) as caught:
        attach(Actor(), plan_set(unchecked))
    message = str(caught.value)
    assert "the plan has 2 regions, the model 2" in message
    assert "first missing: model.layers.0" in message
    assert "first extra: policy.model.layers.0" in message
