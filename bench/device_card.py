"""The device that is here: whether there is one, what its allocator says, and a card made of this CPU's own rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from hilore.planner.estimate import Target, estimated_target, target_of
from hilore.planner.gpu import SMALL_GEMM_SIDE, Fraction, Gpu
from hilore.planner.spec_types import ModelSpec
from hilore.runtime.errors import HiloreError

MEASURED = "measured on this CPU just now"
_SIDE, _REPEATS = 512, 5


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """Highest bytes of one update. ``requested``: by tensors; ``allocated``: in the allocator's blocks, which are
    multiples of 512 B; ``reserved``: what it holds of the card. None on the CPU, whose allocator does not count."""

    requested: int | None
    allocated: int | None
    reserved: int | None


def require_device(kind: str) -> None:
    """Raise HiloreError where the device that figures are wanted of is not here."""
    if kind == "cpu" or torch.cuda.is_available():
        return
    build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
    raise HiloreError(
        f"--device cuda: no CUDA device is here (torch {torch.__version__} {build}); run this on a machine with a GPU, "
        "or check the script itself with: python -m bench.device --device cpu --tiny"
    )


def described(kind: str) -> dict[str, Any]:
    """The card as the driver and PyTorch know it."""
    if kind == "cpu":
        return {"kind": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": "cuda",
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def estimate_of_this_device(spec: ModelSpec) -> Target | None:
    """A target that is estimated although it is here: this card by the table, or this CPU by rates measured now.

    None for a card that the table does not have.
    """
    if spec.device.kind == "cpu":
        return Target(torch.device("cpu"), cpu_as_card(spec.precision.compute), True, "cpu", 0, 0)
    gpu = target_of(spec).gpu
    return None if gpu is None else estimated_target(gpu)


def cpu_as_card(dtype_name: str) -> Gpu:
    """This CPU as planner/devices.py would list it: rates of a large product and of a copy, measured here."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    square = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0)).to(dtype)
    narrow = square[:, : SMALL_GEMM_SIDE // 8].contiguous()
    block = torch.zeros(1 << 23, dtype=torch.uint8)
    one = torch.zeros(1)
    large = 2 * _SIDE**3 / _seconds(lambda: square @ square)
    small = 2 * _SIDE**2 * narrow.shape[1] / _seconds(lambda: square @ narrow)
    bandwidth = 2 * block.numel() / _seconds(block.clone)
    return Gpu(
        name="cpu",
        reported_names=(),
        memory_bytes=0,
        bandwidth=round(bandwidth),
        flops={dtype_name: round(large), "float32": round(large)},
        link_bandwidth=round(bandwidth),
        link_fraction=Fraction(1.0, MEASURED),
        cublas_workspace_bytes=0,
        launch_ns=round(_seconds(lambda: one + one) * 1e9),
        fractions={
            "gemm_large": Fraction(1.0, MEASURED),
            "gemm_small": Fraction(small / large, MEASURED),
            "attention_forward": Fraction(0.5, "assumption"),
            "attention_backward": Fraction(0.5, "assumption"),
            "elementwise": Fraction(1.0, MEASURED),
            "codec": Fraction(0.5, "assumption"),
        },
        source=MEASURED,
        memory_source="",
    )


def peaks_of(run: Callable[[], object]) -> DevicePeaks:
    """What the allocator saw while ``run`` ran; on the CPU it runs all the same."""
    if not torch.cuda.is_available():
        run()
        return DevicePeaks(None, None, None)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return DevicePeaks(
        stats["requested_bytes.all.peak"], stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    )


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same sums every time, where there are such: CUDA's fast ones add in any order."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def _seconds(run: Callable[[], object]) -> float:
    """Median of a few runs after one that is not counted."""
    samples = []
    for _ in range(1 + _REPEATS):
        began = time.perf_counter()
        run()
        samples.append(time.perf_counter() - began)
    return max(median(samples[1:]), 1e-9)
