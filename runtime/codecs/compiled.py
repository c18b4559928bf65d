"""The functions on blocks through torch.compile: what encodes and decodes on devices for which Inductor writes kernels.

One graph per direction, form and dtype, with the number of blocks and of channels as symbols, so that lengths that
change compile nothing again. The results are those of reference.py bit for bit: products and sums are kept apart and
divisions rounded as in plain torch.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hilore.runtime.codecs.form import GroupForm
from hilore.runtime.codecs.reference import decode_blocks, encode_blocks
from hilore.runtime.notice import notice

# Elements per call: bounds what a graph keeps between two kernels.
COMPILED_CHUNK = 1 << 22
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
}
_failed: set[str] = set()


def compiled_encode(
    rows: Tensor, form: GroupForm, mean: Tensor | None, salt: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.encode_blocks; plain torch, with one notice per process, where nothing can be compiled."""
    function = _compiled(encode_blocks, form, rows.dtype, mean is not None)
    if rows.shape[0] > 1:
        found: tuple[Tensor, Tensor, Tensor] = _run(function, encode_blocks, (rows, form, mean, salt))
        return found
    # A length of 1 would be a graph of its own.
    codes, parameters, bad = _run(function, encode_blocks, (_doubled(rows), form, mean, salt))
    return codes[:1], parameters[:1], bad


def compiled_decode(
    codes: Tensor, parameters: Tensor, form: GroupForm, dtype: torch.dtype, mean: Tensor | None
) -> Tensor:
    """As reference.decode_blocks; plain torch, with one notice per process, where nothing can be compiled."""
    function = _compiled(decode_blocks, form, dtype, mean is not None)
    if codes.shape[0] > 1:
        found: Tensor = _run(function, decode_blocks, (codes, parameters, form, dtype, mean))
        return found
    doubled = _doubled(codes), _doubled(parameters)
    result: Tensor = _run(function, decode_blocks, (*doubled, form, dtype, mean))
    first: Tensor = result[:1]
    return first


def compiled_rows(plain: Callable[..., Any], rows: Tensor) -> Any:
    """``plain(rows)``, a function that treats each row by itself.

    Plain torch, with one notice per process, where nothing can be compiled.
    """
    function = _compiled_rows(plain)
    if rows.shape[0] > 1:
        return _run(function, plain, (rows,))
    found = _run(function, plain, (_doubled(rows),))
    return found[:1] if isinstance(found, Tensor) else tuple(each[:1] for each in found)


@cache
def _compiled_rows(plain: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(plain, fullgraph=True, options=_OPTIONS)
    return compiled


@cache
def _compiled(function: Callable[..., Any], form: GroupForm, dtype: torch.dtype, centred: bool) -> Callable[..., Any]:
    """A graph of its own: torch keeps graphs, and counts recompilations, per code object."""
    direction = function.__name__
    code = function.__code__.replace(co_name=f"{direction}_{form.name}_{dtype}".replace("-", "_").replace(".", "_"))
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, options=_OPTIONS)
    return compiled


def _run(function: Callable[..., Any], plain: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    device_type = arguments[0].device.type
    if device_type in _failed:
        return plain(*arguments)
    try:
        return function(*(_own(a) if isinstance(a, Tensor) else a for a in arguments))
    except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError, ImportError) as error:
        _failed.add(device_type)
        notice(
            f"Codecs cannot be compiled for {device_type}: {str(error).strip().splitlines()[0]}. They run as plain "
            "torch operations with the same results, slower by an order of magnitude; install a compiler that "
            "torch.compile finds (Triton for CUDA)"
        )
        return plain(*arguments)


def _own(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that is no view (torch compiles anew for a view of something else), its number of
    blocks or channels a symbol of its own (torch takes two sizes that are equal once for equal)."""
    own = tensor.new_empty(0)
    own.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if own.dim():
        torch._dynamo.mark_dynamic(own, 0)
    return own


def _doubled(rows: Tensor) -> Tensor:
    return torch.cat((rows, torch.zeros_like(rows)))
