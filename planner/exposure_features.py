"""What is known of a microbatch's loss once its log-probs are: its exposure, and how it pulls on regions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hilore.planner.microbatch import Microbatch
from hilore.planner.spec_types import Loss
from hilore.runtime.exposure import normalised_exposure, token_coefficients
from hilore.runtime.losses import LossSpec, length_normaliser


@dataclass(frozen=True, slots=True)
class ExposureFeatures:
    """``psi``: normalised exposure. ``mean_omega``: the mean of |omega| in the same units.

    ``advantage``: root mean square over rows; ``mean_advantage``: of |A|. ``clipped``: share of loss tokens that the
    clip took the gradient of.
    """

    psi: float
    mean_omega: float
    advantage: float
    mean_advantage: float
    clipped: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ExposureFeatures:
        return cls(**data)


def exposure_features(loss: Loss, batch: Microbatch, logps: Tensor) -> ExposureFeatures:
    """``logps``: float [B, Tr], of the exact forward."""
    spec = LossSpec.of(asdict(loss))
    mask, old, reference = batch.completion_mask, batch.old_logps, batch.ref_logps
    policy = token_coefficients(LossSpec.of(spec, beta=0.0), batch.advantages, mask, logps, old)
    omega = token_coefficients(spec, batch.advantages, mask, logps, old, reference)
    scale = length_normaliser(spec, mask.to(omega.dtype))
    weighed = (mask != 0) & (batch.advantages != 0).unsqueeze(1)
    return ExposureFeatures(
        psi=normalised_exposure(spec, batch.advantages, mask, logps, old, reference),
        mean_omega=float(omega.abs().sum() / scale.sum()) if bool(scale.any()) else 0.0,
        advantage=math.sqrt(float(batch.advantages.square().mean())),
        mean_advantage=float(batch.advantages.abs().mean()),
        clipped=float(((policy == 0) & weighed).sum() / weighed.sum()) if bool(weighed.any()) else 0.0,
    )


def token_pulls(loss: Loss, batch: Microbatch, logps: Tensor, leverage: Tensor) -> dict[str, Tensor]:
    """How large the gradient is that a loss sends each token of the response, and that without one part or another.

    ``logps`` float and ``leverage`` float64 [B, Tr], both of the exact forward. By name, [B, Tr]:

    ``full``: omega g, g the norm of the gradient of the token's log-prob by the last region's output
    (gradient_error.py, leverage): exactly the norm of the loss's gradient there. ``without_ratio``: as if no ratio had
    moved and nothing were clipped; ``without_mask``: every column of the response counted; ``without_kl``: no KL term.
    ``by_probability``: 1 - p in g's place, p the token's own probability, which is how far its log-prob moves with its
    logit; ``without_leverage``: 1 in g's place.
    """
    spec = LossSpec.of(asdict(loss))
    mask, old, reference = batch.completion_mask, batch.old_logps, batch.ref_logps
    omega = token_coefficients(spec, batch.advantages, mask, logps, old, reference)
    by_ratio_one = token_coefficients(spec, batch.advantages, mask, logps, logps, reference)
    everywhere = token_coefficients(spec, batch.advantages, torch.ones_like(mask), logps, old, reference)
    policy = token_coefficients(LossSpec.of(spec, beta=0.0), batch.advantages, mask, logps, old)
    return {
        "full": omega * leverage,
        "without_ratio": by_ratio_one * leverage,
        "without_mask": everywhere * leverage,
        "without_kl": policy * leverage,
        "by_probability": omega * -torch.expm1(logps.double()),
        "without_leverage": omega,
    }
