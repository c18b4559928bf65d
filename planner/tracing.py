"""ModelSpec -> Trace: capture, profile and calibrate one actor, on the device of the run or for one not here."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hilore.planner.actor import Actor, build_actor, microbatch_of, policy_loss
from hilore.planner.calibrate import calibrate_trace, refuse_calibration
from hilore.planner.capture import Capture, capture
from hilore.planner.classtrace import Progress, Setting, trace_class
from hilore.planner.estimate import Bench, Target, bench_for, kernels, target_of
from hilore.planner.fixed import measure_fixed
from hilore.planner.head import policy_logps
from hilore.planner.microbatch import Microbatch, synthetic_microbatch
from hilore.planner.outside import OuterRegion, OutsideCosts, measure_outside
from hilore.planner.prior import calibration_from_prior, codec_notes
from hilore.planner.profile import Timing, spread_notes
from hilore.planner.regionrun import region_inputs
from hilore.planner.sharding import Sharding, sharding_of
from hilore.planner.shardtrace import (
    fingerprint_model,
    shard_bucket,
    shard_module,
    sharding_notes,
    unsharded_gradients,
)
from hilore.planner.spec import spec_as_dict
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import TRACE_VERSION, Bucket, Fixed, Outside, RegionClass, RegionTrace, Trace
from hilore.runtime.adapter import ADAPTED, GRAIN_FIELD
from hilore.runtime.ambient import takes_mask, tensors_in
from hilore.runtime.fingerprint import base_model, model_fingerprint
from hilore.runtime.naming import canonical_modules

STEP_REPEATS = 3


def trace_spec(
    spec: ModelSpec, progress: Progress | None = None, *, target: Target | None = None, actor: Actor | None = None
) -> Trace:
    """Capture, profile and calibrate as the file says; estimate times where the card that it names is not here.

    ``target``: in place of the one that the file names. ``actor``: a real one of this spec on the target's device, to
    take times with. An estimate reads no weights and allocates none. Raises UnknownGpuError and UnsupportedModelError
    where there is nothing to plan for or the model cannot be captured, SourceError where the model cannot be loaded.
    """
    tell = progress or (lambda _label, _done, _total: None)
    target = target or target_of(spec)
    refuse_calibration(spec, estimated=target.estimated)
    tell("build the actor", 0, 1)
    fake = build_actor(spec, device=target.device, fake=True)
    bench = bench_for(target, spec, fake, actor)
    tell("build the actor", 1, 1)
    with _little_to_collect():
        run = _captured(spec, target, bench, fake, tell)
        gc.freeze()
        found = [_bucket(run, tokens) for tokens in spec.batch.length_buckets]
        fixed = _fixed(run)
    buckets = tuple(_with_optimizer(bucket, fixed[1]) for bucket, _ in found)
    spread = max(spread for _, spread in found)
    trace = Trace(
        trace_version=TRACE_VERSION,
        name=spec.name,
        spec=spec_as_dict(spec),
        fingerprint=_fingerprint(fake, target),
        device=target.label,
        estimated=target.estimated,
        card_bytes=target.card_bytes,
        fixed=fixed[0],
        buckets=buckets,
        calibration=calibration_from_prior(spec, buckets[-1]),
        time_spread=spread,
        notes=(*_notes(run, spread), *codec_notes(spec, buckets[-1])),
        versions={k: v for k, v in model_fingerprint(fake.model).items() if k.endswith("_patch")},
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return trace if spec.calibration.source == "prior" else calibrate_trace(spec, trace, run.tell)


@dataclass(frozen=True, slots=True)
class _Run:
    """What all length buckets share: one capture of the largest serves them all, since liveness has no lengths."""

    spec: ModelSpec
    target: Target
    bench: Bench
    fake: Actor
    captured: Capture
    regions: tuple[OuterRegion, ...]
    sharding: Sharding | None
    tell: Progress

    @property
    def accumulates(self) -> bool:
        return self.spec.batch.accumulation > 1


def _captured(spec: ModelSpec, target: Target, bench: Bench, fake: Actor, tell: Progress) -> _Run:
    tokens = spec.batch.length_buckets[-1]
    tell(f"{tokens} tokens: capture", 0, 1)
    microbatch = _fake_microbatch(fake, tokens)
    with fake.faked(), fake.autocast():
        inputs = {"input_ids": microbatch.input_ids, "attention_mask": microbatch.attention_mask}
        captured = capture(fake.model, inputs, region_grain=spec.region_grain)
    tell(f"{tokens} tokens: capture", 1, 1)
    modules = canonical_modules(fake.model)
    regions = tuple(OuterRegion(region.name, modules[region.name], region.class_index) for region in captured.regions)
    sharding = sharding_of(spec, fake.model, {region.name: region.module for region in regions})
    return _Run(spec, target, bench, fake, captured, regions, sharding, tell)


def _bucket(run: _Run, tokens: int) -> tuple[Bucket, float]:
    fake_microbatch = _fake_microbatch(run.fake, tokens)
    microbatch = fake_microbatch if run.bench.estimated else microbatch_of(run.bench.actor, tokens)
    gradients_exist = run.accumulates and (run.sharding is None or run.sharding.buffers)
    setting = Setting(
        target=run.target,
        bench=run.bench,
        fake=run.fake,
        microbatch=microbatch,
        fake_microbatch=fake_microbatch,
        captured=run.captured,
        gradients_exist=gradients_exist,
        tell=run.tell,
        label=f"{tokens} tokens",
    )
    found = [trace_class(setting, index) for index in range(len(run.captured.classes))]
    classes = tuple(region_class for region_class, _ in found)
    regions = tuple(RegionTrace(region.name, region.class_index) for region in run.captured.regions)
    run.tell(f"{setting.label}: whole step", 0, 1)
    outside = _outside(run, setting, classes)
    run.tell(f"{setting.label}: whole step", 1, 1)
    masked = _takes_mask(run, fake_microbatch)
    completions = fake_microbatch.completion_mask.numel()
    bucket = Bucket(tokens, fake_microbatch.rows, classes, regions, outside, completions, masked)
    if run.sharding is not None:
        bucket = shard_bucket(run.sharding, bucket, gpu=run.target.gpu, accumulates=run.accumulates)
    return bucket, max(spread for _, spread in found)


def _takes_mask(run: _Run, microbatch: Microbatch) -> bool:
    """Whether the first region gets an attention mask in a plain run."""
    first, modules = run.regions[0].name, canonical_modules(run.fake.model)
    with run.fake.faked(), run.fake.autocast():
        inputs = region_inputs(lambda: policy_logps(run.fake.model, microbatch, run.spec.loss.head), modules, [first])[
            first
        ]
    return takes_mask([inputs.boundary, *tensors_in(inputs.args, inputs.kwargs)])


def _outside(run: _Run, setting: Setting, classes: tuple[RegionClass, ...]) -> Outside:
    """Bytes from a step of the fake actor; times from its clock, or from real steps less what is inside of regions."""
    with kernels(run.target), run.bench.running(autocast=False) if run.bench.estimated else run.fake.faked():
        costs = measure_outside(
            run.fake,
            setting.fake_microbatch,
            run.regions,
            gradients_exist=run.accumulates,
            sharding=run.sharding,
            clock=run.bench.clock if run.bench.estimated else None,
        )
    if not run.bench.estimated:
        forward, backward = _time_step(run.bench, setting.microbatch)
        forward -= sum(classes[region.class_index].forward_ns for region in run.captured.regions)
        backward -= sum(classes[region.class_index].backward_ns for region in run.captured.regions)
        costs = replace(costs, forward_ns=max(forward, 0), backward_ns=max(backward, 0))
    return _as_outside(costs)


def _with_optimizer(bucket: Bucket, working_bytes: int) -> Bucket:
    left = bucket.outside.optimizer_bytes
    return replace(bucket, outside=replace(bucket.outside, optimizer_bytes=left + working_bytes))


def _as_outside(costs: OutsideCosts) -> Outside:
    return Outside(
        before_bytes=costs.before_bytes,
        head_bytes=costs.head_bytes,
        head_left_bytes=costs.head_left_bytes,
        tail_bytes=costs.tail_bytes,
        optimizer_bytes=-costs.released_bytes,
        forward_ns=costs.forward_ns,
        backward_ns=costs.backward_ns,
        optimizer_ns=0,
        leaf_boundary_bytes=costs.leaf_boundary_bytes,
        head_forward_bytes=costs.head_forward_bytes,
        frame_bytes=costs.frame_bytes,
        parts=costs.parts,
    )


def _time_step(bench: Bench, microbatch: Microbatch) -> tuple[int, int]:
    """Median forward (with head and loss) and backward of one microbatch without checkpointing."""
    forwards, backwards = [], []
    for turn in range(1 + STEP_REPEATS):
        began = bench.clock()
        loss = policy_loss(bench.actor, microbatch)
        middle = bench.clock()
        loss.backward()  # type: ignore[no-untyped-call]
        if turn:
            forwards.append(middle - began)
            backwards.append(bench.clock() - middle)
    for parameter in bench.actor.model.parameters():
        parameter.grad = None
    return Timing.of(forwards).median_ns, Timing.of(backwards).median_ns


def _fixed(run: _Run) -> tuple[Fixed, int]:
    """What is live during the whole update, and the optimizer step's working set beside it."""
    state: nn.Module = run.fake.model
    region_gradients = sum(
        p.numel() * p.element_size() for r in run.regions for p in r.module.parameters() if p.requires_grad
    )
    if run.sharding is not None:
        state = shard_module(run.fake, [region.module for region in run.regions])
        region_gradients = sum(group.reduced for group in run.sharding.regions.values())
    fixed, working = measure_fixed(
        run.fake,
        state,
        region_gradients,
        gradients_exist=run.accumulates,
        other_bytes=run.spec.resident.other_mib * 2**20 + run.target.workspace_bytes,
    )
    if run.sharding is not None:
        fixed, working = unsharded_gradients(run.sharding, fixed, working)
    fixed = replace(fixed, workspace_bytes=run.target.workspace_bytes)
    if run.spec.resident.reference:
        copy = sum(_nbytes(p) for p in state.parameters() if not p.requires_grad) or fixed.parameter_bytes
        fixed = replace(fixed, other_bytes=fixed.other_bytes + copy, reference_bytes=copy)
    return fixed, working


def _fake_microbatch(fake: Actor, tokens: int) -> Microbatch:
    """A microbatch without data; its reference log-probabilities need no forward."""
    config = getattr(base_model(fake.model), "config", None)
    with fake.faked():
        microbatch = synthetic_microbatch(
            fake.spec, tokens, device=fake.device, vocabulary=getattr(config, "vocab_size", None)
        )
        if not fake.spec.loss.beta:
            return microbatch
        shape = microbatch.completion_mask.shape
        return replace(microbatch, ref_logps=torch.empty(shape, dtype=torch.float32, device=fake.device))


def _notes(run: _Run, spread: float) -> tuple[str, ...]:
    notes = [*run.captured.notes, *run.target.notes]
    if run.bench.estimated and run.spec.precision.autocast:
        notes.append("which operators autocast runs in float32 is taken from the CPU's list; CUDA's is longer")
    if run.sharding is not None:
        notes += sharding_notes(run.sharding, run.spec, run.target.gpu)
    notes += spread_notes(spread)
    return tuple(notes)


def _fingerprint(fake: Actor, target: Target) -> dict[str, object]:
    spec = fake.spec
    embeddings_grad = hasattr(base_model(fake.model), "enable_input_require_grads")
    gpu = "cpu"
    if spec.device.kind == "cuda":
        named = target.gpu.reported_names[0] if target.gpu is not None else ""
        gpu = named if target.estimated else torch.cuda.get_device_name()
    return fingerprint_model(fake) | {
        "layout": spec.batch.layout,
        "rows": 1 if spec.batch.layout == "packed" else spec.batch.microbatch,
        "region_grain": spec.region_grain,
        GRAIN_FIELD: ADAPTED,
        "parallel": spec.parallel.kind,
        "world_size": spec.parallel.world_size,
        "gradient_sync": spec.parallel.gradient_sync if spec.parallel.kind != "none" else None,
        "head": spec.loss.head,
        "first_input_requires_grad": embeddings_grad,
        "gpu": gpu,
    }


@contextmanager
def _little_to_collect() -> Iterator[None]:
    """What is alive now is left out of garbage collections inside: each measurement makes one, and models are large."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
