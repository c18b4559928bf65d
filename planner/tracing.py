"""ModelSpec -> Trace: capture, profile and calibrate one actor on the device of the run."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hilore.planner.actor import Actor, build_actor, microbatch_of, policy_loss
from hilore.planner.capture import Capture, UnitGraph, capture
from hilore.planner.head import policy_logps
from hilore.planner.instrument import measure_checkpointed, measure_held, measure_keep_set
from hilore.planner.keepsets import split_unit, worthwhile_sets
from hilore.planner.liveness import dead_in_late_stage, running_units
from hilore.planner.microbatch import Microbatch
from hilore.planner.outside import OutsideBytes, measure_fixed, measure_outside
from hilore.planner.prior import calibration_from_prior, prior_codecs
from hilore.planner.profile import LOUD_SPREAD, RegionTimes, Timing, codec_costs, device_clock, time_region
from hilore.planner.regionrun import RegionRunner, Split, attention_wrapped, region_inputs
from hilore.planner.spec import spec_as_dict
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import (
    TRACE_VERSION,
    Bucket,
    CodecCost,
    Fixed,
    KeepSet,
    Outside,
    RegionClass,
    RegionTrace,
    Trace,
    UnitTrace,
)
from hilore.runtime.errors import InternalError, UnsupportedModelError
from hilore.runtime.fingerprint import base_model, model_fingerprint
from hilore.runtime.naming import canonical_modules
from hilore.runtime.region import ATTENTION

Progress = Callable[[str, int, int], None]
STEP_REPEATS = 3


def trace_spec(spec: ModelSpec, progress: Progress | None = None) -> Trace:
    """Capture, profile and calibrate as the file says.

    Raises UnsupportedModelError where the device is not here or the model cannot be captured, SourceError where the
    model cannot be loaded.
    """
    tell = progress or (lambda _label, _done, _total: None)
    device = _device(spec)
    tell("build the actor", 0, 1)
    actor = build_actor(spec, device=device)
    fake = build_actor(spec, device=device, fake=True)
    tell("build the actor", 1, 1)
    gradients_exist = spec.batch.accumulation > 1
    other_bytes = spec.resident.other_mib * 2**20
    fixed, optimizer_bytes = measure_fixed(fake, gradients_exist=gradients_exist, other_bytes=other_bytes)
    if spec.resident.reference:
        fixed = _with_reference(fixed, actor.model)
    buckets, notes, spreads = [], [], [0.0]
    for tokens in spec.batch.length_buckets:
        bucket, found, spread = _bucket(actor, fake, tokens, optimizer_bytes, gradients_exist, tell)
        buckets.append(bucket)
        notes += [note for note in found if note not in notes]
        spreads.append(spread)
    if max(spreads) > LOUD_SPREAD:
        notes.append(
            f"times spread by {max(spreads):.0%} of their median (interquartile range): the machine was busy; trace "
            "again when it is quiet"
        )
    return Trace(
        trace_version=TRACE_VERSION,
        name=spec.name,
        spec=spec_as_dict(spec),
        fingerprint=_fingerprint(actor, spec),
        device=str(device),
        estimated=False,
        card_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
        fixed=fixed,
        buckets=tuple(buckets),
        calibration=calibration_from_prior(spec, buckets[-1]),
        time_spread=max(spreads),
        notes=tuple(notes),
        versions={k: v for k, v in model_fingerprint(actor.model).items() if k.endswith("_patch")},
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _device(spec: ModelSpec) -> torch.device:
    if spec.device.kind == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModelError(
            "device.kind is cuda and no CUDA device is here; trace on the machine that will train, or set device: "
            "{kind: cpu}",
            unit="device",
        )
    return torch.device(spec.device.kind)


@dataclass(frozen=True, slots=True)
class _Setting:
    """One bucket's actor, real and fake, with its microbatches and what capture found."""

    actor: Actor
    fake: Actor
    microbatch: Microbatch
    fake_microbatch: Microbatch
    captured: Capture
    modules: dict[str, nn.Module]
    fake_modules: dict[str, nn.Module]
    gradients_exist: bool


def _bucket(
    actor: Actor, fake: Actor, tokens: int, optimizer_bytes: int, gradients_exist: bool, tell: Progress
) -> tuple[Bucket, tuple[str, ...], float]:
    microbatch = microbatch_of(actor, tokens)
    fake_microbatch = microbatch_of(fake, tokens)
    label = f"{tokens} tokens"
    tell(f"{label}: capture", 0, 1)
    with fake.faked(), fake.autocast():
        inputs = {"input_ids": fake_microbatch.input_ids, "attention_mask": fake_microbatch.attention_mask}
        captured = capture(fake.model, inputs, region_grain=fake.spec.region_grain)
    tell(f"{label}: capture", 1, 1)
    setting = _Setting(
        actor,
        fake,
        microbatch,
        fake_microbatch,
        captured,
        canonical_modules(actor.model),
        canonical_modules(fake.model),
        gradients_exist,
    )
    found = [_region_class(setting, index, tell, label) for index in range(len(captured.classes))]
    classes = tuple(region_class for region_class, _ in found)
    regions = tuple(RegionTrace(region.name, region.class_index) for region in captured.regions)
    outside = measure_outside(
        fake,
        fake_microbatch,
        {region.name: setting.fake_modules[region.name] for region in captured.regions},
        gradients_exist=gradients_exist,
    )
    tell(f"{label}: whole step", 0, 1)
    times = _outside_times(setting, classes, regions, outside, optimizer_bytes)
    tell(f"{label}: whole step", 1, 1)
    bucket = Bucket(tokens, microbatch.input_ids.shape[0], classes, regions, times)
    return bucket, captured.notes, max(spread for _, spread in found)


def _region_class(setting: _Setting, index: int, tell: Progress, label: str) -> tuple[RegionClass, float]:
    graph = setting.captured.classes[index]
    members = [region.name for region in setting.captured.regions if region.class_index == index]
    representative = members[0]
    named = f"{label}: {representative}"
    runner = _runner(setting, representative, graph.units, fake=False)
    _, dead = running_units(graph.units, frozenset(unit.name for unit in graph.units if unit.keepable))
    clock = device_clock(setting.actor.device)
    tell(f"{named}: times", 0, 1)
    all_but_dead = frozenset(running_units(graph.units, frozenset())[1])
    with attention_wrapped(base_model(setting.actor.model)), setting.actor.autocast():
        times = time_region(runner, all_but_dead | frozenset(dead), clock, split_at=split_unit(graph.units))
        costs = {
            unit.name: codec_costs(times.outputs[unit.name], prior_codecs(unit.kind, setting.actor.spec.codecs), clock)
            for unit in graph.units
            if unit.keepable and unit.name in times.outputs
        }
    tell(f"{named}: times", 1, 1)
    return _measured_class(setting, representative, graph.units, times, costs, tell, named), times.spread


def _measured_class(
    setting: _Setting,
    representative: str,
    units: tuple[UnitGraph, ...],
    times: RegionTimes,
    costs: dict[str, tuple[CodecCost, ...]],
    tell: Progress,
    named: str,
) -> RegionClass:
    exact = {unit.name: _nbytes(times.outputs[unit.name]) for unit in units}
    payload = {name: min([cost.payload_bytes for cost in costs.get(name, ())] or [exact[name]]) for name in exact}
    keepable = frozenset(unit.name for unit in units if unit.keepable)
    sets = worthwhile_sets(units, times.run_ns, (exact, payload), keepable)
    runner = _runner(setting, representative, units, fake=True)
    split_at = split_unit(units)
    # Without attention kept, the second stage of a split replay would run it again.
    attention = {unit.name for unit in units if unit.kind == ATTENTION and unit.keepable}
    wanted = [(kept, False) for kept in sets]
    wanted += [(kept, True) for kept in sets if split_at and (not kept or attention <= set(kept))]
    measured: list[KeepSet] = []
    with setting.fake.faked(), setting.fake.autocast(), attention_wrapped(base_model(setting.fake.model)):
        held = measure_held(runner, gradients_exist=setting.gradients_exist)
        checkpointed = measure_checkpointed(runner, gradients_exist=setting.gradients_exist)
        for done, (kept, is_split) in enumerate(wanted):
            tell(f"{named}: memory", done, len(wanted))
            dead = running_units(units, frozenset(kept))[1]
            split = Split(split_at, dead_in_late_stage(units, kept, split_at)) if is_split else None
            found = measure_keep_set(runner, kept, dead, gradients_exist=setting.gradients_exist, split=split)
            measured.append(found.as_keep_set(kept, split=is_split))
        tell(f"{named}: memory", len(wanted), len(wanted))
    nothing = next(found for found in measured if not found.kept)
    alone = {found.kept[0]: found for found in measured if len(found.kept) == 1 and not found.split}
    return RegionClass(
        name=representative,
        units=tuple(
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
        ),
        keep_sets=tuple(measured),
        hold=held.as_keep_set(tuple(unit.name for unit in units)),
        gc=checkpointed.as_keep_set(()),
        forward_ns=times.forward_ns,
        backward_ns=times.backward_ns,
        replay_fixed_ns=times.replay_fixed_ns,
        gc_replay_ns=times.gc_replay_ns,
        gradient_bytes=0 if setting.gradients_exist else held.gradient_bytes,
        split_at=split_at,
        early_fixed_ns=times.early_fixed_ns,
    )


def _runner(setting: _Setting, name: str, units: tuple[UnitGraph, ...], *, fake: bool) -> RegionRunner:
    actor, modules = (setting.fake, setting.fake_modules) if fake else (setting.actor, setting.modules)
    microbatch = setting.fake_microbatch if fake else setting.microbatch
    with actor.faked(), actor.autocast():
        inputs = region_inputs(
            lambda: policy_logps(actor.model, microbatch, actor.spec.loss.head), modules, [name]
        )[name]
    found = {}
    for unit in units:
        path, _, function = f"{name}.{unit.name}".partition(":")
        if path not in modules:
            raise InternalError(f"{name}: captured unit {unit.name} is no module of the model")
        found[unit.name] = (function or unit.kind, modules[path])
    return RegionRunner.of(name, modules[name], inputs, found)


def _outside_times(
    setting: _Setting,
    classes: tuple[RegionClass, ...],
    regions: tuple[RegionTrace, ...],
    outside: OutsideBytes,
    optimizer_bytes: int,
) -> Outside:
    forward, backward = _time_step(setting)
    inside_forward = sum(classes[region.class_index].forward_ns for region in regions)
    inside_backward = sum(classes[region.class_index].backward_ns for region in regions)
    return Outside(
        before_bytes=outside.before_bytes,
        head_bytes=outside.head_bytes,
        head_left_bytes=outside.head_left_bytes,
        tail_bytes=outside.tail_bytes,
        optimizer_bytes=optimizer_bytes,
        forward_ns=max(forward - inside_forward, 0),
        backward_ns=max(backward - inside_backward, 0),
        optimizer_ns=0,
    )


def _time_step(setting: _Setting) -> tuple[int, int]:
    """Median forward (with head and loss) and backward of one microbatch without checkpointing."""
    clock = device_clock(setting.actor.device)
    forwards, backwards = [], []
    for turn in range(1 + STEP_REPEATS):
        began = clock()
        loss = policy_loss(setting.actor, setting.microbatch)
        middle = clock()
        loss.backward()  # type: ignore[no-untyped-call]
        if turn:
            forwards.append(middle - began)
            backwards.append(clock() - middle)
    for parameter in setting.actor.model.parameters():
        parameter.grad = None
    return Timing.of(forwards).median_ns, Timing.of(backwards).median_ns


def _with_reference(fixed: Fixed, model: nn.Module) -> Fixed:
    frozen = sum(_nbytes(p) for p in model.parameters() if not p.requires_grad) or fixed.parameter_bytes
    return Fixed(
        fixed.parameter_bytes, fixed.gradient_bytes, fixed.optimizer_state_bytes, fixed.other_bytes + frozen
    )


def _fingerprint(actor: Actor, spec: ModelSpec) -> dict[str, object]:
    embeddings_grad = hasattr(base_model(actor.model), "enable_input_require_grads")
    return model_fingerprint(actor.model) | {
        "layout": spec.batch.layout,
        "rows": spec.batch.microbatch,
        "region_grain": spec.region_grain,
        "parallel": spec.parallel.kind,
        "world_size": spec.parallel.world_size,
        "head": spec.loss.head,
        "first_input_requires_grad": embeddings_grad,
        "gpu": torch.cuda.get_device_name() if spec.device.kind == "cuda" else "cpu",
    }


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
