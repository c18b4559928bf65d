"""Which modules are regions, and which fx nodes belong to each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hilore.runtime.errors import BindError, HiloreError, UnsupportedModelError
from hilore.runtime.huggingface import is_checkpointable_layer
from hilore.runtime.naming import canonical_names

GRAINS = ("layer", "block")


@dataclass(frozen=True, slots=True)
class Region:
    """``name`` is canonical, ``path`` the module's name in the model as it is."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Span:
    """A region's fx nodes in execution order, without holes. ``inputs``: nodes outside that it reads, by first use."""

    region: Region
    nodes: tuple[torch.fx.Node, ...]
    inputs: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node, ...]


def find_regions(model: nn.Module, region_names: tuple[str, ...] | None, grain: str) -> tuple[Region, ...]:
    """Regions by canonical name, or a Hugging Face model's checkpointed layers (grain ``block``: the children of
    such a layer that hold linears, attention and MLP apart).

    Raises UnsupportedModelError where nothing is found, BindError for names that the model does not have.
    """
    if grain not in GRAINS:
        raise HiloreError(f"region_grain {grain!r}: use one of {', '.join(GRAINS)}", region_grain=grain)
    names = canonical_names(model)
    if region_names is not None:
        return _named_regions(names, region_names)
    layers = _checkpointed_layers(model)
    if not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layers that Hugging Face would checkpoint, so its regions are unknown. "
            "Give region_names, the modules to be replayed one by one",
            unit=type(model).__name__,
        )
    if grain == "layer":
        return tuple(Region(names[path], path) for path in layers)
    blocks = [
        f"{path}.{child}"
        for path, layer in layers.items()
        for child, part in layer.named_children()
        if any(isinstance(module, nn.Linear) for module in part.modules())
    ]
    return tuple(Region(names[path], path) for path in blocks)


def _checkpointed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Outermost modules that transformers marks as checkpointable, by path."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if is_checkpointable_layer(module) and not any(is_inside(path, outer) for outer in found):
            found[path] = module
    return found


def _named_regions(names: dict[str, str], wanted: tuple[str, ...]) -> tuple[Region, ...]:
    paths: dict[str, str] = {}
    for path, canonical in names.items():
        paths.setdefault(canonical, path)
    missing = [name for name in wanted if name not in paths]
    if missing:
        close = difflib.get_close_matches(missing[0], [name for name in paths if name], 1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise BindError(
            f"{len(missing)} of {len(wanted)} regions are not modules of the model, first '{missing[0]}'{hint}",
            missing=tuple(missing),
        )
    for outer in wanted:
        for inner in wanted:
            if is_inside(inner, outer) or (inner == outer and wanted.count(outer) > 1):
                raise BindError(f"region '{inner}' lies inside region '{outer}': regions may not overlap", unit=inner)
    return tuple(Region(name, paths[name]) for name in wanted)


def module_stack(node: torch.fx.Node) -> list[tuple[str, str]]:
    """(key, module path) from the root to the module that ran ``node``; a second call of a module ends in '@1'."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(key, path) for key, (path, _) in stack.items()]


def call_index(key: str) -> int:
    _, mark, count = key.rpartition("@")
    return int(count) if mark and count.isdigit() else 0


def find_spans(graph: torch.fx.Graph, regions: tuple[Region, ...]) -> tuple[tuple[Span, ...], tuple[Region, ...]]:
    """The spans of all regions that ran, in execution order, and the regions that did not run."""
    by_path = {region.path: region for region in regions}
    ordered = [node for node in graph.nodes if node.op == "call_function"]
    places: dict[Region, list[int]] = {}
    for place, node in enumerate(ordered):
        for key, path in module_stack(node):
            if path in by_path:
                if call_index(key):
                    raise UnsupportedModelError(
                        f"region '{by_path[path].name}' runs more than once in one forward. Choose regions that run "
                        "once",
                        unit=by_path[path].name,
                    )
                places.setdefault(by_path[path], []).append(place)
    spans: list[Span] = []
    end = -1
    for region, where in sorted(places.items(), key=lambda item: item[1][0]):
        if where[0] <= end:
            raise UnsupportedModelError(
                f"region '{region.name}' does not run as one piece: it overlaps '{spans[-1].region.name}'. "
                "Choose regions that run one after another",
                unit=region.name,
            )
        end = where[-1]
        spans.append(_span(region, tuple(ordered[where[0] : end + 1])))
    return tuple(spans), tuple(region for region in regions if region not in places)


def _span(region: Region, nodes: tuple[torch.fx.Node, ...]) -> Span:
    inside = set(nodes)
    inputs = dict.fromkeys(before for node in nodes for before in node.all_input_nodes if before not in inside)
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    return Span(region, nodes, tuple(inputs), outputs)


def structure_key(span: Span, modules: Mapping[str, nn.Module]) -> tuple[object, ...]:
    """Equal for regions that run the same operators on the same values in the same order, names apart."""
    index = {node: f"%{place}" for place, node in enumerate(span.nodes)}
    index |= {node: f"^{place}" for place, node in enumerate(span.inputs)}
    rows: list[object] = [type(modules[span.region.path]).__name__]
    for node in span.nodes:
        arguments = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda before: index[before])
        stack = module_stack(node)
        innermost = stack[-1][1] if stack else ""
        rows.append((str(node.target), repr(arguments), relative(innermost, span.region.path)))
    rows.extend(index[node] for node in span.outputs)
    for node in span.inputs:
        if node.op == "get_attr":
            rows.append(_subgraph_key(getattr(node.graph.owning_module, str(node.target), None)))
    return tuple(rows)


def _subgraph_key(value: object) -> object:
    """The same for a block (autocast, no_grad) that the exported graph holds as a graph of its own."""
    if not isinstance(value, torch.fx.GraphModule):
        return repr(value)
    index = {node: f"%{place}" for place, node in enumerate(value.graph.nodes)}
    return tuple(
        (
            node.op,
            str(node.target) if node.op == "call_function" else "",
            repr(torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda before: index[before])),
        )
        for node in value.graph.nodes
    )


def is_inside(path: str, region_path: str) -> bool:
    """Whether ``path`` lies strictly below ``region_path`` ('' is the root)."""
    return path.startswith(f"{region_path}.") if region_path else path != ""


def relative(path: str, region_path: str) -> str:
    """``path`` below ``region_path``, or unchanged where it is not below it."""
    if path == region_path:
        return ""
    prefix = f"{region_path}." if region_path else ""
    return path.removeprefix(prefix)
