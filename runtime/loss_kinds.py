"""Every loss with closed-form coefficients: trl's (losses.py) and verl's (verl_losses.py) behind one set of calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from hilore.runtime import losses, verl_losses
from hilore.runtime.losses import LossInputs, LossSpec
from hilore.runtime.verl_losses import VerlLoss

Loss = LossSpec | VerlLoss
LossLike = LossSpec | VerlLoss | str | Mapping[str, Any]


def resolve(loss: LossLike, **options: Any) -> Loss:
    """A loss from its kind ("grpo", "verl-vanilla", ...), a mapping (a plan's ``loss``) or a loss, ``options`` on top.

    Raises ExposureError for an unknown kind or option, or a value out of its range.
    """
    if isinstance(loss, VerlLoss):
        return replace(loss, **losses.known(VerlLoss, options)) if options else loss
    kind = loss if isinstance(loss, str) else loss.get("kind") if isinstance(loss, Mapping) else None
    if isinstance(kind, str) and kind.startswith(verl_losses.PREFIX):
        given = dict(loss) if isinstance(loss, Mapping) else {"kind": kind}
        kept = {name: value for name, value in given.items() if name not in losses.NOT_OF_THE_LOSS}
        return VerlLoss(**losses.known(VerlLoss, kept | options))
    return LossSpec.of(loss, **options)


def needs_ratio(loss: Loss) -> bool:
    """Whether the policy term's slope depends on the ratio at all."""
    return loss.needs_ratio if isinstance(loss, VerlLoss) else True


def length_normaliser(loss: Loss, mask: Tensor) -> Tensor:
    """c [B, T]: by what a token's policy term is multiplied."""
    if isinstance(loss, VerlLoss):
        return verl_losses.verl_normaliser(loss, mask)
    return losses.length_normaliser(loss, mask)


def coefficients(loss: Loss, inputs: LossInputs) -> Tensor:
    """omega [B, T], 0 where the mask is 0. May hold NaN or infinities: the caller checks."""
    if isinstance(loss, VerlLoss):
        return verl_losses.verl_coefficients(loss, inputs)
    return losses.coefficients(loss, inputs)


def coefficient_bound(loss: Loss, inputs: LossInputs, *, on_policy: bool, log_move: float) -> Tensor:
    """Largest |omega| [B, T] while no log-prob is more than ``log_move`` nats from the old one (``on_policy``: equal to
    it), or from the reference's. ``inputs`` hold no log-probs.
    """
    if isinstance(loss, VerlLoss):
        return verl_losses.verl_bound(loss, inputs, ratio_move=0.0 if on_policy else log_move, kl_move=log_move)
    if on_policy:
        policy = losses.coefficients(replace(loss, beta=0.0), inputs).abs()
    else:
        policy = losses.policy_bound(loss, inputs, log_move)
    corrected = 2 * math.exp(0.0 if on_policy else log_move) if loss.bias_correction else 1.0
    return policy + loss.beta * math.expm1(log_move) * corrected * losses.length_normaliser(loss, inputs.mask)


__all__ = ["Loss", "LossLike", "coefficient_bound", "coefficients", "length_normaliser", "needs_ratio", "resolve"]
