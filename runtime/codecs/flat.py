"""A flat tensor through the functions on blocks, chunk by chunk, so that working memory is bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hilore.runtime.codecs.form import BLOCK, GroupForm, blocks
from hilore.runtime.codecs.reference import decode_blocks, encode_blocks, salt_of

EncodeBlocks = Callable[[Tensor, GroupForm, Tensor | None, Tensor | None], tuple[Tensor, Tensor, Tensor]]
DecodeBlocks = Callable[[Tensor, Tensor, GroupForm, torch.dtype, Tensor | None], Tensor]
EAGER_CHUNK = 1 << 20


def encode_flat(
    flat: Tensor,
    mean: Tensor | None,
    form: GroupForm,
    salt: int,
    start: int,
    run: EncodeBlocks = encode_blocks,
    chunk: int = EAGER_CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[code_bytes]`` uint8, parameters ``[parameter_count]``, the number of groups that failed, int64 ``[1]``.

    ``flat`` is ``[n]`` and begins at element ``start`` of its tensor (a multiple of BLOCK); ``mean`` ``[channels]``:
    element i has channel (start + i) mod channels. ``salt``: the seed of stochastic rounding.
    """
    numel = flat.numel()
    codes = torch.empty(form.code_bytes(numel), dtype=torch.uint8, device=flat.device)
    parameters = torch.empty(form.parameter_count(numel), dtype=form.parameter_dtype(flat.dtype), device=flat.device)
    bad = torch.zeros(1, dtype=torch.int64, device=flat.device)
    for first, last in _spans(numel, chunk):
        means = None if mean is None else _from_channel(mean, start + first)
        salts = torch.tensor(salt_of(salt, start + first), dtype=torch.int32) if form.stochastic else None
        found = run(_rows(flat[first:last], means), form, means, salts)
        for target, part, per_block in zip(
            (codes, parameters), found, (form.block_bytes, form.block_parameters), strict=False
        ):
            place = first // BLOCK * per_block
            room = target[place : place + part.numel()]
            room.copy_(part.reshape(-1)[: room.numel()])
        bad += found[2]
    return codes, parameters, bad


def decode_flat(
    codes: Tensor,
    parameters: Tensor,
    mean: Tensor | None,
    form: GroupForm,
    numel: int,
    dtype: torch.dtype,
    run: DecodeBlocks = decode_blocks,
    chunk: int = EAGER_CHUNK,
) -> Tensor:
    """The flat ``[numel]`` tensor of ``dtype``."""
    flat = torch.empty(numel, dtype=dtype, device=codes.device)
    for first, last in _spans(numel, chunk):
        where = first // BLOCK, blocks(last - first)
        means = None if mean is None else _from_channel(mean, first)
        found = run(
            whole_rows(codes, *where, form.block_bytes),
            whole_rows(parameters, *where, form.block_parameters),
            form,
            dtype,
            means,
        )
        flat[first:last].copy_(found.reshape(-1)[: last - first])
    return flat


def _spans(numel: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of chunks of whole blocks, then of what is left."""
    whole = numel // BLOCK * BLOCK
    yield from ((first, min(first + chunk, whole)) for first in range(0, whole, chunk))
    if whole < numel:
        yield whole, numel


def _rows(part: Tensor, mean: Tensor | None) -> Tensor:
    """``[blocks, 256]``. The last block is filled up with its last value, or with the means so that they cancel."""
    missing = -part.numel() % BLOCK
    if not missing:
        return part.view(-1, BLOCK)
    if mean is None:
        filling = part[-1:].expand(missing)
    else:
        filling = mean[(torch.arange(missing, device=part.device) + part.numel()) % mean.shape[0]].to(part.dtype)
    return torch.cat((part, filling)).view(-1, BLOCK)


def whole_rows(part: Tensor, first: int, count: int, size: int) -> Tensor:
    """``[count, size]``: what ``count`` blocks from number ``first`` on hold, zeros where the last one is cut short."""
    if not size:
        return part.new_empty(count, 0)
    found = part[first * size : (first + count) * size]
    missing = count * size - found.numel()
    return (torch.cat((found, found.new_zeros(missing))) if missing else found).view(-1, size)


def _from_channel(mean: Tensor, start: int) -> Tensor:
    """The means, beginning with the channel of element ``start``."""
    offset = start % mean.shape[0]
    return torch.roll(mean, -offset) if offset else mean
