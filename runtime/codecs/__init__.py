"""Codecs: forms in which a unit's output may be kept until backward needs it (mode L).

``get_codec("int8-g128")`` gives a Codec. ``CODEC_NAMES`` lists those in common use; form.py says which other names
there are (bits, groups, options). See base.py for what every codec promises.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch

from hilore.runtime.codecs.average import AverageCodec
from hilore.runtime.codecs.base import Codec, Encoded
from hilore.runtime.codecs.exact import EXACT
from hilore.runtime.codecs.form import BLOCK, all_names, parse_form
from hilore.runtime.codecs.grouped import GroupCodec
from hilore.runtime.codecs.pack import PackBf16
from hilore.runtime.codecs.seeds import rounding_seed
from hilore.runtime.codecs.tokens import token_codec
from hilore.runtime.errors import CodecError

_COMMON = (
    *("int8-g128", "int8-g64", "int4-g64", "fp8-e4m3"),
    *("int8-g64-cm-h64", "int8-g64-h64", "int8-g64-cm", "int8-g128-sr", "int8-g64-asym"),
    *(f"int{bits}-g32-s8-cm-h64" for bits in (12, 10, 9, 8, 7, 6, 5, 4)),
    *(f"int{bits}-g32-s8-h64" for bits in (12, 10, 9, 8, 7, 6, 5, 4)),
    *("int3-g64", "int2-g32-asym", "int4-g64-asym-sr", "int4-g64-oc", "nf4-g64", "fp4-g32", "fp8-e5m2"),
)
_codecs: dict[str, Codec] = {codec.name: codec for codec in (*EXACT, PackBf16(), AverageCodec())}

LOSSLESS_NAMES: tuple[str, ...] = (*(codec.name for codec in EXACT), PackBf16.name)
CODEC_NAMES: tuple[str, ...] = (*_COMMON, *LOSSLESS_NAMES)
# For comparison: plain casts, which lose values that are no 8-bit floats even where all are equal, and averages.
BASELINE_NAMES: tuple[str, ...] = ("fp8-e4m3-plain", "fp8-e5m2-plain", AverageCodec.name)


def get_codec(name: str) -> Codec:
    """The codec of this name; raises CodecError with the closest known name."""
    codec = _codecs.get(name)
    if codec is None:
        problem = codec_problem(name)
        if problem:
            raise CodecError(f"Unknown codec {name!r}; {problem}", codec=name)
        form = parse_form(name)
        made = GroupCodec(form) if form is not None else token_codec(name)
        assert made is not None
        codec = _codecs.setdefault(name, made)
    return codec


def loses(name: str | None) -> bool:
    """Whether a unit's codec changes values (None: no codec). All do that have no lossless codec's name."""
    return name is not None and name not in LOSSLESS_NAMES


def codec_problem(name: object) -> str:
    """Why nothing is called so, with the closest name; empty for the name of a codec."""
    if isinstance(name, str) and (name in _codecs or parse_form(name) is not None or token_codec(name) is not None):
        return ""
    close = difflib.get_close_matches(str(name), CODEC_NAMES, n=1) or difflib.get_close_matches(
        str(name), all_names(), n=1
    )
    hint = f"did you mean {close[0]!r}?" if close else "this version knows no name like it."
    return f"{hint} In common use: {', '.join(CODEC_NAMES)}."


def warm_up(names: Iterable[str], dtypes: Iterable[torch.dtype], device: torch.device | str = "cpu") -> None:
    """Runs each codec once on a small tensor of each dtype, so that no step pays for building kernels."""
    for dtype in dtypes:
        for name in names:
            codec = get_codec(name)
            codec.decode(codec.encode(torch.zeros(8, BLOCK, dtype=dtype, device=device)))


__all__ = [
    "BASELINE_NAMES",
    "CODEC_NAMES",
    "LOSSLESS_NAMES",
    "Codec",
    "Encoded",
    "codec_problem",
    "get_codec",
    "loses",
    "rounding_seed",
    "warm_up",
]
