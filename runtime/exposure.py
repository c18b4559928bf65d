"""Exposure: how strongly a microbatch's loss weighs its tokens, by ``omega_t = dLoss/dlogp_t``.

Token errors add in quadrature, so a microbatch's exposure is the root mean square of omega over its loss tokens, in
units of the loss's own length normaliser c: ``psi = sqrt(sum m omega^2 / sum m c^2)``. On policy and without a KL
term it is about the RMS of the advantages, whatever the normaliser and the accumulation. docs/design.md, "Risk".
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hilore.runtime.errors import ExposureError
from hilore.runtime.loss_kinds import (
    Loss,
    LossLike,
    coefficient_bound,
    coefficients,
    length_normaliser,
    needs_ratio,
    resolve,
)
from hilore.runtime.losses import LossInputs, LossSpec
from hilore.runtime.verl_losses import VerlLoss

LOG_MOVE = 0.5  # nats; see exposure_before_forward


def known_before_forward(loss: LossLike, old_logps: Tensor | None = None, **options: Any) -> bool:
    """Whether omega is known without the forward's log-probs: the ratio is 1 by construction (``old_logps`` None) or
    does not enter (verl's gpg), and beta is 0."""
    spec = resolve(loss, **options)
    return spec.beta == 0 and (old_logps is None or not needs_ratio(spec))


def token_coefficients(
    loss: LossLike,
    advantages: Tensor,
    mask: Tensor,
    logps: Tensor | None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    rollout_ratio: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """omega = dLoss/dlogp [B, T]: float64 if an input is, else float32; 0 where the mask is 0.

    ``advantages`` [B], [B, 1] or [B, T]; ``mask``, ``logps``, ``old_logps``, ``ref_logps`` [B, T]. ``old_logps``
    None: the ratio is 1 by construction, and if beta is 0 ``logps`` may be None too. ``weights`` ([B, 1] or [B, T])
    multiply the policy term (off-policy or entropy masks); ``rollout_ratio`` too, but for vespo, which takes it
    into its sequence weight. ``options``: fields of LossSpec or VerlLoss. Formulas and sources: runtime/losses.py,
    runtime/verl_losses.py.
    Raises ExposureError for a missing input, shapes that disagree, and a NaN or infinite coefficient (naming the
    first row).
    """
    spec = resolve(loss, **options)
    inputs = _inputs(spec, advantages, mask, logps, old_logps, ref_logps, weights, rollout_ratio)
    omega = coefficients(spec, inputs)
    if not bool(torch.isfinite(omega).all()):
        _raise_first(omega)
    return omega


def normalised_exposure(
    loss: LossLike,
    advantages: Tensor,
    mask: Tensor,
    logps: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    rollout_ratio: Tensor | None = None,
    **options: Any,
) -> float:
    """psi = sqrt(sum m omega^2 / sum m c^2); 0 only where omega is 0 everywhere. Arguments as token_coefficients."""
    spec = resolve(loss, **options)
    inputs = _inputs(spec, advantages, mask, logps, old_logps, ref_logps, weights, rollout_ratio)
    return exposure_from_gradient(coefficients(spec, inputs), inputs.mask, length_normaliser(spec, inputs.mask))


def exposure_from_gradient(gradient: Tensor, mask: Tensor, normaliser: Tensor | None = None) -> float:
    """psi of any loss from its gradient by the log-probs [B, T] (unscaled, as autograd hands it to a hook).

    ``normaliser``: c [B, T]; None: that of a mean over the mask's tokens. Raises ExposureError for NaN or infinity
    where the mask is not 0.
    """
    mask = mask.to(device=gradient.device, dtype=torch.float64)
    omega = torch.where(mask != 0, gradient.detach().double(), 0.0)
    scale = mask / mask.sum().clamp(min=1.0) if normaliser is None else normaliser.double()
    zero = omega.new_zeros(1)
    # Divided by the peak first, so that no square underflows to 0 or overflows.
    peak, scale_peak = torch.cat([omega.abs().flatten(), zero]).amax(), torch.cat([scale.flatten(), zero]).amax()
    top = (mask * (omega / torch.where(peak > 0, peak, 1.0)).square()).sum()
    bottom = (mask * (scale / torch.where(scale_peak > 0, scale_peak, 1.0)).square()).sum()
    values = torch.stack([peak, scale_peak, top, bottom]).tolist()
    if not math.isfinite(values[1]):
        raise ExposureError("The length normaliser holds a NaN or an infinity.", missing="normaliser")
    if not all(math.isfinite(value) for value in values):
        _raise_first(omega)
    if values[0] == 0 or values[3] == 0:
        return 0.0
    return float(values[0] / values[1] * math.sqrt(values[2] / values[3]))


def exposure_before_forward(
    loss: LossLike,
    advantages: Tensor,
    mask: Tensor,
    logps: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    rollout_ratio: Tensor | None = None,
    **options: Any,
) -> float:
    """psi before the forward: exact where it is known (or ``logps`` is given), else an upper bound.

    The bound assumes that no log-prob lies more than LOG_MOVE = 0.5 nats from the old one, or from the reference's;
    ``confirm`` computes the exact value after the forward and demotes where it was exceeded. Raises as
    token_coefficients, but for log-probs that are missing.
    """
    spec = resolve(loss, **options)
    omega, inputs = _before_forward(spec, advantages, mask, logps, old_logps, ref_logps, weights, rollout_ratio)
    return exposure_from_gradient(omega, inputs.mask, length_normaliser(spec, inputs.mask))


def token_magnitudes(
    loss: LossLike,
    advantages: Tensor,
    mask: Tensor,
    logps: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
) -> Tensor:
    """|omega| [B, T] before the forward: exact where exposure_before_forward is, else its bound; 0 at the mask."""
    return _before_forward(resolve(loss), advantages, mask, logps, old_logps, ref_logps)[0].abs()


def _before_forward(
    spec: Loss,
    advantages: Tensor,
    mask: Tensor,
    logps: Tensor | None,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    weights: Tensor | None = None,
    rollout_ratio: Tensor | None = None,
) -> tuple[Tensor, LossInputs]:
    """The coefficients [B, T], or a bound of them where they are not known yet, and what they follow from."""
    given = logps is not None and (spec.beta == 0 or ref_logps is not None)
    if given or known_before_forward(spec, old_logps):
        inputs = _inputs(spec, advantages, mask, logps, old_logps, ref_logps, weights, rollout_ratio)
        return coefficients(spec, inputs), inputs
    inputs = _inputs(resolve(spec, beta=0.0), advantages, mask, None, None, None, weights, rollout_ratio)
    return coefficient_bound(spec, inputs, on_policy=old_logps is None, log_move=LOG_MOVE), inputs


def group_advantages(rewards: Tensor, group_size: int, *, scale: bool = True, epsilon: float = 1e-4) -> Tensor:
    """Group-relative advantages [N] of ``rewards`` [N], groups of ``group_size`` consecutive rows.

    Reward less the group's mean, divided (``scale``) by its unbiased standard deviation plus ``epsilon``, as trl
    1.16. A group without variance, one sample among them, gives exactly 0. Raises ExposureError for a reward that is
    not finite, or a number of rewards that is no multiple of ``group_size``.
    """
    if group_size < 1 or rewards.dim() != 1 or rewards.numel() % group_size:
        raise ExposureError(
            f"{tuple(rewards.shape)} rewards cannot be cut into groups of {group_size}.", group_size=group_size
        )
    groups = rewards.to(torch.promote_types(rewards.dtype, torch.float32)).view(-1, group_size)
    if not bool(torch.isfinite(groups).all()):
        row = int((~torch.isfinite(groups)).flatten().nonzero()[0])
        raise ExposureError(f"Reward {row} is {float(rewards[row])}.", row=row)
    centred = groups - groups.mean(dim=1, keepdim=True)
    if scale and group_size > 1:
        centred = centred / (groups.std(dim=1, keepdim=True) + epsilon)
    flat = groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True)
    return torch.where(flat, 0.0, centred).view(-1)


def _inputs(
    spec: Loss,
    advantages: Tensor,
    mask: Tensor,
    logps: Tensor | None,
    old_logps: Tensor | None,
    ref_logps: Tensor | None,
    weights: Tensor | None,
    rollout_ratio: Tensor | None,
) -> LossInputs:
    """Checked, detached, of one dtype and device (the mask's)."""
    if logps is None and not known_before_forward(spec, old_logps):
        reason = (
            "old_logps are given, so the ratio depends on them"
            if old_logps is not None
            else f"beta is {spec.beta}, so the KL term depends on them"
        )
        raise ExposureError(
            f"logps are missing: {reason}. Pass the log-probs of the forward, or use "
            "exposure_before_forward for a bound.",
            missing="logps",
        )
    if spec.beta != 0 and ref_logps is None:
        raise ExposureError(
            f"ref_logps are missing: beta is {spec.beta}. Pass the reference's log-probs, or a loss "
            "with beta=0 if it has no KL term.",
            missing="ref_logps",
        )
    given = {
        "logps": logps,
        "old_logps": old_logps,
        "ref_logps": ref_logps if spec.beta != 0 else None,
        "weights": weights,
        "rollout_ratio": rollout_ratio,
        "advantages": advantages.unsqueeze(1) if advantages.dim() == 1 else advantages,
    }
    dtype = torch.float32
    for name, tensor in given.items():
        if tensor is not None:
            _check_shape(name, tensor, mask)
            dtype = torch.promote_types(dtype, tensor.dtype)
    ready = {
        name: None if tensor is None else tensor.detach().to(device=mask.device, dtype=dtype)
        for name, tensor in given.items()
    }
    floats = mask.detach().to(dtype)
    policy, old, reference = ready["logps"], ready["old_logps"], ready["ref_logps"]
    log_ratio = torch.zeros_like(floats) if policy is None else policy - (policy if old is None else old)
    distance = None if reference is None or policy is None else reference - policy
    weight, rollout = ready["weights"], ready["rollout_ratio"]
    if rollout is not None and spec.kind != "vespo":
        weight = rollout if weight is None else weight * rollout
    assert ready["advantages"] is not None
    return LossInputs(
        advantages=ready["advantages"],
        mask=floats,
        log_ratio=_masked(log_ratio, floats),
        reference=None if distance is None else _masked(distance, floats),
        weights=weight,
        rollout_ratio=rollout,
        logps=None if policy is None else _masked(policy, floats),
    )


def _check_shape(name: str, tensor: Tensor, mask: Tensor) -> None:
    narrow = name in ("advantages", "weights", "rollout_ratio")
    if (
        mask.dim() != 2
        or tensor.dim() != 2
        or tensor.shape[0] != mask.shape[0]
        or tensor.shape[1] not in ((1, mask.shape[1]) if narrow else (mask.shape[1],))
    ):
        raise ExposureError(
            f"{name} has shape {tuple(tensor.shape)}, the mask {tuple(mask.shape)}; expected one row "
            "per sequence and one column per response token.",
            name=name,
            shape=tuple(tensor.shape),
            mask_shape=tuple(mask.shape),
        )


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask != 0, values, torch.zeros_like(values))


def _raise_first(omega: Tensor) -> None:
    row, token = (int(index) for index in (~torch.isfinite(omega)).nonzero()[0])
    raise ExposureError(
        f"The loss coefficient of row {row}, token {token} is {float(omega[row, token])}; check that "
        "row's advantage and log-probs.",
        row=row,
        token=token,
    )


__all__ = [
    "LOG_MOVE",
    "LossSpec",
    "VerlLoss",
    "exposure_before_forward",
    "exposure_from_gradient",
    "group_advantages",
    "known_before_forward",
    "normalised_exposure",
    "token_coefficients",
    "token_magnitudes",
]
