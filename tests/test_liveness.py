"""The contracted liveness rule against two ways of knowing better: the whole node graph, and poisoned replays."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hilore.planner.capture import Capture, CapturedClass, capture_detailed
from hilore.planner.configure import replayed_units
from hilore.planner.liveness import running_units
from tests import models

_PHI3 = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2-lora": models.qwen2_tiny_lora,
    "qwen2-lora-q-v": lambda: models.lora(models.qwen2_tiny(), targets=["q_proj", "v_proj"]),
    "qwen2-full": models.qwen2_tiny,
    "qwen3-full": models.qwen3_tiny,
    "llama-lora": lambda: models.lora(models.llama_tiny()),
    "phi3-full": models.phi3_tiny,
    "phi3-lora": lambda: models.lora(models.phi3_tiny(), targets=_PHI3),
    "gemma2-eager-full": models.gemma2_tiny,
    "gemma2-eager-lora": lambda: models.lora(models.gemma2_tiny()),
    "gemma2-sdpa-lora": lambda: models.lora(models.gemma2_tiny("sdpa")),
    "qwen2-lora-autocast": models.qwen2_tiny_lora,
    "qwen2-full-autocast": models.qwen2_tiny,
}
every_model = pytest.mark.parametrize("name", MODELS)


def _inputs(model: nn.Module) -> dict[str, Tensor]:
    batch = models.microbatch_for(model)
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def _autocast(name: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if name.endswith("-autocast") else nullcontext()


@functools.cache
def _model(name: str) -> nn.Module:
    return MODELS[name]()


@functools.cache
def _capture(name: str) -> tuple[Capture, tuple[CapturedClass, ...]]:
    with _autocast(name):
        return capture_detailed(_model(name), _inputs(_model(name)))


def _subsets(names: tuple[str, ...]) -> Iterator[frozenset[str]]:
    for size in range(len(names) + 1):
        yield from (frozenset(chosen) for chosen in itertools.combinations(names, size))


def _running_by_nodes(found: CapturedClass, kept: frozenset[str]) -> set[str]:
    """Walk from all dropped saved tensors to the nodes that they come from, not past a kept unit."""
    nodes = found.record.nodes
    owner = {node.name: call.name for call in found.calls.units for node in call.core}
    edges = [(read, node.name) for node in nodes.values() for read in node.reads if read in nodes]
    saved = [source for node in nodes.values() for use in node.saved.values() for source in use.sources]
    edges += [(source, "backward") for source in saved if source in nodes]
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_node("backward")
    graph.add_edges_from((a, b) for a, b in edges if owner.get(a) not in kept)
    return {owner[node] for node in nx.ancestors(graph, "backward") if node in owner}


@every_model
def test_rule_agrees_with_the_node_graph_for_every_kept_subset(name: str) -> None:
    _, classes = _capture(name)
    for found in classes:
        units = found.graph.units
        names = tuple(unit.name for unit in units)
        for kept in _subsets(names):
            running, dead = running_units(units, kept)
            assert set(running) == _running_by_nodes(found, kept), (found.graph.name, sorted(kept))
            assert set(running) | set(dead) | kept == set(names)
            assert len(running) + len(dead) + len(kept) == len(names)


@dataclass
class _Replays:
    """Replays every region by torch's own checkpoint; in a replay, kept units return what the forward stored and
    ``poisoned`` ones return NaN, while what their own autograd saves stays real."""

    model: nn.Module
    captured: Capture
    kept: frozenset[str]
    poisoned: dict[int, frozenset[str]]
    replaying: bool = False

    def __post_init__(self) -> None:
        self.stored: dict[tuple[str, str], Tensor] = {}

    def answer(self, region: str, class_index: int, unit: str, output: Tensor) -> None:
        if not self.replaying:
            self.stored[region, unit] = output.detach().clone()
        elif unit in self.kept:
            output.data.copy_(self.stored[region, unit])
        elif unit in self.poisoned[class_index]:
            output.data.fill_(float("nan"))

    @contextmanager
    def replay(self) -> Iterator[None]:
        self.replaying = True
        try:
            yield
        finally:
            self.replaying = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACE

        attention: dict[int, tuple[str, int, str]] = {}
        sdpa = INTERFACE["sdpa"]

        def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = sdpa(module, *args, **kwargs)
            if id(module) in attention:
                self.answer(*attention[id(module)], result[0])
            return result

        handles, layers = [], []
        for region in self.captured.regions:
            layer = self.model.get_submodule(region.module_path)
            for unit in self.captured.classes[region.class_index].units:
                module = layer.get_submodule(unit.module_path)
                place = (region.name, region.class_index, unit.name)
                if unit.kind == "attention":
                    attention[id(module)] = place
                else:
                    handles.append(module.register_forward_hook(partial(self._hook, place)))
            contexts = partial(lambda: (nullcontext(), self.replay()))
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
            layers.append(layer)
        INTERFACE["sdpa"] = attend
        try:
            yield
        finally:
            del INTERFACE["sdpa"]
            for handle in handles:
                handle.remove()
            for layer in layers:
                del layer.forward

    def _hook(self, place: tuple[str, int, str], module: nn.Module, args: Any, output: Tensor) -> None:
        self.answer(*place, output)


def _gradients(name: str, model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    with models.seeded(5), _autocast(name):
        loss = model(**_inputs(model)).logits.square().sum()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad and p.grad is not None]


def _poisoned_gradients(
    name: str, model: nn.Module, captured: Capture, kept: frozenset[str], poisoned: dict[int, frozenset[str]]
) -> list[Tensor]:
    with _Replays(model, captured, kept, poisoned).installed():
        return _gradients(name, model)


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@every_model
def test_gradients_stay_bitwise_exact_with_every_dead_unit_poisoned(name: str) -> None:
    model = _model(name)
    captured = _capture(name)[0]
    names = tuple(unit.name for unit in captured.classes[0].units)
    plain = _gradients(name, model)
    assert plain
    draws = random.Random(0).sample(list(_subsets(names)), 12)
    for kept in [frozenset(), frozenset(names), *(frozenset({unit}) for unit in names), *draws]:
        dead = {i: frozenset(running_units(c.units, kept)[1]) for i, c in enumerate(captured.classes)}
        assert _same(_poisoned_gradients(name, model, captured, kept, dead), plain), sorted(kept)


@every_model
def test_every_running_unit_is_needed(name: str) -> None:
    """The rule is not merely safe: whatever it runs would be missed (no GEMM is run for nothing)."""
    model = _model(name)
    captured = _capture(name)[0]
    plain = _gradients(name, model)
    for index, graph in enumerate(captured.classes):
        running, _ = running_units(graph.units, frozenset())
        for unit in running:
            if unit.endswith(":attention"):
                continue  # its poison would fall on the log-sum-exp's companion, which its own autograd saved
            poisoned = {i: frozenset({unit} if i == index else ()) for i in range(len(captured.classes))}
            assert not _same(_poisoned_gradients(name, model, captured, frozenset(), poisoned), plain), unit


@every_model
def test_the_solver_knows_the_same_rule(name: str) -> None:
    for graph in _capture(name)[0].classes:
        for kept in _subsets(tuple(unit.name for unit in graph.units)):
            running, _ = running_units(graph.units, kept)
            assert replayed_units(graph.units, kept) == set(running)  # type: ignore[arg-type]


def test_rule_on_a_chain_by_hand() -> None:
    @dataclass(frozen=True)
    class Unit:
        name: str
        feeds: tuple[str, ...] = ()
        feeds_saved: bool = False
        saves_inputs: bool = False
        saves_own: bool = False

    chain = (Unit("a", ("b",)), Unit("b", ("c",)), Unit("c", (), feeds_saved=True))
    assert running_units(chain, set()) == (("a", "b", "c"), ())
    assert running_units(chain, {"c"}) == ((), ("a", "b"))
    assert running_units(chain, {"b"}) == (("c",), ("a",))
    trainable = (Unit("a", ("b",)), Unit("b", ("c",), saves_inputs=True), Unit("c", (), saves_inputs=True))
    assert running_units(trainable, set()) == (("a", "b"), ("c",))
    assert running_units(trainable, {"b"}) == (("a",), ("c",)), "a kept unit's saved input is still asked for"
    assert running_units((Unit("a", (), saves_own=True),), set()) == (("a",), ())
    assert running_units((Unit("a", (), saves_own=True),), {"a"}) == ((), ())
