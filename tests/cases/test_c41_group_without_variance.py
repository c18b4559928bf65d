"""C-41: a group without variance has advantage 0 and exposure 0, and a NaN raises instead of comparing as False."""

from __future__ import annotations

import math

import pytest
import torch

from hilore.runtime.errors import ExposureError
from hilore.runtime.exposure import group_advantages, normalised_exposure, token_coefficients
from hilore.runtime.losses import LOSS_KINDS


@pytest.mark.parametrize("reward", [1.0, 0.0, 0.1, -1e-8, 1e30])
@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_flat_groups_have_advantage_exactly_0(reward: float, size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rewards = torch.full((2 * size,), reward, dtype=dtype)
        assert torch.equal(group_advantages(rewards, size).double(), torch.zeros(2 * size).double())
        assert torch.equal(group_advantages(rewards, size, scale=False).double(), torch.zeros(2 * size).double())


def test_one_flat_group_and_one_not() -> None:
    advantages = group_advantages(torch.tensor([1.0, 1, 1, 1, 1, 0, 0, 0]), 4)
    assert torch.equal(advantages[:4], torch.zeros(4))
    torch.testing.assert_close(advantages[4:], torch.tensor([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-4))
    mask = torch.ones(8, 3)
    assert normalised_exposure("grpo", advantages, mask) == pytest.approx(0.75**0.5 / math.sqrt(2), rel=1e-3)
    assert token_coefficients("grpo", advantages, mask, None)[:4].count_nonzero() == 0


@pytest.mark.parametrize("kind", LOSS_KINDS)
def test_exposure_of_flat_groups_and_of_masked_completions_is_0(kind: str) -> None:
    mask = torch.ones(4, 6)
    flat = group_advantages(torch.ones(4), 4)
    assert normalised_exposure(kind, flat, mask) == 0.0
    logps = -torch.ones(4, 6)
    assert normalised_exposure(kind, flat, mask, logps, logps - 0.7) == 0.0
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert normalised_exposure(kind, advantages, torch.zeros(4, 6)) == 0.0
    mask[1] = 0
    assert normalised_exposure(kind, advantages, mask, logps, logps) > 0.0
    assert token_coefficients(kind, advantages, mask, logps)[1].count_nonzero() == 0


def test_a_flat_group_with_a_kl_term_is_exposed() -> None:
    logps = -torch.ones(4, 6)
    flat = torch.zeros(4)
    assert normalised_exposure("grpo", flat, torch.ones(4, 6), logps, ref_logps=logps + 0.1, beta=0.01) > 0.0
    assert normalised_exposure("grpo", flat, torch.ones(4, 6), logps, ref_logps=logps, beta=0.01) == 0.0


def test_nan_raises() -> None:
    flat = torch.ones(3)
    naive = (flat - flat.mean()) / flat.std()
    with pytest.raises(ExposureError, match="row 0, token 0 is nan"):
        normalised_exposure("grpo", naive, torch.ones(3, 2))
    with pytest.raises(ExposureError, match="Reward 5 is nan"):
        group_advantages(torch.tensor([1.0, 0, 1, 0, 1, math.nan, 0, 0]), 4)
    with pytest.raises(ExposureError, match="cannot be cut into groups of 4"):
        group_advantages(torch.ones(6), 4)
