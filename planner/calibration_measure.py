"""The runs of a calibration: which microbatch runs under which plan, each result kept in the state as it comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hilore.planner.actor import Actor
from hilore.planner.calibration_fit import Observation, expected_model
from hilore.planner.calibration_plans import lossy_units, plan_at, random_plans
from hilore.planner.calibration_state import CalibrationState, sketch_as_json, sketch_from_json
from hilore.planner.digest import plan_digest
from hilore.planner.gradient_error import Backward, Instrument, backward
from hilore.planner.microbatch import Microbatch
from hilore.planner.sketch import Sketch
from hilore.planner.stepping import draws_random, reshuffled
from hilore.planner.trace import Trace
from hilore.planner.updates import MeasuredMicrobatch
from hilore.runtime.plan import Plan

Progress = Callable[[str, int, int], None]

MOST_PASSES = 64
# Random plans for the fit, all microbatches together, and bounds on how many of them one microbatch gets.
FIT_PLANS = 160
FIT_PASSES = (6, 40)
# Of them: with units of one kind alone at L, without which kinds that cost little are not seen beside the others.
ALONE_SHARE = 0.4
# Exact gradients wait on the host for the second part as long as they take no more than this.
KEPT_BYTES = 2**30


def fit_passes(microbatches: int) -> int:
    """Random plans that each microbatch runs for the fit."""
    least, most = FIT_PASSES
    return min(max(math.ceil(FIT_PLANS / microbatches), least), most)


class Measuring:
    """``exposed``: the places of the microbatches whose exposure is above 0; the others need no run."""

    def __init__(
        self,
        instrument: Instrument,
        trace: Trace,
        batches: Sequence[Microbatch],
        exposed: Sequence[int],
        store: CalibrationState,
        seed: int,
        tell: Progress,
    ) -> None:
        self.trace = trace
        self.batches = batches
        self.exposed = exposed
        self.instrument = instrument
        self.largest_log_move = (0.0, 0)
        self._store = store
        self._seed = seed
        self._tell = tell
        self._kept: dict[int, _Exact] = {}
        self._room_bytes = KEPT_BYTES

    def _exact(self, place: int) -> _Exact:
        """The exact gradient of a microbatch, of an earlier part where it was kept."""
        return self._kept.get(place) or _Exact(self.instrument, self.batches[place])

    def _keep(self, place: int, exact: _Exact) -> None:
        """For the next part, on the host, where there is room."""
        if place in self._kept:
            exact.on_host()
        elif exact.kept_bytes <= self._room_bytes:
            self._room_bytes -= exact.kept_bytes
            self._kept[place] = exact.on_host()

    def observations(self) -> list[Observation]:
        """Random plans on every microbatch, each its own."""
        bucket = self.trace.buckets[-1]
        count, expected = fit_passes(len(self.exposed)), expected_model(len(bucket.regions)).kappa2
        found = []
        for done, place in enumerate(self.exposed):
            name = f"fit-{place}"
            seed, alone = seed_of(self._seed, place), round(ALONE_SHARE * count)
            plans = random_plans(self.trace, count, expected, seed=seed, name=name, alone=alone)
            exact = self._exact(place)
            for row, plan in enumerate(plans):
                self._tell("calibrate: random plans", done * count + row, len(self.exposed) * count)
                # The plan too: what is expected of units, and with it the draw, may change between versions.
                key = f"{plan.name}-{plan_digest(plan)}"
                squared = self._store.get(key)
                if squared is None:
                    squared = self._store.put(key, exact.squared_error(plan))
                found.append(Observation(place, lossy_units(bucket, plan.regions), squared))
            self._keep(place, exact)
        return found

    def scored(self, plans: Sequence[Plan]) -> list[MeasuredMicrobatch]:
        """Every microbatch under every plan, in the order of the file; those of exposure 0 without a run."""
        return self._all("calibrate: plans to be bounded", lambda _psi: plans)

    def chosen(self, plans: Sequence[Plan], label: str) -> list[MeasuredMicrobatch]:
        """Every microbatch under that one of ``plans`` (one set, of one length bucket) that its exposure chooses."""
        return self._all(label, lambda psi: (plan_at(plans, psi),))

    def _all(self, label: str, plans_at: Callable[[float], Sequence[Plan | None]]) -> list[MeasuredMicrobatch]:
        measured = []
        for place, batch in enumerate(self.batches):
            if place in self.exposed:
                measured.append(self._measured(place, label, plans_at))
            else:
                nothing = self.instrument.sketcher.nothing()
                errors = (nothing,) * len(plans_at(0.0))
                measured.append(MeasuredMicrobatch(0.0, _tokens(batch), nothing, errors))
        self._tell(label, 1, 1)
        return measured

    def _measured(
        self, place: int, label: str, plans_at: Callable[[float], Sequence[Plan | None]]
    ) -> MeasuredMicrobatch:
        exact = self._exact(place)
        found = self._store.get(f"exact-{place}")
        if found is None:
            found = self._store.put(f"exact-{place}", exact.as_json())
        self.largest_log_move = max(self.largest_log_move, (found["log_move"], place))
        plans = plans_at(found["psi"])
        done = self.exposed.index(place) * len(plans)
        errors = []
        for row, plan in enumerate(plans):
            self._tell(label, done + row, len(self.exposed) * len(plans))
            errors.append(self._error(place, exact, plan))
        self._keep(place, exact)
        gradient = sketch_from_json(found["gradient"])
        return MeasuredMicrobatch(found["psi"], _tokens(self.batches[place]), gradient, tuple(errors))

    def _error(self, place: int, exact: _Exact, plan: Plan | None) -> Sketch:
        if plan is None or not plan.lossy:
            return self.instrument.sketcher.nothing()
        key = f"scored-{place}-{plan_digest(plan)}"
        error = self._store.get(key)
        if error is None:
            error = self._store.put(key, sketch_as_json(exact.error(plan)))
        return sketch_from_json(error)


class _Exact:
    """The exact gradient of a microbatch, taken when it is first needed."""

    def __init__(self, instrument: Instrument, batch: Microbatch) -> None:
        self._instrument = instrument
        self._batch = batch
        self._found: Backward | None = None
        self._device: torch.device | None = None

    @property
    def backward(self) -> Backward:
        if self._found is None:
            self._found = self._instrument.exact(self._batch)
        elif self._device is not None:
            self._found, self._device = self._found.moved(self._device), None
        return self._found

    @property
    def kept_bytes(self) -> int:
        return 0 if self._found is None else sum(gradient.nbytes for gradient in self._found.gradients)

    def on_host(self) -> _Exact:
        """The same with its gradients on the host until they are needed again."""
        if self._found is not None and self._device is None:
            self._device = self._found.gradients[0].device
            self._found = self._found.moved(torch.device("cpu"))
        return self

    def error(self, plan: Plan) -> Sketch:
        return self._instrument.error(self._batch, plan, self.backward)

    def squared_error(self, plan: Plan) -> float:
        """Relative; 0 where there is no gradient (everything clipped)."""
        whole = self._instrument.sketcher.sketch(self.backward.gradients).square
        return self.error(plan).square / whole if whole else 0.0

    def as_json(self) -> dict[str, Any]:
        sketch = sketch_as_json(self._instrument.sketcher.sketch(self.backward.gradients))
        return {"psi": self.backward.exposure, "log_move": self.backward.log_move, "gradient": sketch}


def layout_noise(actor: Actor, batch: Microbatch, seed: int) -> float | None:
    """Relative error between two layouts of the same rollouts; None where dropout draws for other places."""
    if draws_random(actor.model):
        return None
    one, other = (backward(actor, made, seed=seed) for made in (batch, reshuffled(batch)))
    distance = sum(float(part.double().square().sum()) for part in other.distance(one))
    whole = sum(float(part.double().square().sum()) for part in one.gradients)
    return math.sqrt(distance / whole) if whole else 0.0


def seed_of(seed: int, place: int) -> int:
    return seed * 1_000_003 + place


def _tokens(batch: Microbatch) -> int:
    return int(batch.completion_mask.sum())
