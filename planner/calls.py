"""Grouping a region's fx nodes into calls: which of them are units that a plan can name, and the rest, glue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from hilore.planner.regions import Span, call_index, is_inside, module_stack, relative
from hilore.runtime.adapter import front_modules, is_adapted_linear

ATTENTION_MARK = "hilore_attention"

_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_LINEAR = torch.ops.aten.linear.default
_CLOSED = "it runs inside a block that the exported graph keeps closed (autocast or no_grad in the model's forward)"
_KINDS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "out_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "qkv_proj": "qkv",
    "gate_up_proj": "gate_up",
}


@dataclass(frozen=True, slots=True)
class UnitCall:
    """One unit: its ``nodes`` in order, the last of them its ``output``.

    ``name`` and ``module_path`` are relative to the region; the name is canonical, the path the module's own.
    ``flops``: multiplications and additions of one run; attention counts the whole square, causal or not.
    ``front``: those of ``nodes`` that a replay may run although the unit is left out (runtime/adapter.py).
    """

    name: str
    kind: str
    module_path: str
    nodes: tuple[torch.fx.Node, ...]
    output: torch.fx.Node
    flops: int
    front: tuple[torch.fx.Node, ...] = ()

    @property
    def core(self) -> tuple[torch.fx.Node, ...]:
        """The nodes that do not run where the unit is left out."""
        return tuple(node for node in self.nodes if node not in self.front)


@dataclass(frozen=True, slots=True)
class RegionCalls:
    """``left_out``: why a linear or an attention of the region is glue, by relative name."""

    units: tuple[UnitCall, ...]
    left_out: dict[str, str]


def find_calls(
    span: Span, modules: Mapping[str, nn.Module], names: Mapping[str, str], runs: Mapping[str, int]
) -> RegionCalls:
    """Units of one region in forward order.

    ``modules`` and ``names`` (canonical) by path; ``runs``: how often each module ran in the whole forward.
    """
    units: list[UnitCall] = []
    left_out: dict[str, str] = {}
    for path, nodes in _linear_nodes(span, modules).items():
        name = relative(names[path], span.region.name)
        reason = _why_not_linear(path, nodes, span, runs)
        if reason:
            left_out[name] = reason
        else:
            units.append(_linear_unit(name, path, nodes, span, modules, runs))
    for path, groups in _attention_nodes(span).items():
        name = f"{relative(names[path], span.region.name)}:attention"
        if len(groups) > 1 or runs[path] > 1:
            left_out[name] = f"{path} calls attention more than once in one forward"
        else:
            core = next((node for node in groups[0] if node.target == _SDPA), groups[0][0])
            nodes = groups[0][groups[0].index(core) :]
            units.append(_unit(name, "attention", path, nodes, span, _attention_flops(core)))
    _note_unmarked_attention(span, names, left_out)
    _note_silent_linears(span, modules, names, runs, {unit.name for unit in units}, left_out)
    place = {node: index for index, node in enumerate(span.nodes)}
    return RegionCalls(tuple(sorted(units, key=lambda unit: place[unit.output])), left_out)


def count_runs(graph_module: torch.fx.GraphModule) -> dict[str, int]:
    """How often each module ran in the exported forward, closed blocks included, by path."""
    last: dict[str, int] = {}
    blocks = [block for block in graph_module.modules() if isinstance(block, torch.fx.GraphModule)]
    for node in (node for block in blocks for node in block.graph.nodes):
        for key, path in module_stack(node):
            last[path] = max(last.get(path, 0), call_index(key) + 1)
    return last


def is_adapter_part(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether ``path`` lies in an adapter layer beside its frozen ``base_layer``."""
    parts = path.split(".")
    for cut in range(len(parts)):
        owner = modules[".".join(parts[:cut])]
        if "base_layer" in owner._modules and parts[cut] != "base_layer":
            return True
    return False


def _linear_nodes(span: Span, modules: Mapping[str, nn.Module]) -> dict[str, tuple[torch.fx.Node, ...]]:
    found: dict[str, list[torch.fx.Node]] = {}
    for node in span.nodes:
        for _, path in module_stack(node):
            if path not in found and not (
                isinstance(modules.get(path), nn.Linear) and not is_adapter_part(path, modules)
            ):
                continue
            found.setdefault(path, []).append(node)
            break
    return {path: tuple(nodes) for path, nodes in found.items()}


def _linear_unit(
    name: str,
    path: str,
    nodes: tuple[torch.fx.Node, ...],
    span: Span,
    modules: Mapping[str, nn.Module],
    runs: Mapping[str, int],
) -> UnitCall:
    """The linear with its adapter where PEFT's plain LoRA is around it, else the linear alone."""
    owner = path.rpartition(".")[0]
    front: tuple[torch.fx.Node, ...] = ()
    if path.endswith(".base_layer") and is_adapted_linear(modules[owner]):
        path = owner
        nodes = tuple(node for node in span.nodes if any(where == owner for _, where in module_stack(node)))
        front = _front(owner, nodes, modules)
    flops = sum(_linear_flops(node) for node in nodes if node.target == _LINEAR)
    return replace(_unit(name, _kind(name), path, nodes, span, flops), front=front)


def _front(owner: str, nodes: tuple[torch.fx.Node, ...], modules: Mapping[str, nn.Module]) -> tuple[torch.fx.Node, ...]:
    """Nodes of the front's modules, and those of the layer that they read (casts of its input)."""
    paths = {path for path, module in modules.items() for part in front_modules(modules[owner]) if module is part}
    front = [node for node in nodes if any(where in paths for _, where in module_stack(node))]
    for node in front:
        front.extend(before for before in node.all_input_nodes if before in nodes and before not in front)
    return tuple(node for node in nodes if node in front)


def _why_not_linear(path: str, nodes: tuple[torch.fx.Node, ...], span: Span, runs: Mapping[str, int]) -> str:
    if runs[path] > 1:
        return f"the module runs {runs[path]} times in one forward"
    if path == span.region.path:
        return "the region is this linear itself, so a replay of the region is what mode R of the unit would be"
    if not is_inside(path, span.region.path):
        return f"the module is shared: it is {path} elsewhere in the model"
    if not any(node.target == _LINEAR for node in nodes):
        return _CLOSED
    if len(_read_outside(nodes)) != 1:
        return "it has more than one result"
    return ""


def _attention_nodes(span: Span) -> dict[str, list[tuple[torch.fx.Node, ...]]]:
    """Nodes that ran inside the attention interface, by module path and call."""
    calls: dict[tuple[str, int], list[torch.fx.Node]] = {}
    for node in span.nodes:
        mark = (node.meta.get("custom") or {}).get(ATTENTION_MARK)
        if mark is not None:
            calls.setdefault(mark, []).append(node)
    by_path: dict[str, list[tuple[torch.fx.Node, ...]]] = {}
    for (path, _), nodes in calls.items():
        by_path.setdefault(path, []).append(tuple(nodes))
    return by_path


def _unit(name: str, kind: str, path: str, nodes: tuple[torch.fx.Node, ...], span: Span, flops: int) -> UnitCall:
    return UnitCall(name, kind, relative(path, span.region.path), nodes, _read_outside(nodes)[-1], flops)


def _read_outside(nodes: tuple[torch.fx.Node, ...]) -> list[torch.fx.Node]:
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)] or [nodes[-1]]


def _kind(name: str) -> str:
    return _KINDS.get(name.rpartition(".")[2], "linear")


def _linear_flops(node: torch.fx.Node) -> int:
    weight, result = _argument(node, 1), node.meta["val"]
    return 2 * int(result.numel()) * int(weight.shape[1])


def _attention_flops(node: torch.fx.Node) -> int:
    if node.target != _SDPA:
        return 0
    query, key, value = (_argument(node, place) for place in range(3))
    rows = int(query.shape[:-1].numel())
    return 2 * rows * int(key.shape[-2]) * int(query.shape[-1] + value.shape[-1])


def has_mask(attention: UnitCall) -> bool:
    """Whether an attention unit was captured with a mask."""
    core = attention.nodes[0]
    return core.target == _SDPA and len(core.args) > 3 and isinstance(core.args[3], torch.fx.Node)


def _argument(node: torch.fx.Node, place: int) -> torch.Tensor:
    argument = node.args[place]
    assert isinstance(argument, torch.fx.Node)
    value = argument.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def _note_unmarked_attention(span: Span, names: Mapping[str, str], left_out: dict[str, str]) -> None:
    for node in span.nodes:
        if node.target == _SDPA and ATTENTION_MARK not in (node.meta.get("custom") or {}):
            path = module_stack(node)[-1][1] if module_stack(node) else span.region.path
            left_out[f"{relative(names[path], span.region.name)}:attention"] = (
                "attention is called directly, not through transformers' attention interface, so a plan cannot reach it"
            )


def _note_silent_linears(
    span: Span,
    modules: Mapping[str, nn.Module],
    names: Mapping[str, str],
    runs: Mapping[str, int],
    offered: set[str],
    left_out: dict[str, str],
) -> None:
    for path, module in modules.items():
        if not isinstance(module, nn.Linear) or not is_inside(path, span.region.path):
            continue
        name = relative(names[path], span.region.name)
        if name not in offered and name not in left_out and not is_adapter_part(path, modules):
            left_out[name] = _CLOSED if path in runs else "it does not run in this forward, or not as a module"
