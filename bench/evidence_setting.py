"""What the stages of ``python -m bench.evidence`` share: the folder they work in, and how they speak."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hilore.planner.exposure_features import ExposureFeatures
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Trace
from hilore.planner.tracefile import load_trace

# "pairs": of the task that is calibrated on, for a ranking of pairs by scores that were chosen before it was seen.
SPLITS = {"calibration": 0, "same": 1, "other": 2, "confirmation": 3, "pairs": 4}
LINE_EVERY_S = 20.0


@dataclass(frozen=True, slots=True)
class Setting:
    spec: ModelSpec
    folder: Path
    given: argparse.Namespace

    def file(self, name: str) -> Path:
        return self.folder / name

    def of_split(self, split: str) -> ModelSpec:
        """With as many microbatches as that split's file is to have."""
        given = self.given
        of_their_own = {
            "calibration": given.calibration_microbatches,
            "confirmation": given.confirmation_microbatches or given.calibration_microbatches,
        }
        count = of_their_own.get(split, given.microbatches)
        return replace(self.spec, calibration=replace(self.spec.calibration, microbatches=count))

    @property
    def trace(self) -> Trace:
        return load_trace(self.file("calibrated.trace.json"))


def identity_of(setting: Setting, split: str) -> dict[str, Any]:
    given = setting.given
    trace = setting.file("calibrated.trace.json").read_bytes()
    rollouts = setting.file(f"{split}.jsonl").read_bytes()
    return {
        "trace": _hash(trace),
        "rollouts": _hash(rollouts),
        "lr": given.lr,
        "inner_microbatches": given.inner_microbatches,
        "seed": given.seed,
        "threads": torch.get_num_threads(),
        "features": [each.name for each in fields(ExposureFeatures)],
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def tell() -> Callable[[str, int, int], None]:
    """A line now and then: these runs are long, and mostly watched through a file."""
    state = {"last": 0.0, "began": time.monotonic()}

    def line(label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - state["last"] > LINE_EVERY_S:
            state["last"] = now
            sys.stderr.write(f"{now - state['began']:8.0f} s  {label}: {done} of {total}\n")

    return line


def say(part: str | Table) -> None:
    Console(markup=False, highlight=False, width=200).print(part, soft_wrap=isinstance(part, str))
