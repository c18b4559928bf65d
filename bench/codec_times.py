"""How long codecs take beside the GEMM that made the tensor, in one run and on one thread."""

from __future__ import annotations

import ctypes
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hilore.runtime.codecs import get_codec, warm_up


@dataclass(frozen=True, slots=True)
class Shape:
    """``tokens`` x ``inputs`` times ``inputs`` x ``outputs``."""

    tokens: int
    inputs: int
    outputs: int

    @property
    def label(self) -> str:
        return f"{self.tokens} x {self.inputs} -> {self.outputs}"


# The gate projection of a 3B model, and of SmolLM2-135M with as many tokens.
SHAPES = (Shape(1024, 2048, 11008), Shape(1024, 576, 1536))


@dataclass(frozen=True, slots=True)
class CodecTime:
    """Medians over rounds in which every codec, the GEMM and a copy took turns.

    ``moved_bytes``: read and written by one encode and one decode."""

    codec: str
    encode_ns: int
    decode_ns: int
    moved_bytes: int
    bits: float

    @property
    def bytes_per_ns(self) -> float:
        return self.moved_bytes / (self.encode_ns + self.decode_ns)


@dataclass(frozen=True, slots=True)
class Times:
    """``copy_bytes_per_ns``: of copying the tensor into one that is there, its bytes read and written."""

    shape: Shape
    gemm_ns: int
    copy_bytes_per_ns: float
    codecs: tuple[CodecTime, ...]

    def share(self, codec: str) -> float:
        """Encode and decode as a share of the GEMM."""
        found = next(row for row in self.codecs if row.codec == codec)
        return (found.encode_ns + found.decode_ns) / self.gemm_ns


def keep_freed_memory() -> bool:
    """Whether the C library could be told to keep what is freed, as CUDA's caching allocator does.

    Otherwise it depends on the order of calls which of them pay for the page faults of fresh memory, up to three times
    what a codec takes."""
    if platform.libc_ver()[0] != "glibc":
        return False
    trim, mmap = -1, -3
    library = ctypes.CDLL(None)
    return bool(library.mallopt(trim, 2**31 - 1)) and bool(library.mallopt(mmap, 32 << 20))


def measure_times(shape: Shape, names: Sequence[str], rounds: int, *, seed: int = 0) -> Times:
    """Encode and decode of a bfloat16 gate output by each codec, in turn with the GEMM that makes it."""
    keep_freed_memory()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape.tokens, shape.inputs, generator=generator).bfloat16()
    weight = torch.randn(shape.outputs, shape.inputs, generator=generator).bfloat16()
    made = torch.nn.functional.linear(x, weight)
    target = torch.empty_like(made)
    warm_up(names, [made.dtype])
    encoded = {name: get_codec(name).encode(made) for name in names}
    calls: dict[str, Callable[[], object]] = {
        "GEMM": lambda: torch.nn.functional.linear(x, weight),
        "copy": lambda: target.copy_(made),
    }
    for name in names:
        calls[f"encode {name}"] = lambda name=name: get_codec(name).encode(made)  # type: ignore[misc]
        calls[f"decode {name}"] = lambda name=name: get_codec(name).decode(encoded[name])  # type: ignore[misc]
    took = medians_ns(calls, rounds)
    found = tuple(
        CodecTime(
            name,
            took[f"encode {name}"],
            took[f"decode {name}"],
            2 * (_nbytes(made) + encoded[name].nbytes),
            8 * encoded[name].nbytes / made.numel(),
        )
        for name in names
    )
    return Times(shape, took["GEMM"], 2 * _nbytes(made) / took["copy"], found)


def medians_ns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, int]:
    """Nanoseconds; the first round warms up."""
    samples: dict[str, list[int]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            began = time.perf_counter_ns()
            call()
            if turn:
                samples[name].append(time.perf_counter_ns() - began)
    return {name: round(statistics.median(values)) for name, values in samples.items()}


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
