"""One microbatch under one plan in float32: its gradient's error as a sketch. The instrument is the runtime itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hilore.planner.actor import Actor
from hilore.planner.head import grpo_loss, policy_logps
from hilore.planner.microbatch import Microbatch
from hilore.planner.packing import picked
from hilore.planner.sketch import Sketch, Sketcher
from hilore.planner.stepping import trainable
from hilore.runtime.attach import attach
from hilore.runtime.errors import HiloreError, HiloreWarning
from hilore.runtime.exposure import LossSpec, normalised_exposure
from hilore.runtime.naming import canonical_modules
from hilore.runtime.plan import Plan
from hilore.runtime.runtime import Runtime

# The same actor in float32: what a plan's fingerprint then disagrees about.
FLOAT32_DIFFERS = ("parameter_dtypes", "adapter", "trainable_set")


@dataclass(frozen=True, slots=True, eq=False)
class Backward:
    """Every trainable parameter's gradient in model order, and the log-probs [B, Tr], detached.

    ``exposure``: the microbatch's exact one. ``log_move``: median distance of the log-probs from the old ones in nats,
    0 where there are no old ones.
    """

    gradients: tuple[Tensor, ...]
    logps: Tensor
    exposure: float
    log_move: float

    def distance(self, other: Backward) -> tuple[Tensor, ...]:
        return tuple(mine - its for mine, its in zip(self.gradients, other.gradients, strict=True))

    def moved(self, device: torch.device) -> Backward:
        """The same with its gradients there."""
        return replace(self, gradients=tuple(gradient.to(device) for gradient in self.gradients))


def backward(actor: Actor, microbatch: Microbatch, *, seed: int) -> Backward:
    """Forward, loss and backward from ``seed``, under whatever plan is attached; gradients are taken off the model.

    Global random state is left as it was. Raises HiloreError where no gradient is finite.
    """
    parameters = trainable(actor.model)
    for parameter in parameters:
        parameter.grad = None
    spec = LossSpec.of(asdict(actor.spec.loss))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        with actor.autocast():
            logps = policy_logps(actor.model, microbatch, actor.spec.loss.head)
            loss = grpo_loss(logps, microbatch, actor.spec.loss, actor.spec.batch.accumulation)
        exposure = normalised_exposure(
            spec,
            microbatch.advantages,
            microbatch.completion_mask,
            logps.detach(),
            old_logps=microbatch.old_logps,
            ref_logps=microbatch.ref_logps,
        )
        loss.backward()  # type: ignore[no-untyped-call]
    found = []
    for parameter in parameters:
        found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    if not all(bool(torch.isfinite(gradient).all()) for gradient in found):
        raise HiloreError("a microbatch's gradient holds a NaN or an infinity; nothing can be calibrated on it")
    return Backward(tuple(found), logps.detach(), exposure, _log_move(microbatch, logps.detach()))


def leverage(actor: Actor, microbatch: Microbatch, last_region: str, *, seed: int) -> Tensor:
    """As Instrument.leverage."""
    caught: list[Tensor] = []

    def cut_off(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        caught.append(hidden_of(output).detach().requires_grad_())
        return (caught[-1], *output[1:]) if isinstance(output, tuple) else caught[-1]

    handle = canonical_modules(actor.model)[last_region].register_forward_hook(cut_off)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            # Whatever the loss's own head: the log-probs are the same.
            logps = policy_logps(actor.model, microbatch, "naive")
    finally:
        handle.remove()
    if len(caught) != 1:
        raise HiloreError(
            f"{type(actor.model).__name__}: its forward ran {last_region} {len(caught)} times; what moves a token's "
            "log-prob can be told of one run alone"
        )
    (gradient,) = torch.autograd.grad(logps.sum(), caught)
    return at_responses(gradient.double().norm(dim=-1), microbatch)


def hidden_of(output: Any) -> Tensor:
    """Of what a region returns the hidden states, [B, T, d]."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def at_responses(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Of values [B, T] of all tokens those of the tokens whose logits the loss reads, [B, Tr]."""
    if microbatch.places is not None:
        return picked(values, microbatch.places)
    last: Tensor = values[:, :-1][:, -microbatch.completion_mask.shape[1] :]
    return last


def _log_move(microbatch: Microbatch, logps: Tensor) -> float:
    if microbatch.old_logps is None:
        return 0.0
    return float((logps - microbatch.old_logps)[microbatch.completion_mask != 0].abs().median())


class Instrument:
    """Measures plans against the exact gradient of one microbatch at a time, and counts the passes it takes.

    A context manager: the runtime is attached from the first plan on until the end. ``regions``: their names, in order.
    """

    def __init__(self, actor: Actor, regions: Sequence[str], *, seed: int = 0) -> None:
        self.actor = actor
        self.sketcher = Sketcher(actor.model, regions, seed=seed)
        self.passes = 0
        self._last_region = regions[-1]
        self._seed = seed
        self._runtime: Runtime | None = None

    def __enter__(self) -> Instrument:
        return self

    def __exit__(self, *_: object) -> None:
        if self._runtime is not None:
            self._runtime.detach()
            self._runtime = None

    def exact(self, microbatch: Microbatch) -> Backward:
        """Plain eager: no plan."""
        if self._runtime is not None:
            self._runtime.disable()
        return self._backward(microbatch)

    def leverage(self, microbatch: Microbatch) -> Tensor:
        """How far each response token's log-prob moves with what the last region gives it: norms of gradients, [B, Tr]
        float64.

        One forward with all logits at once and the backward of what follows the regions. Raises HiloreError for a
        model whose forward does not run its last region once.
        """
        if self._runtime is not None:
            self._runtime.disable()
        return leverage(self.actor, microbatch, self._last_region, seed=self._seed)

    def error(self, microbatch: Microbatch, plan: Plan, exact: Backward) -> Sketch:
        """The sketch of what a plan's gradient differs by from ``exact``, the same microbatch's."""
        return self.sketcher.sketch(self.under(microbatch, plan).distance(exact))

    def under(self, microbatch: Microbatch, plan: Plan) -> Backward:
        """The microbatch under a plan, whatever its exposure."""
        if self._runtime is None:
            self._runtime = _attached(self.actor, plan)
        self._runtime.enable()
        self._runtime.use(plan)
        # What its tokens weigh follows from the loss.
        with self._runtime.microbatch(
            microbatch.advantages,
            microbatch.completion_mask,
            old_logps=microbatch.old_logps,
            ref_logps=microbatch.ref_logps,
            loss=LossSpec.of(asdict(self.actor.spec.loss)),
            prompt_mask=microbatch.prompt_mask,
        ):
            return self._backward(microbatch)

    def _backward(self, microbatch: Microbatch) -> Backward:
        self.passes += 1
        return backward(self.actor, microbatch, seed=self._seed)


def _attached(actor: Actor, plan: Plan) -> Runtime:
    with warnings.catch_warnings():
        # That the weights are float32 here is the point of it.
        warnings.simplefilter("ignore", HiloreWarning)
        return attach(actor.model, [plan], accept=FLOAT32_DIFFERS)
