"""How a probe runs a module's own code: apart from the step that it stands in, with made-up values, watched.

Two pieces of code that issue the same operators on the same values compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hilore.runtime.ambient import RunningAs

# Tensors that run nobody else's code.
PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
# Fake tensors alone show that they are asked for their device.
_DEVICE: Any = torch.ops.prim.device.default


@contextmanager
def apart() -> Iterator[None]:
    """Autograd records, for no frame and with saved tensors as they are; the CPU's generator is as before after it."""
    with RunningAs(None), torch.enable_grad(), saved_tensors_hooks(_itself, _itself), torch.random.fork_rng([]):
        yield


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def made_up_like(tensor: torch.Tensor, step: float) -> torch.Tensor:
    """Other values of the same shape and dtype, contiguous."""
    values = torch.arange(tensor.numel(), device=tensor.device).mul(step).sin().mul(3)
    return values.to(tensor.dtype).reshape(tensor.shape)


def hooked(module: nn.Module) -> bool:
    """Whether someone sees what goes through a module."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator with what it gets and gives: a tensor by its storage's number and how it lies there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[object] = []
        self._numbers = count()
        # Storages stay alive here: another one would get the identity of one that is gone.
        self._seen: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tree_map(self._noted, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func is not _DEVICE:
            self.operators.append((func, given, tree_map(self._noted, result)))
        return result

    def _noted(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        storage = item.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = (next(self._numbers), storage)
        number, _ = self._seen[storage._cdata]
        return number, item.dtype, tuple(item.shape), item.stride(), item.storage_offset()
