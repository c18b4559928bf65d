"""One region class of one length bucket: its times on the bench, its bytes under every set of kept units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hilore.planner.actor import Actor
from hilore.planner.capture import Capture, UnitGraph
from hilore.planner.estimate import Bench, Target, kernels, timed_kernels
from hilore.planner.head import policy_logps
from hilore.planner.instrument import (
    RegionBytes,
    measure_checkpointed,
    measure_held,
    measure_keep_set,
    measure_plain,
)
from hilore.planner.keepsets import split_unit, worthwhile_sets
from hilore.planner.liveness import dead_in_late_stage, running_units
from hilore.planner.microbatch import Microbatch
from hilore.planner.prior import prior_codecs
from hilore.planner.profile import RegionTimes, time_region
from hilore.planner.regionrun import RegionRunner, Split, attention_wrapped, region_inputs
from hilore.planner.trace import CodecCost, KeepSet, RegionClass, UnitTrace
from hilore.runtime.adapter import ADAPTED, unit_modules
from hilore.runtime.errors import InternalError
from hilore.runtime.fingerprint import base_model
from hilore.runtime.region import ATTENTION

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """One length bucket: what times are taken with, the fake actor for bytes, a microbatch of each.

    ``gradients_exist``: accumulation has filled the gradient buffers of the regions' own (unsharded) parameters.
    """

    target: Target
    bench: Bench
    fake: Actor
    microbatch: Microbatch
    fake_microbatch: Microbatch
    captured: Capture
    gradients_exist: bool
    tell: Progress
    label: str


def trace_class(setting: Setting, index: int) -> tuple[RegionClass, float]:
    """The class's trace, and the spread of its times."""
    units = setting.captured.classes[index].units
    name = next(region.name for region in setting.captured.regions if region.class_index == index)
    named = f"{setting.label}: {name}"
    setting.tell(f"{named}: times", 0, 1)
    with timed_kernels(setting.target):
        times, costs = _times(setting, name, units)
    setting.tell(f"{named}: times", 1, 1)
    with kernels(setting.target):
        return _bytes(setting, name, units, times, costs, named), times.spread


def _times(
    setting: Setting, name: str, units: tuple[UnitGraph, ...]
) -> tuple[RegionTimes, dict[str, tuple[CodecCost, ...]]]:
    bench = setting.bench
    runner = _runner(bench.actor, setting.microbatch, name, units)
    dead = running_units(units, frozenset(unit.name for unit in units if unit.keepable))[1]
    never_run = running_units(units, frozenset())[1]
    with attention_wrapped(base_model(bench.actor.model)), bench.running():
        times = time_region(
            runner,
            frozenset(dead) | frozenset(never_run),
            bench.clock,
            split_at=split_unit(units),
            warm_up_runs=bench.warm_up_runs,
            repeats=bench.repeats,
        )
        costs = {
            unit.name: bench.codec_costs(times.outputs[unit.name], prior_codecs(unit.kind, setting.fake.spec))
            for unit in units
            if unit.keepable and unit.name in times.outputs
        }
    return times, costs


def _bytes(
    setting: Setting,
    name: str,
    units: tuple[UnitGraph, ...],
    times: RegionTimes,
    costs: dict[str, tuple[CodecCost, ...]],
    named: str,
) -> RegionClass:
    exact = {unit.name: times.outputs[unit.name].untyped_storage().nbytes() for unit in units}
    payload = {unit: min([cost.payload_bytes for cost in costs.get(unit, ())] or [exact[unit]]) for unit in exact}
    keepable = frozenset(unit.name for unit in units if unit.keepable)
    sets = worthwhile_sets(units, times.run_ns, (exact, payload), keepable)
    runner = _runner(setting.fake, setting.fake_microbatch, name, units)
    with setting.fake.faked(), attention_wrapped(base_model(setting.fake.model)):
        exist, autocast = setting.gradients_exist, setting.fake.autocast
        held = measure_held(runner, gradients_exist=exist, autocast=autocast)
        differs = runner.binding.differs_held
        plain = measure_plain(runner, gradients_exist=exist, autocast=autocast) if differs else None
        checkpointed = measure_checkpointed(runner, gradients_exist=exist, autocast=autocast)
        measured = _keep_sets(setting, runner, units, sets, named)
    return RegionClass(
        name=name,
        units=_unit_traces(units, times, costs, exact, measured),
        keep_sets=measured,
        hold=held.as_keep_set(tuple(unit.name for unit in units)),
        gc=checkpointed.as_keep_set(()),
        forward_ns=times.forward_ns,
        backward_ns=times.backward_ns,
        replay_fixed_ns=times.replay_fixed_ns,
        gc_replay_ns=times.gc_replay_ns,
        gradient_bytes=0 if setting.gradients_exist else held.gradient_bytes,
        split_at=split_unit(units),
        early_fixed_ns=times.early_fixed_ns,
        plan_extra_ns=times.plan_extra_ns,
        no_gc=plain.as_keep_set(tuple(unit.name for unit in units)) if plain is not None else None,
    )


def _keep_sets(
    setting: Setting,
    runner: RegionRunner,
    units: tuple[UnitGraph, ...],
    sets: tuple[tuple[str, ...], ...],
    named: str,
) -> tuple[KeepSet, ...]:
    split_at = split_unit(units)
    # Without attention kept, the second stage of a split replay would run it again.
    attention = {unit.name for unit in units if unit.kind == ATTENTION and unit.keepable}
    wanted = [(kept, False) for kept in sets]
    wanted += [(kept, True) for kept in sets if split_at and (not kept or attention <= set(kept))]
    measured = []
    for done, (kept, is_split) in enumerate(wanted):
        setting.tell(f"{named}: memory", done, len(wanted))
        dead = running_units(units, frozenset(kept))[1]
        split = Split(split_at, dead_in_late_stage(units, kept, split_at)) if is_split else None
        found: RegionBytes = measure_keep_set(
            runner, kept, dead, gradients_exist=setting.gradients_exist, split=split, autocast=setting.fake.autocast
        )
        measured.append(found.as_keep_set(kept, split=is_split))
    setting.tell(f"{named}: memory", len(wanted), len(wanted))
    return tuple(measured)


def _unit_traces(
    units: tuple[UnitGraph, ...],
    times: RegionTimes,
    costs: dict[str, tuple[CodecCost, ...]],
    exact: dict[str, int],
    measured: tuple[KeepSet, ...],
) -> tuple[UnitTrace, ...]:
    nothing = next(found for found in measured if not found.kept)
    alone = {found.kept[0]: found for found in measured if len(found.kept) == 1 and not found.split}
    return tuple(
        UnitTrace(
            name=unit.name,
            kind=unit.kind,
            run_ns=times.run_ns[unit.name],
            output_bytes=exact[unit.name],
            rest_bytes=max(alone[unit.name].retained_bytes - nothing.retained_bytes - exact[unit.name], 0)
            if unit.name in alone
            else 0,
            feeds=unit.feeds,
            feeds_saved=unit.feeds_saved,
            saves_inputs=unit.saves_inputs,
            saves_own=unit.saves_own,
            keepable=unit.keepable,
            reason=unit.reason,
            codecs=costs.get(unit.name, ()),
        )
        for unit in units
    )


def _runner(actor: Actor, microbatch: Microbatch, name: str, units: tuple[UnitGraph, ...]) -> RegionRunner:
    modules: dict[str, nn.Module] = unit_modules(actor.model, ADAPTED)
    with actor.faked(), actor.autocast():
        inputs = region_inputs(lambda: policy_logps(actor.model, microbatch, actor.spec.loss.head), modules, [name])[
            name
        ]
    found = {}
    for unit in units:
        path, _, function = f"{name}.{unit.name}".partition(":")
        if path not in modules:
            raise InternalError(f"{name}: captured unit {unit.name} is no module of the model")
        found[unit.name] = (function or unit.kind, modules[path])
    return RegionRunner.of(name, modules[name], inputs, found)
