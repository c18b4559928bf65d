"""RegionClass -> Configurations: every assignment of modes to a region's units that can be worth a decision.

What must run in a replay follows from the liveness fields of the trace; bytes come from the trace's keep sets. Only
configurations that another one beats in every byte, in time and in what it encodes are left out, so that an optimum
over the rest is an optimum over all (docs/design.md, "Configurations").
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hilore.planner.problem import Configuration, UnitChoice
from hilore.planner.trace import CodecCost, KeepSet, RegionClass, UnitTrace
from hilore.runtime.errors import HiloreError, InternalError

GRANULARITIES = ("unit", "layer")

# A kept log-sum-exp belongs to the exact q and k: beside it, decoded ones blow the gradient up.
NEVER_LOSSY_KINDS = frozenset({"q", "k"})

# Up to this many raw assignments every mix of codecs is tried; beyond, the L units of one region share one codec.
MIXED_CODEC_LIMIT = 40_000


def replayed_units(units: tuple[UnitTrace, ...], kept: Collection[str]) -> frozenset[str]:
    """Names of the units that a replay must run when ``kept`` (H or L) are not run again.

    A unit runs if its output is saved outside of units or by itself, or if a later unit that it feeds either saves
    its inputs (kept or not) or runs. What is neither kept nor here is dead.
    """
    by_name = {unit.name: unit for unit in units}
    running: set[str] = set()
    for unit in reversed(units):
        if unit.name in kept:
            continue
        fed = (by_name[name] for name in unit.feeds)
        if unit.feeds_saved or unit.saves_own or any(v.saves_inputs or v.name in running for v in fed):
            running.add(unit.name)
    return frozenset(running)


def configurations(
    region_class: RegionClass,
    *,
    codecs: Collection[tuple[str, str]] | None = None,
    lossy: bool,
    granularity: str = "unit",
) -> tuple[Configuration, ...]:
    """All configurations of a region class that none of the others beats, all-R first.

    ``codecs`` holds the allowed pairs (unit name, codec name), None for all that the trace offers; ``lossy=False``
    leaves L out. At granularity ``"layer"`` a region is held, replayed whole, or encoded whole with one codec: each
    unit that offers it at L, the other keepable ones at H, in the keep set that spares the most time.
    Raises HiloreError where the class contradicts itself.
    """
    if granularity not in GRANULARITIES:
        raise HiloreError(f"granularity {granularity!r}: one of {', '.join(GRANULARITIES)}", granularity=granularity)
    _check(region_class)
    offers = {unit.name: _offers(unit, codecs) if lossy else () for unit in region_class.units}
    hold = _hold(region_class)
    if granularity == "layer":
        return _distinct((_all_r(region_class), hold, *_whole_layer(region_class, offers)))
    built = [_build(region_class, assignment) for assignment in _assignments(region_class, offers)]
    candidates = [_all_r(region_class), hold, *(found for found in built if found is not None)]
    return pareto(_distinct(tuple(candidates)))


@dataclass(frozen=True, slots=True)
class _Assignment:
    """``kept``: the keep set of H and L units; ``lossy``: the codec of each L unit, in unit order."""

    kept: KeepSet
    lossy: tuple[tuple[str, CodecCost], ...]


def _offers(unit: UnitTrace, allowed: Collection[tuple[str, str]] | None) -> tuple[CodecCost, ...]:
    if not unit.keepable or unit.kind in NEVER_LOSSY_KINDS:
        return ()
    return tuple(cost for cost in unit.codecs if allowed is None or (unit.name, cost.codec) in allowed)


def _assignments(
    region_class: RegionClass, offers: dict[str, tuple[CodecCost, ...]]
) -> Iterator[_Assignment]:
    order = {unit.name: position for position, unit in enumerate(region_class.units)}
    kept_names = {keep_set: sorted(keep_set.kept, key=order.__getitem__) for keep_set in region_class.keep_sets}
    raw = sum(_product(len(offers[name]) + 1 for name in names) for names in kept_names.values())
    for keep_set, names in kept_names.items():
        choices = [(None, *offers[name]) for name in names]
        for costs in itertools.product(*choices):
            lossy = tuple((name, cost) for name, cost in zip(names, costs, strict=True) if cost is not None)
            if raw <= MIXED_CODEC_LIMIT or len({cost.codec for _, cost in lossy}) <= 1:
                yield _Assignment(keep_set, lossy)


def _product(factors: Iterator[int]) -> int:
    result = 1
    for factor in factors:
        result *= factor
    return result


def _build(region_class: RegionClass, assignment: _Assignment) -> Configuration | None:
    """The configuration of an assignment; None where the trace lacks the keep set that demotion would leave."""
    units, keep_set = region_class.units, assignment.kept
    codec_of = dict(assignment.lossy)
    exact = frozenset(keep_set.kept) - codec_of.keys()
    demoted = _keep_set(region_class, exact)
    if demoted is None:
        return None
    running = replayed_units(units, keep_set.kept)
    running_demoted = replayed_units(units, exact)
    by_name = {unit.name: unit for unit in units}
    outputs = sum(by_name[name].output_bytes for name in codec_of)
    payloads = sum(cost.payload_bytes for cost in codec_of.values())
    rests = sum(by_name[name].rest_bytes for name in codec_of)
    encode = sum(cost.encode_ns for cost in codec_of.values())
    retained = keep_set.retained_bytes - outputs + payloads
    # Demoted, payloads and rests stay where they are while the H-only replay runs beside them.
    demoted_peak = demoted.retained_bytes + payloads + rests + demoted.backward_bytes
    return Configuration(
        hold=False,
        units=tuple(
            UnitChoice(
                name=unit.name,
                mode="H" if unit.name in exact else "L" if unit.name in codec_of else "R",
                codec=codec_of[unit.name].codec if unit.name in codec_of else None,
                dead=unit.name not in keep_set.kept and unit.name not in running,
                dead_if_demoted=unit.name not in exact and unit.name not in running_demoted,
            )
            for unit in units
        ),
        retained_bytes=retained,
        # An output may live on for other units of the region when its payload is there already.
        forward_bytes=keep_set.forward_bytes + payloads,
        backward_bytes=keep_set.backward_bytes + outputs,
        demoted_backward_bytes=max(demoted.backward_bytes, demoted_peak - retained),
        extra_ns=region_class.replay_fixed_ns
        + sum(by_name[name].run_ns for name in running)
        + encode
        + sum(cost.decode_ns for cost in codec_of.values()),
        demoted_extra_ns=region_class.replay_fixed_ns + sum(by_name[name].run_ns for name in running_demoted) + encode,
        lossy_units=len(codec_of),
    )


def _hold(region_class: RegionClass) -> Configuration:
    keep_set = region_class.hold
    return Configuration(
        hold=True,
        units=tuple(UnitChoice(unit.name, "H", None, False, False) for unit in region_class.units),
        retained_bytes=keep_set.retained_bytes,
        forward_bytes=keep_set.forward_bytes,
        backward_bytes=keep_set.backward_bytes,
        demoted_backward_bytes=keep_set.backward_bytes,
        extra_ns=0,
        demoted_extra_ns=0,
        lossy_units=0,
    )


def _all_r(region_class: RegionClass) -> Configuration:
    empty = _keep_set(region_class, frozenset())
    built = _build(region_class, _Assignment(empty, ())) if empty is not None else None
    if built is None:
        raise InternalError(f"region class {region_class.name}: the trace lacks the empty keep set; run trace again")
    return built


def _whole_layer(
    region_class: RegionClass, offers: dict[str, tuple[CodecCost, ...]]
) -> Iterator[Configuration]:
    """Per codec the encoded layer: among all keep sets the one that spares the most time, then the most bytes."""
    names = dict.fromkeys(cost.codec for costs in offers.values() for cost in costs)
    for codec in names:
        found = []
        for keep_set in region_class.keep_sets:
            chosen = {
                unit.name: cost
                for unit in region_class.units
                if unit.name in keep_set.kept
                for cost in offers[unit.name]
                if cost.codec == codec
            }
            built = _build(region_class, _Assignment(keep_set, tuple(chosen.items())))
            if built is not None and chosen:
                found.append(built)
        if found:
            yield min(found, key=lambda c: (c.extra_ns, c.retained_bytes, c.backward_bytes))


def _keep_set(region_class: RegionClass, kept: frozenset[str]) -> KeepSet | None:
    return next((found for found in region_class.keep_sets if frozenset(found.kept) == kept), None)


def _distinct(candidates: tuple[Configuration, ...]) -> tuple[Configuration, ...]:
    return tuple(dict.fromkeys(candidates))


def _check(region_class: RegionClass) -> None:
    """Raises HiloreError unless names are unique, ``feeds`` point forward and keep sets hold keepable units."""
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


def needed_backward_bytes(configuration: Configuration) -> int:
    """Room that the backward of a region needs, demoted or not: a plan must fit either way."""
    return max(configuration.backward_bytes, configuration.demoted_backward_bytes)


def pareto(candidates: tuple[Configuration, ...], risk: tuple[int, ...] | None = None) -> tuple[Configuration, ...]:
    """``candidates`` without those that another one beats; the first is always kept. See `pareto_indices`."""
    return tuple(candidates[index] for index in pareto_indices(candidates, risk))


def pareto_indices(candidates: tuple[Configuration, ...], risk: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Indices, ascending, of the candidates that no other one beats; index 0 (all-R) is always among them.

    One beats another if it is no worse in retained, forward and needed backward bytes and in time, and if its risk is
    no larger (``risk`` given) or its L units with their codecs are among the other's (``risk`` None: then its risk is
    no larger in any region). Of equals the one with fewer L units stays, then the first.
    """
    lossy_sets = [frozenset((u.name, u.codec) for u in c.units if u.mode == "L") for c in candidates]
    bit = {pair: 1 << position for position, pair in enumerate(sorted(set().union(*lossy_sets), key=str))}
    if len(bit) > 62:
        raise InternalError(f"{len(bit)} pairs of unit and codec in one region class, at most 62 are handled")
    masks = np.array([sum(bit[pair] for pair in pairs) for pairs in lossy_sets], dtype=np.int64)
    columns: list[list[int]] = [
        [c.extra_ns for c in candidates],
        [c.retained_bytes for c in candidates],
        [needed_backward_bytes(c) for c in candidates],
        [c.forward_bytes for c in candidates],
    ]
    if risk is not None:
        columns.append(list(risk))
    table: NDArray[np.int64] = np.array(columns, dtype=np.int64).T
    order = sorted(range(len(candidates)), key=lambda i: (*table[i].tolist(), candidates[i].lossy_units, i))
    front: list[int] = []
    for index in order:
        rows, row = table[front], table[index]
        beaten = (rows <= row).all(axis=1)
        if risk is None:
            beaten &= (masks[front] & ~masks[index]) == 0
        if not beaten.any():
            front.append(index)
    return tuple(sorted({0, *front}))
