"""Other implementations of the same formats, where they are installed: torch's own casts, bitsandbytes, torchao."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.codec_times import SHAPES
from hilore.runtime.codecs import get_codec

Encode = Callable[[Tensor], Any]
Decode = Callable[[Any], Tensor]


def rival_rows(rounds: int) -> list[dict[str, object]]:
    """Ours and theirs on the same values, in turn: bits, relative error in percent, milliseconds."""
    shape = SHAPES[0]
    x = torch.randn(shape.tokens, shape.outputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    contenders: list[tuple[str, str, Encode, Decode, float]] = []
    for name in ("fp8-e4m3-plain", "fp8-e5m2-plain", "int8-g256", "int8-g128", "nf4-g64", "int4-g128"):
        codec = get_codec(name)
        contenders.append(
            (name, "this project", codec.encode, codec.decode, 8 * codec.nbytes(x.shape, x.dtype) / x.numel())
        )
    for name, dtype in (("fp8-e4m3-plain", torch.float8_e4m3fn), ("fp8-e5m2-plain", torch.float8_e5m2)):
        contenders.append((name, "torch cast", lambda t, d=dtype: t.to(d), lambda e: e.to(torch.bfloat16), 8.0))  # type: ignore[misc]
    contenders += [*_bitsandbytes(), *_torchao()]
    return [_measured(x, *contender, rounds) for contender in contenders]


def _bitsandbytes() -> list[tuple[str, str, Encode, Decode, float]]:
    if importlib.util.find_spec("bitsandbytes") is None:
        return []
    functional = importlib.import_module("bitsandbytes.functional")
    by = f"bitsandbytes {importlib.import_module('bitsandbytes').__version__}"
    return [
        (
            "int8-g256",
            by + " (8-bit code book)",
            lambda t: functional.quantize_blockwise(t.float(), blocksize=256),
            lambda e: functional.dequantize_blockwise(*e).to(torch.bfloat16),
            8.125,
        ),
        (
            "nf4-g64",
            by,
            lambda t: functional.quantize_4bit(t, blocksize=64, quant_type="nf4"),
            lambda e: functional.dequantize_4bit(*e),
            4.5,
        ),
    ]


def _torchao() -> list[tuple[str, str, Encode, Decode, float]]:
    if importlib.util.find_spec("torchao") is None:
        return []
    primitives = importlib.import_module("torchao.quantization.quant_primitives")
    by = f"torchao {importlib.import_module('torchao').__version__}"

    def encode(t: Tensor) -> Any:
        block = (1, 128)
        scale, zero = primitives.choose_qparams_affine(t, primitives.MappingType.SYMMETRIC, block, torch.int8)
        return primitives.quantize_affine(t, block, scale, zero, torch.int8), scale, zero

    def decode(e: Any) -> Tensor:
        found: Tensor = primitives.dequantize_affine(
            e[0], (1, 128), e[1], e[2], torch.int8, output_dtype=torch.bfloat16
        )
        return found

    return [("int8-g128", by, encode, decode, 8.25)]


def _measured(
    x: Tensor, codec: str, by: str, encode: Encode, decode: Decode, bits: float, rounds: int
) -> dict[str, object]:
    encoded = encode(x)
    decoded = decode(encoded)
    error = 100 * float((decoded.double() - x.double()).norm() / x.double().norm())
    took: dict[str, list[int]] = {"encode": [], "decode": []}
    for _ in range(max(3, rounds // 3)):
        for name, call in (("encode", lambda: encode(x)), ("decode", lambda: decode(encoded))):
            began = time.perf_counter_ns()
            call()
            took[name].append(time.perf_counter_ns() - began)
    times = {f"{name}_ms": round(statistics.median(values) / 1e6, 2) for name, values in took.items()}
    return {"codec": codec, "by": by, "bits": round(bits, 3), "error": round(error, 3)} | times
