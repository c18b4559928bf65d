"""The losses of TRL 1.16's GRPOTrainer as their derivatives by the log-probs, in closed form.

With m the mask, n_b = sum_t m, r the ratio exp(logp - old) of a token or exp(mean of logp - old) of a sequence,
d = ref - logp and k3 = exp(d) - d - 1, every loss is ``sum_t c_t (p_t l(r, logp_t) + beta k3_t)`` and

    omega_t = dLoss/dlogp_t = c_t p_t g_t + beta c_t h_t

c: length normaliser, p: weights of the policy term, g: dl/dlogp, h = 1 - exp(d), with bias correction
r (h + k3). Each kind's c and g stand at its function. Sources: GRPO arXiv:2402.03300, DAPO 2503.14476, Dr. GRPO
2503.20783, GSPO 2507.18071, CISPO 2506.13585, SAPO 2511.20347; two-sided clip INTELLECT-2 2505.07291; K3 is
Schulman's estimator (2020); LUSPO, VESPO and all normalisers as trl 1.16's ``GRPOTrainer._compute_loss`` has them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from hilore.runtime.errors import ExposureError

CLIPPED_KINDS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_KINDS = (*CLIPPED_KINDS, "cispo", "sapo", "vespo", "gspo")
LEVELS = ("token", "sequence")
_PER_UPDATE_KINDS = ("dapo", "cispo", "vespo")
NOT_OF_THE_LOSS = ("inner_epochs", "head")  # keys of model.yaml's loss section that do not change omega
_VESPO_LOG_FLOOR, _VESPO_LOG_CAP, _VESPO_LEAST_RATE = math.log(1e-8), 20.0, 1e-4


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss and its options. Kind "gspo" is "grpo" with ``level="sequence"`` and becomes that.

    ``clip_low``, ``clip_high``: TRL's epsilon and epsilon_high (for cispo ``clip_high`` caps the ratio itself).
    ``ratio_cap``: TRL's delta, the two-sided clip. ``accumulation``: microbatches per update. ``num_items``:
    completion tokens of a generation batch on all ranks (dapo, cispo, vespo; None: this microbatch's, times
    ``accumulation`` and ``world_size``); ``steps_per_generation``: microbatches in it (None: ``accumulation``).
    ``max_tokens``: the completion limit (dr_grpo; None: the width of the mask). ``bias_correction``: the KL term is
    multiplied by the ratio. ``sapo_temperatures``: for advantages above 0, and others. ``vespo_positive``,
    ``vespo_negative``: (k, lambda) for advantages of at least 0, and below.
    Raises ExposureError for an unknown kind or level, or a value out of its range.
    """

    kind: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    level: str = "token"
    accumulation: int = 1
    num_items: float | None = None
    max_tokens: int | None = None
    bias_correction: bool = False
    ratio_cap: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    vespo_negative: tuple[float, float] = (3.0, 2.0)
    world_size: int = 1
    steps_per_generation: int | None = None

    def __post_init__(self) -> None:
        check_name("loss kind", self.kind, LOSS_KINDS)
        check_name("level", self.level, LEVELS)
        if self.kind == "gspo":
            object.__setattr__(self, "kind", "grpo")
            object.__setattr__(self, "level", "sequence")
        for name in ("clip_low", "clip_high", "beta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise out_of_range(name, getattr(self, name), "a finite number of at least 0")
        for name in ("accumulation", "world_size", "max_tokens", "steps_per_generation", "ratio_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise out_of_range(name, value, "a finite number above 0")
        if self.num_items is not None and not 0 <= float(self.num_items) < math.inf:
            raise out_of_range("num_items", self.num_items, "a finite number of at least 0")
        for name in ("vespo_positive", "vespo_negative"):
            power, rate = getattr(self, name)
            if not (0 <= power < math.inf and 0 <= rate < math.inf):
                raise out_of_range(name, (power, rate), "two finite numbers of at least 0")
        if not all(0 < value < math.inf for value in self.sapo_temperatures):
            raise out_of_range("sapo_temperatures", self.sapo_temperatures, "two finite numbers above 0")

    @classmethod
    def of(cls, loss: LossSpec | str | Mapping[str, Any], **options: Any) -> LossSpec:
        """A spec from a kind, from a mapping (a plan's ``loss``) or from another spec, with ``options`` on top."""
        if isinstance(loss, LossSpec):
            return replace(loss, **known(cls, options)) if options else loss
        given = {"kind": loss} if isinstance(loss, str) else dict(loss)
        return cls(**known(cls, {key: value for key, value in given.items() if key not in NOT_OF_THE_LOSS} | options))


def known(loss: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` as a dict. Raises ExposureError for one that is no field of the dataclass ``loss``."""
    names = [field.name for field in fields(loss)]
    for name in options:
        check_name("option", name, names)
    return dict(options)


def check_name(what: str, name: str, allowed: list[str] | tuple[str, ...]) -> None:
    if name not in allowed:
        close = difflib.get_close_matches(str(name), allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        other = " For another loss use exposure_from_gradient." if what == "loss kind" else ""
        raise ExposureError(f"Unknown {what} {name!r}{hint} Known: {', '.join(allowed)}.{other}", name=name)


def out_of_range(name: str, value: object, allowed: str) -> ExposureError:
    return ExposureError(f"Loss option {name} is {value}, must be {allowed}.", name=name, value=value)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss is computed from, floating, of one dtype; B rows, T response tokens.

    ``advantages`` [B, 1] or [B, T]; ``mask`` [B, T]; ``log_ratio`` [B, T] and ``reference`` (ref - logp; None: no
    KL term) [B, T], both 0 where the mask is; ``weights`` (p) and ``rollout_ratio``: 1 or [B, 1] or [B, T]; ``logps``
    [B, T], where a loss depends on the probabilities themselves.
    """

    advantages: Tensor
    mask: Tensor
    log_ratio: Tensor
    reference: Tensor | None
    weights: Tensor | None
    rollout_ratio: Tensor | None
    logps: Tensor | None = None

    @property
    def row_tokens(self) -> Tensor:
        """n_b, at least 1, [B, 1]."""
        return self.mask.sum(-1, keepdim=True).clamp(min=1.0)


def length_normaliser(spec: LossSpec, mask: Tensor) -> Tensor:
    """c [B, T], by what a token's loss is multiplied. GA: accumulation, W: world size, S: steps per generation.

    grpo, sapo: m / (n_b B GA); bnpo: m / (sum m GA); dr_grpo: m / (B L_max GA); luspo: m / (B GA); dapo, cispo,
    vespo: m W S / (num_items GA). Sums and num_items are at least 1.
    """
    rows = max(1, mask.shape[0])
    if spec.kind in ("grpo", "sapo"):
        return mask / (mask.sum(-1, keepdim=True).clamp(min=1.0) * (rows * spec.accumulation))
    if spec.kind == "bnpo":
        return mask / (mask.sum().clamp(min=1.0) * spec.accumulation)
    if spec.kind == "dr_grpo":
        return mask / (rows * (spec.max_tokens or max(1, mask.shape[1])) * spec.accumulation)
    if spec.kind == "luspo":
        return mask / (rows * spec.accumulation)
    if spec.num_items is None:
        return mask / (mask.sum().clamp(min=1.0) * spec.accumulation)
    steps = spec.steps_per_generation or spec.accumulation
    return mask * (spec.world_size * steps / (max(1.0, float(spec.num_items)) * spec.accumulation))


def coefficients(spec: LossSpec, inputs: LossInputs) -> Tensor:
    """omega [B, T], 0 where the mask is 0. May hold NaN or infinities: the caller checks."""
    scale = length_normaliser(spec, inputs.mask)
    log_ratio = inputs.log_ratio
    if spec.level == "sequence":
        log_ratio = (log_ratio * inputs.mask).sum(-1, keepdim=True) / inputs.row_tokens
    ratio = log_ratio.exp()
    slope = policy_slope(spec, inputs, ratio)
    weighted = scale * slope if inputs.weights is None else scale * inputs.weights * slope
    if spec.kind not in ("cispo", "vespo"):
        weighted = _through_ratio(spec, inputs, weighted)
    omega = weighted if inputs.reference is None else weighted + spec.beta * _kl(spec, inputs, scale, ratio)
    return torch.where(inputs.mask != 0, omega, torch.zeros_like(omega))


def _through_ratio(spec: LossSpec, inputs: LossInputs, by_log_ratio: Tensor) -> Tensor:
    """From dLoss/dlog r to dLoss/dlogp: a sequence's log ratio is the mean over its tokens."""
    if spec.level == "token":
        return by_log_ratio
    by_log_ratio = torch.where(inputs.mask != 0, by_log_ratio, torch.zeros_like(by_log_ratio))
    return inputs.mask / inputs.row_tokens * by_log_ratio.sum(-1, keepdim=True)


def _kl(spec: LossSpec, inputs: LossInputs, scale: Tensor, ratio: Tensor) -> Tensor:
    """c h: K3's derivative 1 - exp(d), or r (1 - exp(d)) plus k3 dr/dlogp with bias correction."""
    assert inputs.reference is not None
    slope = -torch.expm1(inputs.reference)
    if not spec.bias_correction:
        return scale * slope
    k3 = torch.expm1(inputs.reference) - inputs.reference
    return scale * ratio * slope + _through_ratio(spec, inputs, scale * ratio * k3)


def policy_slope(spec: LossSpec, inputs: LossInputs, ratio: Tensor) -> Tensor:
    """g: the policy term's derivative by the log ratio (cispo, vespo: by the log-prob). [B, 1] or [B, T]."""
    if spec.kind == "cispo":
        return _cispo(spec, inputs.advantages, ratio)
    if spec.kind == "sapo":
        return _sapo(spec, inputs.advantages, ratio)
    if spec.kind == "vespo":
        return _vespo(spec, inputs)
    return _clipped(spec, inputs.advantages, ratio)


def _clipped(spec: LossSpec, advantages: Tensor, ratio: Tensor) -> Tensor:
    """grpo, bnpo, dr_grpo, dapo, luspo: l = -min(min(r, cap) A, clip(r, 1 - low, 1 + high) A).

    g = -A r where A > 0 and r <= min(1 + high, cap), and where A < 0 and 1 - low <= r <= max(1 + high, cap) (no
    upper end without a cap); else 0. At an end itself autograd passes the gradient, and so do we.
    """
    upper = 1 + spec.clip_high
    top = upper if spec.ratio_cap is None else min(upper, spec.ratio_cap)
    active = (advantages > 0) & (ratio <= top)
    below = (advantages < 0) & (ratio >= 1 - spec.clip_low)
    if spec.ratio_cap is not None:
        below = below & (ratio <= max(upper, spec.ratio_cap))
    # Whatever the clip says: backward through exp multiplies by the ratio, and 0 times infinity is NaN.
    slope = torch.where(ratio.isinf(), torch.nan, -advantages * ratio)
    return torch.where(active | below | slope.isnan(), slope, torch.zeros_like(slope))


def _cispo(spec: LossSpec, advantages: Tensor, ratio: Tensor) -> Tensor:
    """l = -min(r, high) A logp with the ratio detached: g = -A min(r, high)."""
    return -advantages * ratio.clamp(max=spec.clip_high)


def _sapo(spec: LossSpec, advantages: Tensor, ratio: Tensor) -> Tensor:
    """l = -A 4 sigmoid(tau (r - 1)) / tau: g = -A 4 s (1 - s) r with s = sigmoid(tau (r - 1))."""
    positive, other = spec.sapo_temperatures
    gate = _choose(advantages > 0, positive, other, ratio.dtype) * (ratio - 1)
    return -advantages * 4 * torch.sigmoid(gate) * torch.sigmoid(-gate) * ratio


def _vespo(spec: LossSpec, inputs: LossInputs) -> Tensor:
    """l = -phi(w) A logp with phi detached: g = -A phi(w), phi(w) = exp(lambda + k log w - lambda w).

    log w = sum_t m clamp(logp - old, -20, 20), plus the sum of the rollout ratios' logarithms, in [log 1e-8, 20].
    """
    log_weight = (inputs.log_ratio.clamp(-20.0, 20.0) * inputs.mask).sum(-1, keepdim=True)
    if inputs.rollout_ratio is not None:
        log_rollout = inputs.rollout_ratio.log().clamp(_VESPO_LOG_FLOOR, _VESPO_LOG_CAP)
        log_weight = log_weight + log_rollout.sum(-1, keepdim=True)
    log_weight = log_weight.clamp(_VESPO_LOG_FLOOR, _VESPO_LOG_CAP)
    (k_positive, rate_positive), (k_negative, rate_negative) = spec.vespo_positive, spec.vespo_negative
    at_least_0 = inputs.advantages >= 0
    power = _choose(at_least_0, k_positive, k_negative, log_weight.dtype)
    rate = _choose(at_least_0, rate_positive, rate_negative, log_weight.dtype).clamp(min=_VESPO_LEAST_RATE)
    return -inputs.advantages * torch.exp(rate + power * log_weight - rate * log_weight.exp())


def policy_bound(spec: LossSpec, inputs: LossInputs, log_move: float) -> Tensor:
    """Largest |omega| of the policy term for log-probs within ``log_move`` nats of the old ones, [B, T]."""
    largest = math.exp(log_move)
    positive = negative = largest
    if spec.kind == "cispo":
        positive = negative = min(largest, spec.clip_high)
    elif spec.kind == "vespo":
        positive, negative = (
            math.exp(rate - k) * (k / max(rate, _VESPO_LEAST_RATE)) ** k
            for k, rate in (spec.vespo_positive, spec.vespo_negative)
        )
    elif spec.kind != "sapo":
        positive = min(largest, 1 + spec.clip_high)
    scale = length_normaliser(spec, inputs.mask)
    factor = torch.where(inputs.advantages > 0, positive, negative).to(scale.dtype)
    bound = scale * inputs.advantages.abs() * factor
    bound = bound if inputs.weights is None else bound * inputs.weights.abs()
    if spec.level == "sequence" and spec.kind not in ("cispo", "vespo"):
        bound = torch.where(inputs.mask != 0, bound, torch.zeros_like(bound))
        bound = inputs.mask / inputs.row_tokens * bound.sum(-1, keepdim=True)
    return bound


def _choose(condition: Tensor, yes: float, no: float, dtype: torch.dtype) -> Tensor:
    """torch.where of two numbers is float32 whatever the rest is."""

    def constant(value: float) -> Tensor:
        return torch.full((), value, dtype=dtype, device=condition.device)

    return torch.where(condition, constant(yes), constant(no))
