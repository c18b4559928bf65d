"""What a replayed or held region costs under given modes of its units: the builder of Configurations.

What must run in a replay follows from the liveness fields of the trace; bytes come from the trace's keep sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hilore.planner.liveness import dead_in_late_stage, running_units
from hilore.planner.problem import Configuration, UnitChoice
from hilore.planner.taint import tainted_units
from hilore.planner.trace import CodecCost, KeepSet, RegionClass


@dataclass(frozen=True, slots=True)
class Assignment:
    """``kept``: the keep set of H and L units; ``lossy``: the codec of each L unit, in unit order."""

    kept: KeepSet
    lossy: tuple[tuple[str, CodecCost], ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """The numbers of a Configuration, documented there."""

    retained_bytes: int
    forward_bytes: int
    backward_bytes: int
    demoted_backward_bytes: int
    extra_ns: int
    demoted_extra_ns: int
    lossy_units: int


class Builder:
    """Configurations of one class; what depends on a set of units alone is worked out once per set."""

    def __init__(self, region_class: RegionClass) -> None:
        self.region_class = region_class
        self._replays: dict[tuple[frozenset[str], bool], Replay] = {}
        self._peaks: dict[tuple[frozenset[str], bool], int] = {}
        self._size = {unit.name: unit.output_bytes + unit.rest_bytes for unit in region_class.units}
        self._measured = [(frozenset(found.kept), found) for found in region_class.keep_sets]
        self._units = {unit.name: unit for unit in region_class.units}
        self._places = {unit.name: place for place, unit in enumerate(region_class.units)}

    def all_r(self) -> Configuration:
        empty = next(found for found in self.region_class.keep_sets if not found.kept and not found.split)
        return self.build(Assignment(empty, ()))

    def figures(self, assignment: Assignment) -> Figures:
        keep_set = assignment.kept
        split = keep_set.split
        exact = frozenset(keep_set.kept).difference(name for name, _ in assignment.lossy)
        planned, demoted = self.replay(frozenset(keep_set.kept), split), self.replay(exact, split)
        outputs = sum(self._units[name].output_bytes for name, _ in assignment.lossy)
        payloads = sum(cost.payload_bytes for _, cost in assignment.lossy)
        retained = keep_set.retained_bytes - outputs + payloads
        # Demoted, payloads and rests stay where they are while the H-only replay runs beside them.
        beside = payloads + sum(self._units[name].rest_bytes for name, _ in assignment.lossy)
        encode = sum(cost.encode_ns for _, cost in assignment.lossy)
        decode = sum(cost.decode_ns * planned.calls[name] for name, cost in assignment.lossy)
        return Figures(
            retained_bytes=retained,
            # An output may live on for other units of the region when its payload is there already.
            forward_bytes=keep_set.forward_bytes + payloads + self._workspace(name for name, _ in assignment.lossy),
            backward_bytes=self.lossy_peak(keep_set, assignment.lossy) - retained,
            demoted_backward_bytes=self._exact_peak(exact, split) + beside - retained,
            extra_ns=planned.run_ns + encode + decode,
            demoted_extra_ns=demoted.run_ns + encode,
            lossy_units=len(assignment.lossy),
        )

    def build(self, assignment: Assignment) -> Configuration:
        keep_set, units = assignment.kept, self.region_class.units
        codec_of = dict(assignment.lossy)
        exact = frozenset(keep_set.kept).difference(codec_of)
        planned, demoted = self.replay(frozenset(keep_set.kept), keep_set.split), self.replay(exact, keep_set.split)
        figures = self.figures(assignment)
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
                    tainted=self.tainted(unit.name, keep_set) if unit.name in codec_of else (),
                )
                for unit in units
            ),
            retained_bytes=figures.retained_bytes,
            forward_bytes=figures.forward_bytes,
            backward_bytes=figures.backward_bytes,
            demoted_backward_bytes=figures.demoted_backward_bytes,
            extra_ns=figures.extra_ns,
            demoted_extra_ns=figures.demoted_extra_ns,
            lossy_units=figures.lossy_units,
            split_at=self.region_class.split_at if keep_set.split else "",
            cast_bytes=keep_set.cast_bytes,
        )

    def replay(self, kept: frozenset[str], split: bool) -> Replay:
        if (kept, split) not in self._replays:
            self._replays[kept, split] = Replay.of(self.region_class, kept, split)
        return self._replays[kept, split]

    def tainted(self, lossy: str, keep_set: KeepSet) -> tuple[str, ...]:
        """The units that a replay runs on what comes from ``lossy``."""
        running = self.replay(frozenset(keep_set.kept), keep_set.split).running
        return tainted_units(self.region_class.units, lossy, running)

    def lossy_peak(self, keep_set: KeepSet, lossy: Sequence[tuple[str, CodecCost]]) -> int:
        """At most so many bytes are alive because of a region in a backward that decodes the units of ``lossy``.

        Once all are handed out they are what they would be at H; before, each takes its payload at most, or while it
        is decoded both.
        """
        payloads = [cost.payload_bytes for _, cost in lossy]
        beside = keep_set.retained_bytes + self._workspace(name for name, _ in lossy)
        if keep_set.handed_bytes is None or not payloads:
            return beside + keep_set.backward_bytes + sum(payloads)
        first_late = self._places[self.region_class.split_at] if keep_set.split else 0
        waiting = sum(cost.payload_bytes for name, cost in lossy if self._places[name] < first_late)
        highest = max(keep_set.backward_bytes, keep_set.handed_bytes + max(payloads))
        return beside + highest + waiting

    def needed_range(
        self, keep_set: KeepSet, lossy: Sequence[str], least: Sequence[int], most: Sequence[int]
    ) -> tuple[int, int]:
        """Bounds of the room that a backward needs, demoted or not, whatever codecs the units of ``lossy`` take.

        ``least`` and ``most``: payload bytes of each of them. The bounds are equal where the codecs do not matter.
        """
        exact = frozenset(keep_set.kept).difference(lossy)
        unpaid = keep_set.retained_bytes - sum(self._units[name].output_bytes for name in lossy)
        demoted = self._exact_peak(exact, keep_set.split) + sum(self._units[name].rest_bytes for name in lossy) - unpaid
        first = keep_set.retained_bytes - unpaid + self._workspace(lossy)
        if keep_set.handed_bytes is None or not lossy:
            same = max(demoted, first + keep_set.backward_bytes)
            return same, same
        first_late = self._places[self.region_class.split_at] if keep_set.split else 0
        late = [self._places[name] >= first_late for name in lossy]
        low = first + max(keep_set.backward_bytes, keep_set.handed_bytes + max(least))
        high = first + max(keep_set.backward_bytes, keep_set.handed_bytes + max(most))
        low -= sum(size for size, is_late in zip(most, late, strict=True) if is_late)
        high -= sum(size for size, is_late in zip(least, late, strict=True) if is_late)
        return max(demoted, low), max(demoted, high)

    def _workspace(self, lossy: Iterable[str]) -> int:
        """The most that one encode or decode of these units allocates, whichever of its codecs each takes.

        Codecs run one after another. Taken over all offers, it depends on the units alone, as a Menu's shapes must.
        """
        return max((cost.workspace_bytes for name in lossy for cost in self._units[name].codecs), default=0)

    def _exact_peak(self, exact: frozenset[str], split: bool) -> int:
        """At most so many bytes are alive because of a region in a backward that keeps ``exact`` and nothing else.

        The trace measured it, or measured subsets: keeping a unit more adds its output and rest and saves what its
        run would allocate.
        """
        if (exact, split) not in self._peaks:
            self._peaks[exact, split] = min(
                found.retained_bytes + found.backward_bytes + sum(self._size[name] for name in exact.difference(kept))
                for kept, found in self._measured
                if found.split == split and kept <= exact
            )
        return self._peaks[exact, split]


@dataclass(frozen=True, slots=True)
class Replay:
    """``calls``: in how many of the replay's stages a unit is called (and a stored output handed out or decoded)."""

    run_ns: int
    calls: dict[str, int]
    running: frozenset[str]
    dead: frozenset[str]
    dead_late: frozenset[str]

    @classmethod
    def of(cls, region_class: RegionClass, kept: frozenset[str], split: bool) -> Replay:
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


def held(region_class: RegionClass) -> Configuration:
    """The region without replay."""
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
