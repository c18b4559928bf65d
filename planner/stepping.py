"""One real step of an actor under a policy: its loss and gradients, its peak, its float32 twin, its noise control."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from hilore.planner.actor import Actor, policy_loss
from hilore.planner.microbatch import Microbatch
from hilore.planner.optimizer import make_optimizer
from hilore.planner.packing import reversed_sequences
from hilore.planner.rivals import Policy, Running
from hilore.runtime.exposure import exposure_before_forward
from hilore.runtime.losses import LossSpec
from hilore.runtime.meter import StorageMeter

CONTROL_PADDING = 8


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of one microbatch: every trainable parameter's gradient in model order, and the loss, a scalar."""

    loss: Tensor
    tensors: tuple[Tensor, ...]

    def same_loss(self, other: Gradients) -> bool:
        """Bitwise."""
        return _same(self.loss, other.loss)

    def same_gradients(self, other: Gradients) -> bool:
        """Bitwise."""
        return all(_same(left, right) for left, right in zip(self.tensors, other.tensors, strict=True))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def prepare_gradients(model: nn.Module, *, exist: bool) -> None:
    """Gradients before a step: zero buffers that exist already (accumulation), or none."""
    for parameter in trainable(model):
        if not exist:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()


def run_step(actor: Actor, running: Running, microbatch: Microbatch) -> Tensor:
    """Forward, loss and backward of one microbatch; returns the detached loss. What is timed."""
    with running.microbatch(microbatch):
        loss = policy_loss(actor, microbatch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def gradients_of(
    actor: Actor, running: Running, microbatch: Microbatch, *, exist: bool = False, seed: int = 0
) -> Gradients:
    """A step from ``seed`` with its gradients, which the model no longer holds."""
    prepare_gradients(actor.model, exist=exist)
    torch.manual_seed(seed)
    loss = run_step(actor, running, microbatch)
    found = []
    for parameter in trainable(actor.model):
        found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    return Gradients(loss, tuple(found))


def relative_error(found: Sequence[Gradients], reference: Sequence[Gradients]) -> float:
    """Relative L2 error, over all trainable parameters, of the gradient summed over the microbatches of one update."""
    difference = norm = 0.0
    for place in range(len(reference[0].tensors)):
        exact = sum_of(step.tensors[place] for step in reference)
        difference += float((sum_of(step.tensors[place] for step in found) - exact).square().sum())
        norm += float(exact.square().sum())
    if norm == 0:
        return 0.0 if difference == 0 else float("inf")
    return float((difference / norm) ** 0.5)


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Sum in float64."""
    first, *rest = tensors
    total = first.to(torch.float64, copy=True)
    for tensor in rest:
        total += tensor
    return total


def idle_optimizer(actor: Actor) -> Optimizer:
    """The actor's optimizer with its state in place and a learning rate of 0: its steps change no parameter."""
    optimizer = make_optimizer(actor.model, actor.spec, lr=0.0)
    prepare_gradients(actor.model, exist=True)
    optimizer.step()
    prepare_gradients(actor.model, exist=False)
    return optimizer


def peak_of_step(
    actor: Actor, policy: Policy, microbatch: Microbatch, optimizer: Optimizer, *, gradients_exist: bool
) -> int:
    """Peak of live storages from before the forward to after the optimizer step, bytes.

    Counted: parameters, buffers, gradients, optimizer state, the microbatch, and all that the step makes.
    """
    with policy.applied(actor) as running:
        prepare_gradients(actor.model, exist=gradients_exist)
        gc.collect()
        with StorageMeter() as meter:
            meter.track(_resident(actor.model, optimizer))
            meter.track(_tensors_of(microbatch))
            run_step(actor, running, microbatch)
            optimizer.step()
            peak: int = meter.peak_bytes
        prepare_gradients(actor.model, exist=False)
    return peak


def float32_twin(actor: Actor) -> Actor:
    """The same weights computing in float32: what a codec's error is measured on."""
    prepare_gradients(actor.model, exist=False)
    precision = replace(actor.spec.precision, params="float32", compute="float32", autocast=False)
    model = copy.deepcopy(actor.model).float()
    return replace(actor, model=model, spec=replace(actor.spec, precision=precision))


def reshuffled(microbatch: Microbatch, padding: int = CONTROL_PADDING) -> Microbatch:
    """The same rollouts in another layout: rows in reverse, ``padding`` more columns on the left.

    In exact arithmetic its gradients are the same, so what they differ by is the noise of the dtype. A packed row
    holds its sequences in the opposite order.
    """
    if microbatch.packed:
        return reversed_sequences(microbatch)

    def flip(tensor: Tensor) -> Tensor:
        return tensor.flip(0)

    return replace(
        microbatch,
        input_ids=functional.pad(flip(microbatch.input_ids), (padding, 0)),
        attention_mask=functional.pad(flip(microbatch.attention_mask), (padding, 0)),
        completion_mask=flip(microbatch.completion_mask),
        advantages=flip(microbatch.advantages),
        old_logps=None if microbatch.old_logps is None else flip(microbatch.old_logps),
        ref_logps=None if microbatch.ref_logps is None else flip(microbatch.ref_logps),
        padded=True,
    )


def draws_random(model: nn.Module) -> bool:
    """Whether a forward draws random numbers (dropout), which another layout would draw for other places."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def at_exposure(actor: Actor, microbatch: Microbatch, psi: float) -> Microbatch:
    """The microbatch with its advantages scaled so that its exposure before the forward is just under ``psi``."""
    found = exposure_before_forward(
        LossSpec.of(asdict(actor.spec.loss)),
        microbatch.advantages,
        microbatch.completion_mask,
        old_logps=microbatch.old_logps,
        ref_logps=microbatch.ref_logps,
    )
    if found == 0:
        return microbatch
    return replace(microbatch, advantages=microbatch.advantages * (psi / found * (1 - 1e-4)))


def _resident(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*model.parameters(), *model.buffers(), *grads, *state]


def _tensors_of(microbatch: Microbatch) -> list[Tensor]:
    values = (getattr(microbatch, field.name) for field in fields(microbatch))
    return [value for value in values if isinstance(value, Tensor)]


def _same(left: Tensor, right: Tensor) -> bool:
    """Bitwise equality: NaN equals itself, -0.0 is not 0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(
        left.reshape(-1).contiguous().view(torch.uint8), right.reshape(-1).contiguous().view(torch.uint8)
    )
