"""What a replay must run: the graph of units with the glue contracted away, and the rule on it.

Autograd's saved tensors are of two sorts. Those that glue saved are dropped in forward and made again in a replay, so
that every unit they come from must run unless it is kept. Those that a unit's own autograd saved are its inputs,
which the replay must reach even when the unit itself is left out, or results of running it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import networkx as nx


class LiveUnit(Protocol):
    """The liveness fields of a unit (documented at trace.UnitTrace)."""

    @property
    def name(self) -> str: ...
    @property
    def feeds(self) -> tuple[str, ...]: ...
    @property
    def feeds_saved(self) -> bool: ...
    @property
    def saves_inputs(self) -> bool: ...
    @property
    def saves_own(self) -> bool: ...


def running_units(units: Sequence[LiveUnit], kept: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the units (given in forward order) that a replay runs, and of the dead ones.

    ``kept``: units at H or L, in neither answer. A unit runs if glue saves something that comes from it, if its own
    autograd saved a result of running it, or if a later unit that it feeds saves its inputs (kept or not) or runs.
    """
    by_name = {unit.name: unit for unit in units}
    runs: set[str] = set()
    for unit in reversed(units):
        if unit.name in kept:
            continue
        fed = [by_name[name] for name in unit.feeds]
        if unit.feeds_saved or unit.saves_own or any(later.saves_inputs or later.name in runs for later in fed):
            runs.add(unit.name)
    running = tuple(unit.name for unit in units if unit.name in runs)
    dead = tuple(unit.name for unit in units if unit.name not in runs and unit.name not in kept)
    return running, dead


@dataclass(frozen=True, slots=True)
class _Early:
    """An early unit as the late stage of a split replay sees it: what its own autograd saved is not asked for yet."""

    name: str
    feeds: tuple[str, ...]
    feeds_saved: bool
    saves_inputs: bool = False
    saves_own: bool = False


def dead_in_late_stage(units: Sequence[LiveUnit], kept: Collection[str], split_at: str) -> tuple[str, ...]:
    """Names of the units before ``split_at`` that the late stage of a replay split there leaves out.

    Glue's saved tensors count for both stages, so that at most too many units run.
    """
    names = [unit.name for unit in units]
    early = names[: names.index(split_at)]
    seen: list[LiveUnit] = [
        _Early(unit.name, unit.feeds, unit.feeds_saved) if unit.name in early else unit for unit in units
    ]
    dead = running_units(seen, kept)[1]
    return tuple(name for name in early if name in dead)


@dataclass(frozen=True, slots=True)
class SavedUse:
    """One storage that one fx node saved. ``sources``: the nodes whose values it is, the saver itself where it was
    made inside of it; none where it is a parameter or a cast of one."""

    saver: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnitLiveness:
    feeds: tuple[str, ...]
    feeds_saved: bool
    saves_inputs: bool
    saves_own: bool


def dependency_graph(edges: Iterable[tuple[str, str]], nodes: Iterable[str]) -> nx.DiGraph[str]:
    """The region's fx nodes with an edge from each value to each node that reads it."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from((a, b) for a, b in edges if a in graph and b in graph)
    return graph


def contract(
    graph: nx.DiGraph[str], unit_nodes: dict[str, tuple[str, ...]], saved: Iterable[SavedUse]
) -> dict[str, UnitLiveness]:
    """Contract the glue of ``graph`` away. ``unit_nodes``: the fx nodes of each unit, units in forward order."""
    owner = {node: unit for unit, nodes in unit_nodes.items() for node in nodes}
    uses = list(saved)
    glue_sources = {source for use in uses if use.saver not in owner for source in use.sources}
    facts: dict[str, UnitLiveness] = {}
    for unit, nodes in unit_nodes.items():
        reach = _reach_through_glue(graph, nodes, owner)
        fed = {owner[after] for node in reach for after in graph.successors(node) if owner.get(after, unit) != unit}
        own_uses = [use for use in uses if owner.get(use.saver) == unit]
        facts[unit] = UnitLiveness(
            feeds=tuple(name for name in unit_nodes if name in fed),
            feeds_saved=not reach.isdisjoint(glue_sources),
            saves_inputs=any(source not in nodes for use in own_uses for source in use.sources),
            saves_own=any(source in nodes for use in own_uses for source in use.sources),
        )
    return facts


def _reach_through_glue(graph: nx.DiGraph[str], nodes: tuple[str, ...], owner: dict[str, str]) -> set[str]:
    """The unit's own nodes and all glue that its output reaches without passing through another unit."""
    reach = set(nodes)
    front = list(nodes)
    while front:
        for after in graph.successors(front.pop()):
            if after not in owner and after not in reach:
                reach.add(after)
                front.append(after)
    return reach
