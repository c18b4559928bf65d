"""Capture: what is glue with a reason, what is refused, and what is left as it was."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hilore.planner.capture import capture
from hilore.runtime.errors import BindError, UnsupportedModelError
from tests import models
from tests.capture_helpers import Blocks, Pair, captured, of_blocks

# What is not a unit


def test_module_called_twice_is_glue_with_a_reason() -> None:
    class Twice(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(functional.relu(self.up(x))))

    found = of_blocks(Twice)
    assert [unit.name for unit in found.classes[0].units] == ["down"]
    assert "up (Twice#0) is glue: the module runs 2 times in one forward" in found.notes


def test_attention_outside_the_interface_is_glue_with_a_reason() -> None:
    class Attends(Pair):
        def forward(self, x: Tensor) -> Tensor:
            q = self.up(x)[None, None]
            return self.down(functional.scaled_dot_product_attention(q, q, q)[0, 0])

    found = of_blocks(Attends)
    assert [unit.name for unit in found.classes[0].units] == ["up", "down"]
    assert [n for n in found.notes if "not through transformers' attention interface" in n]


def test_linear_inside_a_closed_block_is_glue_with_a_reason() -> None:
    class Autocast(Pair):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            with torch.autocast("cpu", torch.bfloat16):
                return self.down(hidden).float()

    found = of_blocks(Autocast)
    assert [unit.name for unit in found.classes[0].units] == ["up"]
    assert found.classes[0].units[0].feeds_saved, "the block saves a cast of it"
    assert [n for n in found.notes if n.startswith("down (Autocast#0) is glue: it runs inside a block")]


def test_second_run_hidden_in_a_closed_block_is_seen() -> None:
    class Twice(Pair):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            with torch.autocast("cpu", torch.bfloat16):
                return self.down(self.up(hidden)).float()

    found = of_blocks(Twice)
    assert found.classes[0].units == ()
    assert "up (Twice#0) is glue: the module runs 2 times in one forward" in found.notes


def test_regions_that_cannot_be() -> None:
    class Again(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    inputs = {"x": torch.randn(2, 8)}
    with pytest.raises(UnsupportedModelError, match=r"region 'blocks.0' runs more than once in one forward"):
        capture(Again(Pair), inputs, region_names=("blocks.0", "blocks.1"))
    with pytest.raises(BindError, match=r"1 of 2 regions are not modules of the model, first 'block.0'; did you mean"):
        capture(Blocks(Pair), inputs, region_names=("block.0", "blocks.1"))
    with pytest.raises(BindError, match=r"region 'blocks.0.up' lies inside region 'blocks.0'"):
        capture(Blocks(Pair), inputs, region_names=("blocks.0", "blocks.0.up"))
    with pytest.raises(UnsupportedModelError, match="Give region_names"):
        capture(Blocks(Pair), inputs)


# The model's own checkpointing, mode and settings


def test_own_checkpointing_is_set_aside_and_restored() -> None:
    plain = captured(models.qwen2_tiny())
    model = models.qwen2_tiny()
    model._set_gradient_checkpointing(True)  # type: ignore[operator]
    found = captured(model)
    assert found.saved == plain.saved
    assert found.classes == plain.classes
    assert all(layer.gradient_checkpointing for layer in model.model.layers)  # type: ignore[union-attr]
    assert "the model's own gradient checkpointing was off while it was traced" in found.notes


def test_other_checkpointing_is_refused_with_the_setting() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = models.qwen2_tiny()
    model._set_gradient_checkpointing(  # type: ignore[operator]
        True, partial(checkpoint, use_reentrant=True)
    )
    with pytest.raises(UnsupportedModelError, match="use_reentrant"):
        captured(model)
    wrapped = models.qwen2_tiny()
    wrapped.model.layers[1] = checkpoint_wrapper(wrapped.model.layers[1])  # type: ignore[union-attr, index, operator]
    with pytest.raises(UnsupportedModelError, match=r"model.layers.1 is a CheckpointWrapper; remove"):
        captured(wrapped)


@pytest.mark.parametrize(("reentrant", "message"), [(False, "saved-tensor hooks"), (True, "without gradients")])
def test_checkpointing_inside_forward_is_refused(reentrant: bool, message: str) -> None:
    class Checkpoints(Pair):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(super().forward, x, use_reentrant=reentrant)
            return result

    with pytest.raises(UnsupportedModelError, match=rf"blocks.0.up runs .*{message}"):
        of_blocks(Checkpoints)


def test_eval_mode_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"eval mode.*model.train\(\)"):
        captured(models.qwen2_tiny().eval())
    part = models.qwen2_tiny()
    part.model.layers[1].mlp.eval()  # type: ignore[union-attr, index]
    with pytest.raises(UnsupportedModelError, match=r"model.layers.1.mlp is in eval mode"):
        captured(part)


def test_nothing_is_left_behind() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACE

    model = models.qwen2_tiny_lora(use_cache=True)
    sdpa, state = INTERFACE["sdpa"], {name: p.clone() for name, p in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    found = captured(model)
    assert "config.use_cache was off while the model was traced: training has no use for it" in found.notes
    assert model.config.use_cache is True  # type: ignore[union-attr]
    assert INTERFACE["sdpa"] is sdpa
    assert not INTERFACE._local_mapping
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert torch.equal(torch_state, torch.get_rng_state())
    assert python_state == random.getstate()
    assert all(torch.equal(state[name], p) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
