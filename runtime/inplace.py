"""Calls that PyTorch's autograd engine runs in place, unless a dispatch mode is active.

With a dispatch mode (or fake tensors) the engine adds up gradients out of place, and some backward formulas fill their
zeros out of place (``isTensorSubclassLike`` in ATen/TensorSubclassLikeUtils.h of PyTorch 2.13): another kernel, and one
more tensor alive. Whoever observes a step through a mode and wants to see the step that runs without it has to run
the in-place call instead; ``in_place_variant`` says which, and only where nobody else can see the tensor written to.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hilore.runtime.codecs.base import is_dense

_aten = torch.ops.aten
_ADD = _aten.add.Tensor
# Formulas that fill zeros of their own: the call, the node whose formula it is, the call without a mode.
_FILLS: dict[Any, tuple[str, Any]] = {
    _aten.scatter_add.default: ("GatherBackward", _aten.scatter_add_.default),
    _aten.index_put.default: ("IndexBackward", functools.partial(_aten._index_put_impl_.default, unsafe=True)),
}
# A formula that adds nothing itself and may give one input two gradients (x * x), so that an addition is the engine's.
_ADDS_NOTHING = "MulBackward"
_BETWEEN = ("torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/utils/_python_dispatch.py")
_ENGINE = ("_engine_run_backward", "torch/autograd/graph.py")


def prepare() -> None:
    """To be called before ``in_place_variant`` is asked: a small backward of its own, once per process."""
    _uses_of_accumulated()


def in_place_variant(func: Any, args: tuple[Any, ...], node: Any, made_here: bool) -> Callable[..., Tensor] | None:
    """What ``func(*args)`` would be in place, where the engine runs that without a mode; else None.

    To be asked from within a ``__torch_dispatch__``. ``node``: the autograd node that runs. ``made_here``: whether
    the first argument's storage was made while that node ran: a formula's zeros always are, an accumulated gradient
    only where one node gives it two parts. An addition of what a formula made itself may be the formula's own.
    """
    if torch.is_grad_enabled() or (func is not _ADD and func not in _FILLS) or not _called_by_engine(sys._getframe(1)):
        return None
    target: Tensor = args[0]
    if _storage_users(target) > 1:
        return None
    if func is not _ADD:
        owner, fill = _FILLS[func]
        return _callable(fill) if made_here and node.name().startswith(owner) else None
    added = args[1]
    if (made_here and not node.name().startswith(_ADDS_NOTHING)) or len(args) > 2 or not isinstance(added, Tensor):
        return None
    same = target.shape == added.shape and target.dtype == added.dtype and target.device == added.device
    alone = target._use_count() == _uses_of_accumulated()  # type: ignore[attr-defined]
    return _callable(_aten.add_.Tensor) if same and alone and is_dense(target) else None


def _callable(overload: Any) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = overload
    return found


def _storage_users(tensor: Tensor) -> int:
    """Tensors on the storage; the Python object that asks is one more user of it."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def _called_by_engine(frame: FrameType | None) -> bool:
    """Whether no Python function stands between the engine and ``__torch_dispatch__`` (``frame``, or one above it)."""
    frame = frame.f_back if frame is not None else None
    while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        frame = frame.f_back
    if frame is None:
        return True  # a thread of the engine's own, as for CUDA
    name, file = _ENGINE
    return frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file)


class _Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how often a gradient that only the engine holds is referred to inside of a mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _ADD and not torch.is_grad_enabled():
            self.uses = args[0]._use_count()
        return func(*args, **(kwargs or {}))


@functools.cache
def _uses_of_accumulated() -> int:
    """References to an accumulated gradient while a mode looks at it: the engine's and those of the call itself."""
    with torch.inference_mode(False), torch.enable_grad(), _Probe() as probe:
        middle = torch.ones(1, requires_grad=True) * 2.0
        (middle * 3.0 + middle * 4.0).backward()  # type: ignore[no-untyped-call]
        uses: int = probe.uses
    return uses
