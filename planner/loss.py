"""The policy-gradient losses of TRL 1.16, as functions of log-probabilities (the entropy bonus is not among them).

Sources: GRPO arXiv:2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783, GSPO 2507.18071, CISPO 2506.13585, SAPO
2511.20347; the K3 estimator is Schulman's (2020). ``hilore.runtime.exposure`` has their derivatives in closed form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hilore.planner.microbatch import Microbatch
from hilore.planner.spec_types import Loss
from hilore.runtime.errors import ExposureError

SAPO_TEMPERATURES = (1.0, 1.05)  # positive and negative advantages: TRL's defaults
VESPO_GAMMA = ((2.0, 3.0), (3.0, 2.0))  # (k, lambda), the same way
_VESPO_LOG_RATIO = (-18.420680743952367, 20.0)  # log(1e-8) and TRL's upper clamp
SEQUENCE_LEVEL = frozenset({"gspo"})


def grpo_loss(
    logps: Tensor,
    microbatch: Microbatch,
    loss: Loss,
    accumulation: int = 1,
    *,
    num_items: float | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """The loss of one microbatch, a scalar float32 tensor, divided as TRL divides it over one update.

    ``logps``: float [B, Tr], differentiable. Without ``old_logps`` the ratio is exp(logps - logps.detach()), 1.
    ``num_items``: completion tokens of the whole update (dapo, cispo, vespo); by default this microbatch's times
    ``accumulation``. ``max_tokens``: the completion limit (dr_grpo); by default Tr.
    Raises ExposureError where ``loss.beta`` needs ``ref_logps`` and the microbatch has none.
    """
    mask = microbatch.completion_mask.to(logps.dtype)
    advantages = microbatch.advantages.to(logps.dtype).unsqueeze(1)
    old = logps.detach() if microbatch.old_logps is None else microbatch.old_logps
    log_ratio = logps - old
    if loss.kind in SEQUENCE_LEVEL:
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    per_token = _POLICY_TERMS.get(loss.kind, _clipped)(logps, log_ratio, advantages, mask, loss)
    if loss.beta:
        per_token = per_token + loss.beta * _k3(logps, microbatch)
    if loss.kind in ("dapo", "cispo", "vespo"):
        items = mask.sum().clamp(min=1.0) * accumulation if num_items is None else num_items
        return (per_token * mask).sum() / items
    return _averaged(per_token, mask, loss.kind, max_tokens or logps.shape[1]) / accumulation


def _averaged(per_token: Tensor, mask: Tensor, kind: str, max_tokens: int) -> Tensor:
    if kind == "bnpo":
        return (per_token * mask).sum() / mask.sum().clamp(min=1.0)
    if kind == "dr_grpo":
        return (per_token * mask).sum() / (per_token.size(0) * max_tokens)
    if kind == "luspo":
        return (per_token * mask).sum(-1).mean()
    return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


def _k3(logps: Tensor, microbatch: Microbatch) -> Tensor:
    if microbatch.ref_logps is None:
        raise ExposureError(
            "loss.beta is not 0 but the microbatch has no ref_logps; fill them with planner.actor.with_reference, "
            "or set loss.beta: 0",
            missing="ref_logps",
        )
    difference = microbatch.ref_logps - logps
    return torch.exp(difference) - difference - 1


def _clipped(logps: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, loss: Loss) -> Tensor:
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
    return -torch.min(ratio * advantages, clipped * advantages)


def _cispo(logps: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, loss: Loss) -> Tensor:
    """``clip_high`` is the cap of the ratio itself, as in TRL."""
    return -torch.clamp(torch.exp(log_ratio), max=loss.clip_high).detach() * advantages * logps


def _sapo(logps: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, loss: Loss) -> Tensor:
    temperature = torch.where(advantages > 0, *SAPO_TEMPERATURES)
    return -torch.sigmoid(temperature * (torch.exp(log_ratio) - 1)) * 4 / temperature * advantages


def _vespo(logps: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor, loss: Loss) -> Tensor:
    """The weight of a sequence is a normalised gamma density of its ratio; it is a coefficient, not differentiated."""
    with torch.no_grad():
        log_weight = (log_ratio.clamp(-20.0, 20.0) * mask).sum(-1, keepdim=True).clamp(*_VESPO_LOG_RATIO)
        power = torch.where(advantages >= 0, VESPO_GAMMA[0][0], VESPO_GAMMA[1][0])
        rate = torch.where(advantages >= 0, VESPO_GAMMA[0][1], VESPO_GAMMA[1][1])
        density = torch.exp(rate + power * log_weight - rate * torch.exp(log_weight))
    return -density * advantages * logps


_POLICY_TERMS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Loss], Tensor]] = {
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
}
