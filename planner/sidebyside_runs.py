"""The steps of a side-by-side measurement: gradients against eager, peaks, interleaved times (see sidebyside.py)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from hilore.planner.actor import Actor
from hilore.planner.microbatch import Microbatch
from hilore.planner.profile import Clock
from hilore.planner.rivals import Choice, HuggingFaceCheckpointing, NoCheckpointing, PlanPolicy, Policy
from hilore.planner.stepping import (
    Gradients,
    draws_random,
    float32_twin,
    gradients_of,
    idle_optimizer,
    peak_of_step,
    prepare_gradients,
    relative_error,
    reshuffled,
    run_step,
)

Progress = Callable[[str, int, int], None]
NO_GC, GC = NoCheckpointing(), HuggingFaceCheckpointing()
# Fields of the fingerprint in which a float32 twin differs from the actor that the plans were made for.
TWIN_ACCEPTS = ("parameter_dtypes",)


@dataclass(frozen=True, slots=True)
class Contender:
    """One row: a policy, the ceiling that it was chosen for, and what was promised for it (None: nothing).

    ``error_limit``: of the update's gradient, relative L2 in float32 (0.01 is 1 %).
    """

    policy: Policy
    ceiling: str = ""
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    error_limit: float | None = None

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.policy.name, self.ceiling)))


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs share: ``exist`` says that gradient buffers are there before a step (accumulation)."""

    actor: Actor
    microbatches: tuple[Microbatch, ...]
    exist: bool
    seed: int
    clock: Clock
    tell: Progress


@dataclass(slots=True)
class Run:
    """What is known of one contender so far. ``twin_of``: the earlier one that does the same, measured for both.

    ``highest``: the choice whose peak is ``peak_bytes``.
    """

    contender: Contender
    choices: list[Choice] = field(default_factory=list)
    exact: bool = True
    same_loss: bool = True
    native_error: float = 0.0
    error: float = 0.0
    peak_bytes: int = 0
    highest: Choice | None = None
    times_ns: list[int] = field(default_factory=list)
    twin_of: Run | None = None

    @property
    def source(self) -> Run:
        return self.twin_of or self

    @property
    def actions(self) -> tuple[object, ...]:
        """What every microbatch ran under: equal for runs that do the same."""
        return tuple(choice.actions for choice in self.choices)


def order_of_round(count: int, turn: int) -> list[int]:
    """Places in the order of one round: each order forward, then backward, then rotated by one."""
    rotated = [(place + turn // 2) % count for place in range(count)]
    return rotated[::-1] if turn % 2 else rotated


def compare_gradients(setting: Setting, runs: Sequence[Run]) -> float | None:
    """Fill every run's choices, exactness and native error; returns the error of the layout control."""
    eager, _ = _update(setting, NO_GC)
    for done, run in enumerate(runs):
        setting.tell("gradients", done, len(runs))
        found, run.choices = _update(setting, run.contender.policy)
        pairs = list(zip(found, eager, strict=True))
        run.same_loss = all(step.same_loss(reference) for step, reference in pairs)
        run.exact = run.same_loss and all(step.same_gradients(reference) for step, reference in pairs)
        run.native_error = 0.0 if run.exact else relative_error(found, eager)
    setting.tell("gradients", len(runs), len(runs))
    return _layout_control(setting, eager)


def compare_in_float32(setting: Setting, runs: Sequence[Run]) -> float | None:
    """Fill the error of every inexact run from a float32 twin of the actor; returns its layout control."""
    inexact = [run for run in runs if not run.exact]
    if not inexact:
        return None
    twin = replace(setting, actor=float32_twin(setting.actor))
    eager, _ = _update(twin, NO_GC)
    known: dict[tuple[object, ...], float] = {}
    for done, run in enumerate(inexact):
        setting.tell("gradients in float32", done, len(inexact))
        if run.actions not in known:
            known[run.actions] = relative_error(_update(twin, _for_twin(run.contender.policy))[0], eager)
        run.error = known[run.actions]
    setting.tell("gradients in float32", len(inexact), len(inexact))
    return _layout_control(twin, eager)


def find_twins(runs: Sequence[Run]) -> None:
    """Mark the runs that do the same as an earlier one on every microbatch."""
    seen: dict[tuple[object, ...], Run] = {}
    for run in runs:
        run.twin_of = seen.get(run.actions)
        seen.setdefault(run.actions, run)


def measure_peaks(setting: Setting, runs: Sequence[Run], other_bytes: int) -> None:
    """Fill peaks: the highest over what a run's microbatches chose. ``other_bytes`` are added."""
    optimizer = idle_optimizer(setting.actor)
    for done, run in enumerate(runs):
        setting.tell("peaks", done, len(runs))
        if run.twin_of is not None:
            run.peak_bytes = run.twin_of.peak_bytes
            highest = run.twin_of.highest
            run.highest = next((c for c in run.choices if highest and c.actions == highest.actions), None)
            continue
        distinct: dict[tuple[object, ...], int] = {}
        for place, choice in enumerate(run.choices):
            distinct.setdefault(choice.actions, place)
        for place in distinct.values():
            torch.manual_seed(setting.seed + place)
            peak = other_bytes + peak_of_step(
                setting.actor,
                run.contender.policy,
                setting.microbatches[place],
                optimizer,
                gradients_exist=setting.exist,
            )
            if peak > run.peak_bytes:
                run.peak_bytes, run.highest = peak, run.choices[place]
    setting.tell("peaks", len(runs), len(runs))


def measure_times(setting: Setting, runs: Sequence[Run], *, rounds: int, warm_up_rounds: int) -> None:
    """Fill times: every run once a round, in another order each round; microbatches take turns by round."""
    turns = warm_up_rounds + rounds
    for turn in range(turns):
        setting.tell("rounds", turn, turns)
        for index in order_of_round(len(runs), turn):
            took_ns = _timed_step(setting, runs[index].contender.policy, turn % len(setting.microbatches))
            if turn >= warm_up_rounds:
                runs[index].times_ns.append(took_ns)
    prepare_gradients(setting.actor.model, exist=False)
    setting.tell("rounds", turns, turns)


def _timed_step(setting: Setting, policy: Policy, place: int) -> int:
    """Forward, loss and backward; gradients, garbage and the policy are settled outside of the timed part.

    A trainer applies a policy once for thousands of steps: the first one after applying it is not timed.
    """
    with policy.applied(setting.actor) as running:
        for _ in range(2):
            prepare_gradients(setting.actor.model, exist=setting.exist)
            torch.manual_seed(setting.seed + place)
            gc.collect()
            began = setting.clock()
            run_step(setting.actor, running, setting.microbatches[place])
            took_ns = setting.clock() - began
    return took_ns


def _update(setting: Setting, policy: Policy) -> tuple[list[Gradients], list[Choice]]:
    """Gradients of every microbatch of the update under a policy, and what each ran under."""
    found, choices = [], []
    with policy.applied(setting.actor) as running:
        for place, microbatch in enumerate(setting.microbatches):
            seed = setting.seed + place
            found.append(gradients_of(setting.actor, running, microbatch, exist=setting.exist, seed=seed))
            choices.append(running.choice)
    return found, choices


def _layout_control(setting: Setting, eager: Sequence[Gradients]) -> float | None:
    """Error of plain eager on the same rollouts in another layout; None where dropout draws."""
    if draws_random(setting.actor.model):
        return None
    other = replace(setting, microbatches=tuple(map(reshuffled, setting.microbatches)))
    return relative_error(_update(other, NO_GC)[0], eager)


def _for_twin(policy: Policy) -> Policy:
    if isinstance(policy, PlanPolicy):
        return PlanPolicy(policy.name, policy.plans, (*policy.accept, *TWIN_ACCEPTS))
    return policy
