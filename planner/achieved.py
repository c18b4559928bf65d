"""Which part of a card's peak rates each kind of kernel reaches, by family of cards, and where each figure is from.

What no source gives is an assumption and says so; planner/devices.py has the cards.
"""

from __future__ import annotations

from hilore.planner.gpu import SMALL_GEMM_SIDE, Fraction

ASSUMED = "assumption"
FA2 = "FlashAttention-2 (Dao 2023), figures 4 to 6: A100, head dimension 128, causal, 4k tokens"
FA3 = "FlashAttention-3 (Shah et al. 2024): FlashAttention-2 reaches about 0.35 of an H100"


def _fractions(
    gemm: Fraction, attention_forward: Fraction, attention_backward: Fraction, bandwidth: Fraction
) -> dict[str, Fraction]:
    return {
        "gemm_large": gemm,
        "gemm_small": Fraction(0.25, f"{ASSUMED}: a side under {SMALL_GEMM_SIDE} leaves most of a tile idle"),
        "attention_forward": attention_forward,
        "attention_backward": attention_backward,
        "elementwise": bandwidth,
        "codec": Fraction(
            bandwidth.value * 0.75, f"{ASSUMED}: one pass for the group maxima, then as element-wise kernels"
        ),
    }


AMPERE_SERVER = _fractions(
    Fraction(0.80, "NVIDIA, CUTLASS documentation (2021): large BF16 GEMMs on A100 at 80 to 90 % of peak"),
    Fraction(0.60, FA2),
    Fraction(0.50, FA2),
    Fraction(0.85, "BabelStream results for A100 (University of Bristol, 2021): 85 to 90 % of peak"),
)
AMPERE_PCIE = _fractions(
    Fraction(0.70, f"{ASSUMED}: as A100 SXM, less for a limit of 250 to 300 W"),
    Fraction(0.55, f"{ASSUMED}, after {FA2}"),
    Fraction(0.45, f"{ASSUMED}, after {FA2}"),
    Fraction(0.85, f"{ASSUMED}: as A100 SXM"),
)
AMPERE_WORKSTATION = _fractions(
    Fraction(0.70, f"{ASSUMED}: as A100, less for a 300 W limit"),
    Fraction(0.55, f"{ASSUMED}, after {FA2}"),
    Fraction(0.45, f"{ASSUMED}, after {FA2}"),
    Fraction(0.85, f"{ASSUMED}: as A100"),
)
ADA_SERVER = _fractions(
    Fraction(0.55, f"{ASSUMED}: the data sheet's peak needs boost clocks that 350 W do not hold in GEMMs"),
    Fraction(0.45, f"{ASSUMED}, after {FA2}, less for the same power limit"),
    Fraction(0.38, f"{ASSUMED}, after {FA2}, less for the same power limit"),
    Fraction(0.80, f"{ASSUMED}: GDDR6 with ECC"),
)
ADA_CONSUMER = _fractions(
    Fraction(0.85, f"{ASSUMED}: its FP32-accumulate peak is half of what its matrix units can do, so it is reached"),
    Fraction(0.70, f"{ASSUMED}, after {FA2}"),
    Fraction(0.60, f"{ASSUMED}, after {FA2}"),
    Fraction(0.88, f"{ASSUMED}: GDDR6X without ECC"),
)
HOPPER = _fractions(
    Fraction(0.65, f"{ASSUMED}: BF16 GEMMs of 4k to 8k at 600 to 700 TFLOPS in public cuBLAS benchmarks"),
    Fraction(0.35, FA3),
    Fraction(0.32, f"{ASSUMED}, after {FA3}"),
    Fraction(0.88, f"{ASSUMED}: public STREAM results for H100 are about 90 % of peak"),
)
HOPPER_PCIE = _fractions(
    Fraction(0.60, f"{ASSUMED}: as H100 SXM, less for 350 W"),
    Fraction(0.40, f"{ASSUMED}, after {FA3}; its peak is lower"),
    Fraction(0.35, f"{ASSUMED}, after {FA3}; its peak is lower"),
    Fraction(0.88, f"{ASSUMED}: as H100 SXM"),
)
BLACKWELL = _fractions(
    Fraction(0.65, f"{ASSUMED}: as H100"),
    Fraction(0.20, f"{ASSUMED}: PyTorch's own flash kernel does not use this generation's matrix instructions"),
    Fraction(0.18, f"{ASSUMED}: as forward"),
    Fraction(0.85, f"{ASSUMED}: as H100"),
)
CDNA3 = _fractions(
    Fraction(0.45, f"{ASSUMED}: public hipBLASLt results are 500 to 650 TFLOPS in BF16"),
    Fraction(0.25, f"{ASSUMED}: PyTorch's AOTriton kernel"),
    Fraction(0.20, f"{ASSUMED}: PyTorch's AOTriton kernel"),
    Fraction(0.75, f"{ASSUMED}: public STREAM results are about 4 TB/s"),
)

OVER_PCIE = Fraction(0.65, f"{ASSUMED}: ring collectives of NCCL over PCIe")
OVER_NVLINK = Fraction(0.75, f"{ASSUMED}: ring collectives of NCCL over NVLink")
OVER_FABRIC = Fraction(0.70, f"{ASSUMED}: ring collectives of RCCL over Infinity Fabric")
