"""The group codecs as torch operators, so that fake tensors and dispatch modes see one call each.

On CPU bfloat16 and float32 run the kernels of native.py; on devices for which torch.compile writes kernels, compiled.py
runs; all else is the reference. Results are equal bit for bit whichever runs. The operators take no part in
autograd: callers pass detached tensors.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from hilore.runtime.codecs import compiled, reference
from hilore.runtime.codecs.flat import decode_flat, encode_flat
from hilore.runtime.codecs.form import form_of
from hilore.runtime.codecs.native import NATIVE_DTYPES, native_kernels

COMPILED_DEVICES = ("cuda", "xpu")

_Library: Any = torch.library.Library  # torch leaves it untyped
_library = _Library("hilore", "FRAGMENT")
_library.define(
    "encode_groups(Tensor flat, Tensor? mean, str form, int salt, int start) -> (Tensor, Tensor, Tensor)",
)
_library.define(
    "decode_groups(Tensor codes, Tensor parameters, Tensor? mean, str form, SymInt numel, ScalarType dtype) -> Tensor"
)
_library.define("channel_mean(Tensor flat, SymInt channels) -> Tensor")


def encode_groups(
    flat: Tensor, mean: Tensor | None, form: str, salt: int = 0, start: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """As flat.encode_flat, the form by its name."""
    return cast(tuple[Tensor, Tensor, Tensor], torch.ops.hilore.encode_groups(flat, mean, form, salt, start))


def decode_groups(
    codes: Tensor, parameters: Tensor, mean: Tensor | None, form: str, numel: int, dtype: torch.dtype
) -> Tensor:
    """As flat.decode_flat, the form by its name."""
    return cast(Tensor, torch.ops.hilore.decode_groups(codes, parameters, mean, form, numel, dtype))


def channel_mean(flat: Tensor, channels: int) -> Tensor:
    """As reference.channel_mean."""
    return cast(Tensor, torch.ops.hilore.channel_mean(flat, channels))


def _encode(flat: Tensor, mean: Tensor | None, form: str, salt: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    if flat.device.type in COMPILED_DEVICES:
        run, chunk = compiled.compiled_encode, compiled.COMPILED_CHUNK
        return encode_flat(flat, mean, form_of(form), salt, start, run, chunk)
    return encode_flat(flat, mean, form_of(form), salt, start)


def _decode(
    codes: Tensor, parameters: Tensor, mean: Tensor | None, form: str, numel: int, dtype: torch.dtype
) -> Tensor:
    if codes.device.type in COMPILED_DEVICES:
        run, chunk = compiled.compiled_decode, compiled.COMPILED_CHUNK
        return decode_flat(codes, parameters, mean, form_of(form), numel, dtype, run, chunk)
    return decode_flat(codes, parameters, mean, form_of(form), numel, dtype)


def _encode_cpu(flat: Tensor, mean: Tensor | None, form: str, salt: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    kernels = native_kernels() if flat.dtype in NATIVE_DTYPES else None
    if kernels is None:
        return _encode(flat, mean, form, salt, start)
    return kernels.encode(flat.contiguous(), mean, form_of(form), salt, start)


def _decode_cpu(
    codes: Tensor, parameters: Tensor, mean: Tensor | None, form: str, numel: int, dtype: torch.dtype
) -> Tensor:
    kernels = native_kernels() if dtype in NATIVE_DTYPES else None
    if kernels is None:
        return _decode(codes, parameters, mean, form, numel, dtype)
    return kernels.decode(codes.contiguous(), parameters.contiguous(), mean, form_of(form), numel, dtype)


def _mean_cpu(flat: Tensor, channels: int) -> Tensor:
    kernels = native_kernels() if flat.dtype in NATIVE_DTYPES else None
    if kernels is None:
        return reference.channel_mean(flat, channels)
    return kernels.channel_mean(flat.contiguous(), channels)


def _encode_fake(flat: Tensor, mean: Tensor | None, form: str, salt: int, start: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes, numel = form_of(form), flat.numel()
    return (
        flat.new_empty(sizes.code_bytes(numel), dtype=torch.uint8),
        flat.new_empty(sizes.parameter_count(numel), dtype=sizes.parameter_dtype(flat.dtype)),
        flat.new_empty(1, dtype=torch.int64),
    )


def _decode_fake(
    codes: Tensor, parameters: Tensor, mean: Tensor | None, form: str, numel: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty(numel, dtype=dtype)


def _mean_fake(flat: Tensor, channels: int) -> Tensor:
    return flat.new_empty(channels)


for _name, _cpu, _other, _fake in (
    ("encode_groups", _encode_cpu, _encode, _encode_fake),
    ("decode_groups", _decode_cpu, _decode, _decode_fake),
    ("channel_mean", _mean_cpu, reference.channel_mean, _mean_fake),
):
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _other, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hilore::{_name}", _fake, lib=_library)
