"""Rollouts from the actor itself: sampled completions of task prompts, with their rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hilore.planner.actor import Actor
from hilore.planner.head import base_model
from hilore.planner.rollouts import Rollout, with_advantages
from hilore.planner.sources import SourceError
from hilore.planner.tasks import Entry, score


def generate_rollouts(
    actor: Actor, entries: Sequence[Entry], *, completions: int = 4, temperature: float = 1.0, seed: int = 0
) -> tuple[Rollout, ...]:
    """``completions`` samples of every entry, one group per entry, in the order of ``entries``.

    Prompts keep their last ``batch.prompt_tokens`` tokens; completions end with the end-of-sequence token or after
    ``batch.response_tokens``. Samples come from ``seed``; global random state and train mode are left as they were.
    Raises SourceError for an actor without tokenizer.
    """
    if actor.tokenizer is None:
        raise SourceError(
            f"model.source: '{actor.spec.model.source}' brings no tokenizer, so it cannot answer prompts; use "
            "calibration.source: synthetic",
            key="model.source",
            value=actor.spec.model.source,
        )
    training = actor.model.training
    actor.model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), actor.autocast():
            torch.manual_seed(seed)
            rows = [
                rollout
                for group, entry in enumerate(entries)
                for rollout in _complete(actor, entry, group, completions, temperature)
            ]
    finally:
        actor.model.train(training)
    return with_advantages(rows)


def _complete(actor: Actor, entry: Entry, group: int, completions: int, temperature: float) -> list[Rollout]:
    tokenizer, batch = actor.tokenizer, actor.spec.batch
    assert tokenizer is not None
    prompt: list[int] = tokenizer(entry.prompt, add_special_tokens=False).input_ids[-batch.prompt_tokens :]
    inputs = torch.tensor([prompt] * completions, device=actor.device)
    output = base_model(actor.model).generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=batch.response_tokens,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    rollouts = []
    for row in output[:, len(prompt) :].tolist():
        length = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        reward = score(tokenizer.decode(row[:length], skip_special_tokens=True), entry)
        rollouts.append(Rollout(group, tuple(prompt), tuple(row[:length]), reward))
    return rollouts
