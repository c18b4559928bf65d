"""pack-bf16: bfloat16 in 12.25 bits and a short list, bit for bit.

Exponents of neighbours are much alike: those of normally distributed values have an entropy of 2.5 bits. A group of 32
elements keeps its largest exponent in one byte, sign and mantissa of each element as they are, and four bits for how
far its exponent lies below: 1 to 15 for ``largest - 14`` to ``largest``, 0 for zeros and subnormals. Elements below
that window (1 in 10,000 of normally distributed ones) stand in a list with their places. Where the list is too short
for a tensor, the codec cannot hold it: see LosslessCodec.

Layout of a group, 49 bytes: the largest exponent; 32 bytes ``sign << 7 | mantissa``; 16 bytes, of which byte i has the
code of element i in its low and that of element i + 16 in its high half. A last group is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hilore.runtime.codecs import ops
from hilore.runtime.codecs.base import Encoded, element_count, flat_view, is_abstract, is_dense, memory_order
from hilore.runtime.codecs.compiled import COMPILED_CHUNK, compiled_rows
from hilore.runtime.codecs.exact import LosslessCodec
from hilore.runtime.codecs.flat import EAGER_CHUNK
from hilore.runtime.codecs.native import native_kernels

GROUP, GROUP_BYTES, WINDOW = 32, 49, 15
# One element of so many may lie below its window, and a few of a small tensor.
LIST_SHARE, LIST_LEAST = 512, 16
# Bytes per element of a chunk that plain torch, or a compiled graph between its kernels, holds at once.
EAGER_BYTES, COMPILED_BYTES = 32, 12


def code_bytes(numel: int) -> int:
    return (numel + GROUP - 1) // GROUP * GROUP_BYTES


def list_room(numel: int) -> int:
    return min(numel, numel // LIST_SHARE + LIST_LEAST)


class PackBf16(LosslessCodec):
    """bfloat16 tensors of fewer than 2**31 elements at 12.35 bits: payload codes uint8, and the list: places int32,
    values int16."""

    name = "pack-bf16"
    holds_activations = True

    def _payload(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        flat = flat_view(tensor) if is_dense(tensor) else tensor.permute(memory_order(tensor)).reshape(-1)
        codes, places, values, missed = pack(flat.view(torch.int16))
        if not is_abstract(missed) and int(missed) > places.numel():
            return None
        return codes, places, values

    def _restored(self, encoded: Encoded) -> Tensor:
        codes, places, values = encoded.payload
        return unpack(codes, places, values, element_count(encoded.shape)).view(torch.bfloat16)

    def encode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        lists = 6 * list_room(element_count(shape)) * torch.get_num_threads()
        return lists + self.decode_workspace_bytes(shape, dtype, device_type)

    def decode_workspace_bytes(self, shape: Sequence[int], dtype: torch.dtype, device_type: str = "cpu") -> int:
        padded = element_count(shape) + 2 * GROUP
        if device_type in ops.COMPILED_DEVICES:
            return 64 + COMPILED_BYTES * min(padded, COMPILED_CHUNK)
        if device_type == "cpu" and native_kernels() is not None:
            return 64
        return 64 + EAGER_BYTES * min(padded, EAGER_CHUNK)

    def _packed_bytes(self, numel: int, dtype: torch.dtype) -> int | None:
        if dtype != torch.bfloat16 or numel >= 1 << 31:
            return None
        return code_bytes(numel) + 6 * list_room(numel)


def pack_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Groups ``[n, GROUP]`` int16 -> codes ``[n, GROUP_BYTES]`` uint8, and how many of each group lie below its window,
    int32 ``[n]``."""
    bits = rows.to(torch.int32) & 0xFFFF
    exponents = bits >> 7 & 0xFF
    top = exponents.amax(1, keepdim=True)
    below = (top - exponents >= WINDOW) & (exponents != 0)
    codes = torch.where((exponents == 0) | below, 0, exponents - top + WINDOW)
    pairs = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    packed = torch.cat((top, (bits >> 8 & 0x80) | (bits & 0x7F), pairs), 1)
    return packed.to(torch.uint8), below.sum(1, dtype=torch.int32)


def unpack_rows(codes: Tensor) -> Tensor:
    """Groups ``[n, GROUP]`` int16 from codes ``[n, GROUP_BYTES]``; what lies below a window has exponent 0."""
    wide = codes.to(torch.int32)
    top, low, pairs = wide[:, :1], wide[:, 1 : 1 + GROUP], wide[:, 1 + GROUP :]
    code = torch.cat((pairs & 15, pairs >> 4), 1)
    exponents = torch.where(code == 0, 0, top - WINDOW + code)
    return ((low & 0x80) << 8 | exponents << 7 | (low & 0x7F)).to(torch.int16)


def _pack(flat: Tensor, run: Callable[..., Any] = pack_rows, chunk: int = EAGER_CHUNK) -> tuple[Tensor, ...]:
    numel = flat.numel()
    codes = torch.empty(code_bytes(numel), dtype=torch.uint8, device=flat.device)
    # What the list does not need says again what the first element is.
    places = torch.zeros(list_room(numel), dtype=torch.int32, device=flat.device)
    values = flat[:1].repeat(list_room(numel))
    count = 0
    for start, rows in _rows_of(flat, chunk):
        packed, below = run(rows)
        codes[start // GROUP * GROUP_BYTES :][: packed.numel()] = packed.view(-1)
        missed = int(below.sum())
        if count + missed > places.numel():
            # Whatever is left, the list is too short.
            count += missed
            break
        if not missed:
            continue
        groups = below.nonzero().view(-1)
        found = _places_below(rows[groups], groups) + start
        places[count : count + missed] = found.to(torch.int32)
        values[count : count + missed] = flat[found]
        count += missed
    return codes, places, values, torch.full((1,), count, dtype=torch.int64, device=flat.device)


def _places_below(rows: Tensor, groups: Tensor) -> Tensor:
    """Places, int64, of the elements below their group's window, counted from the first group of all."""
    exponents = rows.to(torch.int32) >> 7 & 0xFF
    below = (exponents.amax(1, keepdim=True) - exponents >= WINDOW) & (exponents != 0)
    row, column = below.nonzero(as_tuple=True)
    return groups[row] * GROUP + column


def _rows_of(flat: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """(first element, groups) of chunks of whole groups, then of what is left, filled up with zeros."""
    numel = flat.numel()
    whole = numel // GROUP * GROUP
    for start in range(0, whole, chunk):
        yield start, flat[start : min(start + chunk, whole)].view(-1, GROUP)
    if whole < numel:
        yield whole, torch.cat((flat[whole:], flat.new_zeros(GROUP - numel + whole))).view(1, GROUP)


def _unpack(
    codes: Tensor,
    places: Tensor,
    values: Tensor,
    numel: int,
    run: Callable[..., Any] = unpack_rows,
    chunk: int = EAGER_CHUNK,
) -> Tensor:
    flat = torch.empty(numel, dtype=torch.int16, device=codes.device)
    groups = codes.view(-1, GROUP_BYTES)
    for first in range(0, groups.shape[0], chunk // GROUP):
        found = run(groups[first : first + chunk // GROUP]).view(-1)
        room = flat[first * GROUP :][: found.numel()]
        room.copy_(found[: room.numel()])
    if numel:
        flat[places.long()] = values
    return flat


def _pack_any(flat: Tensor) -> tuple[Tensor, ...]:
    if flat.device.type in ops.COMPILED_DEVICES:
        return _pack(flat, lambda rows: compiled_rows(pack_rows, rows), COMPILED_CHUNK)
    return _pack(flat)


def _unpack_any(codes: Tensor, places: Tensor, values: Tensor, numel: int) -> Tensor:
    if codes.device.type in ops.COMPILED_DEVICES:
        return _unpack(codes, places, values, numel, lambda rows: compiled_rows(unpack_rows, rows), COMPILED_CHUNK)
    return _unpack(codes, places, values, numel)


def _pack_cpu(flat: Tensor) -> tuple[Tensor, ...]:
    kernels = native_kernels()
    if kernels is None:
        return _pack_any(flat)
    codes = torch.empty(code_bytes(flat.numel()), dtype=torch.uint8)
    places = torch.empty(list_room(flat.numel()), dtype=torch.int32)
    values = torch.empty(list_room(flat.numel()), dtype=torch.int16)
    count = kernels.pack_bf16(flat.contiguous(), codes, places, values)
    return codes, places, values, torch.full((1,), count, dtype=torch.int64)


def _unpack_cpu(codes: Tensor, places: Tensor, values: Tensor, numel: int) -> Tensor:
    kernels = native_kernels()
    if kernels is None:
        return _unpack_any(codes, places, values, numel)
    flat = torch.empty(numel, dtype=torch.int16)
    kernels.unpack_bf16(codes.contiguous(), places.contiguous(), values.contiguous(), flat)
    return flat


def _pack_fake(flat: Tensor) -> tuple[Tensor, ...]:
    room = list_room(flat.numel())
    return (
        flat.new_empty(code_bytes(flat.numel()), dtype=torch.uint8),
        flat.new_empty(room, dtype=torch.int32),
        flat.new_empty(room),
        flat.new_empty(1, dtype=torch.int64),
    )


def _unpack_fake(codes: Tensor, places: Tensor, values: Tensor, numel: int) -> Tensor:
    return codes.new_empty(numel, dtype=torch.int16)


_Library: Any = torch.library.Library  # torch leaves it untyped
_library = _Library("hilore", "FRAGMENT")
_library.define("pack_bf16(Tensor flat) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define("unpack_bf16(Tensor codes, Tensor places, Tensor values, SymInt numel) -> Tensor")
for _name, _cpu, _other, _fake in (
    ("pack_bf16", _pack_cpu, _pack_any, _pack_fake),
    ("unpack_bf16", _unpack_cpu, _unpack_any, _unpack_fake),
):
    _library.impl(_name, _cpu, "CPU")
    _library.impl(_name, _other, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hilore::{_name}", _fake, lib=_library)


def pack(flat: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, places and values of the list (int32 and int16 ``[list_room]``), and how many elements it holds, int64
    ``[1]``: more than there is room for where it is too short, when nothing else counts.

    ``flat``: the bits, int16 ``[n]``. One operator, so that fake tensors and dispatch modes see one call.
    """
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], torch.ops.hilore.pack_bf16(flat))


def unpack(codes: Tensor, places: Tensor, values: Tensor, numel: int) -> Tensor:
    """The bits, int16 ``[numel]``, of a list that held all it should."""
    return cast(Tensor, torch.ops.hilore.unpack_bf16(codes, places, values, numel))
