"""What a region costs under given modes: the verifier's own reading of a trace, shared with no other file.

Liveness is followed upstream from its ends here, and downstream in liveness.py; a slip in one shows in the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from hilore.planner.events import RegionCost
from hilore.planner.trace import CodecCost, KeepSet, RegionClass, UnitTrace
from hilore.runtime.errors import InternalError
from hilore.runtime.plan import RegionPlan, UnitPlan


def exact_cost(name: str, region_class: RegionClass, used: KeepSet, replay_ns: int) -> RegionCost:
    """A region without L units that keeps ``used``."""
    return RegionCost(
        name,
        used.retained_bytes,
        used.forward_bytes,
        used.backward_bytes,
        used.backward_bytes,
        region_class.gradient_bytes,
        replay_ns,
        replay_ns,
        0,
        used.cast_bytes,
        held=used is region_class.hold or used is region_class.no_gc,
    )


def region_cost(region: RegionPlan, region_class: RegionClass, risk: int) -> RegionCost:
    """What a region costs under the modes of its plan.

    Raises InternalError where units, split, kept sets or dead calls are not those of the trace.
    """
    planned = [unit.name.removeprefix(region.name + ".") for unit in region.units]
    if planned != [unit.name for unit in region_class.units]:
        raise InternalError(f"{region.name}: the plan's units are not those of class {region_class.name}")
    if region.hold:
        return exact_cost(region.name, region_class, region_class.hold, 0)
    at = {unit.name: plan for unit, plan in zip(region_class.units, region.units, strict=True)}
    encoded = {unit: _cost(region, unit, at[unit.name]) for unit in region_class.units if at[unit.name].mode == "L"}
    stored = {name for name, plan in at.items() if plan.mode in ("H", "L")}
    kept = {name for name, plan in at.items() if plan.mode == "H"}
    split = _split(region, region_class)
    _check_dead(region_class, at, stored, kept, split)
    with_lossy = _measured(region, region_class, stored, split)
    payload = sum(cost.payload_bytes for cost in encoded.values())
    output = sum(unit.output_bytes for unit in encoded)
    beside = sum(unit.rest_bytes for unit in encoded) + payload
    workspace = codec_workspace_bytes(encoded)
    retained = with_lossy.retained_bytes + payload - output
    encode_ns = sum(cost.encode_ns for cost in encoded.values())
    late_from = [unit.name for unit in region_class.units].index(region_class.split_at) if split else 0
    first_part = {unit.name for unit in region_class.units[:late_from]}
    decode_ns = sum(cost.decode_ns * (1 + (unit.name in first_part)) for unit, cost in encoded.items())
    return RegionCost(
        name=region.name,
        retained_bytes=retained,
        forward_bytes=with_lossy.forward_bytes + payload + workspace,
        backward_bytes=_lossy_backward(with_lossy, first_part, encoded) + output - payload + workspace,
        demoted_backward_bytes=_demoted_peak(region_class, kept, split) + beside - retained,
        gradient_bytes=region_class.gradient_bytes,
        extra_ns=_replay_ns(region_class, stored, split) + encode_ns + decode_ns,
        demoted_extra_ns=_replay_ns(region_class, kept, split) + encode_ns,
        risk=risk,
        cast_bytes=with_lossy.cast_bytes,
    )


def codec_workspace_bytes(lossy: Iterable[UnitTrace]) -> int:
    """What one encode or decode of a region's L units allocates at most: any codec that the trace offers them counts,
    so that the bound does not hang on the codec chosen."""
    most = 0
    for unit in lossy:
        for cost in unit.codecs:
            most = max(most, cost.workspace_bytes)
    return most


def _lossy_backward(used: KeepSet, first_part: set[str], encoded: dict[UnitTrace, CodecCost]) -> int:
    """Working set beside what H would retain: outputs are decoded one by one, and payloads of the part before a split
    wait for the second stage."""
    payloads = {unit.name: cost.payload_bytes for unit, cost in encoded.items()}
    if not payloads:
        return used.backward_bytes
    if used.handed_bytes is None:
        return used.backward_bytes + sum(payloads.values())
    waiting = sum(size for name, size in payloads.items() if name in first_part)
    return max(used.backward_bytes, used.handed_bytes + max(payloads.values())) + waiting


def _cost(region: RegionPlan, unit: UnitTrace, plan: UnitPlan) -> CodecCost:
    for cost in unit.codecs:
        if cost.codec == plan.codec:
            return cost
    raise InternalError(f"{region.name}.{unit.name}: the trace offers no codec {plan.codec}")


def _split(region: RegionPlan, region_class: RegionClass) -> bool:
    if region.split_at is None:
        return False
    if region.split_at != f"{region.name}.{region_class.split_at}":
        raise InternalError(f"{region.name}: split at {region.split_at}, the trace splits at {region_class.split_at!r}")
    return True


def _measured(region: RegionPlan, region_class: RegionClass, kept: set[str], split: bool) -> KeepSet:
    for keep_set in region_class.keep_sets:
        if set(keep_set.kept) == kept and keep_set.split == split:
            return keep_set
    raise InternalError(f"{region.name}: the trace measured no keep set {sorted(kept)} (split={split})")


def _demoted_peak(region_class: RegionClass, kept: set[str], split: bool) -> int:
    """Bytes alive because of a region that keeps ``kept`` exactly, at most: from the measured sets inside of it."""
    found = []
    for keep_set in region_class.keep_sets:
        if keep_set.split == split and set(keep_set.kept) <= kept:
            more = sum(u.output_bytes + u.rest_bytes for u in region_class.units if u.name in kept - set(keep_set.kept))
            found.append(keep_set.retained_bytes + keep_set.backward_bytes + more)
    return min(found)


def _needed(region_class: RegionClass, stored: set[str], *, late_stage: bool = False) -> set[str]:
    """Units whose output a replay needs and does not have, by following needs upstream from their ends.

    ``late_stage``: what the first stage of a split replay needs, where nothing asks yet for what the units before the
    split saved themselves.
    """
    names = [unit.name for unit in region_class.units]
    silent = set(names[: names.index(region_class.split_at)]) if late_stage else set()
    fed_by: dict[str, list[str]] = {name: [] for name in names}
    for unit in region_class.units:
        for name in unit.feeds:
            fed_by[name].append(unit.name)
    wanted = [u.name for u in region_class.units if u.feeds_saved or (u.saves_own and u.name not in silent)]
    wanted += [f for u in region_class.units if u.saves_inputs and u.name not in silent for f in fed_by[u.name]]
    running: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in stored and name not in running:
            running.add(name)
            wanted += fed_by[name]
    return running


def _stages(region_class: RegionClass, stored: set[str], split: bool) -> list[set[str]]:
    """The units that each stage of a replay runs."""
    needed = _needed(region_class, stored)
    if not split:
        return [needed]
    names = [unit.name for unit in region_class.units]
    early = set(names[: names.index(region_class.split_at)])
    first = _needed(region_class, stored, late_stage=True)
    return [(first & early) | (needed - early), needed & early]


def _replay_ns(region_class: RegionClass, stored: set[str], split: bool) -> int:
    glue = [region_class.replay_fixed_ns, region_class.early_fixed_ns]
    total = 0
    for stage, fixed_ns in zip(_stages(region_class, stored, split), glue, strict=False):
        total += fixed_ns + sum(unit.run_ns for unit in region_class.units if unit.name in stage)
    return total


def _check_dead(
    region_class: RegionClass, at: dict[str, UnitPlan], stored: set[str], kept: set[str], split: bool
) -> None:
    names = {unit.name for unit in region_class.units}
    flags: dict[str, set[str]] = {}
    for suffix, there in (("", stored), ("_if_demoted", kept)):
        flags["dead" + suffix] = names - there - _needed(region_class, there)
        late = names - there - _stages(region_class, there, split)[0] if split else set()
        order = [unit.name for unit in region_class.units]
        early = set(order[: order.index(region_class.split_at)]) if split else set()
        flags["dead_late" + suffix] = late & early
    for name, plan in at.items():
        for flag, recomputed in flags.items():
            if getattr(plan, flag) != (name in recomputed):
                raise InternalError(
                    f"{plan.name}: planned {flag}={getattr(plan, flag)}, recomputed {name in recomputed}"
                )
