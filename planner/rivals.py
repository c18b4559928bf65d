"""The policies that are measured side by side: none, Hugging Face's checkpointing with its options, and plans.

A policy is applied to an actor for a while and leaves it as it was: ``with policy.applied(actor) as running``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from hilore.planner.actor import Actor
from hilore.planner.head import base_model
from hilore.planner.microbatch import Microbatch
from hilore.runtime.attach import attach
from hilore.runtime.bind import checkpointable_names
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.microbatch import Microbatch as PlannedMicrobatch
from hilore.runtime.naming import canonical_modules
from hilore.runtime.plan import Plan, RegionPlan
from hilore.runtime.runtime import Runtime

Learnt = dict[str, tuple[dict[tuple[Any, ...], Any], dict[tuple[Any, ...], Any]]]


@dataclass(frozen=True, slots=True)
class Choice:
    """What one microbatch ran under. Equal ``actions`` do the same; ``plan`` is None without one."""

    actions: tuple[Any, ...]
    plan: Plan | None = None
    demoted: bool = False

    @property
    def lossy(self) -> bool:
        return self.plan is not None and not self.demoted and self.plan.lossy


class Running:
    """A policy in force. Forward and loss of a microbatch run inside ``microbatch``; then ``choice`` is known."""

    def __init__(self, actions: tuple[Any, ...], runtime: Runtime | None = None) -> None:
        self.runtime = runtime
        self._actions = actions
        self._planned: PlannedMicrobatch | None = None

    def microbatch(self, batch: Microbatch) -> AbstractContextManager[Any]:
        if self.runtime is None:
            return contextlib.nullcontext()
        self._planned = self.runtime.microbatch(
            batch.advantages,
            batch.completion_mask,
            old_logps=batch.old_logps,
            ref_logps=batch.ref_logps,
            prompt_mask=batch.prompt_mask,
        )
        return self._planned

    @property
    def choice(self) -> Choice:
        """Of the last microbatch."""
        if self.runtime is None:
            return Choice(self._actions)
        chosen = self._planned.choice if self._planned is not None else None
        if chosen is None or chosen.plan is None:
            return Choice(("replayed",))
        return Choice(("plan", chosen.plan.regions, chosen.demoted), chosen.plan, chosen.demoted)


class Policy(Protocol):
    """``name`` heads its row."""

    @property
    def name(self) -> str: ...

    def applied(self, actor: Actor) -> AbstractContextManager[Running]: ...


@dataclass(frozen=True, slots=True)
class NoCheckpointing:
    """Autograd keeps all: plain eager, the fastest and the reference of every gradient."""

    name: str = "No-GC"

    @contextmanager
    def applied(self, actor: Actor) -> Iterator[Running]:
        disable = getattr(base_model(actor.model), "activation_checkpointing_disable", None)
        if disable is not None:
            disable()
            _keep_input_gradients(actor.model)
        yield Running(("eager",))


@dataclass(frozen=True, slots=True)
class HuggingFaceCheckpointing:
    """transformers' own non-reentrant checkpointing.

    ``every_n_layers`` is its own option (every n-th layer is replayed); ``held`` names layers by place that are held
    besides, by their own switch, as Megatron's block method does.
    """

    name: str = "GC"
    every_n_layers: int = 1
    held: frozenset[int] = frozenset()

    @contextmanager
    def applied(self, actor: Actor) -> Iterator[Running]:
        causal = base_model(actor.model)
        if not hasattr(causal, "activation_checkpointing_enable"):
            raise UnsupportedModelError(
                f"{type(causal).__name__} has no gradient checkpointing of Hugging Face to compare with",
                unit=type(causal).__name__,
            )
        layers = checkpointed_layers(actor.model)
        causal.disable_input_require_grads()
        causal.activation_checkpointing_enable(every_n_layers=self.every_n_layers)
        try:
            for place in self.held:
                layers[place].gradient_checkpointing = False  # type: ignore[assignment]
            replayed = tuple(place for place, layer in enumerate(layers) if layer.gradient_checkpointing)
            yield Running(("checkpoint", replayed) if replayed else ("eager",))
        finally:
            causal.activation_checkpointing_disable()
            _keep_input_gradients(actor.model)


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """Plans, chosen per microbatch by its exposure as in training.

    ``accept``: fingerprint fields whose difference is known and wanted (a float32 twin's dtypes).
    """

    name: str
    plans: tuple[Plan, ...]
    accept: tuple[str, ...] = ()
    _learnt: Learnt = field(default_factory=dict, compare=False, repr=False)

    @contextmanager
    def applied(self, actor: Actor) -> Iterator[Running]:
        with warnings.catch_warnings():
            for name in self.accept:
                warnings.filterwarnings("ignore", message=f"Plan field {name}=")
            runtime = attach(actor.model, self.plans, accept=self.accept)
        # A trainer attaches once; what the first steps learn about units is handed on to the next attachment.
        for region in runtime.regions:
            for unit in region.units.values():
                derivations, sums = self._learnt.setdefault(unit.name, ({}, {}))
                unit.derivations.update(derivations)
                unit.sums.update(sums)
        try:
            yield Running((), runtime)
        finally:
            for region in runtime.regions:
                for unit in region.units.values():
                    derivations, sums = self._learnt[unit.name]
                    derivations.update(unit.derivations)
                    sums.update(unit.sums)
            runtime.detach()


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that Hugging Face checkpoints, in order."""
    modules = canonical_modules(model)
    return [modules[name] for name in checkpointable_names(model)]


def last_held(layers: int, count: int) -> frozenset[int]:
    """The last ``count`` places: their memory is free again before the first replay of backward."""
    return frozenset(range(layers - count, layers))


def first_held(layers: int, count: int) -> frozenset[int]:
    return frozenset(range(count))


def counts(regions: Sequence[RegionPlan]) -> dict[str, int]:
    """How many units are at H, L, R, how many of those at R are dead, and how many regions are held."""
    units = [unit for region in regions for unit in region.units]
    modes = {mode: sum(unit.mode == mode for unit in units) for mode in ("H", "L", "R")}
    return modes | {"dead": sum(unit.dead for unit in units), "held": sum(region.hold for region in regions)}


def _keep_input_gradients(model: nn.Module) -> None:
    """Every policy runs with embeddings that require grad, as build_actor leaves them; transformers may undo that."""
    causal = base_model(model)
    if not getattr(causal, "_require_grads_hooks", None):
        causal.enable_input_require_grads()
