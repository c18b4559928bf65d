"""Weights and inputs without data, for running an exported graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind

META = torch.device("meta")
_STAND_IN = torch.device("cpu")


def fake_mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode that a model's weights were made under, None for real and meta weights."""
    return next((tensor.fake_mode for tensor in weights_of(model) if isinstance(tensor, FakeTensor)), None)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def as_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """``tensor`` without data, in ``mode``. Meta becomes cpu: on meta, attention is taken apart into T x T products."""
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.device != META:
        return mode.from_tensor(tensor)
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_STAND_IN)
    return fake.requires_grad_(tensor.requires_grad)


def fake_arguments(
    program: torch.export.ExportedProgram, mode: FakeTensorMode, inputs: dict[str, Tensor]
) -> tuple[list[Any], list[Tensor]]:
    """Values for the graph's placeholders in order, and those of them that are parameters or buffers."""
    given = iter(inputs.values())
    made: dict[int, Tensor] = {}
    arguments: list[Any] = []
    fixed: list[Tensor] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            arguments.append(as_fake(next(given), mode))
            continue
        target = str(spec.target)
        value = program.state_dict[target] if target in program.state_dict else program.constants[target]
        if isinstance(value, Tensor):
            if id(value) not in made:
                made[id(value)] = as_fake(value, mode)
            value = made[id(value)]
            fixed.append(value)
        arguments.append(value)
    return arguments, fixed


def take_off_meta(graph_module: torch.fx.GraphModule) -> None:
    """Make a graph that was exported on meta weights run on the device that stands in for it."""

    def swap(argument: Any) -> Any:
        return _STAND_IN if argument == META else argument

    for node in graph_module.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, swap)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, swap)
