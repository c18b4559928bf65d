"""Canonical names: wrappers' own path parts go, and nothing else."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hilore.runtime.naming import canonical_modules, canonical_names
from tests import models


def names_of(model: nn.Module) -> list[str]:
    return [name for name in canonical_names(model).values() if name]


def test_peft_names_are_those_of_the_plain_model() -> None:
    plain, wrapped = models.qwen2_tiny(), models.qwen2_tiny_lora()
    names = canonical_modules(wrapped)
    assert set(names) >= set(canonical_modules(plain))
    assert type(names["model.layers.0.self_attn.q_proj"]) is nn.Linear
    assert "model.layers.0.self_attn.q_proj.lora_A.default" in names
    assert not any("base_model" in name or "base_layer" in name for name in names)


def test_a_module_that_is_truly_called_like_a_wrappers_part_keeps_its_name() -> None:
    inner = nn.ModuleDict({"module": nn.Linear(2, 2), "model": nn.Linear(2, 2), "base_layer": nn.Linear(2, 2)})
    model = nn.ModuleDict({"module": inner, "base_model": nn.Linear(2, 2)})
    assert names_of(model) == [
        "module",
        "module.module",
        "module.model",
        "module.base_layer",
        "base_model",
    ]


def test_a_part_is_never_a_substring() -> None:
    model = nn.ModuleDict({"my_orig_mod": nn.Linear(2, 2), "module_0": nn.Linear(2, 2)})
    assert names_of(model) == ["my_orig_mod", "module_0"]


def test_a_user_class_named_like_a_wrapper_is_none() -> None:
    class DataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert names_of(DataParallel()) == ["module"]


def test_wrappers_in_wrappers() -> None:
    plain = models.mlp()
    wrapped = nn.DataParallel(torch.compile(checkpoint_wrapper(models.mlp())))
    assert names_of(wrapped) == names_of(plain) == ["0", "1", "2"]
    assert canonical_modules(wrapped)["0"].weight.shape == (256, 64)


def test_shared_modules_have_all_their_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared})
    assert canonical_modules(model)["a"] is canonical_modules(model)["b"]
