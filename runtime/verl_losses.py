"""The policy losses of verl 0.9 as their derivatives by the log-probs, in closed form.

With x = logp - old, r = exp(x), m the mask, p the rollout correction's weights and A the advantages [B, T],

    omega_t = dLoss/dlogp_t = c_t p_t g_t + beta c^kl_t h_t

``c``: what the aggregation multiplies a token's loss with (``verl_normaliser``); ``c^kl`` the same for the KL term,
which sapo and geo_mean aggregate apart from their policy term. g of each kind stands at its function, h at
``_kl_slope``. Sources: ``agg_loss``, ``compute_policy_loss_*`` and ``kl_penalty`` of verl 0.9's
``trainer/ppo/core_algos.py``; dual clip arXiv:1912.09729, GSPO 2507.18071, SAPO 2511.20347, CISPO 2506.13585, GPG
2504.02546, DPPO 2602.04879, GMPO 2507.20673. ``clip_cov`` and ``kl_cov`` draw tokens by their covariance and have no
closed form: exposure_from_gradient measures them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hilore.runtime.losses import LossInputs, check_name, out_of_range

PREFIX = "verl-"
VERL_KINDS = (
    "verl-vanilla",
    "verl-gspo",
    "verl-sapo",
    "verl-cispo",
    "verl-gpg",
    "verl-dppo-tv",
    "verl-dppo-kl",
    "verl-geo-mean",
)
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
_KL_SHORT = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_KINDS = ("k1", "abs", "k2", "k3", *_KL_SHORT, "k1+", "abs+", "k3+", "kl+", "low_var_kl+")
_RATIO_CAPS = {"verl-vanilla": 3.0, "verl-dppo-tv": 20.0, "verl-dppo-kl": 20.0}
_LOG_CLAMP, _GSPO_LOG_CAP, _EPSILON = 20.0, 10.0, 1e-8


@dataclass(frozen=True, slots=True)
class VerlLoss:
    """A policy loss of verl's actor and its options, under verl's defaults.

    ``clip_low``, ``clip_high``: clip_ratio_low and _high (dppo: the divergence's thresholds). ``ratio_cap``:
    clip_ratio_c (None: 3 for vanilla, 20 for dppo). ``aggregation``: loss_agg_mode; ``batch_tokens``,
    ``batch_rows``, ``data_parallel``, ``sequence_scale``: batch_num_tokens, global_batch_size, dp_size and
    loss_scale_factor of its global batch info (None: this microbatch's own). ``beta`` and ``kl``: kl_loss_coef (0
    without use_kl_loss) and kl_loss_type. ``loss_scale``: what else the trainer multiplies a microbatch's loss with.
    Raises ExposureError for an unknown name or a value out of its range.
    """

    kind: str = "verl-vanilla"
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    kl: str = "low_var_kl"
    aggregation: str = "token-mean"
    ratio_cap: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    batch_tokens: float | None = None
    batch_rows: float | None = None
    data_parallel: int = 1
    sequence_scale: float | None = None
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        check_name("loss kind", self.kind, VERL_KINDS)
        check_name("aggregation", self.aggregation, AGGREGATIONS)
        check_name("kl", self.kl, KL_KINDS)
        for name in ("clip_low", "clip_high", "beta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise out_of_range(name, getattr(self, name), "a finite number of at least 0")
        for name in ("ratio_cap", "batch_tokens", "batch_rows", "data_parallel", "sequence_scale", "loss_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise out_of_range(name, value, "a finite number above 0")
        if not all(0 < value < math.inf for value in self.sapo_temperatures):
            raise out_of_range("sapo_temperatures", self.sapo_temperatures, "two finite numbers above 0")

    @property
    def needs_ratio(self) -> bool:
        """Whether the policy term's slope depends on the log-probs at all (gpg's does not)."""
        return self.kind != "verl-gpg"

    @property
    def cap(self) -> float:
        """The ratio's upper end of dual clip and truncated importance sampling."""
        return self.ratio_cap if self.ratio_cap is not None else _RATIO_CAPS.get(self.kind, math.inf)


def verl_normaliser(spec: VerlLoss, mask: Tensor) -> Tensor:
    """c [B, T] of the policy term. sapo always takes seq-mean-token-mean, geo_mean m / ((n_b + 1e-8) B)."""
    if spec.kind == "verl-geo-mean":
        return mask / ((mask.sum(-1, keepdim=True) + _EPSILON) * max(1, mask.shape[0])) * spec.loss_scale
    return _aggregated(spec, "seq-mean-token-mean" if spec.kind == "verl-sapo" else spec.aggregation, mask)


def _aggregated(spec: VerlLoss, aggregation: str, mask: Tensor) -> Tensor:
    """m times, with D = dp_size, N = batch tokens, R = rows that hold a token, n_b a row's tokens:

    token-mean D / N; token-sum D; seq-mean-token-sum D / R; -norm D / (R scale); seq-mean-token-mean D / (R n_b).
    """
    factor = float(spec.data_parallel) * spec.loss_scale
    tokens = mask.sum(-1, keepdim=True)
    if aggregation == "token-sum":
        return mask * factor
    if aggregation == "token-mean":
        return mask * factor / (mask.sum().clamp(min=1.0) if spec.batch_tokens is None else spec.batch_tokens)
    rows = (tokens > 0).sum().clamp(min=1) if spec.batch_rows is None else spec.batch_rows
    scaled = mask * factor / rows
    if aggregation == "seq-mean-token-mean":
        return scaled / (tokens + _EPSILON)
    if aggregation == "seq-mean-token-sum-norm":
        return scaled / (spec.sequence_scale or max(1, mask.shape[1]))
    return scaled


def verl_coefficients(spec: VerlLoss, inputs: LossInputs) -> Tensor:
    """omega [B, T], 0 where the mask is 0. May hold NaN or infinities: the caller checks."""
    slope = _SLOPES[spec.kind](spec, inputs)
    weights = _sequence_weights(inputs) if spec.kind == "verl-geo-mean" else inputs.weights
    omega = verl_normaliser(spec, inputs.mask) * slope
    omega = omega if weights is None else omega * weights
    if inputs.reference is not None:
        omega = omega + spec.beta * _aggregated(spec, spec.aggregation, inputs.mask) * _kl_slope(spec, inputs.reference)
    return torch.where(inputs.mask != 0, omega, torch.zeros_like(omega))


def _kl_slope(spec: VerlLoss, reference: Tensor) -> Tensor:
    """h by d = ref - logp: k1 1; abs sign(-d); k2 -d; k3 1 - exp(d), 0 where its clamps at |d| = 20 and k3 = 10 hold.

    With a plus sign the value is that kind's and the gradient k2's.
    """
    kind = spec.kl if spec.kl.endswith("+") else _KL_SHORT.get(spec.kl, spec.kl)
    if kind.endswith("+") or kind == "k2":
        return -reference
    if kind == "k1":
        return torch.ones_like(reference)
    if kind == "abs":
        return -reference.sign()
    clamped = reference.clamp(-_LOG_CLAMP, _LOG_CLAMP)
    inside = (reference.abs() <= _LOG_CLAMP) & (clamped.exp() - clamped - 1 <= 10.0)
    return torch.where(inside | reference.isnan(), -torch.expm1(clamped), torch.zeros_like(reference))


def _ratio(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """r = exp(clamp(x, -20, 20)), and where the clamp lets a gradient through."""
    return inputs.log_ratio.clamp(-_LOG_CLAMP, _LOG_CLAMP).exp(), inputs.log_ratio.abs() <= _LOG_CLAMP


def _where(condition: Tensor, slope: Tensor) -> Tensor:
    return torch.where(condition | slope.isnan(), slope, torch.zeros_like(slope))


def _vanilla(spec: VerlLoss, inputs: LossInputs) -> Tensor:
    """l = max(-A r, -A clip(r)), for A < 0 at most -A cap: g = -A r where A > 0 and r <= 1 + high, and where A < 0
    and 1 - low <= r < cap; else 0."""
    ratio, through = _ratio(inputs)
    above = (inputs.advantages > 0) & (ratio <= 1 + spec.clip_high)
    below = (inputs.advantages < 0) & (ratio >= 1 - spec.clip_low) & (ratio < spec.cap)
    return _where(through & (above | below), -inputs.advantages * ratio)


def _gspo(spec: VerlLoss, inputs: LossInputs) -> Tensor:
    """The clip of vanilla's first line on s = exp(min(mean of x over the row, 10)), straight through: each token's
    gradient is -A_t s."""
    mean = (inputs.log_ratio * inputs.mask).sum(-1, keepdim=True) / inputs.row_tokens
    ratio = mean.clamp(max=_GSPO_LOG_CAP).exp()
    above = (inputs.advantages > 0) & (ratio <= 1 + spec.clip_high)
    below = (inputs.advantages < 0) & (ratio >= 1 - spec.clip_low)
    return _where((mean <= _GSPO_LOG_CAP) & (above | below), -inputs.advantages * ratio)


def _sapo(spec: VerlLoss, inputs: LossInputs) -> Tensor:
    """l = -A 4 s / tau, s = sigmoid(tau (r - 1)): g = -4 A s (1 - s) r."""
    ratio, through = _ratio(inputs)
    positive, other = (ratio.new_full((), value) for value in spec.sapo_temperatures)
    gate = torch.where(inputs.advantages > 0, positive, other) * (ratio - 1)
    return _where(through, -inputs.advantages * 4 * torch.sigmoid(gate) * torch.sigmoid(-gate) * ratio)


def _cispo(spec: VerlLoss, inputs: LossInputs) -> Tensor:
    """l = -sg(clip(r, 1 - low, 1 + high)) A logp: g = -A clip(r)."""
    return -inputs.advantages * _ratio(inputs)[0].clamp(1 - spec.clip_low, 1 + spec.clip_high)


def _gpg(spec: VerlLoss, inputs: LossInputs) -> Tensor:
    """l = -A logp: g = -A, whatever the ratio."""
    return -inputs.advantages * torch.ones_like(inputs.mask)


def _dppo(spec: VerlLoss, inputs: LossInputs) -> Tensor:
    """l = -A sg(min(r, cap) v) logp: g = -A min(r, cap) v, where v is 1 inside the trust region.

    With P = exp(logp), Q = exp(old): tv, A > 0: P - Q <= high, else P - Q >= -low; kl with the binary divergence
    D = Q (old - logp) + (1 - Q) log((1 - Q + 1e-8) / (1 - P + 1e-8)), A > 0: D <= high or P <= Q, else D <= low or
    P >= Q. On policy (no log-probs needed) v is 1.
    """
    slope = -inputs.advantages * _ratio(inputs)[0].clamp(max=spec.cap)
    if inputs.logps is None:
        return slope
    new, old = inputs.logps.exp(), (inputs.logps - inputs.log_ratio).exp()
    if spec.kind == "verl-dppo-tv":
        valid = torch.where(inputs.advantages > 0, new - old <= spec.clip_high, new - old >= -spec.clip_low)
    else:
        apart = -old * inputs.log_ratio + (1 - old) * torch.log((1.0 - old + 1e-8) / (1.0 - new + 1e-8))
        rising = (apart <= spec.clip_high) | (new <= old)
        falling = (apart <= spec.clip_low) | (new >= old)
        valid = torch.where(inputs.advantages > 0, rising, falling)
    return _where(valid, slope)


def _geo_mean(spec: VerlLoss, inputs: LossInputs) -> Tensor:
    """l = -mean(A) R per row, R = exp(sum of clipped x / (n_b + 1e-8)), clipped where the sign of A_t makes it count:
    g = -mean(A) R where A_t > 0 and x <= high, and where A_t < 0 and x >= -low; else 0."""
    advantages, x = inputs.advantages.expand_as(inputs.mask), inputs.log_ratio
    tokens = inputs.mask.sum(-1, keepdim=True) + _EPSILON
    above, below = (advantages > 0) & (x <= spec.clip_high), (advantages < 0) & (x >= -spec.clip_low)
    counted = torch.where(advantages > 0, x.clamp(max=spec.clip_high), x.clamp(min=-spec.clip_low))
    counted = torch.where(advantages == 0, torch.zeros_like(x), counted)
    ratio = ((counted * inputs.mask).sum(-1, keepdim=True) / tokens).exp()
    slope = -(advantages * inputs.mask).sum(-1, keepdim=True) / tokens * ratio
    return _where(above | below, slope.expand_as(inputs.mask))


def _sequence_weights(inputs: LossInputs) -> Tensor | None:
    """geo_mean's weights of a row, [B, 1]: the geometric mean of its tokens' weights."""
    if inputs.weights is None:
        return None
    logs = torch.log(inputs.weights.expand_as(inputs.mask) + 1e-10) * inputs.mask
    return (logs.sum(-1, keepdim=True) / (inputs.mask.sum(-1, keepdim=True) + _EPSILON)).exp()


_SLOPES = {
    "verl-vanilla": _vanilla,
    "verl-gspo": _gspo,
    "verl-sapo": _sapo,
    "verl-cispo": _cispo,
    "verl-gpg": _gpg,
    "verl-dppo-tv": _dppo,
    "verl-dppo-kl": _dppo,
    "verl-geo-mean": _geo_mean,
}


def verl_bound(spec: VerlLoss, inputs: LossInputs, *, ratio_move: float, kl_move: float) -> Tensor:
    """Largest |omega| [B, T] for log-probs within ``ratio_move`` nats of the old and ``kl_move`` of the reference's.

    The policy term's factor: 1 for gpg; exp(ratio_move) for sapo and geo_mean; min of it and the cap for dppo; for
    the others with the clip's upper end 1 + high (cispo for every A, and at least 1 - low) and, for A < 0, vanilla's
    cap.
    """
    largest = math.exp(ratio_move)
    upper, lower = largest, largest
    if spec.kind == "verl-gpg":
        upper = lower = 1.0
    elif spec.kind == "verl-cispo":
        upper = lower = min(max(largest, 1 - spec.clip_low), 1 + spec.clip_high)
    elif spec.kind.startswith("verl-dppo"):
        upper = lower = min(largest, spec.cap)
    elif spec.kind in ("verl-vanilla", "verl-gspo"):
        upper, lower = min(largest, 1 + spec.clip_high), min(largest, spec.cap)
    factor = torch.where(inputs.advantages > 0, upper, lower).to(inputs.mask.dtype)
    size = inputs.advantages.abs() * factor
    weights = inputs.weights
    if spec.kind == "verl-geo-mean":
        weights = _sequence_weights(inputs)
        tokens = inputs.mask.sum(-1, keepdim=True) + _EPSILON
        size = (size.expand_as(inputs.mask) * inputs.mask).sum(-1, keepdim=True) / tokens
    bound = verl_normaliser(spec, inputs.mask) * size
    bound = bound if weights is None else bound * weights.abs()
    slope = {"k1": 1.0, "abs": 1.0, "k2": kl_move, "k3": math.expm1(kl_move)}
    kind = "k2" if spec.kl.endswith("+") else _KL_SHORT.get(spec.kl, spec.kl)
    return bound + spec.beta * slope[kind] * _aggregated(spec, spec.aggregation, inputs.mask)


__all__ = ["AGGREGATIONS", "KL_KINDS", "VERL_KINDS", "VerlLoss", "verl_bound", "verl_coefficients", "verl_normaliser"]
