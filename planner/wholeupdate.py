"""The peak of a whole update, as it is trained: every microbatch, gradients accumulated, then the optimizer step."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hilore.planner.actor import Actor
from hilore.planner.microbatch import Microbatch
from hilore.planner.rivals import Policy, Running
from hilore.planner.stepping import prepare_gradients, run_step
from hilore.runtime.attach import attach
from hilore.runtime.meter import StorageMeter
from hilore.runtime.plan import Plan
from hilore.runtime.region import Choice
from hilore.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class UpdatePeak:
    """``sizes``: how many storages of each size in bytes were alive at the peak."""

    peak_bytes: int
    sizes: Counter[int]


def peak_of_update(actor: Actor, policy: Policy, update: Sequence[Microbatch], optimizer: Optimizer) -> UpdatePeak:
    """Highest bytes of live storages from before the first forward to after the optimizer step.

    Counted: parameters, buffers, the state that ``optimizer`` has, all microbatches of the update, and all that it
    makes. Gradients do not exist before it. A fake actor gives the same as a real one.
    """
    with actor.faked(), policy.applied(actor) as running:
        prepare_gradients(actor.model, exist=False)
        gc.collect()
        with StorageMeter() as meter:
            meter.track(_resident(actor.model, optimizer))
            for microbatch in update:
                meter.track(_tensors_of(microbatch))
            sizes = meter.sizes()

            def note() -> None:
                nonlocal sizes
                sizes = meter.sizes()

            meter.on_peak = note
            for place, microbatch in enumerate(update):
                _reduce_gradients(actor, last=place == len(update) - 1)
                run_step(actor, running, microbatch)
            optimizer.step()
            peak = UpdatePeak(meter.peak_bytes, sizes)
        prepare_gradients(actor.model, exist=False)
    return peak


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """One plan for every microbatch, without a look at exposures. ``demoted``: after each forward its L units are
    turned to R, as the runtime does where the exact exposure is above the plan's."""

    name: str
    plan: Plan
    demoted: bool = False

    @contextmanager
    def applied(self, actor: Actor) -> Iterator[Running]:
        runtime = attach(actor.model, (self.plan,), accept=("plans",))  # of fake ranks only one is there
        runtime.use(self.plan)
        actions = ("plan", self.plan.regions, self.demoted)
        try:
            yield _Demoting(actions, runtime) if self.demoted else Running(actions)
        finally:
            runtime.detach()


class _Demoting(Running):
    """Turns each forward's choice to demoted once loss and forward are over."""

    def __init__(self, actions: tuple[Any, ...], runtime: Runtime) -> None:
        super().__init__(actions)
        self._fixed = runtime

    @contextmanager
    def microbatch(self, batch: Microbatch) -> Iterator[None]:
        made: list[Choice] = []
        choose: Callable[..., tuple[Choice, str]] = self._fixed.choose

        def noting(*args: Any, **options: Any) -> tuple[Choice, str]:
            found = choose(*args, **options)
            made.append(found[0])
            return found

        self._fixed.choose = noting  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._fixed.choose
        for choice in made:
            choice.demoted = True


def _reduce_gradients(actor: Actor, *, last: bool) -> None:
    """Under FSDP2 whether this microbatch's gradients are reduced."""
    switch = getattr(actor.model, "set_requires_gradient_sync", None)
    if switch is not None and actor.spec.parallel.gradient_sync == "last_microbatch":
        switch(last)


def _resident(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return [*model.parameters(), *model.buffers(), *state]


def _tensors_of(microbatch: Microbatch) -> list[Tensor]:
    values = (getattr(microbatch, name) for name in microbatch.__slots__)
    return [value for value in values if isinstance(value, Tensor)]
