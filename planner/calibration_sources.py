"""Where calibration's microbatches come from: a file of rollouts, the actor's own answers, or random tokens."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hilore.planner.actor import Actor, microbatch_of
from hilore.planner.conformal import check_confidence
from hilore.planner.generate import generate_rollouts
from hilore.planner.head import base_model
from hilore.planner.microbatch import GROUP_SIZE, Microbatch
from hilore.planner.rollouts import Rollout, RolloutFileError, from_rollouts, read_recorded, write_rollouts
from hilore.planner.tasks import TASKS, build_dataset
from hilore.runtime.exposure import exposure_before_forward
from hilore.runtime.losses import LossSpec

Progress = Callable[[str, int, int], None]

# Of a weak model most groups are flat: at most so many groups are answered for each microbatch that is asked for.
GROUPS_PER_MICROBATCH = 8


@dataclass(frozen=True, slots=True)
class Recording:
    """``microbatches`` up to the last that is needed, also those of exposure 0; ``digest`` says which they are."""

    microbatches: tuple[Microbatch, ...]
    digest: str


def recorded(actor: Actor, path: Path) -> Recording:
    """The microbatches of a file until ``calibration.microbatches`` of them have an exposure above 0.

    Raises RolloutFileError, and ConfidenceError where there are too few for the confidence asked for.
    """
    spec = actor.spec
    needed = _until(spec.loss, read_microbatches(actor, path), spec.calibration.microbatches)
    check_confidence(exposed(spec.loss, needed), spec.calibration.confidence, f"microbatches of {path} with exposure")
    return Recording(needed, hashlib.sha256(path.read_bytes()).hexdigest())


def read_microbatches(actor: Actor, path: Path) -> tuple[Microbatch, ...]:
    """All microbatches of a file of rollouts for this actor, in order. Raises RolloutFileError."""
    found = read_recorded(path)
    vocabulary = getattr(getattr(base_model(actor.model), "config", None), "vocab_size", None)
    spec = actor.spec
    microbatches = from_rollouts(
        found.rollouts,
        spec,
        pad_token=_pad_token(actor),
        device=actor.device,
        vocabulary=vocabulary,
        places=found.places,
    )
    if spec.loss.beta and _without_reference(actor) and any(batch.ref_logps is None for batch in microbatches):
        raise RolloutFileError(
            f"{path}: loss.beta is {spec.loss.beta}, but not every row has ref_logps and the actor has no adapter to "
            "switch off; record ref_logps",
            path=str(path),
            line=0,
        )
    return microbatches


def synthetic(actor: Actor, tokens: int, *, seed: int) -> Recording:
    """Random tokens and rewards (planner/microbatch.py), as many microbatches as asked for."""
    count = actor.spec.calibration.microbatches
    check_confidence(count, actor.spec.calibration.confidence, "microbatches")
    made = tuple(microbatch_of(actor, tokens, seed=seed * count + place) for place in range(count))
    return Recording(made, f"synthetic {seed}")


def generate_file(actor: Actor, path: Path, progress: Progress, *, seed: int, tasks: tuple[str, ...] = TASKS) -> None:
    """Let the actor without its adapter answer ``tasks``, and write what it said, with its rewards, to ``path``.

    Groups of GROUP_SIZE completions, one prompt after another, until enough microbatches have an exposure above 0. The
    same seed gives the same file. Raises ConfidenceError where too few of them do.
    """
    spec = actor.spec
    wanted = spec.calibration.microbatches
    most = wanted * GROUPS_PER_MICROBATCH
    entries = build_dataset(most, seed, actor.tokenizer, tasks)
    rollouts: list[Rollout] = []
    enough = 0
    disable_adapter = getattr(actor.model, "disable_adapter", contextlib.nullcontext)
    for group, entry in enumerate(entries):
        progress("generate rollouts", enough, wanted)
        with disable_adapter():
            made = generate_rollouts(actor, [entry], completions=GROUP_SIZE, seed=seed * most + group)
        rollouts += [replace(rollout, group=group) for rollout in made]
        enough = exposed(spec.loss, from_rollouts(rollouts, spec, pad_token=_pad_token(actor)))
        if enough >= wanted:
            break
    progress("generate rollouts", enough, wanted)
    check_confidence(enough, spec.calibration.confidence, f"microbatches of {len(entries)} groups with exposure")
    write_rollouts(path, rollouts)


def exposed(loss: Any, microbatches: Sequence[Microbatch]) -> int:
    """How many microbatches have an exposure above 0."""
    return sum(not is_null(loss, batch) for batch in microbatches)


def is_null(loss: Any, batch: Microbatch) -> bool:
    """Whether no gradient can pass whatever the forward gives: only then is the bound before the forward 0."""
    return exposure_of(loss, batch) == 0


def exposure_of(loss: Any, batch: Microbatch) -> float:
    """psi before the forward; a reference that is missing is taken to be the policy itself."""
    reference = batch.ref_logps
    spec = LossSpec.of(asdict(loss))
    if spec.beta and reference is None:
        reference = batch.completion_mask.float() * 0
    return exposure_before_forward(
        spec,
        batch.advantages,
        batch.completion_mask,
        old_logps=batch.old_logps,
        ref_logps=reference,
    )


def _until(loss: Any, microbatches: Sequence[Microbatch], wanted: int) -> tuple[Microbatch, ...]:
    taken: list[Microbatch] = []
    count = 0
    for batch in microbatches:
        if count == wanted:
            break
        taken.append(batch)
        count += not is_null(loss, batch)
    return tuple(taken)


def _pad_token(actor: Actor) -> int:
    return int(getattr(actor.tokenizer, "pad_token_id", None) or 0)


def _without_reference(actor: Actor) -> bool:
    return not hasattr(actor.model, "disable_adapter")
