"""The parameters that FSDP shards: one rank's shards of them, adapters, and embeddings in a group of their own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hilore.planner.flatparams import flat_shards
from hilore.planner.shardgroup import distinct, persistent_dtype
from hilore.planner.spec_types import ModelSpec


def shard_parameters(spec: ModelSpec, model: nn.Module, regions: Iterable[nn.Module] = ()) -> nn.ParameterList:
    """One rank's shards of all parameters, padded, empty, on the model's device: for measuring state and optimizer.

    ``regions``: whose parameters are one flat parameter each, under FSDP1.
    """
    if spec.parallel.kind == "fsdp1":
        return flat_shards(spec, model, regions)
    adapters = adapter_parameters(model)
    shards = nn.ParameterList()
    for parameter in distinct(model.parameters()):
        rows = -(-parameter.shape[0] // spec.parallel.world_size)
        dtype = persistent_dtype(spec, adapter=id(parameter) in adapters)
        data = torch.empty((rows, *parameter.shape[1:]), dtype=dtype, device=parameter.device)
        shards.append(nn.Parameter(data, requires_grad=parameter.requires_grad))
    return shards


def adapter_parameters(model: nn.Module) -> set[int]:
    return {id(p) for name, p in model.named_parameters() if any(part.startswith("lora_") for part in name.split("."))}


def untied_embeddings(model: nn.Module) -> set[int]:
    """Ids of the input embedding's parameters where they are not the output layer's too; empty otherwise."""
    embedding, output = (getattr(model, f"get_{kind}_embeddings", lambda: None)() for kind in ("input", "output"))
    if not isinstance(embedding, nn.Module) or not isinstance(output, nn.Module):
        return set()
    inputs, outputs = ({id(p) for p in module.parameters()} for module in (embedding, output))
    return set() if inputs & outputs else inputs
