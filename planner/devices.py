"""The GPUs that can be planned for: what their data sheets say, and which part of that kernels reach.

Rates are dense (no sparsity) and per second, memory is what the driver reports to PyTorch as the card's total. Every
figure names where it is from; what no source gives is an assumption and says so. A trace made from this table says
``estimated``; no card has been compared with a measurement yet (`python -m bench.device` does that, Gpu.bias holds it).
"""

from __future__ import annotations

import difflib

from hilore.planner.achieved import (
    ADA_CONSUMER,
    ADA_SERVER,
    AMPERE_PCIE,
    AMPERE_SERVER,
    AMPERE_WORKSTATION,
    BLACKWELL,
    CDNA3,
    HOPPER,
    HOPPER_PCIE,
    OVER_FABRIC,
    OVER_NVLINK,
    OVER_PCIE,
)
from hilore.planner.gpu import Fraction, Gpu
from hilore.runtime.errors import HiloreError

GIB = 1 << 30
MIB = 1 << 20
TERA = 10**12
GIGA = 10**9


class UnknownGpuError(HiloreError):
    """No card of this name in the table. Attributes: ``gpu``, ``known``."""


_OOM = "total capacity in public out-of-memory messages of PyTorch for this card"
CUBLAS_WORKSPACE_BEFORE_SM90 = 2 * 4 * MIB + 8 * 16 * 1024  # PyTorch's default CUBLAS_WORKSPACE_CONFIG :4096:2:16:8
CUBLAS_WORKSPACE_SM90 = 32 * MIB  # PyTorch's default from compute capability 9.0 on, :4096:8

_PCIE4 = 32 * GIGA  # x16, per direction
_PCIE5 = 64 * GIGA


def _rates(bfloat16: float, float32: float) -> dict[str, int]:
    """Peak per dtype from teraflops; float16 is bfloat16's on every card here, float64 is no planning target."""
    matrix, vector = round(bfloat16 * TERA), round(float32 * TERA)
    return {"bfloat16": matrix, "float16": matrix, "float32": vector}


def _gpu(
    name: str,
    reported: tuple[str, ...],
    gib: float,
    bandwidth: int,
    rates: dict[str, int],
    link: int,
    link_fraction: Fraction,
    fractions: dict[str, Fraction],
    source: str,
    *,
    workspace: int = CUBLAS_WORKSPACE_BEFORE_SM90,
    notes: tuple[str, ...] = (),
    launch_ns: int = 4_000,
    memory_source: str = _OOM,
) -> Gpu:
    return Gpu(
        name,
        reported,
        int(gib * GIB),
        bandwidth * GIGA,
        rates,
        link,
        link_fraction,
        workspace,
        launch_ns,
        fractions,
        source,
        memory_source,
        notes,
    )


GPUS: tuple[Gpu, ...] = (
    _gpu(
        "l40s-48gb",
        ("NVIDIA L40S",),
        44.39,
        864,
        _rates(362.05, 91.6),
        _PCIE4,
        OVER_PCIE,
        ADA_SERVER,
        "NVIDIA L40S data sheet (2023)",
    ),
    _gpu(
        "a6000-48gb",
        ("NVIDIA RTX A6000",),
        47.53,
        768,
        _rates(154.8, 38.7),
        _PCIE4,
        OVER_PCIE,
        AMPERE_WORKSTATION,
        "NVIDIA RTX A6000 data sheet and Ampere GA102 white paper (2021)",
        notes=("with ECC on, the driver reports about 3 GiB less",),
    ),
    _gpu(
        "rtx4090-24gb",
        ("NVIDIA GeForce RTX 4090",),
        23.64,
        1008,
        _rates(165.2, 82.6),
        _PCIE4,
        OVER_PCIE,
        ADA_CONSUMER,
        "NVIDIA Ada GPU architecture white paper (2022): FP16 and BF16 with FP32 accumulate",
        notes=("cards of this series have no direct traffic between them: collectives pass through host memory",),
    ),
    _gpu(
        "a100-40gb",
        ("NVIDIA A100-SXM4-40GB",),
        39.38,
        1555,
        _rates(312.0, 19.5),
        300 * GIGA,
        OVER_NVLINK,
        AMPERE_SERVER,
        "NVIDIA A100 data sheet (2020), SXM",
    ),
    _gpu(
        "a100-80gb",
        ("NVIDIA A100-SXM4-80GB",),
        79.15,
        2039,
        _rates(312.0, 19.5),
        300 * GIGA,
        OVER_NVLINK,
        AMPERE_SERVER,
        "NVIDIA A100 80GB data sheet (2021), SXM",
    ),
    _gpu(
        "a100-pcie-40gb",
        ("NVIDIA A100-PCIE-40GB",),
        39.38,
        1555,
        _rates(312.0, 19.5),
        _PCIE4,
        OVER_PCIE,
        AMPERE_PCIE,
        "NVIDIA A100 data sheet (2020), PCIe",
    ),
    _gpu(
        "a100-pcie-80gb",
        ("NVIDIA A100 80GB PCIe",),
        79.15,
        1935,
        _rates(312.0, 19.5),
        _PCIE4,
        OVER_PCIE,
        AMPERE_PCIE,
        "NVIDIA A100 80GB data sheet (2021), PCIe",
    ),
    _gpu(
        "h100-sxm-80gb",
        ("NVIDIA H100 80GB HBM3",),
        79.10,
        3350,
        _rates(989.4, 66.9),
        450 * GIGA,
        OVER_NVLINK,
        HOPPER,
        "NVIDIA H100 data sheet (2023), SXM; half of the sparse figures",
        workspace=CUBLAS_WORKSPACE_SM90,
    ),
    _gpu(
        "h100-pcie-80gb",
        ("NVIDIA H100 PCIe",),
        79.10,
        2000,
        _rates(756.5, 51.2),
        _PCIE5,
        OVER_PCIE,
        HOPPER_PCIE,
        "NVIDIA H100 data sheet (2023), PCIe; half of the sparse figures",
        workspace=CUBLAS_WORKSPACE_SM90,
    ),
    _gpu(
        "h200-141gb",
        ("NVIDIA H200",),
        139.72,
        4800,
        _rates(989.4, 66.9),
        450 * GIGA,
        OVER_NVLINK,
        HOPPER,
        "NVIDIA H200 data sheet (2024), SXM; half of the sparse figures",
        workspace=CUBLAS_WORKSPACE_SM90,
    ),
    _gpu(
        "b200-180gb",
        ("NVIDIA B200",),
        178.35,
        7700,
        _rates(2250.0, 75.0),
        900 * GIGA,
        OVER_NVLINK,
        BLACKWELL,
        "NVIDIA DGX and HGX B200 data sheets (2024), an eighth of the system, the lower bandwidth of the two; half of "
        "the sparse figures",
        workspace=CUBLAS_WORKSPACE_SM90,
    ),
    _gpu(
        "mi300x-192gb",
        ("AMD Instinct MI300X",),
        191.98,
        5300,
        _rates(1307.4, 163.4),
        448 * GIGA,
        OVER_FABRIC,
        CDNA3,
        "AMD Instinct MI300X data sheet (2023)",
        workspace=CUBLAS_WORKSPACE_SM90,
        launch_ns=6_000,
        notes=("saved tensors of its attention kernels and the workspace of its BLAS are taken to be those of CUDA's",),
    ),
)


def gpu_names() -> tuple[str, ...]:
    """Names that ``device.gpu`` of model.yaml takes."""
    return tuple(gpu.name for gpu in GPUS)


def gpu_named(name: str, *, where: str = "device.gpu") -> Gpu:
    """The card of this name. Raises UnknownGpuError, with the closest name."""
    for gpu in GPUS:
        if gpu.name == name:
            return gpu
    known = gpu_names()
    folded = {entry: entry for entry in known} | {entry.rpartition("-")[0]: entry for entry in known}
    close = difflib.get_close_matches(name.lower().replace("_", "-").replace(" ", "-"), folded, n=1, cutoff=0.5)
    hint = f"; did you mean '{folded[close[0]]}'?" if close else ""
    raise UnknownGpuError(f"{where} is '{name}', expected one of {', '.join(known)}{hint}", gpu=name, known=known)


def gpu_reported_as(device_name: str) -> Gpu | None:
    """The card whose driver calls itself ``device_name`` (``torch.cuda.get_device_name()``), None if unknown."""
    return next((gpu for gpu in GPUS if device_name in gpu.reported_names), None)
