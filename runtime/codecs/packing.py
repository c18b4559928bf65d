"""Codes of any number of bits, packed tightly."""

from __future__ import annotations

import torch
from torch import Tensor

from hilore.runtime.codecs.form import BLOCK, GroupForm


def pack(codes: Tensor, form: GroupForm) -> Tensor:
    """int32 codes ``[blocks, 256]`` as uint8 ``[blocks, 32 bits]``.

    Per bit field of w bits, 32 w bytes: byte j holds the fields of elements j, j + 32 w, j + 2 * 32 w, ... from its
    low bits up.
    """
    parts, shift = [], 0
    for width in form.pieces:
        field = (codes >> shift) & ((1 << width) - 1)
        sections = field.view(-1, 8 // width, BLOCK * width // 8).unbind(1)
        byte = sections[0]
        for place, section in enumerate(sections[1:], 1):
            byte = byte | (section << (width * place))
        parts.append(byte.to(torch.uint8))
        shift += width
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def unpack(packed: Tensor, form: GroupForm) -> Tensor:
    """The int32 codes ``[blocks, 256]``."""
    codes, shift, start = None, 0, 0
    for width in form.pieces:
        size = BLOCK * width // 8
        byte = packed[:, start : start + size].to(torch.int32)
        sections = [(byte >> (width * place)) & ((1 << width) - 1) for place in range(8 // width)]
        field = (sections[0] if len(sections) == 1 else torch.cat(sections, dim=1)) << shift
        codes = field if codes is None else codes | field
        shift, start = shift + width, start + size
    assert codes is not None
    return codes
