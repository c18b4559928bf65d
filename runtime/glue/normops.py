"""RMSNorm's elementwise passes as torch operators, so that fake tensors and dispatch modes see one call each.

On CPU bfloat16 and float32 run norm.c; where it could not be built, or rows do not lie side by side, the same operators
run ATen's calls block by block. Results are equal bit for bit (short of which NaN a NaN is). No operator takes memory
beside its result, blocks aside. They take no part in autograd: rmsnorm.py calls them from an autograd function.

h is x in float32, ``inverse`` [..., 1] float32 its rows' 1 / sqrt(mean(h^2) + eps), ``weight`` [width] of x's dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from hilore.runtime.codecs.native import NATIVE_DTYPES, native_kernels

# ATen's calls run on so many elements at once.
_BLOCK_ELEMENTS = 1 << 14
# Dimensions that norm.c counts rows in.
_LEADING = 3
_OPERANDS = ("grad", "x", "inverse", "of_square", "out")

_Library: Any = torch.library.Library  # torch leaves it untyped
_library = _Library("hilore", "FRAGMENT")
_library.define("rms_square(Tensor x) -> Tensor")
_library.define("rms_scale(Tensor x, Tensor inverse, Tensor weight) -> Tensor")
_library.define("rms_product(Tensor grad, Tensor x, Tensor weight) -> Tensor")
_library.define("rms_gradient(Tensor grad, Tensor x, Tensor weight, Tensor inverse, Tensor of_square) -> Tensor")


def rms_square(x: Tensor) -> Tensor:
    """h * h, float32, lying as x does."""
    return cast(Tensor, torch.ops.hilore.rms_square(x))


def rms_scale(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """weight * (h * inverse), rounded to x's dtype after each product; lies as x does."""
    return cast(Tensor, torch.ops.hilore.rms_scale(x, inverse, weight))


def rms_product(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """(grad * weight) * h, float32, the first product in grad's dtype: its rows add up to ``inverse``'s gradient."""
    return cast(Tensor, torch.ops.hilore.rms_product(grad, x, weight))


def rms_gradient(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, of_square: Tensor) -> Tensor:
    """(grad * weight) * inverse + of_square * 2h, added in float32, in x's dtype; ``of_square`` [..., 1]: h^2's."""
    return cast(Tensor, torch.ops.hilore.rms_gradient(grad, x, weight, inverse, of_square))


class _Rows(ctypes.Structure):
    """Rows of norm.c."""

    _fields_ = (
        ("sizes", ctypes.c_int64 * _LEADING),
        ("width", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        *((name, ctypes.c_int64 * _LEADING) for name in _OPERANDS),
    )


@lru_cache(maxsize=1024)
def _rows(shape: torch.Size, threads: int, operands: tuple[tuple[str, tuple[int, ...]], ...]) -> _Rows | None:
    """Shape and strides by operand; None where there are too many dimensions. Shared, so not to be changed."""
    missing = _LEADING + 1 - len(shape)
    if missing < 0:
        return None
    described = _Rows((ctypes.c_int64 * _LEADING)(*[1] * missing, *shape[:-1]), shape[-1], threads)
    for name, stride in operands:
        getattr(described, name)[:] = (*[0] * missing, *stride[:-1])
    return described


def _ran(name: str, arguments: dict[str, Tensor]) -> bool:
    """Whether norm.c's function could run on these, which are in its order, ``out`` filled at the end."""
    dtype = arguments["x"].dtype
    if dtype not in NATIVE_DTYPES or not all(_fits(role, tensor, dtype) for role, tensor in arguments.items()):
        return False
    strides = tuple((role, tensor.stride()) for role, tensor in arguments.items() if role != "weight")
    rows, kernels = _rows(arguments["out"].shape, torch.get_num_threads(), strides), native_kernels()
    if rows is None or kernels is None:
        return False
    function = getattr(kernels.library, f"{name}_{NATIVE_DTYPES[dtype]}")
    function.restype = None
    function(ctypes.byref(rows), *(ctypes.c_void_p(tensor.data_ptr()) for tensor in arguments.values()))
    return True


def _fits(role: str, tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor is of the type that norm.c takes for this, its rows' elements side by side."""
    if role in ("inverse", "of_square"):
        return tensor.dtype == torch.float32
    return (role == "out" or tensor.dtype == dtype) and tensor.stride(-1) == 1


def _in_blocks(run: Callable[..., Tensor], out: Tensor, *operands: Tensor) -> Tensor:
    """``out`` filled with ``run(*operands)``, some rows at a time."""
    length, dim = max((size, place) for place, size in enumerate(out.shape[:-1]))
    step = max(1, _BLOCK_ELEMENTS * length // max(out.numel(), 1))
    for start in range(0, length, step):
        into, *parts = (tensor.narrow(dim, start, min(step, length - start)) for tensor in (out, *operands))
        into.copy_(run(*parts))
    return out


def _square(x: Tensor) -> Tensor:
    return _in_blocks(lambda a: a.float().pow(2), _like_square(x), x)


def _scale(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    def run(a: Tensor, factor: Tensor) -> Tensor:
        return weight * (a.float() * factor).to(x.dtype)

    return _in_blocks(run, _like_scale(x, inverse, weight), x, inverse)


def _product(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return _in_blocks(lambda g, a: (g * weight).float() * a, _like_product(grad, x, weight), grad, x)


def _gradient(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, of_square: Tensor) -> Tensor:
    def run(g: Tensor, a: Tensor, factor: Tensor, through: Tensor) -> Tensor:
        return ((g * weight).float() * factor + through * (a.float() * 2.0)).to(x.dtype)

    return _in_blocks(run, _like_gradient(grad, x, weight, inverse, of_square), grad, x, inverse, of_square)


def _square_cpu(x: Tensor) -> Tensor:
    out = _like_square(x)
    return out if _ran("rms_square", {"x": x, "out": out}) else _square(x)


def _scale_cpu(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    out = _like_scale(x, inverse, weight)
    ran = _ran("rms_scale", {"x": x, "inverse": inverse, "weight": weight, "out": out})
    return out if ran else _scale(x, inverse, weight)


def _product_cpu(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    out = _like_product(grad, x, weight)
    ran = _ran("rms_product", {"grad": grad, "x": x, "weight": weight, "out": out})
    return out if ran else _product(grad, x, weight)


def _gradient_cpu(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, of_square: Tensor) -> Tensor:
    out = _like_gradient(grad, x, weight, inverse, of_square)
    given = {"grad": grad, "x": x, "weight": weight, "inverse": inverse, "of_square": of_square, "out": out}
    return out if _ran("rms_gradient", given) else _gradient(grad, x, weight, inverse, of_square)


def _like_square(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


def _like_scale(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def _like_product(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(grad, dtype=torch.float32)


def _like_gradient(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, of_square: Tensor) -> Tensor:
    return torch.empty_like(grad, dtype=x.dtype)


for _name, _cpu, _other, _fake in (
    ("rms_square", _square_cpu, _square, _like_square),
    ("rms_scale", _scale_cpu, _scale, _like_scale),
    ("rms_product", _product_cpu, _product, _like_product),
    ("rms_gradient", _gradient_cpu, _gradient, _like_gradient),
):
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _other, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hilore::{_name}", _fake, lib=_library)
