"""Rotary embedding in one pass over q and k, forward and backward, with the bits of transformers' own function.

``apply_rotary_pos_emb``, a global of each modeling module, makes six tensors for each of q and k, and more in backward.
While a region runs under a plan a stand-in takes that global's place and runs the operator of rotaryops.py.

Nothing is assumed of the function: before its first use it runs on a few tokens, forward and backward, and shows that
it issues the operators of ``plain_rotary``, and no others, and that results and gradients have the same bits. Its
caller must let go of q and k: autograd would add what they get from elsewhere before the three terms they get here, one
by one, and a sum of floats depends on its order.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from hilore.runtime.ambient import running
from hilore.runtime.codecs.native import NATIVE_DTYPES
from hilore.runtime.derive import same_bits
from hilore.runtime.errors import HiloreWarning
from hilore.runtime.glue.caller import lets_go
from hilore.runtime.glue.decisions import KNOWN_AT_MOST, transformed
from hilore.runtime.glue.probing import Recorder, apart
from hilore.runtime.glue.rotaryops import Strides, plain_rotary, result_strides, rotary, rotary_backward

NAME = "apply_rotary_pos_emb"
_DIM = "unsqueeze_dim"
_PLAIN = (Tensor, FakeTensor)
_PROBED_TOKENS = 3


class _Rotary(torch.autograd.Function):
    """``plain_rotary`` that keeps cos and sin alone. ``merged``: whose gradient (q's, k's) may lie as its projection's
    result does, which spares the copy that autograd else makes there."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int, merged: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        ctx.dim, ctx.merged = dim, merged
        if _in_rows(q, k, cos, sin):
            q_strides, k_strides = (result_strides(x.shape, x.stride(), cos.shape, cos.stride(), dim) for x in (q, k))
            if q_strides[-1] == k_strides[-1] == 1:
                return rotary(q, k, cos, sin, dim, q_strides, k_strides)
        return plain_rotary(q, k, cos, sin, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q_grad, k_grad = grads
        cos, sin = ctx.saved_tensors
        again = torch.is_grad_enabled()
        if q_grad is None or k_grad is None or again or not _in_rows(q_grad, k_grad, cos, sin):
            return (*(_by_autograd(grad, cos, sin, ctx.dim, again) for grad in grads), None, None, None, None)
        lying = (_strides(grad.shape, merged) for grad, merged in zip((q_grad, k_grad), ctx.merged, strict=True))
        return (*rotary_backward(q_grad, k_grad, cos, sin, ctx.dim, *lying), None, None, None, None)


def _in_rows(*tensors: Tensor) -> bool:
    return all(tensor.stride(-1) == 1 for tensor in tensors)


def _strides(shape: torch.Size, merged: bool) -> Strides:
    """Contiguous; ``merged``: [batch, heads, tokens, width] as [batch, tokens, heads, width] lies."""
    first, second, width = shape[1:]
    whole = first * second * width
    return (whole, width, first * width, 1) if merged else (whole, second * width, width, 1)


def _by_autograd(grad: Tensor | None, cos: Tensor, sin: Tensor, dim: int, create_graph: bool) -> Tensor | None:
    """One gradient by the form's own graph: for gradients of gradients, and of tensors that lie in no rows."""
    if grad is None:
        return None
    with torch.enable_grad():
        # Of any values: the form is linear.
        x = grad.detach().requires_grad_()
        result, _ = plain_rotary(x, x, cos, sin, dim)
        (found,) = torch.autograd.grad(result, x, grad, create_graph=create_graph)
    return found


class RotaryCall:
    """Stands in for a modeling module's ``apply_rotary_pos_emb`` (``call``) while a region runs."""

    __slots__ = ("call", "known")

    def __init__(self, call: Callable[..., Any], known: dict[tuple[object, ...], bool]) -> None:
        self.call = call
        self.known = known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = running.frame
        if frame is None or not running.fused or len(args) != 4 or not kwargs.keys() <= {_DIM}:
            return self.call(*args, **kwargs)
        q, k, cos, sin = args
        dim, code = kwargs.get(_DIM, 1), sys._getframe(1).f_code

        def decide() -> bool:
            return _takes(q, k, cos, sin, dim) and lets_go(code, NAME) and self._is_known(q, dim, kwargs)

        if not frame.decisions.take(self.known, decide):
            return self.call(*args, **kwargs)
        return _Rotary.apply(q, k, cos, sin, dim, (_is_merged(q, dim), _is_merged(k, dim)))  # type: ignore[no-untyped-call]

    def _is_known(self, q: Tensor, dim: int, kwargs: dict[str, Any]) -> bool:
        key = (self.call, q.dtype, dim, not kwargs, type(q))
        if key not in self.known and len(self.known) < KNOWN_AT_MOST:
            self.known[key] = _Probe(self.call, q, dim, kwargs).agrees()
        return self.known.get(key, False)


def _takes(q: Any, k: Any, cos: Any, sin: Any, dim: Any) -> bool:
    """What no replay sees otherwise than its forward: how tensors lie is none of it, placeholders lie otherwise."""
    tensors = (q, k, cos, sin)
    if dim not in (1, 2) or any(type(each) not in _PLAIN for each in tensors) or q.dtype not in NATIVE_DTYPES:
        return False
    if any(each.dtype != q.dtype or each.device.type != "cpu" for each in tensors) or not torch.is_grad_enabled():
        return False
    if not q.requires_grad or not k.requires_grad or cos.requires_grad or sin.requires_grad:
        return False
    if q is k or transformed():  # q and k: their gradients would be added up in another order
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or q.numel() == 0 or k.numel() == 0:
        return False
    batch, tokens, width = q.shape[0], q.shape[3 - dim], q.shape[3]
    alike = k.shape[0] == batch and k.shape[3 - dim] == tokens and k.shape[3] == width
    return alike and width % 2 == 0 and cos.shape[1:] == (tokens, width) and cos.shape[0] in (1, batch)


def _is_merged(x: Tensor, dim: int) -> bool:
    """Whether x is a projection's result [batch, tokens, heads * width], split into heads and transposed, and nobody
    looks at its gradient in between: however that lies, the projection gets it contiguous.
    """
    transposed: Any = x.grad_fn
    if (
        dim != 1
        or x._backward_hooks
        or x.retains_grad
        or transposed is None
        or transposed.name() != "TransposeBackward0"
    ):
        return False
    if {transposed._saved_dim0, transposed._saved_dim1} != {1, 2}:
        return False
    ((view, _),) = transposed.next_functions
    if view is None or view.name() not in ("ViewBackward0", "UnsafeViewBackward0"):
        return False
    batch, heads, tokens, width = x.shape
    return tuple(view._saved_self_sym_sizes) == (batch, tokens, heads * width)


class _Probe:
    """Runs of the function, forward and backward, on a few tokens with made-up values."""

    def __init__(self, call: Callable[..., Any], q: Tensor, dim: int, kwargs: dict[str, Any]) -> None:
        self._call = call
        self._dim = dim
        self._kwargs = kwargs
        width, heads, tokens = q.shape[-1], 2, _PROBED_TOKENS
        with torch.no_grad():
            sizes = ((2, tokens, heads, width), (2, tokens, 1, width), (1, tokens, width), (1, tokens, width))
            self._given = [_made_up(size, q.dtype, place) for place, size in enumerate(sizes)]

    def agrees(self) -> bool:
        """Whether it is ``plain_rotary``; a HiloreWarning where it is, but not with our bits."""
        with apart():
            own = None
            with suppress(Exception):  # of a function that takes no such tensors, or changes them in place
                own = self._run(lambda *tensors: self._call(*tensors, **self._kwargs))
            form = self._run(lambda q, k, cos, sin: plain_rotary(q, k, cos, sin, self._dim))
            if own is None or form is None or own[0] != form[0]:
                return False
            if isinstance(self._given[0], FakeTensor):
                return True
            ours = self._run(lambda *tensors: _Rotary.apply(*tensors, self._dim, (False, False)))  # type: ignore[no-untyped-call]
        if ours is not None and all(map(same_bits, own[1], ours[1])):
            return True
        _tell(self._call)
        return False

    def _run(self, forward: Callable[..., Any]) -> tuple[list[object], list[Tensor]] | None:
        """Its operators; results and gradients. None: not even of the kind."""
        leaves = [each.clone().requires_grad_() for each in self._given[:2]]
        with Recorder() as recorder:
            q, k = (leaf.transpose(1, self._dim % 2 + 1) for leaf in leaves)
            results = forward(q, k, *self._given[2:])
            if type(results) is not tuple or len(results) != 2:
                return None
            if any(not isinstance(each, Tensor) or not each.requires_grad for each in results):
                return None
            if any(each.shape != x.shape or each.dtype != x.dtype for each, x in zip(results, (q, k), strict=True)):
                return None
            grads = [_made_up(each.shape, each.dtype, 4 + place) for place, each in enumerate(results)]
            found = torch.autograd.grad(results, leaves, grads)
        return recorder.operators, [*(each.detach() for each in results), *found]


def _made_up(shape: tuple[int, ...], dtype: torch.dtype, place: int) -> Tensor:
    """Signed zeros among them."""
    values = torch.arange(torch.Size(shape).numel(), device="cpu").mul(1.7 + place / 7).sin().mul(3)
    values[::5] *= 0.0
    return values.to(dtype).reshape(shape)


def _tell(call: Callable[..., Any]) -> None:
    warnings.warn(
        f"{getattr(call, '__module__', '')}.{NAME}: this torch gives its operators other bits than those that were "
        "expected, so it runs as it is, which takes longer and holds more than a trace on another torch has predicted.",
        HiloreWarning,
        stacklevel=2,
    )


class RotaryGlobal:
    """``apply_rotary_pos_emb`` of one modeling module; entered, with a stand-in in its place, by any number of regions
    and threads at once. What someone else puts there meanwhile stays."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._lock = threading.Lock()
        self._users = 0
        self._stand_in: RotaryCall | None = None
        self.known: dict[tuple[object, ...], bool] = {}

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0 and NAME in self._namespace:
                # A new one each time: whatever is found there may call an earlier one.
                self._stand_in = RotaryCall(self._namespace[NAME], self.known)
                self._namespace[NAME] = self._stand_in
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users or self._stand_in is None:
                return
            original, there = self._stand_in.call, self._namespace.get(NAME)
            if there is self._stand_in:
                self._namespace[NAME] = original
            self._stand_in = None


_globals: dict[int, RotaryGlobal] = {}


def rotary_globals(region: nn.Module) -> list[RotaryGlobal]:
    """Those whose function a module of this region calls in its forward."""
    found: dict[int, RotaryGlobal] = {}
    for module in region.modules():
        forward: Any = inspect.unwrap(type(module).forward)
        namespace, code = getattr(forward, "__globals__", None), getattr(forward, "__code__", None)
        if namespace is not None and code is not None and NAME in code.co_names and NAME in namespace:
            found[id(namespace)] = _globals.setdefault(id(namespace), RotaryGlobal(namespace))
    return list(found.values())
