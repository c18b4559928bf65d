"""What each codec costs the gradient of a real model, per unit kind: the table behind planner/prior.py.

For every kind and codec: all layers' units of that kind at L, the others kept exactly, or recomputed from what is
decoded. Float32 compute on one microbatch of rollouts that the model samples itself; error = relative L2 distance of
all trainable gradients from plain eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hilore.planner.actor import Actor, build_actor
from hilore.planner.generate import generate_rollouts
from hilore.planner.kind_errors import KindError, in_float32, measure_kinds
from hilore.planner.microbatch import Microbatch
from hilore.planner.prior import DEFAULT_CODECS, ERRORS
from hilore.planner.rollouts import from_rollouts, with_advantages
from hilore.planner.spec_types import ModelSpec
from hilore.planner.tasks import build_dataset
from hilore.planner.trace import Trace

COMPLETIONS = 4


def measure_prior(
    spec: ModelSpec, trace: Trace, progress: Callable[[str, int, int], None], *, seed: int = 0
) -> Iterator[KindError]:
    """One row per kind and codec of the prior; ``trace`` is that of ``offering_all(spec)``."""
    actor = build_actor(in_float32(spec), live_adapters=True, seed=seed)
    pairs = tuple((kind, codec) for kind in ERRORS for codec in _codecs_of(kind))
    yield from measure_kinds(actor, real_microbatch(actor, seed), trace, pairs, progress)


def offering_all(spec: ModelSpec) -> ModelSpec:
    """The actor with every codec of the prior on offer, the default ones and those measured beside them."""
    return replace(spec, codecs=tuple(dict.fromkeys(codec for kind in ERRORS for codec in _codecs_of(kind))))


def _codecs_of(kind: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*DEFAULT_CODECS.get(kind, ()), *ERRORS[kind])))


def real_microbatch(actor: Actor, seed: int) -> Microbatch:
    """One group of sampled completions of a reasoning task. Rewards are drawn, since this model rarely earns any."""
    entries = build_dataset(1, seed, actor.tokenizer)
    rollouts = generate_rollouts(actor, entries, completions=COMPLETIONS, seed=seed)
    rewarded = [replace(rollout, reward=float(place % 2), advantage=None) for place, rollout in enumerate(rollouts)]
    pad = getattr(actor.tokenizer, "pad_token_id", None) or 0
    return from_rollouts(with_advantages(rewarded), actor.spec, pad_token=pad, device=actor.device)[0]
