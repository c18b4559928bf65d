"""Codecs: forms in which a unit's output may be kept until backward needs it (mode L).

``get_codec("int8-g128")`` gives a Codec; ``CODEC_NAMES`` lists all. See base.py for what every codec promises.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch

from hilore.runtime.codecs.base import Codec, Encoded
from hilore.runtime.codecs.exact import EXACT_BF16
from hilore.runtime.codecs.grouped import FP8_E4M3, INT4_G64, INT8_G64, INT8_G128
from hilore.runtime.errors import CodecError

_CODECS: dict[str, Codec] = {codec.name: codec for codec in (INT8_G128, INT8_G64, INT4_G64, FP8_E4M3, EXACT_BF16)}

CODEC_NAMES: tuple[str, ...] = tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """The codec of this name; raises CodecError with the closest known name."""
    codec = _CODECS.get(name)
    if codec is None:
        close = difflib.get_close_matches(name, CODEC_NAMES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "this version knows no name like it."
        raise CodecError(f"Unknown codec {name!r}; {hint} Known: {', '.join(CODEC_NAMES)}.", codec=name)
    return codec


def warm_up(names: Iterable[str], dtypes: Iterable[torch.dtype], device: torch.device | str = "cpu") -> None:
    """Runs each codec once on a small tensor of each dtype, so that no step pays for building kernels."""
    for dtype in dtypes:
        for name in names:
            codec = get_codec(name)
            codec.decode(codec.encode(torch.zeros(256, dtype=dtype, device=device)))


__all__ = ["CODEC_NAMES", "Codec", "Encoded", "get_codec", "warm_up"]
