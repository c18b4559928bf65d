"""Microbatches of recorded rollouts as a later inner epoch meets them, and updates of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.evidence_setting import Setting, tell
from hilore.planner.actor import Actor, with_reference
from hilore.planner.calibration_sources import is_null, recorded
from hilore.planner.head import grpo_loss, policy_logps
from hilore.planner.microbatch import Microbatch
from hilore.planner.optimizer import make_optimizer


def moved(setting: Setting, native: Actor, actor: Actor, split: str) -> tuple[Microbatch, ...]:
    """A split's batches with the log-probs of now as old ones, after the first of them have trained ``actor``.

    What is measured then is a later inner epoch: ratios are not 1, and some tokens are clipped.
    """
    given, loss = setting.given, actor.spec.loss
    reading = replace(native, spec=setting.of_split(split))
    found = recorded(reading, setting.file(f"{split}.jsonl")).microbatches
    batches = [with_reference(native, batch) for batch in found]
    exposed = [place for place, batch in enumerate(batches) if not is_null(loss, batch)]
    line = tell()
    with torch.no_grad():
        for done, place in enumerate(exposed):
            line("old log-probs", done, len(exposed))
            logps = policy_logps(actor.model, batches[place], loss.head).detach()
            batches[place] = replace(batches[place], old_logps=logps)
    if given.lr:
        train(actor, [batches[place] for place in exposed[: given.inner_microbatches]], lr=given.lr, seed=given.seed)
    return tuple(batches)


def train(actor: Actor, batches: Sequence[Microbatch], *, lr: float, seed: int, accumulation: int = 0) -> None:
    """One epoch of updates on ``batches``; ``accumulation`` 0: the spec's."""
    optimizer = make_optimizer(actor.model, actor.spec, lr=lr)
    loss, accumulation = actor.spec.loss, accumulation or actor.spec.batch.accumulation
    line = tell()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for place, batch in enumerate(batches):
            line("updates of the policy", place, len(batches))
            grpo_loss(policy_logps(actor.model, batch, loss.head), batch, loss, accumulation).backward()  # type: ignore[no-untyped-call]
            if (place + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    optimizer.zero_grad(set_to_none=True)


def until_exposed(batches: Sequence[Microbatch], count: int) -> tuple[Microbatch, ...]:
    """The first batches, ``count`` of them with advantages."""
    seen = 0
    for place, batch in enumerate(batches):
        seen += bool(batch.advantages.any())
        if seen == count:
            return tuple(batches[: place + 1])
    return tuple(batches)


def spread(batches: Sequence[Microbatch], count: int) -> list[Microbatch]:
    """``count`` of the batches, evenly, so that all groups are among them."""
    return [batches[place * len(batches) // count] for place in range(min(count, len(batches)))]


def copy_trained(source: Actor, target: Actor) -> None:
    with torch.no_grad():
        for mine, its in zip(target.model.parameters(), source.model.parameters(), strict=True):
            if mine.requires_grad:
                mine.copy_(its)
