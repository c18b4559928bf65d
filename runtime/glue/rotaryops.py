"""Rotary embedding of q and k as one torch operator, so that fake tensors and dispatch modes see one call.

On CPU bfloat16 and float32 run rotary.c, without it the formulas below, a few tokens at a time. The operator takes no
part in autograd (rotary.py does) and holds nothing but what it returns, or those few tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from hilore.runtime.codecs.native import NATIVE_DTYPES, NativeKernels, native_kernels

# Elements of each of the four temporaries that the formulas make for one piece of q or k.
_PIECE = 1 << 12

Strides = tuple[int, ...]


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """What transformers' ``apply_rotary_pos_emb`` of Llama and those after it computes, operator by operator.

    q, k [batch, heads, tokens, width], for ``dim`` 2 [batch, tokens, heads, width]; cos, sin [batch or 1, tokens,
    width], which get their heads at ``dim``.
    """
    cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    return (q * cos) + (_half_turned(q) * sin), (k * cos) + (_half_turned(k) * sin)


def _half_turned(x: Tensor) -> Tensor:
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-high, low), dim=-1)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int, q_strides: Strides, k_strides: Strides
) -> tuple[Tensor, Tensor]:
    """``plain_rotary``, bit for bit, in these strides. The last dimension of everything is contiguous."""
    return cast(tuple[Tensor, Tensor], torch.ops.hilore.rotary(q, k, cos, sin, dim, q_strides, k_strides))


def rotary_backward(
    q_grad: Tensor, k_grad: Tensor, cos: Tensor, sin: Tensor, dim: int, q_strides: Strides, k_strides: Strides
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k from those of ``plain_rotary``'s results, bit for bit those that autograd finds."""
    found = torch.ops.hilore.rotary_backward(q_grad, k_grad, cos, sin, dim, q_strides, k_strides)
    return cast(tuple[Tensor, Tensor], found)


@lru_cache(maxsize=1024)
def result_strides(
    shape: Sequence[int], strides: Strides, cos_shape: Sequence[int], cos_strides: Strides, dim: int
) -> Strides:
    """How ``plain_rotary``'s result for a tensor that lies like this lies."""
    with torch.no_grad():
        x = torch.empty_strided(tuple(shape), strides, device="meta")
        cos = torch.empty_strided(tuple(cos_shape), cos_strides, device="meta")
        result, _ = plain_rotary(x, x, cos, cos, dim)
        # On CPU, unlike here, a sum of contiguous tensors has the usual strides at sizes of one too.
        return (
            torch.empty_like(result, memory_format=torch.contiguous_format) if result.is_contiguous() else result
        ).stride()


class _Rotary(ctypes.Structure):
    """Rotary of rotary.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "cos", "sin", "q_out", "k_out")),
        *((name, ctypes.c_int64) for name in ("batches", "tokens", "width", "q_heads", "k_heads", "threads")),
        *((name, ctypes.c_int64 * 3) for name in ("q_by", "k_by", "q_out_by", "k_out_by")),
        *((name, ctypes.c_int64 * 2) for name in ("cos_by", "sin_by")),
    )


@cache
def _kernel(kernels: NativeKernels, name: str, dtype: torch.dtype) -> Any:
    function = getattr(kernels.library, f"{name}_{NATIVE_DTYPES[dtype]}")
    function.restype = None
    function.argtypes = (ctypes.POINTER(_Rotary),)
    return function


def _run(
    name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int, q_strides: Strides, k_strides: Strides
) -> tuple[Tensor, Tensor]:
    q_out, k_out = q.new_empty_strided(q.shape, q_strides), k.new_empty_strided(k.shape, k_strides)
    kernels = native_kernels() if q.dtype in NATIVE_DTYPES and q.device.type == "cpu" else None
    if kernels is None:
        for x, out in ((q, q_out), (k, k_out)):
            _in_pieces(_FORMULAS[name], x, cos.unsqueeze(dim), sin.unsqueeze(dim), 3 - dim, out)
        return q_out, k_out
    heads, tokens = dim, 3 - dim
    sizes = (q.shape[0], q.shape[tokens], q.shape[3], q.shape[heads], k.shape[heads], torch.get_num_threads())
    strides = (_by(each.stride(), heads, tokens) for each in (q, k, q_out, k_out))
    of_angles = (_by_row(each) for each in (cos, sin))
    pointers = (each.data_ptr() for each in (q, k, cos, sin, q_out, k_out))
    _kernel(kernels, name, q.dtype)(_Rotary(*pointers, *sizes, *strides, *of_angles))
    return q_out, k_out


def _by(strides: Strides, heads: int, tokens: int) -> tuple[int, int, int]:
    return strides[0], strides[heads], strides[tokens]


def _by_row(cos: Tensor) -> tuple[int, int]:
    return 0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1)


def _in_pieces(
    formula: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, cos: Tensor, sin: Tensor, tokens: int, out: Tensor
) -> None:
    step = max(1, _PIECE // max(1, x[:1].numel() // x.shape[tokens]))
    for batch in range(x.shape[0]):
        of_batch = slice(batch, batch + 1)
        angles = [each if each.shape[0] == 1 else each[of_batch] for each in (cos, sin)]
        for start in range(0, x.shape[tokens], step):
            size = min(step, x.shape[tokens] - start)
            piece, *angles_there = (each.narrow(tokens, start, size) for each in (x[of_batch], *angles))
            out[of_batch].narrow(tokens, start, size).copy_(formula(piece, *angles_there))


def _forward_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).add_(_half_turned(x).mul_(sin))


def _backward_formula(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = grad.shape[-1] // 2
    turned = grad * sin
    # Zero: autograd adds up the gradients of slices, filled up with zeros, which leaves no -0.
    turned = torch.cat((turned[..., half:], -turned[..., :half]), dim=-1).add_(0.0)
    return turned.add_(grad * cos)


_FORMULAS = {"rotary": _forward_formula, "rotary_backward": _backward_formula}


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    return _run("rotary", *args)


def _backward(*args: Any) -> tuple[Tensor, Tensor]:
    return _run("rotary_backward", *args)


def _fake(
    q: Tensor, k: Tensor, _cos: Tensor, _sin: Tensor, _dim: int, q_strides: Strides, k_strides: Strides
) -> tuple[Tensor, Tensor]:
    return q.new_empty_strided(q.shape, q_strides), k.new_empty_strided(k.shape, k_strides)


_Library: Any = torch.library.Library  # torch leaves it untyped
_library = _Library("hilore", "FRAGMENT")
for _name, _implementation in (("rotary", _forward), ("rotary_backward", _backward)):
    _library.define(
        f"{_name}(Tensor q, Tensor k, Tensor cos, Tensor sin, int dim, int[] q_strides, int[] k_strides) "
        "-> (Tensor, Tensor)"
    )
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hilore::{_name}", _fake, lib=_library)
