"""What a region's extra time is made of under the modes of a plan: glue, units that run again, encoding, decoding."""

from __future__ import annotations

from hilore.planner.modecost import region_cost
from hilore.planner.trace import RegionClass
from hilore.runtime.errors import InternalError
from hilore.runtime.plan import RegionPlan, UnitPlan


def region_times(region: RegionPlan, region_class: RegionClass) -> dict[str, int]:
    """Nanoseconds by what takes them, beyond a held region's forward and backward: nothing for a held region.

    They add up to the verifier's figure exactly: InternalError where they do not.
    """
    if region.hold:
        return {}
    split = region.split_at is not None
    names = [unit.name for unit in region_class.units]
    early = set(names[: names.index(region_class.split_at)]) if split else set()
    found = {"glue of the replay": region_class.replay_fixed_ns + (region_class.early_fixed_ns if split else 0)}
    for unit, plan in zip(region_class.units, region.units, strict=True):
        in_early = unit.name in early
        found[f"{unit.name} runs"] = _runs(plan, split=split, early=in_early) * unit.run_ns
        if plan.mode == "L":
            cost = next(cost for cost in unit.codecs if cost.codec == plan.codec)
            found[f"{unit.name} encoded"] = cost.encode_ns
            found[f"{unit.name} decoded"] = cost.decode_ns * (1 + in_early)
    expected = region_cost(region, region_class, 0).extra_ns
    if sum(found.values()) != expected:
        raise InternalError(
            f"{region.name}: its times add up to {sum(found.values())} ns, the verifier has {expected} ns"
        )
    return found


def _runs(plan: UnitPlan, *, split: bool, early: bool) -> int:
    """How often a replay runs the unit: a split one passes through the early part in both of its stages."""
    if plan.mode != "R":
        return 0
    if split and early:
        return (not plan.dead_late) + (not plan.dead)
    return int(not plan.dead)
