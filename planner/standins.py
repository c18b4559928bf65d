"""What stands in for a region where only what lies outside of regions is measured: its form, without its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hilore.runtime.ambient import tensors_in


class Arguments:
    """Which of the arguments that all regions share (masks, positions, rotary tables) a held region saves."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._saved: set[int] = set()

    @contextmanager
    def noted(self, args: tuple[Any, ...], kwargs: Any) -> Iterator[None]:
        """Note the arguments of the region whose forward runs inside the block, and what its autograd saves."""
        self._sizes |= {_storage_of(t): storage_bytes(t) for t in tensors_in(args[1:], kwargs)}

        def pack(tensor: Tensor) -> Tensor:
            self._saved.add(_storage_of(tensor))
            return tensor.detach()

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def frame_bytes(self, inputs: list[Tensor]) -> int:
        """Bytes of arguments that are gone after the forward unless a frame holds them; ``inputs`` stay anyway."""
        others = self._saved | {_storage_of(tensor) for tensor in inputs}
        return sum(size for storage, size in self._sizes.items() if storage not in others)


def _storage_of(tensor: Tensor) -> int:
    return id(tensor.untyped_storage())


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor without its memory."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, leaf: Any) -> Any:
        return cls(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class StandIn(torch.autograd.Function):
    """Takes a boundary, gives a tensor of the region's form; backward gives a gradient of the boundary's form.

    ``held``: the region's arguments, alive until its backward as a frame holds them.
    """

    @staticmethod
    def forward(ctx: Any, boundary: Tensor, anchor: Tensor, form: Form, *held: Tensor) -> Tensor:
        ctx.boundary = Form.of(boundary)
        ctx.save_for_backward(*held)
        return form.empty()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.maybe_clear_saved_tensors()
        boundary = ctx.boundary.empty() if ctx.needs_input_grad[0] else None
        return (boundary, *(None for _ in ctx.needs_input_grad[1:]))


def storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
