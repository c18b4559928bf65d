"""The plans that calibration runs: random ones, and what each has at L in which context.

A random plan draws per region one of the keep sets that the trace measured, then which of its units are at L and
with which codecs; how many is drawn so that the error it is expected to cause is one that plans are solved for (half
of delta_star to four times). So that no codec drowns another, the codecs of one plan cost about the same. So that no
kind of unit drowns another, some plans have units of one kind alone at L: the solver likes those that are cheapest, and
beside gate and up nothing would be known of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hilore.planner.configure import NEVER_LOSSY_KINDS
from hilore.planner.handmade import handmade_plan
from hilore.planner.taint import contexts_of, tainted_units
from hilore.planner.trace import Bucket, RegionClass, Trace, UnitTrace
from hilore.runtime.codecs import loses
from hilore.runtime.plan import Plan, RegionPlan

# In units of delta_star.
LEAST_ERROR, MOST_ERROR = 0.5, 4.0
OTHER_CODEC_SHARE = 0.25
# Codecs of one plan cost at most so many times each other's squared error.
NEAR = 10.0
SHARES_OF_A_KIND = (0.2, 0.5, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class LossyUnit:
    """One unit at L. ``place``: of its region in the bucket; ``kind`` and ``tainted`` as in planner/trace.py."""

    place: int
    unit: str
    kind: str
    codec: str
    tainted: tuple[str, ...]


# The squared error that an L unit is expected to cause, in whatever context.
Expected = Callable[[LossyUnit], float]


def lossy_units(bucket: Bucket, regions: Sequence[RegionPlan]) -> tuple[LossyUnit, ...]:
    """All L units of a plan whose codec changes values, in order."""
    found = []
    for place, (region, known) in enumerate(zip(regions, bucket.regions, strict=True)):
        units = bucket.classes[known.class_index].units
        running = {plan.name for plan in region.units if plan.mode == "R" and not plan.dead}
        runs = {unit.name for unit in units if f"{region.name}.{unit.name}" in running}
        for unit, plan in zip(units, region.units, strict=True):
            if plan.codec is not None and loses(plan.codec):
                tainted = tainted_units(units, unit.name, runs)
                found.append(LossyUnit(place, unit.name, unit.kind, plan.codec, tainted))
    return tuple(found)


def plan_at(plans: Sequence[Plan], psi: float) -> Plan | None:
    """What the runtime chooses of one set of one bucket, by ascending exposure; None above every regime, where the
    highest plan's L units are recomputed."""
    return next((plan for plan in plans if psi <= plan.regime.exposure_high), None)


def every_lossy_unit(bucket: Bucket) -> tuple[LossyUnit, ...]:
    """Each unit, codec that changes values, and context that a plan can have, in order.

    None of regions that can only be held.
    """
    return tuple(
        LossyUnit(place, unit.name, unit.kind, cost.codec, tainted)
        for place, region in enumerate(bucket.regions)
        if not region.hold_only
        for unit in offering(bucket.classes[region.class_index])
        for cost in unit.codecs
        if loses(cost.codec)
        for tainted in contexts_of(
            bucket.classes[region.class_index].units,
            [keep_set.kept for keep_set in bucket.classes[region.class_index].keep_sets],
            unit.name,
        )
    )


def offering(region_class: RegionClass) -> tuple[UnitTrace, ...]:
    """The units that may be at L with a codec that changes values."""
    return tuple(
        unit
        for unit in region_class.units
        if unit.keepable and unit.kind not in NEVER_LOSSY_KINDS and any(loses(cost.codec) for cost in unit.codecs)
    )


def codecs_of(bucket: Bucket) -> tuple[str, ...]:
    """All codecs that some unit can have, sorted."""
    return tuple(sorted({unit.codec for unit in every_lossy_unit(bucket)}))


def random_plans(
    trace: Trace, count: int, expected: Expected, *, seed: int, name: str, alone: int = 0
) -> tuple[Plan, ...]:
    """``count`` random plans of the largest bucket, the codecs taking turns; none where nothing can be at L.

    ``alone``: so many of them, the last ones, have units of one kind alone at L, the kinds taking turns.
    """
    drawing = _Drawing(trace, expected, random.Random(seed))
    if not drawing.codecs:
        return ()
    mixed = count - alone
    return tuple(
        drawing.plan(f"{name}-{place}") if place < mixed else drawing.plan_of_one_kind(f"{name}-{place}")
        for place in range(count)
    )


class _Drawing:
    def __init__(self, trace: Trace, expected: Expected, draw: random.Random) -> None:
        self.trace = trace
        self.bucket = trace.buckets[-1]
        self.draw = draw
        self._expected = expected
        every = every_lossy_unit(self.bucket)
        self._of_codec: dict[str, list[LossyUnit]] = {}
        for item in every:
            self._of_codec.setdefault(item.codec, []).append(item)
        self.codecs = sorted(self._of_codec)
        self._kinds = sorted({item.kind for item in every})
        # What the codec costs the unit that takes it best: how codecs compare.
        self._least = {codec: min(map(expected, items)) for codec, items in self._of_codec.items()}
        self._turn: list[str] = []
        self._kind_turn: list[str] = []

    def plan(self, name: str) -> Plan:
        """One random plan with at least one L unit."""
        return self._drawn(name, self._next_codec(), self._kinds)

    def plan_of_one_kind(self, name: str) -> Plan:
        """One random plan with at least one L unit, all of one kind."""
        if not self._kind_turn:
            self._kind_turn = self.draw.sample(self._kinds, len(self._kinds))
        kind = self._kind_turn.pop()
        offered = [codec for codec in self.codecs if any(item.kind == kind for item in self._of_codec[codec])]
        return self._drawn(name, self.draw.choice(offered), (kind,))

    def _drawn(self, name: str, codec: str, kinds: Sequence[str]) -> Plan:
        kept = [self._kept(self.bucket.classes[region.class_index]) for region in self.bucket.regions]
        share = {kind: self.draw.choice(SHARES_OF_A_KIND) for kind in kinds}
        chosen = [item for item in self._candidates(kept, codec) if self.draw.random() < share.get(item.kind, 0.0)]
        if not chosen:
            chosen = [self._somewhere(kept, codec, kinds)]
        modes = {(item.place, item.unit): item.codec for item in self._thinned(chosen)}
        place_of = {region.name: place for place, region in enumerate(self.bucket.regions)}

        def mode_of(region: str, unit: UnitTrace) -> str:
            place = place_of[region]
            return modes.get((place, unit.name), "H" if unit.name in kept[place] else "R")

        return handmade_plan(self.trace, mode_of, name=name)

    def _next_codec(self) -> str:
        if not self._turn:
            self._turn = self.draw.sample(self.codecs, len(self.codecs))
        return self._turn.pop()

    def _kept(self, region_class: RegionClass) -> tuple[str, ...]:
        return self.draw.choice([keep_set.kept for keep_set in region_class.keep_sets if not keep_set.split])

    def _candidates(self, kept: Sequence[tuple[str, ...]], codec: str) -> Iterator[LossyUnit]:
        """Every unit that is kept and offers the codec, now and then with another one that costs about the same."""
        for place, (region, names) in enumerate(zip(self.bucket.regions, kept, strict=True)):
            for unit in () if region.hold_only else offering(self.bucket.classes[region.class_index]):
                if unit.name in names:
                    offered = [cost.codec for cost in unit.codecs if cost.codec in self._least]
                    near = [c for c in offered if 1 / NEAR < self._least[c] / self._least[codec] < NEAR]
                    other = near and (codec not in offered or self.draw.random() < OTHER_CODEC_SHARE)
                    taken = self.draw.choice(near) if other else codec
                    if taken in offered:
                        yield LossyUnit(place, unit.name, unit.kind, taken, ())

    def _somewhere(self, kept: list[tuple[str, ...]], codec: str, kinds: Sequence[str]) -> LossyUnit:
        """Any unit of these kinds that offers the codec, its region's keep set made to hold it."""
        item = self.draw.choice([item for item in self._of_codec[codec] if item.kind in kinds])
        region_class = self.bucket.classes[self.bucket.regions[item.place].class_index]
        kept[item.place] = next(found.kept for found in region_class.keep_sets if item.unit in found.kept)
        return item

    def _thinned(self, chosen: Sequence[LossyUnit]) -> Sequence[LossyUnit]:
        """A random part of ``chosen``, one unit at least, as large as the expected error that is drawn allows."""
        wanted = math.exp(self.draw.uniform(math.log(LEAST_ERROR), math.log(MOST_ERROR)))
        limit = (self.trace.calibration.delta_star * wanted) ** 2
        taken: list[LossyUnit] = []
        total = 0.0
        for item in self.draw.sample(chosen, len(chosen)):
            if taken and total + self._expected(item) > limit:
                break
            taken.append(item)
            total += self._expected(item)
        return taken
