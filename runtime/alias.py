"""Tensors that a replay hands to glue in place of a call's own output: an alias of the stored one, or a placeholder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hilore.runtime.errors import ReplayMismatchError

if TYPE_CHECKING:
    from hilore.runtime.saved import Layout

_ANCHOR = torch.zeros((), requires_grad=True)


class _Alias(torch.autograd.Function):
    """An alias of a stored tensor behind a node that holds nothing: a leaf would be held by its accumulation node
    until the whole replay is over."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        return stored.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ReplayMismatchError("a backward ran through a replay; replays only make tensors")


def non_leaf_alias(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """``tensor`` as backward-time code must see it: a non-leaf with the requires_grad of the forward."""
    if not requires_grad:
        return tensor.detach()
    alias: torch.Tensor = _Alias.apply(_ANCHOR, tensor)  # type: ignore[no-untyped-call]
    return alias


def placeholder(layout: Layout) -> torch.Tensor:
    """A dead call's output: NaN everywhere, so that liveness that was wrong is loud, and no memory."""
    return torch.full((), float("nan"), dtype=layout.dtype, device=layout.device).expand(layout.shape)


def is_placeholder(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and all(step == 0 for step in tensor.stride())
