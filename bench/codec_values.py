"""Values to encode: drawn distributions, and what units of a real model put out in one forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hilore.planner.actor import build_actor
from hilore.planner.head import base_model
from hilore.planner.rivals import checkpointed_layers
from hilore.planner.spec import load_spec
from hilore.planner.tasks import build_dataset

DRAWN = (1024, 1024)
MODEL = "examples/smollm2.yaml"
ENTRIES = 4
# First, middle and last layers: a figure is the median over them.
LAYERS = (0, 7, 15, 22, 29)
PROJECTIONS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
PROJECTIONS |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj"}
# Inputs of a module: attention's result goes into o, a norm's input into the norm.
INPUTS = {"attention": "self_attn.o_proj", "norm input": "input_layernorm"}


@dataclass(frozen=True, slots=True)
class Values:
    """Tensors of one kind (several layers of a real model), bfloat16, channels last."""

    name: str
    tensors: tuple[Tensor, ...]


def drawn_values(seed: int = 0) -> list[Values]:
    """Normal, heavy-tailed (Student's t, 4 degrees of freedom), 0.2 % of channels 30 times as large, SiLU(1.5 z)."""
    generator = torch.Generator().manual_seed(seed)
    normal, other, chi = (torch.randn(DRAWN, generator=generator) for _ in range(3))
    squares = torch.stack([chi, *(torch.randn(DRAWN, generator=generator) for _ in range(3))]).square().sum(0)
    outlying = (torch.arange(DRAWN[1]) % 500 == 250).float() * 29 + 1
    found = {
        "Gaussian": normal,
        "Student-t4": other / (squares / 4).sqrt(),
        "outlier channels": normal * outlying,
        "SiLU(1.5 z)": nn.functional.silu(1.5 * normal),
    }
    return [Values(name, (tensor,)) for name, tensor in found.items()]


def recorded_values(seed: int = 0) -> list[Values]:
    """One forward of SmolLM2-135M in bfloat16 on reasoning-gym prompts, padding left out."""
    spec = load_spec(MODEL)
    actor = build_actor(replace(spec, adapter=replace(spec.adapter, kind="none")), seed=seed)
    assert actor.tokenizer is not None
    texts = [entry.prompt for entry in build_dataset(ENTRIES, seed, actor.tokenizer)]
    actor.tokenizer.padding_side = "left"
    batch = actor.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    real = batch["attention_mask"].bool()
    model = base_model(actor.model).eval()
    seen: dict[str, list[Tensor]] = {}
    handles = [handle for layer in _layers(model) for handle in _record(layer, seen, real)]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return [Values(name, tuple(tensors)) for name, tensors in seen.items()]


def _layers(model: nn.Module) -> list[nn.Module]:
    layers = checkpointed_layers(model)
    return [layers[place] for place in LAYERS]


def _record(layer: nn.Module, seen: dict[str, list[Tensor]], real: Tensor) -> list[torch.utils.hooks.RemovableHandle]:
    def keep(name: str, tensor: Tensor) -> None:
        seen.setdefault(name, []).append(tensor.detach()[real].clone())

    handles = []
    for name, path in PROJECTIONS.items():
        module = layer.get_submodule(path)
        handles.append(module.register_forward_hook(lambda _m, _args, out, name=name: keep(name, out)))
    for name, path in INPUTS.items():
        module = layer.get_submodule(path)
        handles.append(module.register_forward_pre_hook(lambda _m, args, name=name: keep(name, args[0])))
    return handles
