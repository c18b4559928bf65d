"""Capture: a model as regions, their classes, and the units of each class with their liveness.

torch.export gives the graph, its module names and its operators. An fx interpreter under fake tensors gives what
autograd saves at each node. Nodes are grouped into units and glue, and the glue is contracted away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from hilore.planner.calls import RegionCalls, UnitCall, count_runs, find_calls, has_mask
from hilore.planner.export import attention_implementations, export_model
from hilore.planner.fake import as_fake, fake_mode_of
from hilore.planner.liveness import UnitLiveness, contract, dependency_graph
from hilore.planner.record import ClassRecord, NodeRecord, Recording, RegionRun, record
from hilore.planner.regions import Region, find_regions, find_spans
from hilore.planner.storages import SavedStorage
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.naming import canonical_names

_CHANGED = "its output is changed in place"


@dataclass(frozen=True, slots=True)
class UnitGraph:
    """One unit of a region class, in forward order; ``name``, ``kind`` and the liveness fields as in trace.UnitTrace.

    ``module_path``: the module that runs it, relative to the region's module and with wrappers (attention: the module
    that calls it; PEFT's plain LoRA: the layer around the frozen linear). ``flops`` of one run. ``output_dtype``
    without ``torch.``.
    """

    name: str
    kind: str
    module_path: str
    feeds: tuple[str, ...]
    feeds_saved: bool
    saves_inputs: bool
    saves_own: bool
    keepable: bool
    reason: str
    flops: int
    output_shape: tuple[int, ...]
    output_dtype: str


@dataclass(frozen=True, slots=True)
class RegionGraph:
    """Regions that run the same operators on the same shapes, dtypes and requires_grad."""

    name: str
    units: tuple[UnitGraph, ...]


@dataclass(frozen=True, slots=True)
class CapturedRegion:
    """``name`` is canonical, ``module_path`` the module's name in the model as it is.

    ``input_requires_grad``: whether any tensor that it is called with does. ``boundary_bytes``: storages that the
    region reads and no other region does; rotary tables and masks, which all of them read, are left out.
    """

    name: str
    class_index: int
    module_path: str
    input_requires_grad: bool
    boundary_bytes: int


@dataclass(frozen=True, slots=True)
class Capture:
    """``saved`` holds every region and, under the name '', what lies outside.

    ``all_r_bytes``: unique storages alive after a forward that replays every region: inputs of regions and what is
    saved outside.
    """

    regions: tuple[CapturedRegion, ...]
    classes: tuple[RegionGraph, ...]
    region_grain: str
    notes: tuple[str, ...]
    saved: tuple[SavedStorage, ...]
    all_r_bytes: int


@dataclass(frozen=True, slots=True)
class CapturedClass:
    """A class with the nodes behind it, for whoever wants to look under a RegionGraph."""

    graph: RegionGraph
    calls: RegionCalls
    record: ClassRecord


def capture(
    model: nn.Module,
    inputs: dict[str, Tensor],
    *,
    region_names: tuple[str, ...] | None = None,
    region_grain: str = "layer",
) -> Capture:
    """Capture ``model(**inputs)``; weights and inputs may be real, fake or meta, nothing is computed or changed.

    Call it in train mode and under the autocast context of the run. ``region_names``: canonical names, needed for
    models that are not Hugging Face's. ``region_grain``: ``layer``, or ``block`` for attention and MLP apart.
    Raises UnsupportedModelError (eval mode, checkpointing that cannot be set aside, a region that runs twice or
    changes its input or a buffer in place), BindError (unknown region names).
    """
    return capture_detailed(model, inputs, region_names=region_names, region_grain=region_grain)[0]


def capture_detailed(
    model: nn.Module,
    inputs: dict[str, Tensor],
    *,
    region_names: tuple[str, ...] | None = None,
    region_grain: str = "layer",
) -> tuple[Capture, tuple[CapturedClass, ...]]:
    """``capture`` with each class's fx nodes and their records beside it."""
    regions = find_regions(model, region_names, region_grain)
    mode = fake_mode_of(model)
    if mode is not None:
        inputs = {name: as_fake(tensor, mode) for name, tensor in inputs.items()}
    exported = export_model(model, inputs, regions)
    graph_module = exported.program.graph_module
    spans, idle = find_spans(graph_module.graph, regions)
    if not spans:
        raise UnsupportedModelError("none of the regions ran in the forward", regions=tuple(r.name for r in regions))
    recording = record(exported, spans, model, inputs)
    modules = dict(model.named_modules(remove_duplicate=False))
    names, runs = canonical_names(model), count_runs(graph_module)
    classes = tuple(
        _class(index, ran, find_calls(ran.span, modules, names, runs), type(modules[ran.span.region.path]).__name__)
        for index, ran in enumerate(recording.classes)
    )
    captured = Capture(
        regions=_regions(recording, exported.grad_regions),
        classes=tuple(found.graph for found in classes),
        region_grain=region_grain if region_names is None else "named",
        notes=(*exported.notes, *_notes(model, classes, idle)),
        saved=tuple(saved_storages(recording)),
        all_r_bytes=_all_r_bytes(recording),
    )
    return captured, classes


def _class(index: int, ran: ClassRecord, calls: RegionCalls, module_name: str) -> CapturedClass:
    nodes = ran.nodes
    graph = dependency_graph(((read, node.name) for node in nodes.values() for read in node.reads), nodes)
    unit_nodes = {unit.name: tuple(node.name for node in unit.core) for unit in calls.units}
    liveness = contract(graph, unit_nodes, (use for node in nodes.values() for use in node.saved.values()))
    units = tuple(_unit(unit, liveness[unit.name], ran) for unit in calls.units)
    return CapturedClass(RegionGraph(f"{module_name}#{index}", units), calls, ran)


def _unit(call: UnitCall, live: UnitLiveness, ran: ClassRecord) -> UnitGraph:
    output = call.output.meta["val"]
    own = {node.name for node in call.nodes}
    storage = ran.nodes[call.output.name].result
    changed = storage in ran.written_later or any(
        storage in node.written for node in ran.nodes.values() if node.name not in own
    )
    return UnitGraph(
        name=call.name,
        kind=call.kind,
        module_path=call.module_path,
        feeds=live.feeds,
        feeds_saved=live.feeds_saved,
        saves_inputs=live.saves_inputs,
        saves_own=live.saves_own,
        keepable=not changed,
        reason=_CHANGED if changed else "",
        flops=call.flops,
        output_shape=tuple(output.shape),
        output_dtype=str(output.dtype).removeprefix("torch."),
    )


def _regions(recording: Recording, grad_regions: set[str]) -> tuple[CapturedRegion, ...]:
    readers: dict[int, int] = {}
    for run in recording.regions:
        for storage in {s for s in run.inputs if s is not None}:
            readers[storage] = readers.get(storage, 0) + 1
    return tuple(
        CapturedRegion(
            name=run.span.region.name,
            class_index=run.class_index,
            module_path=run.span.region.path,
            input_requires_grad=run.span.region.path in grad_regions,
            boundary_bytes=sum(
                recording.book.nbytes(s) for s in {s for s in run.inputs if s is not None} if readers[s] == 1
            ),
        )
        for run in recording.regions
    )


def saved_storages(recording: Recording) -> Iterable[SavedStorage]:
    """Every saved storage once per region; regions that did not run have their class's, under their own names."""
    yield from _saved_in("", recording.outside, recording, {})
    for run in recording.regions:
        ran = recording.classes[run.class_index]
        own = {before.name: now.name for before, now in zip(ran.span.nodes, run.span.nodes, strict=True)}
        own |= {before.name: now.name for before, now in zip(ran.span.inputs, run.span.inputs, strict=True)}
        own |= _producers_of_inputs(ran, run, recording)
        yield from _saved_in(run.span.region.name, ran.nodes, recording, own)


def _producers_of_inputs(ran: ClassRecord, run: RegionRun, recording: Recording) -> dict[str, str]:
    """An input may be a view: its storage's producer is another node than the one that the region reads."""
    producer = recording.book.producer
    return {
        producer[theirs]: producer[ours]
        for theirs, ours in zip(ran.inputs, run.inputs, strict=True)
        if theirs is not None and ours is not None
    }


def _saved_in(
    region: str, nodes: dict[str, NodeRecord], recording: Recording, own: dict[str, str]
) -> Iterable[SavedStorage]:
    seen: set[int] = set()
    for node in nodes.values():
        for storage, use in node.saved.items():
            if storage in seen:
                continue
            seen.add(storage)
            producer = recording.book.producer[storage]
            yield SavedStorage(
                region=region,
                saver=own.get(use.saver, use.saver),
                producer=own.get(producer, producer),
                nbytes=recording.book.nbytes(storage),
                outside=region != "" and producer not in nodes,
            )


def _all_r_bytes(recording: Recording) -> int:
    alive = {storage for node in recording.outside.values() for storage in node.saved}
    alive |= {storage for run in recording.regions for storage in run.inputs if storage is not None}
    return sum(recording.book.nbytes(storage) for storage in alive)


def _notes(model: nn.Module, classes: tuple[CapturedClass, ...], idle: tuple[Region, ...]) -> list[str]:
    notes = [f"region '{region.name}' does not run in this forward and is left out" for region in idle]
    if "eager" in attention_implementations(model):
        notes.append(
            "attention implementation 'eager' is not in transformers' attention interface: attention is glue, always "
            "run in a replay. Set attention: sdpa in model.yaml (attn_implementation='sdpa') to make it a unit"
        )
    reasons: dict[tuple[str, str], list[str]] = {}
    for found in classes:
        for name, reason in found.calls.left_out.items():
            reasons.setdefault((name, reason), []).append(found.graph.name)
    notes.extend(f"{name} ({', '.join(where)}) is glue: {reason}" for (name, reason), where in reasons.items())
    if any(unit.kind == "attention" and has_mask(unit) for found in classes for unit in found.calls.units):
        notes.append(
            "under torch.export transformers always builds an attention mask and expands k and v; without padding a "
            "plain run passes no mask. The graph gives names and liveness only, bytes come from plain runs"
        )
    return notes
