"""What is known of a microbatch's loss once its log-probs are: its exposure, and that without one part or another."""

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
    """``psi``: normalised exposure. ``mean_omega``: the mean of |omega| in the same units. ``strength``: root of the
    sum of (omega (1 - p))^2, p the token's own probability, which the norm of the gradient goes with: a token's
    log-prob moves with its logit by 1 - p, so that a sure one hardly counts. Then the same without ratio and clipping,
    with every column of the response counted, and without the KL term. ``advantage``: root mean square over rows;
    ``mean_advantage``: of |A|. ``clipped``: share of loss tokens that the clip took the gradient of.
    ``strength_without_probability``: root of the sum of omega^2."""

    psi: float
    mean_omega: float
    strength: float
    strength_without_ratio: float
    strength_without_mask: float
    strength_without_kl: float
    advantage: float
    mean_advantage: float
    clipped: float
    strength_without_probability: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ExposureFeatures:
        return cls(**data)


def exposure_features(loss: Loss, batch: Microbatch, logps: Tensor) -> ExposureFeatures:
    """``logps``: float [B, Tr], of the exact forward."""
    spec = LossSpec.of(asdict(loss))
    without_kl = LossSpec.of(spec, beta=0.0)
    mask = batch.completion_mask
    old, reference = batch.old_logps, batch.ref_logps
    policy = token_coefficients(without_kl, batch.advantages, mask, logps, old)
    omega = token_coefficients(spec, batch.advantages, mask, logps, old, reference)
    by_ratio_one = token_coefficients(spec, batch.advantages, mask, logps, logps, reference)
    everywhere = token_coefficients(spec, batch.advantages, torch.ones_like(mask), logps, old, reference)
    scale = length_normaliser(spec, mask.to(omega.dtype))
    free = -torch.expm1(logps.double())
    weighed = (mask != 0) & (batch.advantages != 0).unsqueeze(1)
    return ExposureFeatures(
        psi=normalised_exposure(spec, batch.advantages, mask, logps, old, reference),
        mean_omega=float(omega.abs().sum() / scale.sum()) if bool(scale.any()) else 0.0,
        strength=_norm(omega * free),
        strength_without_ratio=_norm(by_ratio_one * free),
        strength_without_mask=_norm(everywhere * free),
        strength_without_kl=_norm(policy * free),
        advantage=math.sqrt(float(batch.advantages.square().mean())),
        mean_advantage=float(batch.advantages.abs().mean()),
        clipped=float(((policy == 0) & weighed).sum() / weighed.sum()) if bool(weighed.any()) else 0.0,
        strength_without_probability=_norm(omega),
    )


def _norm(omega: Tensor) -> float:
    return float(omega.double().square().sum().sqrt())
