"""C-25: a model that checkpoints itself: Hugging Face's non-reentrant kind is taken over, every other is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from hilore.planner.capture import capture
from hilore.runtime.attach import attach
from hilore.runtime.errors import HiloreWarning, UnsupportedModelError
from tests import models
from tests.plans import assert_same_step, attach_plan, forget, gradients, plan_for, plan_set, units_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def ready(model: nn.Module) -> Any:
    model.enable_input_require_grads()
    batch = models.microbatch_for(model)
    units_of(model, batch)
    return batch


def test_hugging_faces_own_is_taken_over_and_said_once() -> None:
    model = models.qwen2_tiny()
    batch = ready(model)
    plan = plan_for(model, "R")
    expected = gradients(model, batch)
    model.gradient_checkpointing_enable()
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    with pytest.warns(HiloreWarning, match="Qwen2ForCausalLM: its own gradient checkpointing was on; the plan takes"):
        runtime = attach_plan(model, plan)
    runs: list[int] = []
    gate = model.model.layers[0].mlp.gate_proj
    handle = gate.register_forward_hook(lambda _module, _inputs, output: runs.append(output.shape[:-1].numel()))
    assert_same_step(gradients(model, batch), expected)
    tokens = batch.input_ids.numel()
    assert sum(run == tokens for run in runs) == 2, "one forward and one replay, never two"
    assert all(run <= 16 for run in runs if run != tokens), "the first look at a gated MLP takes a few tokens"
    assert (runtime.stats.frames, runtime.stats.replays) == (2, 2)
    handle.remove()
    runtime.detach()
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions
    assert model.is_gradient_checkpointing
    assert_same_step(gradients(model, batch), expected)


def test_it_is_traced_as_without() -> None:
    model = models.qwen2_tiny()
    batch = ready(model)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    plain = capture(model, inputs)
    model.gradient_checkpointing_enable()
    found = capture(model, inputs)
    assert found.saved == plain.saved
    assert found.classes == plain.classes
    assert model.is_gradient_checkpointing


def replace_layers(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
    layers = model.model.layers
    for place in range(len(layers)):
        layers[place] = wrap(layers[place])


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("reentrant", r"model.layers.0: reentrant gradient checkpointing is on .*Set gradient_checkpointing_kwargs="),
        ("offload", r"model.layers.0: activation offload is on \(offload=True\).*enable\(\) without offload"),
        ("checkpoint wrapper", r"model.layers.0: it checkpoints itself; leave out apply_activation_checkpointing \(or"),
        ("offload wrapper", r"model.layers.0: it offloads its activations; leave out offload_wrapper"),
    ],
)
def test_every_other_kind_is_refused_naming_the_setting(kind: str, named: str) -> None:
    model = models.qwen2_tiny()
    ready(model)
    plan = plan_for(model, "R")
    if kind == "reentrant":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    elif kind == "offload":
        model.activation_checkpointing_enable(offload=True)
    else:
        replace_layers(model, checkpoint_wrapper if kind == "checkpoint wrapper" else offload_wrapper)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        attach(model, plan_set(plan))
    assert caught.value.exit_code == 2
    assert [dict(vars(module)) for module in model.modules()] == before


def test_every_n_layers_is_taken_over_too() -> None:
    model = models.qwen2_tiny(num_hidden_layers=3)
    batch = ready(model)
    plan = plan_for(model, "R")
    expected = gradients(model, batch)
    model.activation_checkpointing_enable(every_n_layers=2)
    with pytest.warns(HiloreWarning, match="its own gradient checkpointing was on"):
        runtime = attach_plan(model, plan)
    assert_same_step(gradients(model, batch), expected)
    assert runtime.stats.frames == 3
    runtime.detach()
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True]


def test_a_layer_that_calls_checkpoint_itself_inside_is_refused_or_exact() -> None:
    """A user's own checkpoint inside a region: two recomputations; the trace refuses it."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = models.mlp(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
            return out

    model = nn.Sequential(Inner(), Inner()).train()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(UnsupportedModelError, match="runs under saved-tensor hooks"):
        units_of(model, x, regions=("0", "1"))
    forget(model)
