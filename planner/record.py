"""Running an exported graph on fake tensors and writing down what autograd saves at each node.

One region per class runs; the other regions of the class get results of the same form without running.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from hilore.planner.export import Exported
from hilore.planner.fake import META, fake_arguments, fake_mode_of, take_off_meta, weights_of
from hilore.planner.liveness import SavedUse
from hilore.planner.regions import Span, module_stack, relative, structure_key
from hilore.planner.storages import CopyWatch, StorageBook, tensors_of
from hilore.runtime.errors import UnsupportedModelError

_HIGHER_ORDER = torch.ops.higher_order


@dataclass(slots=True)
class NodeRecord:
    """One fx node. ``reads``: the nodes whose values it needs, those that changed one in place included. ``saved``:
    storages that autograd saved while it ran, parameters left out. ``written``: storages that it changed in place.
    ``result``: the storage of its first result, -1 without one."""

    name: str
    reads: tuple[str, ...]
    saved: dict[int, SavedUse] = field(default_factory=dict)
    written: tuple[int, ...] = ()
    result: int = -1


@dataclass(slots=True)
class ClassRecord:
    """The region of a class that ran. ``inputs``: storages of the span's inputs, None for parameters and numbers.
    ``written_later``: storages made in a region of the class that something after it changed in place."""

    span: Span
    inputs: tuple[int | None, ...]
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    results: dict[torch.fx.Node, Any] = field(default_factory=dict)
    written_later: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class RegionRun:
    """One region: its class and the storages of its own inputs."""

    span: Span
    class_index: int
    inputs: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    book: StorageBook
    classes: list[ClassRecord]
    regions: list[RegionRun]
    outside: dict[str, NodeRecord]


def record(exported: Exported, spans: tuple[Span, ...], model: nn.Module, inputs: dict[str, Tensor]) -> Recording:
    """Run the graph under fake tensors, gradients on, in the autocast state of the caller.

    Raises UnsupportedModelError where a region changes its input or a buffer in place, or where the graph lost sight
    of an input that requires grad.
    """
    mode = fake_mode_of(model) or FakeTensorMode()
    arguments, fixed = fake_arguments(exported.program, mode, inputs)
    if any(tensor.device == META for tensor in weights_of(model)):
        take_off_meta(exported.program.graph_module)
    recorder = _Recorder(exported, spans, dict(model.named_modules(remove_duplicate=False)))
    recorder.book.fix(fixed)
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, _never)
    with mode, torch.enable_grad(), hooks, CopyWatch(recorder.book):
        recorder.run(*arguments, enable_io_processing=False)
    return Recording(recorder.book, recorder.classes, recorder.regions, recorder.outside)


def _never(packed: object) -> Tensor:
    raise AssertionError("a recorded graph is never run backward")


class _Recorder(torch.fx.Interpreter):
    """Interprets the exported graph node by node."""

    def __init__(self, exported: Exported, spans: tuple[Span, ...], modules: Mapping[str, nn.Module]) -> None:
        super().__init__(exported.program.graph_module)
        # It would put the graph into the text of errors that are meant for the user.
        self.extra_traceback = False
        self.book = StorageBook()
        self.classes: list[ClassRecord] = []
        self.regions: list[RegionRun] = []
        self.outside: dict[str, NodeRecord] = {}
        signature = exported.program.graph_signature
        self._weight_names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self._starts = {span.nodes[0]: span for span in spans}
        self._modules = modules
        self._grad_regions = exported.grad_regions
        self._grad_results = {path for path in exported.grad_results if not modules[path]._modules}
        self._by_key: dict[object, int] = {}
        self._made_in: dict[int, tuple[int, int]] = {}
        self._writer: dict[int, str] = {}
        self._span: Span | None = None
        self._stand_ins: dict[torch.fx.Node, Any] | None = None
        self._current = NodeRecord("", ())
        self._values: list[tuple[str, int]] = []

    def pack(self, tensor: Tensor) -> None:
        """The saved-tensor hook: the storage, by the node that is running and the nodes whose value it is."""
        number = self.book.number(tensor)
        if number in self.book.fixed:
            return
        name = self._current.name
        sources: tuple[str, ...] = (name,)
        for origin in self.book.origins(number):
            read = tuple(node for node, storage in self._values if storage == origin)
            if origin in self.book.fixed or read:
                sources = () if origin in self.book.fixed else read
                break
        self.book.producer.setdefault(number, name)
        self._current.saved.setdefault(number, SavedUse(name, sources))

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op != "call_function":
            value = super().run_node(n)
            for tensor in tensors_of(value) if n.op == "placeholder" else ():
                self.book.producer.setdefault(self.book.number(tensor), n.name)
            return value
        if n in self._starts:
            self._enter(self._starts[n])
        value = self._record(n) if self._stand_ins is None else self._stand_ins.get(n)
        if self._span is not None:
            if self._stand_ins is None and n in self._span.outputs:
                self.classes[-1].results[n] = value
            if n is self._span.nodes[-1]:
                self._span = self._stand_ins = None
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten._assert_tensor_metadata.default:
            return None
        if target is _HIGHER_ORDER.wrap_with_set_grad_enabled:
            return _run_block(torch.set_grad_enabled(args[0]), args[1], args[2:])
        if target is _HIGHER_ORDER.wrap_with_autocast:
            autocast = torch.autocast(args[0], dtype=args[1], enabled=args[2], cache_enabled=args[3])
            return _run_block(autocast, args[4], args[5:])
        return super().call_function(target, args, kwargs)

    def _record(self, n: torch.fx.Node) -> Any:
        tensors = [(before.name, t) for before in n.all_input_nodes for t in tensors_of(self.env[before])]
        self._values = [(name, self.book.number(t)) for name, t in tensors]
        # A value that was changed in place is also the work of whatever changed it.
        self._values += [(self._writer[s], s) for _, s in tuple(self._values) if s in self._writer]
        reads = dict.fromkeys([*(before.name for before in n.all_input_nodes), *(name for name, _ in self._values)])
        versions = [(t, t._version) for _, t in tensors]
        current = self._current = NodeRecord(n.name, tuple(name for name in reads if name != n.name))
        value = super().run_node(n)
        current.written = tuple(dict.fromkeys(self.book.number(t) for t, before in versions if t._version != before))
        for number in set(current.written) & current.saved.keys():
            # Saved after the change: the value is the node's own work too.
            sources = current.saved[number].sources
            current.saved[number] = SavedUse(n.name, (*sources, n.name))
        self._note_written(current)
        for tensor in reversed(tensors_of(value)):
            current.result = self.book.number(tensor)
            self.book.producer.setdefault(current.result, n.name)
        if self._span is None:
            self.outside[n.name] = current
            self._require_grad_as_hooked(n, value)
        else:
            self.classes[-1].nodes[n.name] = current
            self._made_in.setdefault(current.result, (len(self.classes) - 1, current.result))
        return value

    def _require_grad_as_hooked(self, n: torch.fx.Node, value: Any) -> None:
        """What a forward hook did by ``requires_grad_()`` to a module's result, which no fx node shows."""
        stack = module_stack(n)
        if not stack or stack[-1][1] not in self._grad_results or any(stack == module_stack(u) for u in n.users):
            return
        if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
            value.requires_grad_()

    def _note_written(self, current: NodeRecord) -> None:
        for number in current.written:
            self._writer[number] = current.name
            if self._span is None:
                class_index, original = self._made_in.get(number, (-1, -1))
                if class_index >= 0:
                    self.classes[class_index].written_later.add(original)
            elif number in self.classes[-1].inputs:
                raise UnsupportedModelError(
                    f"region '{self._span.region.name}' changes its input in place ({current.name}), so a replay would "
                    "start from changed values. Make the change on a clone",
                    unit=self._span.region.name,
                )
            elif number in self.book.fixed:
                raise UnsupportedModelError(
                    f"region '{self._span.region.name}' changes {self._weight_name(number)} in place ({current.name}), "
                    "so a replay would change it a second time. Keep counters and running statistics outside of "
                    "regions (BatchNorm: track_running_stats=False)",
                    unit=self._span.region.name,
                )

    def _weight_name(self, number: int) -> str:
        """Of the parameter or buffer that the running node reads."""
        names = (self._weight_names.get(name) for name, storage in self._values if storage == number)
        return next((name for name in names if name is not None), "a parameter or buffer")

    def _enter(self, span: Span) -> None:
        # A block's graph is an attribute that the exported graph may fetch in the middle of the region.
        values = [self.env.get(before) for before in span.inputs]
        self._check_gradients(span, values)
        inputs = tuple(self._own_storage(value) for value in values)
        key = (structure_key(span, self._modules), self._input_key(span, values))
        class_index = self._by_key.setdefault(key, len(self.classes))
        if class_index == len(self.classes):
            self.classes.append(ClassRecord(span, inputs))
        else:
            self._stand_ins = self._make_stand_ins(span, class_index, values)
        self.regions.append(RegionRun(span, class_index, inputs))
        self._span = span

    def _own_storage(self, value: Any) -> int | None:
        tensors = tensors_of(value)
        number = self.book.number(tensors[0]) if tensors else None
        return None if number in self.book.fixed else number

    def _input_key(self, span: Span, values: list[Any]) -> tuple[object, ...]:
        """Form of every input; which of them share a storage; which parameter is which."""
        first: dict[int, int] = {}
        rows: list[object] = []
        for node, value in zip(span.inputs, values, strict=True):
            rows.append(relative(self._weight_names.get(node.name, ""), span.region.path))
            for t in tensors_of(value):
                place = first.setdefault(self.book.number(t), len(first))
                form = (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, str(t.device))
                rows.append((form, t.requires_grad, place))
        return tuple(rows)

    def _check_gradients(self, span: Span, values: list[Any]) -> None:
        seen = any(t.requires_grad and self.book.number(t) not in self.book.fixed for t in tensors_of(values))
        if span.region.path in self._grad_regions and not seen:
            raise UnsupportedModelError(
                f"region '{span.region.name}' gets an input that requires grad in the model's own forward, but none in "
                "the exported graph. Set requires_grad on the model's inputs or in a forward hook of a module without "
                "children (as enable_input_require_grads does), not inside forward",
                unit=span.region.name,
            )

    def _make_stand_ins(self, span: Span, class_index: int, values: list[Any]) -> dict[torch.fx.Node, Any]:
        """Results of the same form as those of the class's region that ran, in storages of their own."""
        ran = self.classes[class_index]
        own_inputs = {s: value for s, value in zip(ran.inputs, values, strict=True) if s is not None}
        bases: dict[int, Tensor] = {}

        def stand_in(like: Tensor) -> Tensor:
            original = self.book.number(like)
            if original in self.book.fixed:
                return like
            base = own_inputs.get(original, bases.get(original))
            if base is None:
                size = like.untyped_storage().nbytes() // like.element_size()
                base = torch.empty(size, dtype=like.dtype, device=like.device)
                # A clone, since a leaf that requires grad may not be changed in place.
                base = base.requires_grad_().clone() if like.requires_grad else base
                bases[original] = base
                self._made_in[self.book.number(base)] = (class_index, original)
                self.book.producer[self.book.number(base)] = twin[self.book.producer[original]]
            return base.as_strided(like.shape, like.stride(), like.storage_offset())

        twin = {before.name: now.name for before, now in zip(ran.span.nodes, span.nodes, strict=True)}
        return {
            now: tree_map_only(Tensor, stand_in, ran.results[before])
            for before, now in zip(ran.span.outputs, span.outputs, strict=True)
        }


def _run_block(context: AbstractContextManager[Any], block: torch.fx.GraphModule, args: tuple[Any, ...]) -> Any:
    with context:
        return block(*args)
