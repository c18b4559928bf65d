"""Plans for tests: right ``dead`` flags from the capture and its liveness, on any tiny model."""

from __future__ import annotations

import inspect
import random
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hilore.planner.capture import UnitGraph, capture
from hilore.planner.liveness import dead_in_late_stage, running_units
from hilore.planner.microbatch import Microbatch
from hilore.runtime.adapter import ADAPTED, GRAIN_FIELD
from hilore.runtime.attach import attach
from hilore.runtime.fingerprint import model_fingerprint
from hilore.runtime.plan import Plan, Predicted, Regime, RegionPlan, SolverReport, UnitPlan
from hilore.runtime.planfile import PlanSet
from hilore.runtime.runtime import Runtime
from tests.models import microbatch_for

Modes = str | Mapping[str, str] | Callable[[str], str]
Batch = Microbatch | Tensor
_units: weakref.WeakKeyDictionary[nn.Module, tuple[RegionUnits, ...]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class RegionUnits:
    """One region as captured: its units in forward order, and whether its input requires grad."""

    name: str
    units: tuple[UnitGraph, ...]
    input_requires_grad: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Loss and gradients of one forward and backward; ``rng_state``: the CPU generator's afterwards."""

    loss: Tensor
    gradients: dict[str, Tensor]
    rng_state: Tensor


def units_of(
    model: nn.Module,
    batch: Batch | None = None,
    *,
    regions: tuple[str, ...] | None = None,
    autocast: torch.dtype | None = None,
) -> tuple[RegionUnits, ...]:
    """Capture the model once; the answer is remembered until the model is gone (``forget`` drops it)."""
    if model not in _units:
        batch = microbatch_for(model) if batch is None else batch
        with _autocast(autocast):
            found = capture(model, _inputs_by_name(model, batch), region_names=regions)
        _units[model] = tuple(
            RegionUnits(region.name, found.classes[region.class_index].units, region.input_requires_grad)
            for region in found.regions
        )
    return _units[model]


def forget(model: nn.Module) -> None:
    """After a change of the model (input gradients, freezing) that alters liveness."""
    _units.pop(model, None)


def plan_for(
    model: nn.Module,
    modes: Modes = "R",
    *,
    hold: bool | Collection[str] = (),
    codec: str = "int8-g128",
    split: str | None = None,
    units: tuple[RegionUnits, ...] | None = None,
    fingerprint: dict[str, Any] | None = None,
    **changes: Any,
) -> Plan:
    """A plan with the right ``dead`` and ``dead_if_demoted``.

    modes: one mode for all units, a function of the full unit name, or a mapping from full names, or from names
    relative to the region, with "" for all others (R if it is left out).
    hold: names of held regions, or True for all. codec: that of every L unit. split: the unit (relative name) at which
    every replay is split into two stages. changes: fields of Plan.
    """
    units = units_of(model) if units is None else units
    regions = tuple(_region(region, modes, hold, codec, split) for region in units)
    if fingerprint is None:
        fingerprint = model_fingerprint(model) | {
            "rows": 8,
            "first_input_requires_grad": units[0].input_requires_grad,
            "region_grain": "layer",
            GRAIN_FIELD: ADAPTED,
        }
    plan = Plan(
        schema_version=1,
        set_id="set",
        name="test",
        loss={"kind": "grpo"},
        regime=Regime("high", 0.0, 1e9, 1.0),
        budget_bytes=1,
        margin_bytes=0,
        delta=1.0,
        delta_star=0.01,
        calibrated=False,
        predicted=Predicted(1, "head", 100, 120, 1, 80, 1, 0.0),
        length_bucket=1024,
        regions=regions,
        solver=SolverReport("test", "optimal", 0, 0, 0.0, 0.0, 0),
        fingerprint=fingerprint,
        provenance={},
    )
    return replace(plan, **changes)


def plan_set(*plans: Plan) -> PlanSet:
    return PlanSet(tuple(plans))


def attach_plan(model: nn.Module, plan: Plan) -> Runtime:
    """Attach one plan and fix it for every forward, whatever the exposure."""
    runtime = attach(model, plan_set(plan))
    runtime.use(plan)
    return runtime


def random_modes(units: Iterable[RegionUnits], seed: int) -> tuple[dict[str, str], set[str]]:
    """A random mixture of H and R over keepable units, and of held regions (about one in four)."""
    draw = random.Random(seed)
    modes: dict[str, str] = {}
    held: set[str] = set()
    for region in units:
        if draw.random() < 0.25:
            held.add(region.name)
        for unit in region.units:
            modes[f"{region.name}.{unit.name}"] = draw.choice("HR") if unit.keepable else "R"
    return modes, held


def keepable(units: Iterable[RegionUnits], mode: str = "H") -> dict[str, str]:
    """``mode`` for every unit that may be kept, R for the rest."""
    return {f"{region.name}.{unit.name}": mode if unit.keepable else "R" for region in units for unit in region.units}


def gradients(
    model: nn.Module, batch: Batch, *, seed: int = 0, autocast: torch.dtype | None = None, backward: bool = True
) -> Step:
    """One step from a seeded generator: gradients of this step alone, by full parameter name."""
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loss = loss_of(model, batch, autocast=autocast)
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
        state = torch.get_rng_state()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach().clone(), found, state)


def loss_of(model: nn.Module, batch: Batch, *, autocast: torch.dtype | None = None) -> Tensor:
    """A policy loss for language models (advantage times log-prob over completion tokens), else a mean square."""
    with _autocast(autocast):
        if isinstance(batch, Tensor):
            output: Tensor = model(batch)
            return output.float().square().mean()
        logits: Tensor = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.float()
    logps = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    width = batch.completion_mask.shape[1]
    weights = batch.completion_mask * batch.advantages[:, None]
    return -(logps[:, -width:] * weights).sum() / batch.completion_mask.sum()


def assert_same_step(found: Step, expected: Step) -> None:
    """Bitwise: loss, the set of parameters with gradients, every gradient, the generator's state."""
    assert torch.equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    different = [n for n, grad in expected.gradients.items() if not torch.equal(grad, found.gradients[n])]
    assert different == []
    assert torch.equal(found.rng_state, expected.rng_state)


def assert_exact(
    model: nn.Module, plan: Plan, batch: Batch, expected: Step, *, autocast: torch.dtype | None = None
) -> Runtime:
    """Run one step under ``plan`` and compare it with the eager one; the plan must have run, and left nothing."""
    runtime = attach_plan(model, plan)
    try:
        found = gradients(model, batch, autocast=autocast)
        held = sum(region.hold for region in plan.regions)
        assert (runtime.stats.held, runtime.stats.frames) == (held, len(plan.regions) - held)
        assert runtime.stats.live_saved_bytes == 0
    finally:
        runtime.detach()
    assert_same_step(found, expected)
    return runtime


def _region(
    region: RegionUnits, modes: Modes, hold: bool | Collection[str], codec: str, split: str | None
) -> RegionPlan:
    held = hold is True or (not isinstance(hold, bool) and region.name in hold)
    by_name = {u.name: "H" if held else _mode(modes, f"{region.name}.{u.name}", u.name) for u in region.units}
    kept = {name for name, mode in by_name.items() if mode != "R"}
    exact = {name for name, mode in by_name.items() if mode == "H"}
    split = None if held else split
    dead, late = _dead(region, kept, split)
    dead_if_demoted, late_if_demoted = _dead(region, exact, split)
    return RegionPlan(
        region.name,
        held,
        tuple(
            UnitPlan(
                name=f"{region.name}.{unit.name}",
                mode=by_name[unit.name],  # type: ignore[arg-type]
                codec=codec if by_name[unit.name] == "L" else None,
                dead=unit.name in dead,
                dead_if_demoted=unit.name in dead_if_demoted,
                dead_late=unit.name in late,
                dead_late_if_demoted=unit.name in late_if_demoted,
            )
            for unit in region.units
        ),
        None if split is None else f"{region.name}.{split}",
    )


def _dead(region: RegionUnits, kept: set[str], split: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    late = () if split is None else dead_in_late_stage(region.units, kept, split)
    return running_units(region.units, kept)[1], late


def _mode(modes: Modes, full: str, relative: str) -> str:
    if isinstance(modes, str):
        return modes
    if callable(modes):
        return modes(full)
    return modes.get(full, modes.get(relative, modes.get("", "R")))


def _inputs_by_name(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    if isinstance(batch, Tensor):
        return {next(iter(inspect.signature(model.forward).parameters)): batch}
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def _autocast(dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
