"""One calibrated tiny actor for all tests that need one: traced and calibrated once per process."""

from __future__ import annotations

import functools
import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import hilore.planner.calibration_measure as measure
from hilore.planner.calibrate import calibrate_trace
from hilore.planner.rollouts import Rollout, write_rollouts
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import RegionClass, Trace, UnitTrace
from hilore.planner.tracing import trace_spec
from tests.specs import spec_of

CALIBRATION = "{source: rollouts, path: rollouts.jsonl, microbatches: 4, confidence: 0.75}"
SECTIONS = {
    "adapter": "{kind: lora, rank: 4, alpha: 8, dtype: float32}",
    "batch": "{microbatch: 2, prompt_tokens: 8, response_tokens: 8, accumulation: 2}",
    "codecs": "[int8-g128, int4-g64]",
}
DEFAULT_PASSES = measure.FIT_PASSES
FEW_PASSES = (3, 3)


@dataclass(frozen=True, slots=True)
class Made:
    """``spec``: source rollouts, of a file in its folder. ``trace``: calibrated by `trace` itself, on one synthetic
    microbatch. ``calibrated``: the same on the rollouts."""

    spec: ModelSpec
    trace: Trace
    calibrated: Trace


@functools.cache
def tiny_calibrated() -> Made:
    folder = Path(tempfile.mkdtemp(prefix="tiny-calibrated-"))
    write_rollouts(folder / "rollouts.jsonl", rollouts())
    spec = spec_of(folder, calibration=CALIBRATION, **SECTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "FIT_PASSES", FEW_PASSES)
        trace = trace_spec(spec_of(calibration="{source: synthetic, microbatches: 1, confidence: 0.5}", **SECTIONS))
        trace = with_times(trace)
        return Made(spec, trace, calibrate_trace(spec, trace))


def with_times(trace: Trace, *, run_ns: int = 10**6, codec_ns: int = 10**3) -> Trace:
    """The same for units that all take ``run_ns`` and codecs that all take ``codec_ns``: no clock decides which units
    are worth L."""

    def timed(unit: UnitTrace) -> UnitTrace:
        codecs = tuple(replace(cost, encode_ns=codec_ns, decode_ns=codec_ns) for cost in unit.codecs)
        return replace(unit, run_ns=run_ns, codecs=codecs)

    def of_class(region_class: RegionClass) -> RegionClass:
        return replace(region_class, units=tuple(map(timed, region_class.units)))

    buckets = (replace(bucket, classes=tuple(map(of_class, bucket.classes))) for bucket in trace.buckets)
    return replace(trace, buckets=tuple(buckets))


def rollouts(groups: int = 4, *, seed: int = 0, **fields: Any) -> list[Rollout]:
    """Groups of four, every third one flat."""
    draw = random.Random(seed)
    made = []
    for group in range(groups):
        prompt = tuple(draw.randrange(3, 128) for _ in range(draw.randint(2, 8)))
        for row in range(4):
            completion = tuple(draw.randrange(3, 128) for _ in range(draw.randint(2, 8)))
            reward = float(row == group % 4) if group % 3 else 0.0
            made.append(Rollout(group, prompt, completion, reward, **fields))
    return made
