"""RegionClass -> Offer: every assignment of modes to a region's units that can be worth a decision.

Few are listed; of many, a plain selection is, and a menu (menu.py) finds the others when their price is right. Only
configurations that another one beats in every byte, in time and in what it encodes are left out, so that an optimum
over the rest is an optimum over all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hilore.planner.liveness import running_units
from hilore.planner.menu import Menu
from hilore.planner.pareto import pareto
from hilore.planner.problem import Configuration
from hilore.planner.regionmodes import Assignment, Builder, held
from hilore.planner.trace import CodecCost, RegionClass, UnitTrace
from hilore.runtime.codecs import loses
from hilore.runtime.errors import HiloreError

GRANULARITIES = ("unit", "layer")

# A kept log-sum-exp belongs to the exact q and k: beside it, decoded ones blow the gradient up.
NEVER_LOSSY_KINDS = frozenset({"q", "k"})

# Up to so many assignments are all listed; beyond, a menu finds what plain ones do not cover.
LISTED_LIMIT = 1_000


def replayed_units(units: tuple[UnitTrace, ...], kept: Collection[str]) -> frozenset[str]:
    """Names of the units that a replay must run when ``kept`` (H or L) are not run again; the others are dead."""
    return frozenset(running_units(units, kept)[0])


@dataclass(frozen=True, slots=True)
class Offer:
    """What a region class can be given. ``listed``: all-R first, then held. ``menu``: all that is not held, listed or
    not; None where every configuration that can be worth a decision is listed."""

    listed: tuple[Configuration, ...]
    menu: Menu | None


def offer(
    region_class: RegionClass,
    *,
    codecs: Collection[tuple[str, str]] | None = None,
    lossy: bool,
    granularity: str = "unit",
    contexts: bool = False,
) -> Offer:
    """All configurations of a region class that can be worth a decision.

    ``codecs`` holds the allowed pairs (unit name, codec name), None for all that the trace offers; ``lossy=False``
    leaves codecs that change values out. Keep sets that the trace measured with a split replay give configurations of
    their own. At granularity ``"layer"`` a region is held, replayed whole, or encoded whole with one codec: each unit
    that offers it at L, the other keepable ones at H, in the keep set that spares the most time. ``contexts``: the
    risk of an L unit depends on which units a replay runs on its decoded value.
    Raises HiloreError where the class contradicts itself.
    """
    if granularity not in GRANULARITIES:
        raise HiloreError(f"granularity {granularity!r}: one of {', '.join(GRANULARITIES)}", granularity=granularity)
    _check(region_class)
    offers = {unit.name: _offers(unit, codecs, lossy) for unit in region_class.units}
    builder = Builder(region_class)
    first = (builder.all_r(), held(region_class))
    if granularity == "layer":
        return Offer((*first, *_whole_layer(builder, offers)), None)
    if _count(region_class, offers) <= LISTED_LIMIT:
        built = (builder.build(assignment) for assignment in _assignments(region_class, offers))
        return Offer(pareto((*first, *built), contexts=contexts), None)
    menu = Menu(builder, offers)
    return Offer((*first, *(menu.build(recipe) for recipe in menu.plain_recipes())), menu)


def configurations(
    region_class: RegionClass,
    *,
    codecs: Collection[tuple[str, str]] | None = None,
    lossy: bool,
    granularity: str = "unit",
) -> tuple[Configuration, ...]:
    """What `offer` lists."""
    return offer(region_class, codecs=codecs, lossy=lossy, granularity=granularity).listed


def _offers(unit: UnitTrace, allowed: Collection[tuple[str, str]] | None, lossy: bool) -> tuple[CodecCost, ...]:
    if not unit.keepable:
        return ()
    lossy = lossy and unit.kind not in NEVER_LOSSY_KINDS
    return tuple(
        cost
        for cost in unit.codecs
        if (lossy or not loses(cost.codec)) and (allowed is None or (unit.name, cost.codec) in allowed)
    )


def _count(region_class: RegionClass, offers: dict[str, tuple[CodecCost, ...]]) -> int:
    """How many assignments there are."""
    return sum(math.prod(len(offers[name]) + 1 for name in found.kept) for found in region_class.keep_sets)


def _assignments(region_class: RegionClass, offers: dict[str, tuple[CodecCost, ...]]) -> Iterator[Assignment]:
    order = {unit.name: position for position, unit in enumerate(region_class.units)}
    for keep_set in region_class.keep_sets:
        names = sorted(keep_set.kept, key=order.__getitem__)
        choices = [(None, *offers[name]) for name in names]
        for costs in itertools.product(*choices):
            lossy = tuple((name, cost) for name, cost in zip(names, costs, strict=True) if cost is not None)
            yield Assignment(keep_set, lossy)


def _whole_layer(builder: Builder, offers: dict[str, tuple[CodecCost, ...]]) -> Iterator[Configuration]:
    """Per codec the encoded layer: among all keep sets the one that spares the most time, then the most bytes."""
    names = dict.fromkeys(cost.codec for costs in offers.values() for cost in costs)
    for codec in names:
        found = []
        for keep_set in builder.region_class.keep_sets:
            if keep_set.split:
                continue
            chosen = {
                unit.name: cost
                for unit in builder.region_class.units
                if unit.name in keep_set.kept
                for cost in offers[unit.name]
                if cost.codec == codec
            }
            if chosen:
                found.append(builder.build(Assignment(keep_set, tuple(chosen.items()))))
        if found:
            yield min(found, key=lambda c: (c.extra_ns, c.retained_bytes, c.backward_bytes))


def _check(region_class: RegionClass) -> None:
    """Raises HiloreError unless names are unique, ``feeds`` point forward, keep sets hold keepable units, and the empty
    one is among them, also split where any is."""
    seen: set[str] = set()
    for unit in reversed(region_class.units):
        wrong = [name for name in unit.feeds if name not in seen]
        if wrong:
            raise HiloreError(f"{region_class.name}.{unit.name}: feeds {wrong[0]}, which is no later unit; trace again")
        if unit.name in seen:
            raise HiloreError(f"{region_class.name}.{unit.name}: there are two units of this name; trace again")
        seen.add(unit.name)
    keepable = {unit.name for unit in region_class.units if unit.keepable}
    for keep_set in region_class.keep_sets:
        stray = sorted(set(keep_set.kept) - keepable)
        if stray:
            raise HiloreError(f"{region_class.name}.{stray[0]}: in a keep set, but not a keepable unit; trace again")
    for split in {False, *(keep_set.split for keep_set in region_class.keep_sets)}:
        if not any(not keep_set.kept and keep_set.split == split for keep_set in region_class.keep_sets):
            raise HiloreError(f"{region_class.name}: no keep set without units (split={split}); trace again")
        if split and region_class.split_at not in seen:
            raise HiloreError(f"{region_class.name}: split at {region_class.split_at!r}, which is no unit; trace again")
