"""Which calibration this is: what can be carried out here, on which actor, and what measurements may be used again."""

from __future__ import annotations

from dataclasses import asdict

import torch

from hilore.planner.calibration_sources import Recording
from hilore.planner.digest import digest
from hilore.planner.spec import spec_as_dict
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Trace
from hilore.runtime.errors import HiloreError, UnsupportedModelError


def refuse_calibration(spec: ModelSpec, *, estimated: bool) -> None:
    """Raise UnsupportedModelError for a ``calibration.source`` that cannot be carried out on this machine."""
    source = spec.calibration.source
    if source != "prior" and estimated:
        raise UnsupportedModelError(
            f"calibration.source: {source} runs the actor, and its device is not here; use `source: prior`, or trace "
            "on the machine that will train",
            unit="calibration.source",
        )


def identity_of(spec: ModelSpec, trace: Trace, recording: Recording, seed: int) -> dict[str, object]:
    """What must be the same for measurements to be used again."""
    return {
        "trace": digest(asdict(trace) | {"calibration": None, "notes": None, "spec": None}),
        "model.yaml": digest(spec_as_dict(spec) | {"defaults_taken": None}),
        "rollouts": recording.digest,
        "seed": seed,
        "threads": torch.get_num_threads(),
    }


def refuse_another_actor(spec: ModelSpec, trace: Trace) -> None:
    mine, its = spec_as_dict(spec), trace.spec
    differs = [key for key in mine if key not in ("calibration", "defaults_taken") and mine[key] != its.get(key)]
    if differs:
        raise HiloreError(
            f"{spec.path}: {differs[0]} is not that of the trace of {trace.name} ({mine[differs[0]]} against "
            f"{its.get(differs[0])}); trace again with: hilore-plan trace {spec.path}"
        )
