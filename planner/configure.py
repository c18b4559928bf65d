"""RegionClass -> Configurations: every assignment of modes to a region's units that can be worth a decision.

What must run in a replay follows from the liveness fields of the trace; bytes come from the trace's keep sets. Only
configurations that another one beats in every byte, in time and in what it encodes are left out, so that an optimum
over the rest is an optimum over all (docs/design.md, "Configurations").
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hilore.planner.liveness import dead_in_late_stage, running_units
from hilore.planner.pareto import pareto
from hilore.planner.problem import Configuration, UnitChoice
from hilore.planner.taint import tainted_units
from hilore.planner.trace import CodecCost, KeepSet, RegionClass, UnitTrace
from hilore.runtime.errors import HiloreError

GRANULARITIES = ("unit", "layer")

# A kept log-sum-exp belongs to the exact q and k: beside it, decoded ones blow the gradient up.
NEVER_LOSSY_KINDS = frozenset({"q", "k"})

# Up to this many raw assignments every mix of codecs is tried; beyond, the L units of one region share one codec.
MIXED_CODEC_LIMIT = 40_000


def replayed_units(units: tuple[UnitTrace, ...], kept: Collection[str]) -> frozenset[str]:
    """Names of the units that a replay must run when ``kept`` (H or L) are not run again; the others are dead."""
    return frozenset(running_units(units, kept)[0])


def configurations(
    region_class: RegionClass,
    *,
    codecs: Collection[tuple[str, str]] | None = None,
    lossy: bool,
    granularity: str = "unit",
    contexts: bool = False,
) -> tuple[Configuration, ...]:
    """All configurations of a region class that none of the others beats, all-R first.

    ``codecs`` holds the allowed pairs (unit name, codec name), None for all that the trace offers; ``lossy=False``
    leaves L out. Keep sets that the trace measured with a split replay give configurations of their own. At granularity
    ``"layer"`` a region is held, replayed whole, or encoded whole with one codec: each unit that offers it at L, the
    other keepable ones at H, in the keep set that spares the most time. ``contexts``: the risk of an L unit depends
    on which units a replay runs on its decoded value.
    Raises HiloreError where the class contradicts itself.
    """
    if granularity not in GRANULARITIES:
        raise HiloreError(f"granularity {granularity!r}: one of {', '.join(GRANULARITIES)}", granularity=granularity)
    _check(region_class)
    offers = {unit.name: _offers(unit, codecs) if lossy else () for unit in region_class.units}
    builder = _Builder(region_class)
    if granularity == "layer":
        return (builder.all_r(), _hold(region_class), *_whole_layer(builder, offers))
    built = (builder.build(assignment) for assignment in _assignments(region_class, offers))
    return pareto((builder.all_r(), _hold(region_class), *built), contexts=contexts)


@dataclass(frozen=True, slots=True)
class _Assignment:
    """``kept``: the keep set of H and L units; ``lossy``: the codec of each L unit, in unit order."""

    kept: KeepSet
    lossy: tuple[tuple[str, CodecCost], ...]


def _offers(unit: UnitTrace, allowed: Collection[tuple[str, str]] | None) -> tuple[CodecCost, ...]:
    if not unit.keepable or unit.kind in NEVER_LOSSY_KINDS:
        return ()
    return tuple(cost for cost in unit.codecs if allowed is None or (unit.name, cost.codec) in allowed)


def _assignments(region_class: RegionClass, offers: dict[str, tuple[CodecCost, ...]]) -> Iterator[_Assignment]:
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


class _Builder:
    """Configurations of one class; what depends on a set of units alone is worked out once per set."""

    def __init__(self, region_class: RegionClass) -> None:
        self.region_class = region_class
        self._replays: dict[tuple[frozenset[str], bool], _Replay] = {}
        self._peaks: dict[tuple[frozenset[str], bool], int] = {}

    def all_r(self) -> Configuration:
        empty = next(found for found in self.region_class.keep_sets if not found.kept and not found.split)
        return self.build(_Assignment(empty, ()))

    def build(self, assignment: _Assignment) -> Configuration:
        region_class, keep_set = self.region_class, assignment.kept
        units, split = region_class.units, keep_set.split
        codec_of = dict(assignment.lossy)
        exact = frozenset(keep_set.kept).difference(codec_of)
        planned, demoted = self._replay(frozenset(keep_set.kept), split), self._replay(exact, split)
        lossy = [unit for unit in units if unit.name in codec_of]
        outputs = sum(unit.output_bytes for unit in lossy)
        payloads = sum(cost.payload_bytes for cost in codec_of.values())
        retained = keep_set.retained_bytes - outputs + payloads
        # Demoted, payloads and rests stay where they are while the H-only replay runs beside them.
        beside = payloads + sum(unit.rest_bytes for unit in lossy)
        encode = sum(cost.encode_ns for cost in codec_of.values())
        decode = sum(cost.decode_ns * planned.calls[name] for name, cost in codec_of.items())
        return Configuration(
            hold=False,
            units=tuple(
                UnitChoice(
                    name=unit.name,
                    mode="H" if unit.name in exact else "L" if unit.name in codec_of else "R",
                    codec=codec_of[unit.name].codec if unit.name in codec_of else None,
                    dead=unit.name in planned.dead,
                    dead_if_demoted=unit.name in demoted.dead,
                    dead_late=unit.name in planned.dead_late,
                    dead_late_if_demoted=unit.name in demoted.dead_late,
                    tainted=tainted_units(units, unit.name, planned.running) if unit.name in codec_of else (),
                )
                for unit in units
            ),
            retained_bytes=retained,
            # An output may live on for other units of the region when its payload is there already.
            forward_bytes=keep_set.forward_bytes + payloads,
            backward_bytes=self._lossy_peak(keep_set, codec_of) - retained,
            demoted_backward_bytes=self._exact_peak(exact, split) + beside - retained,
            extra_ns=planned.run_ns + encode + decode,
            demoted_extra_ns=demoted.run_ns + encode,
            lossy_units=len(codec_of),
            split_at=region_class.split_at if split else "",
            cast_bytes=keep_set.cast_bytes,
        )

    def _replay(self, kept: frozenset[str], split: bool) -> _Replay:
        if (kept, split) not in self._replays:
            self._replays[kept, split] = _Replay.of(self.region_class, kept, split)
        return self._replays[kept, split]

    def _lossy_peak(self, keep_set: KeepSet, codec_of: dict[str, CodecCost]) -> int:
        """At most so many bytes are alive because of a region in a backward that decodes the units of ``codec_of``.

        Once all are handed out they are what they would be at H; before, each takes its payload at most, or while it
        is decoded both.
        """
        payloads = [cost.payload_bytes for cost in codec_of.values()]
        if keep_set.handed_bytes is None or not payloads:
            return keep_set.retained_bytes + keep_set.backward_bytes + sum(payloads)
        names = [unit.name for unit in self.region_class.units]
        first_late = names.index(self.region_class.split_at) if keep_set.split else 0
        waiting = sum(cost.payload_bytes for name, cost in codec_of.items() if names.index(name) < first_late)
        highest = max(keep_set.backward_bytes, keep_set.handed_bytes + max(payloads))
        return keep_set.retained_bytes + highest + waiting

    def _exact_peak(self, exact: frozenset[str], split: bool) -> int:
        """At most so many bytes are alive because of a region in a backward that keeps ``exact`` and nothing else.

        The trace measured it, or measured subsets: keeping a unit more adds its output and rest and saves what its
        run would allocate.
        """
        if (exact, split) not in self._peaks:
            size = {unit.name: unit.output_bytes + unit.rest_bytes for unit in self.region_class.units}
            self._peaks[exact, split] = min(
                found.retained_bytes + found.backward_bytes + sum(size[name] for name in exact.difference(found.kept))
                for found in self.region_class.keep_sets
                if found.split == split and exact.issuperset(found.kept)
            )
        return self._peaks[exact, split]


@dataclass(frozen=True, slots=True)
class _Replay:
    """``calls``: in how many of the replay's stages a unit is called (and a stored output handed out or decoded)."""

    run_ns: int
    calls: dict[str, int]
    running: frozenset[str]
    dead: frozenset[str]
    dead_late: frozenset[str]

    @classmethod
    def of(cls, region_class: RegionClass, kept: frozenset[str], split: bool) -> _Replay:
        units = region_class.units
        running, dead = running_units(units, kept)
        dead_late = dead_in_late_stage(units, kept, region_class.split_at) if split else ()
        names = [unit.name for unit in units]
        early = names[: names.index(region_class.split_at)] if split else []
        # The late stage passes through the early part too; the early stage stops where its part ends.
        late_runs = [name for name in names if name not in kept and name not in (dead_late if name in early else dead)]
        runs = late_runs + [name for name in early if name in running]
        run_ns = {unit.name: unit.run_ns for unit in units}
        fixed_ns = region_class.replay_fixed_ns + (region_class.early_fixed_ns if split else 0)
        calls = {name: 2 if name in early else 1 for name in names}
        spent_ns = fixed_ns + sum(run_ns[name] for name in runs)
        return cls(spent_ns, calls, frozenset(running), frozenset(dead), frozenset(dead_late))


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
        cast_bytes=keep_set.cast_bytes,
    )


def _whole_layer(builder: _Builder, offers: dict[str, tuple[CodecCost, ...]]) -> Iterator[Configuration]:
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
                found.append(builder.build(_Assignment(keep_set, tuple(chosen.items()))))
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
