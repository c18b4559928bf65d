"""Audits: now and then a microbatch runs under its plan and exactly, and the gradients are compared.

An audited microbatch runs three times: under its plan, exactly with the last bit of every sixteenth replayed value
changed (the control), and exactly, which is the run that trains. In low precision any change that is not bit-exact
reshuffles all the rounding after it, so the plan's error is what exceeds the control's. Errors of microbatches add in
quadrature as their gradients do, so the audits are pooled: ``sqrt(sum (e^2 - control^2) / sum |g|^2)`` estimates the
relative error of an update. An audit costs two extra forward and backward passes; in between nothing is added.
Gradients wait on the host meanwhile, so the peak stays that of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hilore.runtime.ambient import RandomState
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.notice import notice

if TYPE_CHECKING:
    from hilore.runtime.region import Choice

CONTROL_STRIDE = 16
LEAST_AUDITS = 4
_BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


@dataclass(slots=True)
class AuditLog:
    """Sums over the audited microbatches: squared L2 of the plan's error, the control's and the exact gradient.

    ``alarm``: the pooled error is above what the plans allow; from then on their L units run as R. ``unusable``:
    microbatches that were run and are in no sum, since their exact gradient or the control's is not finite.
    """

    audits: int = 0
    unusable: int = 0
    squared_error: float = 0.0
    squared_control: float = 0.0
    squared_norm: float = 0.0
    squared_allowed: float = 0.0
    last_error: float | None = None
    alarm: bool = False

    @property
    def error(self) -> float | None:
        """Pooled relative error beyond the control's; None before the first audit."""
        if self.squared_norm == 0:
            return None
        return math.sqrt(max(0.0, self.squared_error - self.squared_control) / self.squared_norm)

    def add(self, error: float, control: float, norm: float, allowed: float) -> None:
        """One audited microbatch: squared L2 of error, control and gradient; ``allowed``: delta times delta_star.

        An error that is no number, where the exact gradient is finite, is infinite.
        """
        if not (math.isfinite(norm) and math.isfinite(control)):
            self.unusable += 1
            return
        error = math.inf if math.isnan(error) else error
        self.audits += 1
        self.squared_error += error
        self.squared_control += control
        self.squared_norm += norm
        self.squared_allowed += allowed * allowed * norm
        self.last_error = math.sqrt(max(0.0, error - control) / norm) if norm > 0 else None
        if not self.alarm and self.audits >= LEAST_AUDITS and self.squared_norm > 0 and self._above():
            self.alarm = True
            limit = math.sqrt(self.squared_allowed / self.squared_norm)
            notice(
                f"audits found a gradient error of {self.error:.3%} over {self.audits} microbatches where the plans "
                f"allow {limit:.3%}; from now on every encoded unit is recomputed. Calibrate on rollouts of this "
                "policy and solve again: hilore-plan calibrate model.yaml --rollouts FILE"
            )

    def _above(self) -> bool:
        return self.squared_error - self.squared_control > self.squared_allowed


def audited_loss(
    model: nn.Module, choice_of: Callable[[], Choice | None], log: AuditLog, step: Callable[[], Tensor]
) -> Tensor:
    """``step()``'s loss, run under the plan, as control and exactly; the exact gradients are in ``.grad`` already.

    ``step``: forward and loss of one microbatch, repeatable. ``choice_of``: the choice that its forward ran under.
    The loss that is returned has the exact value; its backward adds nothing more. Under FSDP2 it is compared where
    every rank's plan encodes something. Raises UnsupportedModelError for DistributedDataParallel, and in that backward
    if the loss was scaled after it was returned.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _refuse(model)
    random = RandomState.now(trainable[0].device.type, [*trainable])
    before = [_to_host(parameter.grad) for parameter in trainable]
    try:
        loss = _audited(trainable, choice_of, log, step, random)
    except BaseException:
        # Whoever catches it (out of memory, say) finds what earlier microbatches left, and nothing of this one.
        for parameter in trainable:
            parameter.grad = None
        _add_back(trainable, before)
        raise
    _add_back(trainable, before)
    result: Tensor = _AlreadyDone.apply(loss.detach(), trainable[0])  # type: ignore[no-untyped-call]
    return result


def _audited(
    trainable: list[nn.Parameter],
    choice_of: Callable[[], Choice | None],
    log: AuditLog,
    step: Callable[[], Tensor],
    random: RandomState,
) -> Tensor:
    """The loss of the last run, which was exact if the plan encodes anything; its gradients are in ``.grad``."""
    planned, loss = _gradients(trainable, step)
    choice = choice_of()
    encodes = choice is not None and choice.plan is not None and choice.plan.lossy and not choice.demoted
    if not _on_every_rank(encodes, trainable[0]):
        return loss
    assert choice is not None
    assert choice.plan is not None
    try:
        choice.demoted = choice.control = True
        random.restore()
        control, _ = _gradients(trainable, step)
        choice.control = False
        random.restore()
        exact, loss = _gradients(trainable, step)
    finally:
        choice.demoted = choice.control = False
    sums = [_distance(planned, exact), _distance(control, exact), _distance(exact, [None for _ in exact])]
    error, noise, norm = _over_ranks(sums, trainable[0])
    log.add(error, noise, norm, choice.plan.delta * choice.plan.delta_star)
    return loss


def _add_back(trainable: list[nn.Parameter], before: list[Tensor | None]) -> None:
    for parameter, earlier in zip(trainable, before, strict=True):
        if earlier is not None:
            moved = earlier.to(parameter.device)
            parameter.grad = moved if parameter.grad is None else parameter.grad.add_(moved)


def perturb(output: Tensor) -> None:
    """Flip the last bit of every sixteenth element, in place and unseen by autograd (the control of an audit)."""
    values = output.data
    if values.dtype in _BITS and values.is_contiguous():
        values.view(_BITS[values.dtype]).flatten()[::CONTROL_STRIDE].bitwise_xor_(1)


def _gradients(trainable: list[nn.Parameter], step: Callable[[], Tensor]) -> tuple[list[Tensor | None], Tensor]:
    """Gradients of one run of ``step`` on the host, and its loss. The last run's stay in ``.grad``."""
    for parameter in trainable:
        parameter.grad = None
    loss = step()
    loss.backward()  # type: ignore[no-untyped-call]
    return [_to_host(parameter.grad) for parameter in trainable], loss


def _to_host(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().to("cpu", copy=True)


def _local(gradient: Tensor) -> Tensor:
    shard = getattr(gradient, "to_local", None)
    return gradient if shard is None else shard()


def _distance(left: list[Tensor | None], right: list[Tensor | None]) -> float:
    """Squared L2 of the difference, in float64; None is 0."""
    total = 0.0
    for one, other in zip(left, right, strict=True):
        values = [_local(gradient).double() for gradient in (one, other) if gradient is not None]
        if values:
            total += float((values[0] - values[1] if len(values) == 2 else values[0]).square().sum())
    return total


def _on_every_rank(encodes: bool, parameter: Tensor) -> bool:
    """Whether the further runs are worth it on all ranks that hold a shard: each run gathers, so all run or none."""
    if not hasattr(parameter, "to_local"):
        return encodes
    return _over_ranks([float(not encodes)], parameter) == [0.0]


def _over_ranks(sums: list[float], parameter: Tensor) -> list[float]:
    """Sums over the ranks that each hold a shard; a model that is not sharded keeps its own."""
    if not hasattr(parameter, "to_local"):
        return sums
    device = "cpu" if "gloo" in dist.get_backend() else parameter.device
    total = torch.tensor(sums, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


def _refuse(model: nn.Module) -> None:
    for name, module in (("model", model), *model.named_modules()):
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            raise UnsupportedModelError(
                f"{name}: an audit runs a microbatch's backward several times, and {type(module).__name__} reduces "
                "gradients once per update; leave audit_every out, or shard with fully_shard (FSDP2)",
                unit=name,
                setting="audit_every",
            )


class _AlreadyDone(torch.autograd.Function):
    """The loss of a run whose backward has been: its value, and nothing to add."""

    @staticmethod
    def forward(context: Any, loss: Tensor, _parameter: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[None, None]:
        scale = float(gradients[0])
        if scale != 1.0:
            raise UnsupportedModelError(
                f"an audited loss was multiplied by {scale} after runtime.audited(...) returned it, but its gradients "
                "are in .grad already; scale it inside the audited function",
                setting="audit_every",
            )
        return None, None
