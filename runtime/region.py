"""A region bound to the model, and what a plan tells it to do.

Units are intercepted only while their region runs: a linear's instance gets a ``forward`` for that time, so an idle
model carries no hook of ours inside its regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from hilore.runtime.ambient import running
from hilore.runtime.codecs import loses
from hilore.runtime.codecs.tokens import token_codec
from hilore.runtime.glue import glue_forwards
from hilore.runtime.glue.rotary import rotary_globals
from hilore.runtime.huggingface import attention_implementations, attention_wrapped
from hilore.runtime.plan import Plan, RegionPlan
from hilore.runtime.stats import Stats
from hilore.runtime.tokenweights import TokenWeights
from hilore.runtime.unitbinding import UnitBinding

ATTENTION = "attention"


@dataclass(frozen=True, slots=True)
class Action:
    """What a replay does with a unit: answer from the store (``kept``, decoded where ``codec``), leave it out
    (``dead``), or run it (neither). ``dead_late``: the same for the late stage of a split replay."""

    kept: bool
    codec: str | None
    dead: bool
    dead_late: bool = False


@dataclass(frozen=True, slots=True)
class RegionActions:
    """One region of one plan, also for the case that its L units run as R."""

    hold: bool
    planned: dict[str, Action]
    demoted: dict[str, Action]
    recordable: frozenset[str]
    split_at: str | None = None

    @classmethod
    def of(cls, region: RegionPlan) -> RegionActions:
        planned = {u.name: Action(u.mode != "R", u.codec, u.dead, u.dead_late) for u in region.units}
        demoted = {u.name: Action(u.mode == "H", None, u.dead_if_demoted, u.dead_late_if_demoted) for u in region.units}
        actions = (*planned.items(), *demoted.items())
        names = frozenset(name for name, action in actions if action.kept or action.dead or action.dead_late)
        return cls(region.hold, planned, demoted, names, region.split_at)


class RegionBinding:
    """One region of the model: its module and its units by full canonical name."""

    __slots__ = (
        "_attention",
        "_forwards",
        "adapted_units",
        "attention_units",
        "glue",
        "module",
        "modules",
        "name",
        "rotary",
        "units",
    )

    def __init__(self, name: str, module: nn.Module, units: dict[str, UnitBinding]) -> None:
        self.name = name
        self.module = module
        self.modules = tuple(module.modules())
        self.units = units
        self.attention_units = {id(u.module): u.name for u in units.values() if u.kind == ATTENTION}
        self.adapted_units = frozenset(u.name for u in units.values() if u.front)
        self._forwards = {u.name: _forwards(u) for u in units.values() if u.kind != ATTENTION}
        # A region without units is one under plain checkpointing.
        self.glue = glue_forwards(module) if units else []
        self.rotary = rotary_globals(module) if units else []
        self._attention = attention_implementations(u.module for u in units.values() if u.kind == ATTENTION)

    @property
    def differs_held(self) -> bool:
        """Whether something of it runs otherwise than without a plan even where it is held."""
        return bool(self.adapted_units or (running.fused and (self.glue or self.rotary)))

    @contextmanager
    def installed(self, names: frozenset[str], *, glue: bool = True) -> Iterator[None]:
        """Intercept the calls of these units, and of glue but for modules that someone else has given a ``forward``."""
        before: list[tuple[nn.Module, Any]] = []
        with ExitStack() as stack:
            for implementation in self._attention:
                stack.enter_context(attention_wrapped(implementation))
            for rotary in self.rotary if glue else ():
                stack.enter_context(rotary)
            stack.callback(_put_back, before)
            for forward in (forward for name in names for forward in self._forwards.get(name, ())):
                if forward.module.__dict__.get("forward") is forward:
                    continue
                before.append((forward.module, forward.module.__dict__.get("forward")))
                forward.call = forward.module.forward
                forward.module.__dict__["forward"] = forward
            for stand_in in self.glue if glue else ():
                if "forward" not in stand_in.module.__dict__:
                    before.append((stand_in.module, None))
                    stand_in.call = stand_in.module.forward
                    stand_in.module.__dict__["forward"] = stand_in
            yield


def _put_back(before: list[tuple[nn.Module, Any]]) -> None:
    for module, previous in before:
        if previous is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = previous


class UnitForward:
    """Stands in for a unit module's ``forward`` while its region runs."""

    __slots__ = ("call", "module", "name")

    def __init__(self, unit: UnitBinding) -> None:
        self.name = unit.name
        self.module = unit.module
        self.call: Callable[..., Any] = unit.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = running.frame
        if frame is None or self.name not in frame.region.units:
            return self.call(*args, **kwargs)
        return frame.unit_call(self.name, self.call, args, kwargs)


class FrontForward:
    """Stands in for the ``forward`` of a module in a unit's front, while the unit's region runs."""

    __slots__ = ("call", "module", "unit_name")

    def __init__(self, unit: UnitBinding, module: nn.Module) -> None:
        self.unit_name = unit.name
        self.module = module
        self.call: Callable[..., Any] = module.forward

    def __call__(self, *args: Any) -> Any:
        frame = running.frame
        if frame is None or self.unit_name not in frame.region.units:
            return self.call(*args)
        return frame.front_call(self.unit_name, self.module, self.call, args)


def _forwards(unit: UnitBinding) -> tuple[UnitForward | FrontForward, ...]:
    return (UnitForward(unit), *(FrontForward(unit, module) for module in unit.front))


class Choice:
    """One plan chosen for one microbatch; every frame keeps the choice that it was made under.

    ``plan`` None: no plan fits (too many tokens), every unit runs in the replay. ``demoted`` may turn True between
    forward and backward (late demotion), never back. ``control``: an audit's control run (runtime/audit.py).
    ``whole_replays``: replays run to their end, as those of other ranks do, since they issue collectives.
    ``tokens``: what the microbatch's tokens weigh, None where it was not asked for.
    """

    __slots__ = ("_actions", "control", "demoted", "plan", "stats", "tokens", "whole_replays")

    def __init__(self, plan: Plan | None, actions: dict[str, RegionActions], stats: Stats, demoted: bool) -> None:
        self.plan = plan
        self.demoted = demoted
        self.control = False
        self.tokens: TokenWeights | None = None
        self.whole_replays = False
        self.stats = stats
        self._actions = actions

    def holds(self, region: RegionBinding) -> bool:
        return self.plan is not None and self._actions[region.name].hold

    def actions(self, region: RegionBinding, *, unfit: bool = False) -> dict[str, Action]:
        """``unfit``: the region met values that a lossless codec cannot hold, so its L units run as R."""
        if self.plan is None:
            return {}
        actions = self._actions[region.name]
        return actions.demoted if self.demoted or unfit else actions.planned

    @property
    def weighs_tokens(self) -> bool:
        """Whether the plan has codecs that need ``tokens``."""
        return self.plan is not None and any(
            unit.codec is not None and token_codec(unit.codec) is not None
            for region in self.plan.regions
            for unit in region.units
        )

    def encodes(self, region: RegionBinding, unit_name: str) -> bool:
        """Whether the plan keeps this unit in a codec that changes values, demoted or not."""
        if self.plan is None:
            return False
        action = self._actions[region.name].planned.get(unit_name)
        return action is not None and loses(action.codec)

    def split_at(self, region: RegionBinding) -> str | None:
        """The unit at which the region's replay is split into two stages."""
        return None if self.plan is None else self._actions[region.name].split_at

    def recordable(self, region: RegionBinding) -> frozenset[str]:
        return frozenset() if self.plan is None else self._actions[region.name].recordable


def compile_plan(plan: Plan) -> dict[str, RegionActions]:
    """Every region's actions by region name."""
    return {region.name: RegionActions.of(region) for region in plan.regions}
