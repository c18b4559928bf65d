"""Which regions repeat themselves: a replay is only exact where running a forward again gives the same values.

A router whose ties fall otherwise the second time, or a kernel that adds up in any order, gives other values of the
same shape. No check of shapes sees that in a replay, and the gradient is then wrong in silence; so each region is run
twice here with the random state restored, and compared bitwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hilore.planner.actor import Actor
from hilore.planner.head import policy_logps
from hilore.planner.microbatch import Microbatch
from hilore.runtime.ambient import RandomState, device_type_of, tensors_in
from hilore.runtime.naming import canonical_modules


def unrepeatable_regions(actor: Actor, microbatch: Microbatch, regions: Sequence[str]) -> dict[str, str]:
    """Why each region that does not repeat its forward bitwise may only be held; nothing for those that do."""
    with watched(actor.model, regions) as checks, actor.autocast():
        policy_logps(actor.model, microbatch, actor.spec.loss.head)
    return {check.name: check.reason for check in checks if check.reason}


@contextmanager
def watched(model: nn.Module, regions: Sequence[str]) -> Iterator[tuple[RunTwice, ...]]:
    """In a forward inside, with gradients on, each region runs a second time on the same inputs and random state.

    Afterwards each check says whether it gave the same; global random state is left as it was.
    """
    modules = canonical_modules(model)
    checks = tuple(RunTwice(name) for name in regions)
    handles: list[Any] = []
    try:
        for check in checks:
            module = modules[check.name]
            handles.append(module.register_forward_pre_hook(check.before, with_kwargs=True))
            handles.append(module.register_forward_hook(check.after, with_kwargs=True))
        with torch.random.fork_rng():
            yield checks
    finally:
        for handle in handles:
            handle.remove()


class RunTwice:
    """``reason``: '' where the region repeated itself (or has not run)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reason = ""
        self._random: RandomState | None = None
        self._again = False

    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._again:
            inputs = tensors_in(args, kwargs)
            self._random = RandomState.now(device_type_of(inputs), inputs)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._again or self._random is None:
            return
        self._again = True
        try:
            with self._random.forked():
                second = module(*args, **kwargs)
        finally:
            self._again = False
        self.reason = _difference(tensors_in(output), tensors_in(second))


def _difference(first: list[Tensor], second: list[Tensor]) -> str:
    if [(tuple(t.shape), t.dtype) for t in first] != [(tuple(t.shape), t.dtype) for t in second]:
        return "its forward gave other shapes when it was run again with the same inputs and random state"
    for one, other in zip(first, second, strict=True):
        if not torch.equal(_bits(one), _bits(other)):
            differing = int((_bits(one) != _bits(other)).sum())
            return (
                "its forward gave other values when it was run again with the same inputs and random state "
                f"({differing} of {one.numel() * one.element_size()} bytes of its output)"
            )
    return ""


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
