"""C-13: a plan that changes between forward and backward changes nothing for frames in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hilore.runtime.errors import PlanSwitchError
from hilore.runtime.plan import Plan
from tests import models
from tests.plans import Step, assert_same_step, attach_plan, gradients, loss_of, plan_for, random_modes, units_of

ENCODED = {"mlp.gate_proj": "L", "mlp.up_proj": "L"}


def plans_of(model: nn.Module) -> dict[str, Plan]:
    modes, held = random_modes(units_of(model), 3)
    return {
        "R": plan_for(model, "R"),
        "H": plan_for(model, "H"),
        "mixed": plan_for(model, modes, hold=held),
        "split": plan_for(model, {"self_attn:attention": "H"}, split="mlp.gate_proj"),
        "held": plan_for(model, hold=True),
        "L": plan_for(model, ENCODED),
    }


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return models.qwen2_tiny_lora(dropout=0.1)


@pytest.mark.parametrize("then", ["R", "H", "mixed", "split", "held", "L", "detached", "attached anew"])
@pytest.mark.parametrize("first", ["R", "H", "mixed", "split", "L"])
def test_another_plan_between_forward_and_backward(model: nn.Module, first: str, then: str) -> None:
    batch = models.microbatch_for(model)
    plans = plans_of(model)
    runtime = attach_plan(model, plans[first])
    expected = gradients(model, batch)
    model.zero_grad(set_to_none=True)
    with models.seeded(0):
        loss = loss_of(model, batch)
    if then in ("detached", "attached anew"):
        runtime.detach()
        if then == "attached anew":
            runtime = attach_plan(model, plans["R"])
    else:
        runtime.use(plans[then])
    loss.backward()
    runtime.detach()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.gradients.keys()
    assert [name for name, grad in expected.gradients.items() if not torch.equal(grad, found[name])] == []


@pytest.mark.parametrize(("first", "second"), [("R", "H"), ("mixed", "split"), ("L", "R"), ("held", "L"), ("L", "L")])
def test_two_microbatches_under_two_plans_in_one_backward(model: nn.Module, first: str, second: str) -> None:
    batches = [models.microbatch_for(model, seed=seed) for seed in (0, 1)]
    plans = plans_of(model)
    runtime = attach_plan(model, plans[first])
    expected: list[Step] = []
    losses: list[torch.Tensor] = []
    for batch, name in zip(batches, (first, second), strict=True):
        runtime.use(plans[name])
        expected.append(gradients(model, batch))
    model.zero_grad(set_to_none=True)
    for batch, name in zip(batches, (first, second), strict=True):
        runtime.use(plans[name])
        with models.seeded(0):
            losses.append(loss_of(model, batch))
    torch.stack(losses).sum().backward()
    runtime.detach()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, expected[0].gradients[name] + expected[1].gradients[name]), name


def test_a_choice_in_the_middle_of_a_forward_raises_and_leaves_the_forward_as_it_was(model: nn.Module) -> None:
    batch = models.microbatch_for(model)
    plans = plans_of(model)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plans["R"])
    messages: list[str] = []

    def switch(module: nn.Module, args: Any) -> None:
        with pytest.raises(PlanSwitchError) as caught:
            runtime.use(plans["H"])
        messages.append(str(caught.value))

    handle = model.base_model.model.model.layers[1].register_forward_pre_hook(switch)
    assert_same_step(gradients(model, batch), expected)
    handle.remove()
    assert messages == [
        "a plan can change only between forwards, and one is under way: 1 of 2 regions have run. Choose before the "
        "model is called (after a forward that died half-way: runtime.reset())"
    ]
    assert runtime.stats.units == {} or all(unit.answered == 0 for unit in runtime.stats.units.values())
    runtime.detach()
