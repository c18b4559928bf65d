"""Microbatches whose every loss coefficient is 0: their gradient is exactly 0, so forward and backward can be left out.

Opt-in, because a skipped forward also leaves out what the trainer logs of it (entropy, clip shares), and would not
show a NaN inside the model. The denominator of the loss is the caller's and stays what it was: a null microbatch's
tokens count in it whether it ran or not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hilore.runtime.errors import UnsupportedModelError


class _ZeroGradients(torch.autograd.Function):
    """0 as a loss whose backward hands each parameter a gradient of zeros, as the exact backward would."""

    @staticmethod
    def forward(context: Any, *parameters: Tensor) -> Tensor:
        context.save_for_backward(*parameters)
        return torch.zeros((), device=parameters[0].device, dtype=torch.float32)

    @staticmethod
    def backward(context: Any, *_gradients: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in context.saved_tensors)


def null_loss(model: nn.Module) -> Tensor:
    """A loss of exactly 0, float32 [], for a microbatch that is skipped.

    Its backward adds zeros to every trainable parameter's gradient (made where there is none), so that an optimizer
    sees what it would have seen. Raises UnsupportedModelError for a model without trainable parameters.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise UnsupportedModelError(
            f"{type(model).__name__}: has no trainable parameter, so there is nothing to skip a backward for",
            unit=type(model).__name__,
        )
    result: Tensor = _ZeroGradients.apply(*trainable)  # type: ignore[no-untyped-call]
    return result


def agree_on_null(null: bool, group: Any = None) -> bool:
    """Whether this microbatch is null on every rank (collective over ``group``; without torch.distributed: ``null``).

    A rank that skipped alone would leave the others' gathers and reductions waiting.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return null
    device = "cpu" if "gloo" in dist.get_backend(group) else "cuda"
    running = torch.tensor([0 if null else 1], device=device)
    dist.all_reduce(running, op=dist.ReduceOp.MAX, group=group)
    return int(running.item()) == 0


def refuse_skipping(model: nn.Module) -> None:
    """Raise UnsupportedModelError where a skipped backward would leave gradients of earlier microbatches unreduced."""
    for name, module in (("model", model), *model.named_modules()):
        kind = type(module)
        if kind.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel") and "torch" in kind.__module__:
            raise UnsupportedModelError(
                f"{name}: {kind.__name__} reduces the gradients of several microbatches in the backward of the last "
                "one, which a null microbatch could be; leave skip_null off, or shard with fully_shard (FSDP2)",
                unit=name,
                setting="skip_null",
            )
        state = getattr(module, "_get_fsdp_state", None)
        group = getattr(state(), "_fsdp_param_group", None) if callable(state) else None
        if group is not None and not group.reduce_grads:
            raise UnsupportedModelError(
                f"{name}: set_requires_gradient_sync(False) is on, so its gradients wait for the backward of a later "
                "microbatch, which a null one could be; leave skip_null off, or reduce in every microbatch",
                unit=name,
                setting="skip_null",
            )
