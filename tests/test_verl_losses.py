"""verl's losses against autograd, through a reference written row by row and apart from the closed forms."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hilore.runtime.errors import ExposureError
from hilore.runtime.exposure import (
    LOG_MOVE,
    exposure_before_forward,
    known_before_forward,
    normalised_exposure,
    token_coefficients,
)
from hilore.runtime.loss_kinds import resolve
from hilore.runtime.verl_losses import AGGREGATIONS, VERL_KINDS, VerlLoss
from tests.test_exposure import MOVES, ROWS, TOKENS, batch

KLS = (None, "k1", "abs", "mse", "low_var_kl", "k3+")


def policy_row(spec: VerlLoss, lp: Tensor, old: Tensor, adv: Tensor, m: Tensor, w: Tensor | None) -> Tensor:
    """The policy losses [T] of one row, without mask and aggregation; geo_mean: its row's loss in every place."""
    x = lp - old
    ratio = x.clamp(-20, 20).exp()
    low, high, n = 1 - spec.clip_low, 1 + spec.clip_high, m.sum()
    if spec.kind == "verl-gspo":
        row = (x.detach() * m).sum() / n.clamp(min=1)
        ratio = (lp - lp.detach() + row).clamp(max=10).exp()
    if spec.kind in ("verl-vanilla", "verl-gspo"):
        term = torch.maximum(-adv * ratio, -adv * ratio.clamp(low, high))
        if spec.kind == "verl-vanilla":
            term = torch.where(adv < 0, torch.minimum(-adv * spec.cap, term), term)
    elif spec.kind == "verl-sapo":
        tau = torch.where(adv > 0, *(torch.tensor(t, dtype=lp.dtype) for t in spec.sapo_temperatures))
        term = -adv * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    elif spec.kind == "verl-cispo":
        term = -ratio.clamp(low, high).detach() * adv * lp
    elif spec.kind == "verl-gpg":
        term = -adv * lp
    elif spec.kind == "verl-geo-mean":
        signs = adv.sign()
        counted = signs * torch.minimum(signs * x, signs * x.clamp(-spec.clip_low, spec.clip_high))
        n = n + 1e-8
        value = -(adv * m).sum() / n * ((counted * m).sum() / n).exp()
        if w is not None:
            value = value * ((w + 1e-10).log() * m).sum().div(n).exp()
        return value.expand(TOKENS)
    else:
        new, was = lp.exp(), old.exp()
        if spec.kind == "verl-dppo-tv":
            valid = torch.where(adv > 0, new - was <= spec.clip_high, new - was >= -spec.clip_low)
        else:
            apart = was * (old - lp) + (1 - was) * torch.log((1 - was + 1e-8) / (1 - new + 1e-8))
            up, down = (apart <= spec.clip_high) | (new <= was), (apart <= spec.clip_low) | (new >= was)
            valid = torch.where(adv > 0, up, down)
        term = -adv * ratio.clamp(max=spec.cap).detach() * lp * valid.detach()
    return term if w is None else term * w


def kl_row(kind: str, lp: Tensor, ref: Tensor) -> Tensor:
    if kind.endswith("+"):
        return (lp - ref).square() / 2
    if kind == "k1":
        return lp - ref
    if kind == "abs":
        return (lp - ref).abs()
    if kind == "mse":
        return (lp - ref).square() / 2
    away = (ref - lp).clamp(-20, 20)
    return (away.exp() - away - 1).clamp(-10, 10)


def aggregate(rows: list[Tensor], mask: Tensor, mode: str, spec: VerlLoss) -> Tensor:
    """The sum over tokens in the mode's weights, times dp_size."""
    if mode == "token-mean":
        count = spec.batch_tokens or float(mask.sum())
        total = sum((row * m).sum() for row, m in zip(rows, mask, strict=True)) / count
    elif mode == "token-sum":
        total = sum((row * m).sum() for row, m in zip(rows, mask, strict=True))
    else:
        full = [(row * m).sum() for row, m in zip(rows, mask, strict=True)]
        if mode == "seq-mean-token-mean":
            full = [value / (m.sum() + 1e-8) for value, m in zip(full, mask, strict=True)]
        total = sum(full) / (spec.batch_rows or float((mask.sum(-1) > 0).sum()))
        if mode == "seq-mean-token-sum-norm":
            total = total / (spec.sequence_scale or TOKENS)
    return total * spec.data_parallel  # type: ignore[return-value]


def reference_loss(spec: VerlLoss, logps: Tensor, data: dict[str, Any], weights: Tensor | None) -> Tensor:
    mask = data["mask"].double()
    old = logps.detach() if data["old_logps"] is None else data["old_logps"]
    adv = data["advantages"].unsqueeze(1).expand(ROWS, TOKENS)
    rows = [
        policy_row(spec, logps[b], old[b], adv[b], mask[b], None if weights is None else weights[b])
        for b in range(ROWS)
    ]
    if spec.kind == "verl-geo-mean":
        loss = sum(row[0] for row in rows) / ROWS
    else:
        mode = "seq-mean-token-mean" if spec.kind == "verl-sapo" else spec.aggregation
        loss = aggregate(rows, mask, mode, spec)
    if spec.beta:
        kls = [kl_row(spec.kl, logps[b], data["ref_logps"][b]) for b in range(ROWS)]
        loss = loss + spec.beta * aggregate(kls, mask, spec.aggregation, spec)
    return loss * spec.loss_scale  # type: ignore[return-value]


@pytest.mark.parametrize("move", [*MOVES.values(), 12.0], ids=[*MOVES, "past every clamp"])
@pytest.mark.parametrize("kind", VERL_KINDS)
def test_coefficients_equal_autograd(kind: str, move: float | None) -> None:
    data = batch(move)
    if move is not None:
        data["old_logps"] = data["old_logps"].clamp(max=-1e-3)
    weights = torch.linspace(0.1, 1.5, ROWS * TOKENS, dtype=torch.float64).view(ROWS, TOKENS)
    whole = {"batch_tokens": 640.0, "batch_rows": 24.0, "data_parallel": 2, "sequence_scale": 512.0, "loss_scale": 0.25}
    for mode, kl, weight, options in product(AGGREGATIONS, KLS, (None, weights), ({}, whole)):
        given = dict(options, aggregation=mode, clip_high=0.28, ratio_cap=1.9, beta=0.0 if kl is None else 0.04)
        spec = VerlLoss(kind=kind, kl=kl or "k3", **given)
        logps = data["logps"].clone().requires_grad_()
        (expected,) = torch.autograd.grad(reference_loss(spec, logps, data, weight), logps)
        found = token_coefficients(spec, **data, weights=weight)
        assert found.dtype == torch.float64
        assert (found - expected).abs().max() <= 1e-10 * max(1.0, float(expected.abs().max())), spec
        assert torch.all(found[data["mask"] == 0] == 0)


def test_every_branch_is_on_the_grid() -> None:
    """Kept and clipped tokens of both signs occur for every kind that clips, so the comparison above covers both."""
    for kind in set(VERL_KINDS) - {"verl-gpg", "verl-sapo", "verl-cispo"}:
        seen = set()
        for move in (0.05, -0.4, 1.0, -1.0):
            data = batch(move)
            data["old_logps"] = data["old_logps"].clamp(max=-1e-3)
            found = token_coefficients(kind, **data)
            signs = data["advantages"].sign().unsqueeze(1).expand(ROWS, TOKENS)
            inside = data["mask"] > 0
            seen |= set(zip((found[inside] != 0).tolist(), signs[inside].tolist(), strict=True))
        assert seen >= set(product((False, True), (-1.0, 1.0))), kind


@pytest.mark.parametrize("kind", VERL_KINDS)
@pytest.mark.parametrize("kl", [kl for kl in KLS if kl is not None])
def test_bound_before_the_forward_holds(kind: str, kl: str) -> None:
    generator = torch.Generator().manual_seed(5)
    for policy, beta, mode in product(("on", "off"), (0.0, 0.04), AGGREGATIONS):
        data = batch(None)
        noise = torch.rand(ROWS, TOKENS, generator=generator, dtype=torch.float64) * 2 - 1
        data["ref_logps"] = data["logps"] + LOG_MOVE * noise
        data["old_logps"] = None if policy == "on" else data["logps"] + LOG_MOVE * noise.flip(0)
        loss = VerlLoss(kind=kind, kl=kl, beta=beta, aggregation=mode)
        exact = normalised_exposure(loss, **data)
        before = exposure_before_forward(loss, **(data | {"logps": None}))
        assert exact <= before * (1 + 1e-9)
        if policy == "on" and beta == 0:
            assert before == pytest.approx(exact, rel=1e-12)


def test_what_is_known_before_the_forward() -> None:
    old = batch(0.6)["old_logps"]
    assert known_before_forward("verl-vanilla")
    assert not known_before_forward("verl-vanilla", old)
    assert known_before_forward("verl-gpg", old)
    assert not known_before_forward("verl-gpg", old, beta=1e-3)
    assert known_before_forward({"kind": "verl-sapo", "inner_epochs": 1, "head": "naive"})


def test_on_policy_exposure_is_the_rms_advantage_whatever_the_aggregation() -> None:
    mask, advantages = torch.ones(4, 5), torch.tensor([1.5, -0.5, -0.5, -0.5])
    for kind, mode in product(VERL_KINDS, AGGREGATIONS):
        found = normalised_exposure(kind, advantages, mask, aggregation=mode, loss_scale=0.125)
        assert found == pytest.approx(math.sqrt(0.75), rel=1e-6), (kind, mode)


@pytest.mark.parametrize("kind", VERL_KINDS)
def test_flat_groups_and_masked_rows_give_zero(kind: str) -> None:
    assert normalised_exposure(kind, torch.zeros(3), torch.ones(3, 4)) == 0
    assert normalised_exposure(kind, torch.ones(3), torch.zeros(3, 4)) == 0
    assert normalised_exposure(kind, torch.ones(0), torch.ones(0, 4)) == 0


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(ExposureError, match="Unknown loss kind 'verl-vanila'; did you mean 'verl-vanilla'"):
        resolve("verl-vanila")
    with pytest.raises(ExposureError, match="Unknown aggregation 'token_mean'; did you mean 'token-mean'"):
        resolve("verl-vanilla", aggregation="token_mean")
    with pytest.raises(ExposureError, match="Unknown option 'num_items'"):
        resolve("verl-vanilla", num_items=3)
    with pytest.raises(ExposureError, match="ratio_cap is 0"):
        resolve("verl-vanilla", ratio_cap=0)
    with pytest.raises(ExposureError, match="exposure_from_gradient"):
        resolve("verl-clip-cov")
