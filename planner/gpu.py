"""What the planner knows of one card (planner/devices.py has the cards)."""

from __future__ import annotations

from dataclasses import dataclass, field

KERNEL_KINDS = (
    "gemm_large",
    "gemm_small",
    "attention_forward",
    "attention_backward",
    "elementwise",
    "codec",
)
# A GEMM with a side below this many elements (adapters of low rank) fills no tile of the tensor cores.
SMALL_GEMM_SIDE = 128


@dataclass(frozen=True, slots=True)
class Fraction:
    """The part of a peak rate that one kind of kernel reaches, and where that is from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card.

    ``reported_names``: what ``torch.cuda.get_device_name`` says of it. ``memory_bytes``: total that PyTorch can see.
    ``bandwidth``: bytes per second of its memory. ``flops``: dense peak per dtype name (matrix units where PyTorch
    uses them by default: float32 without TF32). ``link_bandwidth``: bytes per second and direction between cards of
    one machine; ``link_fraction`` of it is reached by collectives. ``cublas_workspace_bytes``: what PyTorch reserves
    per thread and stream for cuBLAS on this card. ``launch_ns``: least time of any kernel (an assumption, everywhere).
    ``bias``: measured over estimated time per kind of call, where `python -m bench.device` ran on this card.
    """

    name: str
    reported_names: tuple[str, ...]
    memory_bytes: int
    bandwidth: int
    flops: dict[str, int]
    link_bandwidth: int
    link_fraction: Fraction
    cublas_workspace_bytes: int
    launch_ns: int
    fractions: dict[str, Fraction]
    source: str
    memory_source: str
    notes: tuple[str, ...] = field(default=())
    bias: dict[str, float] = field(default_factory=dict)

    def rate(self, dtype: str, kind: str) -> float:
        """Floating-point operations per second that a kernel of ``kind`` reaches in ``dtype`` ("bfloat16")."""
        return self.flops.get(dtype, self.flops["float32"]) * self.fractions[kind].value

    def bytes_per_second(self, kind: str = "elementwise") -> float:
        return self.bandwidth * self.fractions[kind].value
