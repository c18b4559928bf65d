"""The configurations of a problem that are written out, a list that grows as a search asks for more from the menus.

Indices stay what they are: what is written out is appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from hilore.planner.menu import Recipe
from hilore.planner.pareto import nowhere_worse
from hilore.planner.problem import Configuration, Problem
from hilore.planner.regionmenu import RegionMenu
from hilore.planner.tables import Columns, Integers, Tables, columns_of, make_tables


@dataclass(slots=True, eq=False)
class Kind:
    """Regions with the same configurations and risks. ``known``: the recipes that are written out, or were beaten."""

    regions: list[int]
    configurations: tuple[Configuration, ...]
    risk: tuple[int, ...]
    menu: RegionMenu | None
    columns: Columns
    known: set[Recipe] = field(default_factory=set)


class Listing:
    """``kinds``, and the kind of each region in ``kind_of``; ``problem`` and ``tables`` as they are by now."""

    def __init__(self, problem: Problem, tables: Tables) -> None:
        self._problem = problem
        self._tables = tables
        self._stale = False
        self.kinds: list[Kind] = []
        self.kind_of: list[int] = []
        places: dict[tuple[int, tuple[int, ...], int], int] = {}
        for r, region in enumerate(problem.regions):
            key = (id(region.configurations), region.risk, id(region.menu))
            if key not in places:
                places[key] = len(self.kinds)
                columns = columns_of(region.configurations, region.risk)
                self.kinds.append(Kind([], region.configurations, region.risk, region.menu, columns))
            self.kinds[places[key]].regions.append(r)
            self.kind_of.append(places[key])

    @property
    def problem(self) -> Problem:
        self._refresh()
        return self._problem

    @property
    def tables(self) -> Tables:
        self._refresh()
        return self._tables

    def add(self, kind: Kind, recipes: Iterable[Recipe]) -> list[int]:
        """Write out recipes of a kind's menu that nothing written out beats; returns their indices."""
        menu, columns = kind.menu, kind.columns
        if menu is None:
            return []
        fresh = [recipe for recipe in recipes if recipe not in kind.known]
        kind.known.update(fresh)
        if not fresh:
            return []
        # Of equals the one with fewer L units comes first.
        rows = sorted(
            ((*menu.figures(recipe), _lossy(recipe), menu.risk(recipe)), at) for at, recipe in enumerate(fresh)
        )
        listed = [columns.retained, columns.forward, columns.needed, columns.extra, columns.lossy, columns.risk]
        table = np.array([row for row, _ in rows], dtype=np.int64)
        kept = np.flatnonzero(~_beaten(table, np.stack(listed, axis=1)))
        # Sorted rows are beaten by earlier ones only.
        within = np.tril((table[kept][None, :, :] <= table[kept][:, None, :]).all(axis=2), k=-1)
        kept = kept[~within.any(axis=1)]
        if len(kept) == 0:
            return []
        chosen = [fresh[rows[at][1]] for at in kept]
        first = len(kind.configurations)
        retained, forward, needed, extra, lossy, risk = table[kept].T
        never_held = np.zeros(len(kept), dtype=np.bool_)
        built = tuple(menu.build(recipe) for recipe in chosen)
        self._append(kind, built, Columns(retained, forward, needed, extra, lossy, risk, never_held))
        return list(range(first, first + len(kept)))

    def place(self, chosen: Sequence[Configuration]) -> tuple[int, ...] | None:
        """A choice given by its configurations, as indices of the ones written out, or of ones nowhere worse.

        What a menu may hold is written out. None where some region has no such configuration.
        """
        result = []
        for configuration, at in zip(chosen, self.kind_of, strict=True):
            index = self._index(self.kinds[at], configuration)
            if index is None:
                return None
            result.append(index)
        return tuple(result)

    def _index(self, kind: Kind, configuration: Configuration) -> int | None:
        if configuration in kind.configurations:
            return kind.configurations.index(configuration)
        risk = None if kind.menu is None else kind.menu.risk_of(configuration)
        if risk is None:
            instead = (k for k, c in enumerate(kind.configurations) if nowhere_worse(c, configuration))
            return min(instead, key=lambda k: kind.risk[k], default=None)
        self._append(kind, (configuration,), columns_of((configuration,), (risk,)))
        return len(kind.configurations) - 1

    def _append(self, kind: Kind, configurations: tuple[Configuration, ...], columns: Columns) -> None:
        kind.configurations += configurations
        kind.risk += tuple(int(risk) for risk in columns.risk)
        pairs = ((getattr(kind.columns, f.name), getattr(columns, f.name)) for f in fields(Columns))
        kind.columns = Columns(*(np.concatenate(pair) for pair in pairs))
        self._stale = True

    def _refresh(self) -> None:
        if not self._stale:
            return
        kinds = [self.kinds[at] for at in self.kind_of]
        regions = tuple(
            replace(region, configurations=kind.configurations, risk=kind.risk)
            for region, kind in zip(self._problem.regions, kinds, strict=True)
        )
        self._problem = replace(self._problem, regions=regions)
        self._tables = make_tables(self._problem, [kind.columns for kind in kinds], like=self._tables)
        self._stale = False


def _lossy(recipe: Recipe) -> int:
    return sum(at >= 0 for at in recipe.codecs)


def _beaten(rows: Integers, by: Integers) -> NDArray[np.bool_]:
    """Which rows are nowhere better than some row of ``by``."""
    nowhere: NDArray[np.bool_] = np.all(by[None, :, :] <= rows[:, None, :], axis=2)
    result: NDArray[np.bool_] = np.any(nowhere, axis=1)
    return result
