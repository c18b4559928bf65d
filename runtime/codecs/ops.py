"""The group codecs as two torch operators, so that fake tensors and dispatch modes see one call each.

On CPU bfloat16 and float32 run the kernels of native.py, other dtypes and devices the reference. Results are equal
bit for bit whichever runs. The operators take no part in autograd: callers pass detached tensors.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from hilore.runtime.codecs import reference
from hilore.runtime.codecs.native import NATIVE_DTYPES, native_kernels

_Library: Any = torch.library.Library  # torch leaves it untyped
_library = _Library("hilore", "FRAGMENT")
_library.define("encode_groups(Tensor flat, str kind, int group) -> (Tensor, Tensor, Tensor)")
_library.define("decode_groups(Tensor codes, Tensor peaks, str kind, int group, SymInt numel) -> Tensor")


def encode_groups(flat: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.encode_groups."""
    return cast(tuple[Tensor, Tensor, Tensor], torch.ops.hilore.encode_groups(flat, kind, group))


def decode_groups(codes: Tensor, peaks: Tensor, kind: str, group: int, numel: int) -> Tensor:
    """As reference.decode_groups."""
    return cast(Tensor, torch.ops.hilore.decode_groups(codes, peaks, kind, group, numel))


def _encode_cpu(flat: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    kernels = native_kernels() if flat.dtype in NATIVE_DTYPES else None
    if kernels is None:
        return reference.encode_groups(flat, kind, group)
    return kernels.encode_groups(flat.contiguous(), kind, group)


def _decode_cpu(codes: Tensor, peaks: Tensor, kind: str, group: int, numel: int) -> Tensor:
    kernels = native_kernels() if peaks.dtype in NATIVE_DTYPES else None
    if kernels is None:
        return reference.decode_groups(codes, peaks, kind, group, numel)
    return kernels.decode_groups(codes.contiguous(), peaks.contiguous(), kind, group, numel)


def _encode_fake(flat: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    form, numel = reference.FORMATS[kind], flat.numel()
    return (
        flat.new_empty(form.code_count(numel, group), dtype=form.code_dtype),
        flat.new_empty(reference.group_count(numel, group)),
        flat.new_empty(1, dtype=torch.int64),
    )


def _decode_fake(codes: Tensor, peaks: Tensor, kind: str, group: int, numel: int) -> Tensor:
    return peaks.new_empty(numel)


_library.impl("encode_groups", _encode_cpu, "CPU")
_library.impl("decode_groups", _decode_cpu, "CPU")
_library.impl("encode_groups", reference.encode_groups, "CompositeExplicitAutograd")
_library.impl("decode_groups", reference.decode_groups, "CompositeExplicitAutograd")
torch.library.register_fake("hilore::encode_groups", _encode_fake, lib=_library)
torch.library.register_fake("hilore::decode_groups", _decode_fake, lib=_library)
