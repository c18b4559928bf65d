"""Loss coefficients against autograd, through a reference loss written apart from them and through TRL's own."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hilore.runtime.errors import ExposureError
from hilore.runtime.exposure import (
    LOG_MOVE,
    exposure_before_forward,
    exposure_from_gradient,
    known_before_forward,
    normalised_exposure,
    token_coefficients,
)
from hilore.runtime.logprobhook import LogprobHook
from hilore.runtime.losses import CLIPPED_KINDS, LossSpec, length_normaliser

KINDS = (*CLIPPED_KINDS, "cispo", "sapo", "vespo")
ROWS, TOKENS = 6, 7
MOVES = {"on policy": None, "inside": 0.05, "clipped": -0.4, "far": 1.0, "far back": -1.0}
_TOKEN_MOVES = (0.3, -2.0, 2.0, -1.0, 0.0, 1.0, -0.3)
_ROW_MOVES = (0.5, -0.6, 0.0, 1.2, -0.2, -0.5)


def batch(move: float | None, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Advantages of both signs and 0, ragged rows with one fully masked, log ratios within 2.6 ``move``."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[1, 4:], mask[2], mask[3, 1:] = 0, 0, 0
    logps = -normal(ROWS, TOKENS).abs()
    advantages = torch.tensor([1.3, -0.7, 2.0, -1.1, 0.0, 0.4], dtype=dtype)
    moves = torch.tensor(_TOKEN_MOVES, dtype=dtype) + torch.tensor(_ROW_MOVES, dtype=dtype).unsqueeze(1)
    old = None if move is None else logps - move * moves
    return {
        "advantages": advantages,
        "mask": mask,
        "logps": logps,
        "old_logps": old,
        "ref_logps": logps + 0.3 * normal(ROWS, TOKENS),
    }


def reference_loss(spec: LossSpec, logps: Tensor, data: dict[str, Any], weights: Tensor | None) -> Tensor:
    """The loss row by row and, for the clipped family, with the two-sided objective as nested min and clamp."""
    total = logps.new_zeros(())
    mask = data["mask"].double()
    old = logps.detach() if data["old_logps"] is None else data["old_logps"]
    for row in range(ROWS):
        m, adv, lp = mask[row], data["advantages"][row], logps[row]
        moved = lp - old[row]
        count = max(1.0, float(m.sum()))
        ratio = ((moved * m).sum() / count).exp().expand(TOKENS) if spec.level == "sequence" else moved.exp()
        if spec.kind == "cispo":
            term = -ratio.clamp(max=spec.clip_high).detach() * adv * lp
        elif spec.kind == "sapo":
            tau = spec.sapo_temperatures[0 if adv > 0 else 1]
            term = -(4 / tau) * adv / (1 + torch.exp(-tau * (ratio - 1)))
        elif spec.kind == "vespo":
            k, rate = spec.vespo_positive if adv >= 0 else spec.vespo_negative
            w = (moved.clamp(-20, 20) * m).sum().clamp(math.log(1e-8), 20).exp().detach()
            term = -(w**k) * math.exp(rate) * torch.exp(-rate * w) * adv * lp
        else:
            capped = ratio if spec.ratio_cap is None else ratio.clamp(max=spec.ratio_cap)
            term = -torch.minimum(capped * adv, ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high) * adv)
        if weights is not None:
            term = term * weights[row]
        if spec.beta:
            away = data["ref_logps"][row] - lp
            kl = torch.exp(away) - away - 1
            term = term + spec.beta * (kl * ratio if spec.bias_correction else kl)
        total = total + (term * m).sum() / divisor(spec, mask, count)
    return total


def divisor(spec: LossSpec, mask: Tensor, count: float) -> float:
    batch_tokens = max(1.0, float(mask.sum()))
    if spec.kind in ("grpo", "sapo"):
        return count * ROWS * spec.accumulation
    if spec.kind == "bnpo":
        return batch_tokens * spec.accumulation
    if spec.kind == "dr_grpo":
        return ROWS * (spec.max_tokens or TOKENS) * spec.accumulation
    if spec.kind == "luspo":
        return ROWS * spec.accumulation
    items = batch_tokens * spec.accumulation if spec.num_items is None else spec.num_items / spec.world_size
    return items * spec.accumulation / (spec.steps_per_generation or spec.accumulation)


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_equal_autograd(kind: str, level: str, move: float | None) -> None:
    data = batch(move)
    weights = torch.linspace(0.0, 1.5, ROWS * TOKENS, dtype=torch.float64).view(ROWS, TOKENS)
    for beta, corrected, cap, weight in product((0.0, 0.04), (False, True), (None, 1.1, 4.0), (None, weights)):
        spec = LossSpec(
            kind=kind,
            level=level,
            beta=beta,
            bias_correction=corrected,
            ratio_cap=cap,
            clip_high=5.0 if kind == "cispo" and cap else 0.28,
            accumulation=4,
        )
        logps = data["logps"].clone().requires_grad_()
        (expected,) = torch.autograd.grad(reference_loss(spec, logps, data, weight), logps)
        found = token_coefficients(spec, **data, weights=weight)
        assert found.dtype == torch.float64
        assert (found - expected).abs().max() <= 1e-10, spec
        assert torch.all(found[data["mask"] == 0] == 0)


@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo"])
def test_a_ratio_that_overflows_is_refused_also_where_it_is_clipped(kind: str, level: str, cap: float | None) -> None:
    """0 times infinity: autograd's gradients are NaN there, and exposure 0 would pick the null regime."""
    data = batch(0.4, torch.float32)
    data["advantages"] = torch.full((ROWS,), 1.5)
    data["old_logps"] = data["logps"] - 2000.0 * (torch.arange(ROWS) == 4).unsqueeze(1)
    spec = LossSpec(kind=kind, level=level, ratio_cap=cap)
    logps = data["logps"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reference_loss(spec, logps, data, None), logps)
    assert gradient[4].isnan().all()
    with pytest.raises(ExposureError, match="loss coefficient of row 4, token 0 is nan"):
        token_coefficients(spec, **data)
    with pytest.raises(ExposureError, match="loss coefficient of row 4, token 0 is nan"):
        normalised_exposure(spec, **data)


@pytest.mark.parametrize(
    ("option", "value"),
    [("num_items", math.nan), ("num_items", math.inf), ("num_items", -5), ("vespo_positive", (2.0, -1.0))],
)
def test_options_out_of_their_range(option: str, value: object) -> None:
    with pytest.raises(ExposureError, match=f"Loss option {option} is .* must be "):
        LossSpec(kind="vespo", **{option: value})  # type: ignore[arg-type]


def test_vespos_bound_holds_where_its_rate_is_at_its_least() -> None:
    spec = LossSpec(kind="vespo", vespo_positive=(2.0, 0.0), vespo_negative=(0.0, 0.0))
    data = batch(0.1)
    data.pop("ref_logps")
    exact = normalised_exposure(spec, **data)
    assert 0 < exact <= exposure_before_forward(spec, **(data | {"logps": None}))


def test_what_is_masked_cannot_make_a_bound_nan() -> None:
    data = batch(0.1)
    advantages = data["advantages"].unsqueeze(1).expand(ROWS, TOKENS).clone()
    advantages[data["mask"] == 0] = math.nan
    for level in ("token", "sequence"):
        spec = LossSpec(level=level)
        found = exposure_before_forward(spec, advantages, data["mask"], old_logps=data["old_logps"])
        assert found == exposure_before_forward(spec, data["advantages"], data["mask"], old_logps=data["old_logps"])


def test_every_clip_state_is_on_the_grid() -> None:
    states = set()
    for move in (0.05, -0.4, 1.0, -1.0):
        data = batch(move)
        seen = data["mask"] > 0
        ratio = (data["logps"] - data["old_logps"]).exp()[seen]
        signs = data["advantages"].sign().unsqueeze(1).expand(ROWS, TOKENS)[seen]
        states |= set(
            zip(torch.bucketize(ratio, torch.tensor([0.8, 1.1, 1.28, 4.0])).tolist(), signs.tolist(), strict=True)
        )
    assert states >= set(product(range(5), (-1.0, 1.0)))


@pytest.mark.parametrize(
    ("kind", "divided_by"),
    [
        ("grpo", 6 * 5 * 7),
        ("sapo", 6 * 5 * 7),
        ("bnpo", 26 * 5),
        ("dr_grpo", 6 * 512 * 5),
        ("luspo", 6 * 5),
        ("dapo", 640 / 2 * 5 / 8),
        ("cispo", 640 / 2 * 5 / 8),
        ("vespo", 640 / 2 * 5 / 8),
    ],
)
def test_length_normaliser(kind: str, divided_by: float) -> None:
    mask = batch(None)["mask"].double()
    spec = LossSpec(kind=kind, accumulation=5, num_items=640, world_size=2, steps_per_generation=8, max_tokens=512)
    normaliser = length_normaliser(spec, mask)
    assert normaliser[0, 0] == pytest.approx(1 / divided_by, rel=1e-15)
    assert normaliser[2].abs().sum() == 0


class TrlStub(SimpleNamespace):
    """What GRPOTrainer._compute_loss reads of its trainer; the forward gives the log-probs it is handed."""

    def __init__(self, spec: LossSpec, logps: Tensor) -> None:
        args = SimpleNamespace(
            delta=spec.ratio_cap,
            use_bias_correction_kl=spec.bias_correction,
            sapo_temperature_pos=spec.sapo_temperatures[0],
            sapo_temperature_neg=spec.sapo_temperatures[1],
            vespo_k_pos=spec.vespo_positive[0],
            vespo_lambda_pos=spec.vespo_positive[1],
            vespo_k_neg=spec.vespo_negative[0],
            vespo_lambda_neg=spec.vespo_negative[1],
            steps_per_generation=spec.steps_per_generation,
        )
        accelerator = SimpleNamespace(
            num_processes=spec.world_size, gather=lambda value: value, reduce=lambda value, reduction: value
        )
        super().__init__(
            args=args,
            accelerator=accelerator,
            model=SimpleNamespace(training=True),
            beta=spec.beta,
            loss_type=spec.kind,
            importance_sampling_level=spec.level,
            epsilon_low=spec.clip_low,
            epsilon_high=spec.clip_high,
            max_completion_length=spec.max_tokens,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            aux_loss_enabled=False,
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            current_gradient_accumulation_steps=spec.accumulation,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)},
        )
        self._get_per_token_logps_and_entropies = lambda *a, **k: (logps, torch.zeros_like(logps), None)


@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_equal_those_of_trl(kind: str) -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    rollout = torch.linspace(0.5, 1.5, ROWS * TOKENS, dtype=torch.float64).view(ROWS, TOKENS)
    for level, beta, corrected, cap, name in product(
        ("token", "sequence"), (0.0, 0.04), (False, True), (None, 1.1, 4.0), MOVES
    ):
        data = batch(MOVES[name])
        spec = LossSpec(
            kind=kind,
            level=level,
            beta=beta,
            bias_correction=corrected,
            ratio_cap=cap,
            clip_high=0.28,
            accumulation=4,
            num_items=640,
            world_size=2,
            steps_per_generation=8,
            max_tokens=11,
            sapo_temperatures=(1.0, 1.0625),
        )  # TRL's become float32 on the way, so one exact in it
        logps = data["logps"].clone().requires_grad_()
        stub = TrlStub(spec, logps)
        stub.get_gamma_weights = trainer.get_gamma_weights
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
        given = {
            "prompt_ids": ids[:, :2],
            "prompt_mask": ids[:, :2],
            "completion_ids": ids,
            "completion_mask": data["mask"],
            "advantages": data["advantages"],
            "ref_per_token_logps": data["ref_logps"],
            "importance_sampling_ratio": rollout,
            "num_items_in_batch": torch.tensor(640.0, dtype=torch.float64),
        }
        if data["old_logps"] is not None:
            given["old_per_token_logps"] = data["old_logps"]
        (expected,) = torch.autograd.grad(trainer._compute_loss(stub, None, given), logps)
        found = token_coefficients(spec, **data, rollout_ratio=rollout)
        assert (found - expected).abs().max() <= 1e-10, (spec, name)


def test_gspo_is_sequence_level_grpo() -> None:
    data = batch(0.6)
    assert LossSpec(kind="gspo") == LossSpec(kind="grpo", level="sequence")
    assert torch.equal(token_coefficients("gspo", **data), token_coefficients("grpo", **data, level="sequence"))
    row = token_coefficients("gspo", **data, clip_high=9.0, clip_low=1.0)[1]
    assert torch.equal(row[:4], row[:1].expand(4))


def test_exposure_is_the_rms_of_the_coefficients_in_units_of_the_normaliser() -> None:
    data = batch(0.6)
    for kind in KINDS:
        omega = token_coefficients(kind, **data)
        scale = length_normaliser(LossSpec(kind), data["mask"].double())
        expected = float((omega.square().sum() / scale.square().sum()).sqrt())
        assert normalised_exposure(kind, **data) == pytest.approx(expected, rel=1e-12)


def test_on_policy_exposure_is_the_rms_advantage_and_needs_no_forward() -> None:
    mask = torch.ones(4, 5)
    advantages = torch.tensor([1.5, -0.5, -0.5, -0.5])
    for kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo", "gspo"):
        for accumulation in (1, 64):
            found = normalised_exposure(kind, advantages, mask, accumulation=accumulation)
            assert found == pytest.approx(math.sqrt(0.75), rel=1e-6), kind
    assert normalised_exposure("cispo", advantages, mask, clip_high=5.0) == pytest.approx(math.sqrt(0.75), rel=1e-6)
    assert normalised_exposure("grpo", advantages.unsqueeze(1).expand(4, 5), mask) == pytest.approx(math.sqrt(0.75))


def test_known_before_forward() -> None:
    data = batch(0.6)
    assert known_before_forward("grpo")
    assert not known_before_forward("grpo", data["old_logps"])
    assert not known_before_forward("grpo", beta=1e-3)
    assert not known_before_forward({"kind": "grpo", "beta": 1e-3, "inner_epochs": 1, "head": "naive"})
    on_policy = batch(None) | {"logps": None, "ref_logps": None}
    assert torch.equal(token_coefficients("dapo", **on_policy), token_coefficients("dapo", **batch(None)))


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ({"logps": None, "beta": 0.0}, "logps"),
        ({"beta": 0.1, "ref_logps": None}, "ref_logps"),
        ({"logps": None, "old_logps": None, "beta": 0.1}, "logps"),
    ],
)
def test_a_missing_input_is_named(arguments: dict[str, Any], missing: str) -> None:
    with pytest.raises(ExposureError, match=f"^{missing} are missing") as caught:
        token_coefficients("grpo", **(batch(0.6) | arguments))
    assert caught.value.missing == missing


@pytest.mark.parametrize("kind", [*KINDS, "gspo"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("corrected", [False, True])
def test_bound_before_the_forward_holds(kind: str, beta: float, corrected: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    for policy in ("on", "off"):
        for cap in (None, 1.5):
            data = batch(None)
            noise = torch.rand(ROWS, TOKENS, generator=generator, dtype=torch.float64) * 2 - 1
            data["ref_logps"] = data["logps"] + LOG_MOVE * noise
            data["old_logps"] = None if policy == "on" else data["logps"] + LOG_MOVE * noise.flip(0)
            options = {"beta": beta, "bias_correction": corrected, "ratio_cap": cap}
            exact = normalised_exposure(kind, **data, **options)
            before = exposure_before_forward(kind, **(data | {"logps": None}), **options)
            assert exact <= before * (1 + 1e-9)
            assert exposure_before_forward(kind, **data, **options) == exact
            if policy == "on" and beta == 0:
                assert before == exact


def test_zero_only_where_omega_is_zero_everywhere() -> None:
    mask = torch.ones(2, 3)
    assert normalised_exposure("grpo", torch.zeros(2), mask) == 0
    assert normalised_exposure("grpo", torch.ones(2), torch.zeros(2, 3)) == 0
    assert normalised_exposure("bnpo", torch.ones(0), torch.ones(0, 3)) == 0
    tiny = normalised_exposure("grpo", torch.tensor([1e-30, 0.0]), mask)
    assert tiny == pytest.approx(1e-30 * math.sqrt(0.5), rel=1e-6)
    huge = normalised_exposure("grpo", torch.tensor([1e30, 0.0]), mask)
    assert huge == pytest.approx(1e30 * math.sqrt(0.5), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_coefficients_that_are_not_finite_raise_with_their_row(bad: float) -> None:
    advantages = torch.tensor([1.0, bad, bad])
    for call in (token_coefficients, normalised_exposure):
        with pytest.raises(ExposureError, match="row 1, token 0") as caught:
            call("grpo", advantages, torch.ones(3, 2), None)
        assert caught.value.row == 1
    logps = torch.zeros(2, 3)
    logps[1, 2] = math.nan
    with pytest.raises(ExposureError, match="row 1, token 2 is nan"):
        normalised_exposure("grpo", torch.ones(2), torch.ones(2, 3), logps)
    mask = torch.ones(2, 3)
    mask[1, 2] = 0
    assert normalised_exposure("grpo", torch.ones(2), mask, logps) == pytest.approx(1.0)


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(ExposureError, match="Unknown loss kind 'dpao'; did you mean 'dapo'"):
        normalised_exposure("dpao", torch.ones(1), torch.ones(1, 1))
    with pytest.raises(ExposureError, match="Unknown option 'clip_hihg'; did you mean 'clip_high'"):
        normalised_exposure("grpo", torch.ones(1), torch.ones(1, 1), clip_hihg=0.3)
    with pytest.raises(ExposureError, match="Unknown level 'sequnce'"):
        LossSpec(level="sequnce")
    with pytest.raises(ExposureError, match="accumulation is 0"):
        LossSpec(accumulation=0)


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ExposureError, match=r"advantages has shape \(3, 1\), the mask \(2, 4\)"):
        normalised_exposure("grpo", torch.ones(3), torch.ones(2, 4))
    with pytest.raises(ExposureError, match=r"logps has shape \(2, 5\), the mask \(2, 4\)"):
        normalised_exposure("grpo", torch.ones(2), torch.ones(2, 4), torch.zeros(2, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    data = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch(0.1).items()}
    found = token_coefficients("grpo", **data)
    exact = token_coefficients("grpo", **{n: v.double() if v.is_floating_point() else v for n, v in data.items()})
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=1e-9)


def test_hook_measures_any_loss_before_the_layers() -> None:
    data = batch(0.6)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    logps = data["logps"] * weight
    order: list[str] = []
    scale = length_normaliser(LossSpec("grpo"), data["mask"].double())
    hook = LogprobHook(logps, data["mask"], scale, when_known=lambda psi: order.append(f"{psi:.9f}"))
    weight.register_hook(lambda gradient: order.append("layer"))
    reference_loss(LossSpec("grpo"), logps, data, None).backward()
    expected = normalised_exposure("grpo", **data)
    assert hook.exposure == pytest.approx(expected, rel=1e-12)
    assert order == [f"{expected:.9f}", "layer"]
    with pytest.raises(ExposureError, match="do not require a gradient"):
        LogprobHook(data["logps"], data["mask"])


def test_exposure_from_gradient_by_default_takes_a_token_mean() -> None:
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    gradient = torch.tensor([[1.0, -1.0], [2.0, 99.0]]) / 3
    assert exposure_from_gradient(gradient, mask) == pytest.approx(math.sqrt(2.0))
