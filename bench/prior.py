"""What each codec costs the gradient of a real model, per unit kind: the table behind planner/prior.py.

For every kind and codec: all layers' units of that kind at L, the others kept exactly, or recomputed from what is
decoded. Float32 compute on one microbatch of rollouts that the model samples itself; error = relative L2 distance of
all trainable gradients from plain eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from hilore.planner.actor import Actor, build_actor, policy_loss
from hilore.planner.generate import generate_rollouts
from hilore.planner.handmade import handmade_plan
from hilore.planner.microbatch import Microbatch
from hilore.planner.prior import ERRORS
from hilore.planner.rollouts import from_rollouts, with_advantages
from hilore.planner.spec_types import ModelSpec
from hilore.planner.tasks import build_dataset
from hilore.planner.trace import Trace, UnitTrace
from hilore.runtime.attach import attach

COMPLETIONS = 4


@dataclass(frozen=True, slots=True)
class PriorRow:
    """``kept_percent``: the other units at H; ``recomputed_percent``: the others at R."""

    kind: str
    codec: str
    kept_percent: float
    recomputed_percent: float


def float32(spec: ModelSpec) -> ModelSpec:
    """The same actor with float32 weights, adapters and compute."""
    precision = replace(spec.precision, params="float32", compute="float32", autocast=False)
    return replace(
        spec, precision=precision, adapter=replace(spec.adapter, dtype="float32" if spec.adapter.dtype else "")
    )


def measure_prior(
    spec: ModelSpec, trace: Trace, progress: Callable[[str, int, int], None], *, seed: int = 0
) -> Iterator[PriorRow]:
    """One row per kind and codec of the prior."""
    actor = build_actor(float32(spec), live_adapters=True, seed=seed)
    microbatch = real_microbatch(actor, seed)
    exact = gradient(actor, microbatch)
    cases = [(kind, codec) for kind, codecs in ERRORS.items() for codec in codecs]
    for done, (kind, codec) in enumerate(cases):
        progress(f"{kind} {codec}", done, len(cases))
        errors = []
        for others in ("H", "R"):

            def mode_of(_region: str, unit: UnitTrace, others: str = others) -> str:
                if unit.kind == kind:  # noqa: B023
                    return codec  # noqa: B023
                return others if unit.keepable else "R"

            runtime = attach(actor.model, [handmade_plan(trace, mode_of)], accept=ACCEPTED)
            try:
                runtime.use(runtime.plans.plans[0])
                errors.append(100 * relative_error(gradient(actor, microbatch), exact))
            finally:
                runtime.detach()
        yield PriorRow(kind, codec, errors[0], errors[1])
    progress("done", len(cases), len(cases))


# The errors are those of float32 compute under plans made for the bfloat16 actor.
ACCEPTED = ("parameter_dtypes", "adapter", "trainable_set")


def real_microbatch(actor: Actor, seed: int) -> Microbatch:
    """One group of sampled completions of a reasoning task. Rewards are drawn, since this model rarely earns any."""
    entries = build_dataset(1, seed, actor.tokenizer)
    rollouts = generate_rollouts(actor, entries, completions=COMPLETIONS, seed=seed)
    rewarded = [replace(rollout, reward=float(place % 2), advantage=None) for place, rollout in enumerate(rollouts)]
    pad = getattr(actor.tokenizer, "pad_token_id", None) or 0
    return from_rollouts(with_advantages(rewarded), actor.spec, pad_token=pad, device=actor.device)[0]


def gradient(actor: Actor, microbatch: Microbatch) -> torch.Tensor:
    """All trainable gradients of one microbatch, flat, float64."""
    actor.model.zero_grad(set_to_none=True)
    policy_loss(actor, microbatch).backward()  # type: ignore[no-untyped-call]
    parts = [p.grad.flatten().double() for p in actor.model.parameters() if p.grad is not None]
    actor.model.zero_grad(set_to_none=True)
    return torch.cat(parts)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
