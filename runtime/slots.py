"""What autograd holds for a tensor that a region saved outside of its recorded units."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hilore.runtime.saved import mutated

if TYPE_CHECKING:
    from hilore.runtime.frame import Frame


class Slot:
    """What autograd holds instead of a dropped tensor."""

    __slots__ = ("__weakref__", "dtype", "frame", "late", "shape", "value", "version")

    def __init__(self, frame: Frame, tensor: torch.Tensor, late: bool) -> None:
        self.frame = frame
        self.late = late
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.value: torch.Tensor | None = None
        self.version = 0

    def take(self) -> torch.Tensor:
        if self.value is None:
            self.frame.replay(self.late)
        value = self.value
        if value is None:
            raise self.frame.mismatch("it saved fewer tensors than its forward")
        if value._version != self.version:
            raise mutated(self.frame.region_name, self.version, value._version)
        self.value = None
        return value


class Direct:
    """A parameter that autograd saved: an alias of it, never dropped."""

    __slots__ = ("tensor", "unit_name", "version")

    def __init__(self, tensor: torch.Tensor, unit_name: str) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.unit_name = unit_name

    def take(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise mutated(self.unit_name, self.version, self.tensor._version)
        return self.tensor


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a parameter or a view of one (a linear saves its weight transposed)."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
