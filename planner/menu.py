"""Every configuration of a region class without listing them: with many codecs there are far too many.

A **shape** is a keep set, its replay split or not, with the units of it that are at L. All that depends on several
units together is the shape's: what a replay runs, its working sets, which units compression taints. The codec of each
L unit then adds payload, time and risk of its own, whatever the others'. At given prices of bytes and risk the
cheapest configuration of a shape therefore takes each unit's cheapest codec, and all within a margin of it are found
unit by unit (regionmenu.py, which adds the risks of one region).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hilore.planner.pareto import front
from hilore.planner.problem import Configuration
from hilore.planner.regionmodes import Assignment, Builder, Figures
from hilore.planner.trace import CodecCost, KeepSet
from hilore.runtime.errors import InternalError

Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Recipe:
    """One configuration: its shape, and the place of each L unit's codec in its offers (-1: not at L)."""

    shape: int
    codecs: tuple[int, ...]


class Menu:
    """The shapes of one region class that can be worth a decision, as arrays with one row per shape.

    ``retained``, ``forward``, ``extra``: without payloads, encoding and decoding. ``needed``: at least the room that
    its backward needs, whatever the codecs, and ``needed_most`` at most. ``calls[s, u]``: how often the replay decodes
    offering unit u, 0 where it is not at L; ``context[s, u]``: place of its tainted units in ``contexts[u]``.
    """

    def __init__(self, builder: Builder, offers: Mapping[str, tuple[CodecCost, ...]]) -> None:
        self.builder = builder
        self.units = tuple(unit.name for unit in builder.region_class.units if offers[unit.name])
        self.offers = tuple(offers[name] for name in self.units)
        self.payload = [np.array([cost.payload_bytes for cost in costs], dtype=np.int64) for costs in self.offers]
        self.encode = [np.array([cost.encode_ns for cost in costs], dtype=np.int64) for costs in self.offers]
        self.decode = [np.array([cost.decode_ns for cost in costs], dtype=np.int64) for costs in self.offers]
        self.keep_sets: list[KeepSet] = []
        self.contexts: list[list[tuple[str, ...]]] = [[] for _ in self.units]
        self._built: dict[Recipe, Configuration] = {}
        self._figures: dict[Recipe, tuple[int, int, int, int]] = {}
        rows, calls, context = [], [], []
        for keep_set in builder.region_class.keep_sets:
            for row, row_calls, row_context in self._shapes_of(keep_set):
                self.keep_sets.append(keep_set)
                rows.append(row)
                calls.append(row_calls)
                context.append(row_context)
        figures = np.array(rows, dtype=np.int64)
        self.retained, self.forward, self.needed, self.needed_most, self.extra = figures.T
        self.calls = np.array(calls, dtype=np.int64).reshape(len(rows), len(self.units))
        self.context = np.array(context, dtype=np.int64).reshape(len(rows), len(self.units))
        self._keep(self._unbeaten())

    @property
    def most_lossy(self) -> int:
        return int((self.calls > 0).sum(axis=1).max())

    @property
    def largest(self) -> tuple[int, int, int, int]:
        """At least the retained, forward and needed bytes and the extra nanoseconds of every configuration."""
        payloads = sum(int(sizes.max()) for sizes in self.payload)
        times = sum(int((e + 2 * d).max()) for e, d in zip(self.encode, self.decode, strict=True))
        return (
            int(self.retained.max()) + payloads,
            int(self.forward.max()) + payloads,
            int(self.needed_most.max()),
            int(self.extra.max()) + times,
        )

    def build(self, recipe: Recipe) -> Configuration:
        if recipe not in self._built:
            self._built[recipe] = self.builder.build(self._assignment(recipe))
        return self._built[recipe]

    def figures(self, recipe: Recipe) -> tuple[int, int, int, int]:
        """Retained, forward and needed bytes and extra nanoseconds, as built.

        Raises InternalError unless they are what the shape and its codecs add up to.
        """
        if recipe not in self._figures:
            found = self.builder.figures(self._assignment(recipe))
            needed = max(found.backward_bytes, found.demoted_backward_bytes)
            self._check(recipe, found, needed)
            self._figures[recipe] = (found.retained_bytes, found.forward_bytes, needed, found.extra_ns)
        return self._figures[recipe]

    def _check(self, recipe: Recipe, found: Figures, needed: int) -> None:
        shape, chosen = recipe.shape, [(u, at) for u, at in enumerate(recipe.codecs) if at >= 0]
        payloads = sum(int(self.payload[u][at]) for u, at in chosen)
        times = sum(int(self.encode[u][at] + self.decode[u][at] * self.calls[shape, u]) for u, at in chosen)
        added = (
            int(self.retained[shape]) + payloads,
            int(self.forward[shape]) + payloads,
            int(self.extra[shape]) + times,
        )
        built = (found.retained_bytes, found.forward_bytes, found.extra_ns)
        if added != built or not self.needed[shape] <= needed <= self.needed_most[shape]:
            raise InternalError(
                f"{self.builder.region_class.name}: a shape and its codecs add up to {added}, built are {built}; its "
                f"backward needs {needed} bytes, not from {self.needed[shape]} to {self.needed_most[shape]}"
            )

    def plain_recipes(self) -> Iterator[Recipe]:
        """Each keep set with nothing at L, and with one codec for all its units that offer it."""
        names = sorted({cost.codec for costs in self.offers for cost in costs})
        places = [{cost.codec: at for at, cost in enumerate(costs)} for costs in self.offers]
        for shape, keep_set in enumerate(self.keep_sets):
            lossy = {int(u) for u in np.flatnonzero(self.calls[shape])}
            if not lossy:
                yield Recipe(shape, (-1,) * len(self.units))
                continue
            for name in names:
                if lossy == {u for u, unit in enumerate(self.units) if unit in keep_set.kept and name in places[u]}:
                    yield Recipe(shape, tuple(places[u][name] if u in lossy else -1 for u in range(len(self.units))))

    def _assignment(self, recipe: Recipe) -> Assignment:
        chosen = ((name, at, u) for u, (name, at) in enumerate(zip(self.units, recipe.codecs, strict=True)) if at >= 0)
        return Assignment(self.keep_sets[recipe.shape], tuple((name, self.offers[u][at]) for name, at, u in chosen))

    def _shapes_of(self, keep_set: KeepSet) -> Iterator[tuple[tuple[int, ...], list[int], list[int]]]:
        """The figures, decode calls and contexts of a keep set's shapes, the one without L units first."""
        kept = [u for u, name in enumerate(self.units) if name in keep_set.kept]
        calls_of = self.builder.replay(frozenset(keep_set.kept), keep_set.split).calls
        context_of = {u: self._context(u, self.builder.tainted(self.units[u], keep_set)) for u in kept}
        least = {u: int(self.payload[u].min()) for u in kept}
        most = {u: int(self.payload[u].max()) for u in kept}
        for mask in range(1 << len(kept)):
            lossy = [u for place, u in enumerate(kept) if mask >> place & 1]
            names = [self.units[u] for u in lossy]
            firsts = tuple((name, self.offers[u][0]) for name, u in zip(names, lossy, strict=True))
            figures = self.builder.figures(Assignment(keep_set, firsts))
            calls, context = [0] * len(self.units), [0] * len(self.units)
            payloads = extra = 0
            for u in lossy:
                calls[u], context[u] = calls_of[self.units[u]], context_of[u]
                first = self.offers[u][0]
                payloads += first.payload_bytes
                extra += first.encode_ns + first.decode_ns * calls[u]
            low, high = self.builder.needed_range(keep_set, names, [least[u] for u in lossy], [most[u] for u in lossy])
            row = (
                figures.retained_bytes - payloads,
                figures.forward_bytes - payloads,
                low,
                high,
                figures.extra_ns - extra,
            )
            yield row, calls, context

    def _context(self, unit: int, tainted: tuple[str, ...]) -> int:
        known = self.contexts[unit]
        if tainted not in known:
            known.append(tainted)
        return known.index(tainted)

    def _keep(self, shapes: Sequence[int]) -> None:
        self.keep_sets = [self.keep_sets[shape] for shape in shapes]
        index = np.array(shapes, dtype=np.int64)
        self.retained, self.forward = self.retained[index], self.forward[index]
        self.needed, self.needed_most = self.needed[index], self.needed_most[index]
        self.extra = self.extra[index]
        self.calls, self.context = self.calls[index], self.context[index]

    def _unbeaten(self) -> Sequence[int]:
        """Shapes that no other one beats, whatever the codecs and their risks.

        One beats another where its L units are among the other's, with the same contexts and no more decoding, and
        where it needs no more bytes and time even beside the smallest codecs of the units that it has less.
        """
        lossy = self.calls > 0
        least_payload = np.array([sizes.min() for sizes in self.payload], dtype=np.int64)
        least_ns = np.stack([self._least_ns(u) for u in range(len(self.units))], axis=1) if self.units else lossy * 0
        payloads = lossy @ least_payload if self.units else np.zeros(len(lossy), dtype=np.int64)
        times = (least_ns * lossy).sum(axis=1)

        def beaten(those: Integers, by: Integers) -> Bools:
            fewer = payloads[those][:, None] - payloads[by]
            # What decoding the units that both have at L takes at least, at the other's calls.
            spared = times[those][:, None] - least_ns[those] @ lossy[by].T.astype(np.int64)
            result: Bools = self.needed_most[by] <= self.needed[those][:, None]
            result &= self.retained[by] <= self.retained[those][:, None] + fewer
            result &= self.forward[by] <= self.forward[those][:, None] + fewer
            result &= self.extra[by] <= self.extra[those][:, None] + spared
            for u in range(len(self.units)):
                same = (self.context[by, u] == self.context[those, u][:, None]) & lossy[those, u][:, None]
                result &= ~lossy[by, u] | (same & (self.calls[by, u] <= self.calls[those, u][:, None]))
            return result

        count = lossy.sum(axis=1)
        order = np.lexsort((count, self.forward + payloads, self.needed, self.retained + payloads, self.extra + times))
        return sorted(front(order, beaten).tolist())

    def _least_ns(self, unit: int) -> Integers:
        """The least that encoding and decoding a unit takes, per shape."""
        per_calls = np.array([(self.encode[unit] + self.decode[unit] * calls).min() for calls in range(3)])
        result: Integers = per_calls[self.calls[:, unit]]
        return result
