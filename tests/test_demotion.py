"""Exposure chooses the plan; a microbatch that turns out too exposed is demoted, and its gradients are then exact."""

from __future__ import annotations

import gc
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hilore.planner.microbatch import Microbatch
from hilore.runtime.attach import attach
from hilore.runtime.errors import BindError, ExposureError, HiloreWarning, PlanSwitchError
from hilore.runtime.plan import Plan, Regime
from hilore.runtime.runtime import Runtime
from tests import models
from tests.plans import (
    Step,
    assert_same_step,
    attach_plan,
    gradients,
    loss_of,
    plan_for,
    plan_set,
    units_of,
)

ENCODED = {"mlp.gate_proj": "L", "mlp.up_proj": "L", "self_attn.o_proj": "L", "self_attn:attention": "H"}


def regime(label: str, low: float, high: float) -> Regime:
    return Regime(label, low, high, 0.25)  # type: ignore[arg-type]


def four_plans(model: nn.Module) -> dict[str, Plan]:
    """null and low encode most, mid less, high nothing but one unit."""
    modes: dict[str, Any] = {
        "null": "L",
        "low": ENCODED,
        "mid": {"mlp.gate_proj": "L"},
        "high": {"mlp.up_proj": "L"},
    }
    edges = {"null": (0.0, 0.0), "low": (0.0, 0.5), "mid": (0.5, 1.0), "high": (1.0, 2.0)}
    return {label: plan_for(model, modes[label], regime=regime(label, *edges[label])) for label in modes}


def logps_of(model: nn.Module, batch: Microbatch) -> Tensor:
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.float()
    every = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    return every[:, -batch.completion_mask.shape[1] :]


def policy_loss(logps: Tensor, batch: Microbatch) -> Tensor:
    return -(logps * batch.completion_mask * batch.advantages[:, None]).sum() / batch.completion_mask.sum()


def planned_step(
    runtime: Runtime,
    model: nn.Module,
    batch: Microbatch,
    *,
    confirm: bool = True,
    scale: float = 1.0,
    shift: float = 0.0,
) -> Step:
    """One step inside a microbatch; advantages scaled for the exposure alone, old log-probs ``shift`` nats below."""
    old_logps = None
    if shift:
        with torch.no_grad(), models.seeded(0):
            old_logps = logps_of(model, batch) - shift
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with runtime.microbatch(batch.advantages * scale, batch.completion_mask, old_logps=old_logps) as microbatch:
            logps = logps_of(model, batch)
            if confirm:
                microbatch.confirm(logps)
        loss = policy_loss(logps, batch)
        loss.backward()
        state = torch.get_rng_state()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach().clone(), found, state)


def differs(found: Step, expected: Step) -> bool:
    assert torch.equal(found.loss, expected.loss)
    return any(not torch.equal(grad, found.gradients[name]) for name, grad in expected.gradients.items())


OUTSIDE = pytest.mark.filterwarnings("ignore:a forward ran outside of runtime.microbatch")


@pytest.fixture
def actor() -> tuple[nn.Module, Microbatch, Step]:
    model = models.qwen2_tiny_lora(dropout=0.1)
    batch = models.microbatch_for(model)
    units_of(model, batch)
    return model, batch, gradients(model, batch)


@pytest.mark.parametrize(
    ("scale", "label"), [(0.0, "null"), (0.3, "low"), (0.5, "low"), (0.7, "mid"), (1.0, "mid"), (1.9, "high")]
)
def test_the_exposure_chooses_the_plan(actor: tuple[nn.Module, Microbatch, Step], scale: float, label: str) -> None:
    model, batch, expected = actor
    runtime = attach(model, plan_set(*four_plans(model).values()))
    found = planned_step(runtime, model, batch, scale=scale)
    step = runtime.stats.steps[-1]
    assert (step.regime, step.demoted, step.fallback) == (label, False, "")
    assert step.exposure == step.exact_exposure == pytest.approx(scale)
    assert step.gain == pytest.approx(0.2)
    assert differs(found, expected)
    runtime.detach()


def test_above_every_regime_the_highest_plan_runs_with_its_l_units_replayed(
    actor: tuple[nn.Module, Microbatch, Step],
) -> None:
    model, batch, expected = actor
    runtime = attach(model, plan_set(*four_plans(model).values()))
    assert_same_step(planned_step(runtime, model, batch, scale=2.5), expected)
    step = runtime.stats.steps[-1]
    assert (step.regime, step.demoted, step.fallback) == ("high", True, "exposure above every regime")
    assert (runtime.stats.over_exposure, runtime.stats.demotions) == (1, 0)
    assert runtime.stats.log()["hilore/over_exposure"] == 1
    assert step.gain == 0.0
    assert runtime.stats.units["model.layers.0.mlp.up_proj"].encoded_bytes == 0
    runtime.detach()


@pytest.mark.parametrize("split", [None, "mlp.gate_proj"])
def test_late_demotion_is_exact(actor: tuple[nn.Module, Microbatch, Step], split: str | None) -> None:
    """The bound before the forward takes ratios up to exp(0.5); the true ones are exp(1.5) on the negative row."""
    model, batch, expected = actor
    runtime = attach(model, plan_set(plan_for(model, ENCODED, split=split, regime=regime("high", 0.0, 2.0))))
    assert_same_step(planned_step(runtime, model, batch, shift=1.5), expected)
    step = runtime.stats.steps[-1]
    assert step.exposure is not None
    assert step.exact_exposure is not None
    assert step.exposure < 2.0 < step.exact_exposure < math.exp(1.5)
    assert (step.regime, step.demoted, step.fallback) == ("high", True, "")
    assert (runtime.stats.demotions, runtime.stats.over_exposure) == (1, 0)
    stats = runtime.stats.units["model.layers.0.mlp.gate_proj"]
    assert stats.encoded_bytes > 0
    assert stats.answered == 0
    stages = 1 if split is None else 2
    assert runtime.stats.units["model.layers.0.self_attn:attention"].answered == stages
    assert runtime.stats.live_saved_bytes == 0
    assert differs(planned_step(runtime, model, batch, shift=0.1), expected)
    assert runtime.stats.steps[-1].demoted is False
    runtime.detach()


def test_without_confirm_or_below_the_edge_nothing_is_demoted(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, batch, expected = actor
    runtime = attach(model, plan_set(plan_for(model, ENCODED, regime=regime("high", 0.0, 2.0))))
    unconfirmed = planned_step(runtime, model, batch, shift=1.5, confirm=False)
    assert differs(unconfirmed, expected)
    assert runtime.stats.steps[-1].exact_exposure is None
    assert_same_step(planned_step(runtime, model, batch, shift=0.1), unconfirmed)
    assert runtime.stats.demotions == 0
    runtime.detach()


def test_outside_of_any_microbatch_the_highest_plan_runs_exact(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, batch, expected = actor
    runtime = attach(model, plan_set(*four_plans(model).values()))
    with pytest.warns(HiloreWarning, match=r"a forward ran outside of runtime.microbatch\(...\): no exposure given"):
        found = gradients(model, batch)
    assert_same_step(found, expected)
    assert_same_step(gradients(model, batch), expected)
    assert (runtime.stats.frames, runtime.stats.steps, runtime.stats.outside) == (4, [], 2)
    runtime.detach()


def test_a_plan_without_l_is_never_demoted(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, batch, expected = actor
    plan = plan_for(model, {"self_attn:attention": "H"}, regime=regime("high", 0.0, 2.0))
    runtime = attach(model, plan_set(plan))
    assert_same_step(planned_step(runtime, model, batch, shift=1.5), expected)
    assert (runtime.stats.demotions, runtime.stats.steps[-1].demoted) == (0, False)
    runtime.detach()


class Chain(nn.Module):
    """trainable -> frozen -> frozen -> tanh: with the second frozen linear kept, the first one is dead."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.middle, self.end = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.middle.requires_grad_(False)
        self.end.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.end(self.middle(self.start(x))).tanh()


def chain() -> tuple[nn.Module, Tensor]:
    with models.seeded(0):
        model = nn.Sequential(Chain(), Chain()).train()
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    units_of(model, x, regions=("0", "1"))
    return model, x


@OUTSIDE
def test_what_is_dead_under_the_plan_runs_once_demoted() -> None:
    model, x = chain()
    expected = gradients(model, x)
    plan = plan_for(model, {"end": "L"})
    middle = {unit.name: (unit.dead, unit.dead_if_demoted) for region in plan.regions for unit in region.units}
    assert middle["0.middle"] == (True, False)
    runtime = attach(model, plan_set(plan))
    runtime.use(plan)
    assert differs(gradients(model, x), expected)
    assert runtime.stats.units["0.middle"].dead == 1
    runtime.use(None)
    assert_same_step(gradients(model, x), expected)
    assert runtime.stats.units["0.middle"].dead == 1
    runtime.detach()


@OUTSIDE
def test_a_wrong_dead_if_demoted_is_nan() -> None:
    model, x = chain()
    plan = plan_for(model, {"end": "L"})
    wrong = replace(
        plan,
        regions=tuple(
            replace(r, units=tuple(replace(u, dead_if_demoted=u.name.endswith("middle")) for u in r.units))
            for r in plan.regions
        ),
    )
    runtime = attach(model, plan_set(wrong))
    assert bool(gradients(model, x).gradients["0.start.weight"].isnan().all())
    runtime.detach()


def test_two_microbatches_in_flight_one_demoted(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, first, _ = actor
    second = models.microbatch_for(model, seed=5)
    runtime = attach(model, plan_set(plan_for(model, ENCODED, regime=regime("high", 0.0, 2.0))))
    separately = [
        planned_step(runtime, model, first, shift=1.5),
        planned_step(runtime, model, second, shift=0.1),
    ]
    model.zero_grad(set_to_none=True)
    losses = []
    for batch, shift in ((first, 1.5), (second, 0.1)):
        with torch.no_grad(), models.seeded(0):
            old = logps_of(model, batch) - shift
        with models.seeded(0), runtime.microbatch(batch.advantages, batch.completion_mask, old_logps=old) as microbatch:
            logps = logps_of(model, batch)
            microbatch.confirm(logps)
            losses.append(policy_loss(logps, batch))
    assert [step.demoted for step in runtime.stats.steps[-2:]] == [True, False]
    sum(losses).backward()
    runtime.detach()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, separately[0].gradients[name] + separately[1].gradients[name]), name


def test_nested_microbatches_belong_to_the_innermost(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, batch, _ = actor
    runtime = attach(model, plan_set(*four_plans(model).values()))
    outer = runtime.microbatch(batch.advantages * 0.3, batch.completion_mask)
    with pytest.warns(HiloreWarning, match="no region ran under a plan in this microbatch"):  # noqa: SIM117
        with outer, runtime.microbatch(batch.advantages * 0.7, batch.completion_mask) as inner:
            loss_of(model, batch)
    assert (outer.regions_run, inner.regions_run) == (0, 2)
    assert inner.choice is not None
    assert inner.choice.plan is not None
    assert inner.choice.plan.regime.label == "mid"
    runtime.detach()


def test_a_microbatch_in_which_nothing_ran_is_said(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, batch, _ = actor
    runtime = attach(model, plan_set(*four_plans(model).values()))
    with pytest.warns(HiloreWarning, match="no region ran under a plan in this microbatch"):  # noqa: SIM117
        with runtime.microbatch(batch.advantages, batch.completion_mask):
            pass
    runtime.disable()
    with runtime.microbatch(batch.advantages, batch.completion_mask):
        loss_of(model, batch)
    runtime.detach()


def test_eval_mode_in_a_training_step_is_said(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    """Gradients are right and all activations stay: what the plan was for did not happen."""
    model, batch, _ = actor
    runtime = attach(model, plan_set(*four_plans(model).values()))
    model.eval()
    with pytest.warns(HiloreWarning, match=r"the model is in eval mode, where plans rest.*Call model\.train\(\)"):  # noqa: SIM117
        with runtime.microbatch(batch.advantages, batch.completion_mask):
            loss_of(model, batch).backward()
    with warnings.catch_warnings(), torch.no_grad(), runtime.microbatch(batch.advantages, batch.completion_mask):
        warnings.simplefilter("error")
        loss_of(model, batch)
    model.train()
    assert runtime.stats.frames == 0
    runtime.detach()


@OUTSIDE
def test_a_nan_advantage_raises_before_anything_runs(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, batch, expected = actor
    runtime = attach(model, plan_set(*four_plans(model).values()))
    with pytest.raises(ExposureError, match="row 1, token 0 is nan"):
        runtime.microbatch(torch.tensor([1.0, float("nan")]), batch.completion_mask)
    assert_same_step(gradients(model, batch), expected)
    runtime.detach()


# --- lengths --------------------------------------------------------------------------------------------------------


def test_a_longer_microbatch_takes_the_next_bucket_then_all_replayed(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, _, _ = actor
    buckets = [plan_for(model, ENCODED, length_bucket=bucket, regime=regime("high", 0.0, 2.0)) for bucket in (16, 24)]
    buckets = [replace(plan, fingerprint=plan.fingerprint | {"rows": 2}) for plan in buckets]
    runtime = attach(model, plan_set(*buckets))
    for tokens, bucket in ((16, 16), (17, 24), (24, 24)):
        batch = models.microbatch_for(model, tokens=tokens)
        microbatch = runtime.microbatch(batch.advantages, batch.completion_mask)
        with microbatch:
            loss_of(model, batch)
        assert microbatch.choice is not None
        assert microbatch.choice.plan is not None
        assert microbatch.choice.plan.length_bucket == bucket
    for rows, tokens in ((2, 25), (3, 24)):
        batch = models.microbatch_for(model, rows=rows, tokens=tokens)
        expected = plain(model, batch, runtime)
        if tokens == 25:
            with pytest.warns(
                HiloreWarning, match=r"A microbatch of 2 x 25 tokens is larger than any plan was made for"
            ):
                found = planned_step(runtime, model, batch)
        else:
            found = planned_step(runtime, model, batch)
        assert_same_step(found, expected)
        step = runtime.stats.steps[-1]
        assert (step.regime, step.fallback, step.regions_replayed) == ("none", "over_length", 2)
    assert runtime.stats.over_length == 2
    runtime.detach()


def plain(model: nn.Module, batch: Microbatch, runtime: Runtime) -> Step:
    runtime.disable()
    step = gradients(model, batch)
    runtime.enable()
    return step


def test_a_larger_forward_in_the_same_microbatch_chooses_again(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, _, _ = actor
    buckets = [plan_for(model, ENCODED, length_bucket=bucket, regime=regime("high", 0.0, 2.0)) for bucket in (16, 24)]
    runtime = attach(model, plan_set(*buckets))
    small, large = (models.microbatch_for(model, tokens=tokens) for tokens in (16, 20))
    with runtime.microbatch(small.advantages, small.completion_mask) as microbatch:
        taken = []
        for batch in (small, large, small):
            loss_of(model, batch)
            assert microbatch.choice is not None
            assert microbatch.choice.plan is not None
            taken.append(microbatch.choice.plan.length_bucket)
    assert taken == [16, 24, 24]
    runtime.detach()


# --- one plan per forward -------------------------------------------------------------------------------------------


@OUTSIDE
def test_a_choice_in_the_middle_of_a_forward_raises(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, batch, expected = actor
    plans = four_plans(model)
    runtime = attach(model, plan_set(*plans.values()))
    seen: list[str] = []

    def choose(module: nn.Module, args: Any) -> None:
        for attempt in (lambda: runtime.use(plans["low"]), lambda: runtime.open(outer)):
            with pytest.raises(PlanSwitchError, match="1 of 2 regions have run") as caught:
                attempt()
            assert caught.value.regions_run == 1
            seen.append(str(caught.value))

    outer = runtime.microbatch(batch.advantages, batch.completion_mask)
    layer = model.base_model.model.model.layers[1]
    handle = layer.register_forward_pre_hook(choose)
    assert_same_step(gradients(model, batch), expected)
    handle.remove()
    assert len(seen) == 2
    runtime.use(plans["low"])
    assert differs(gradients(model, batch), expected)
    runtime.detach()


@OUTSIDE
def test_a_forward_that_died_between_regions_is_forgotten_when_switched_off(
    actor: tuple[nn.Module, Microbatch, Step],
) -> None:
    model, batch, expected = actor
    plans = four_plans(model)
    runtime = attach(model, plan_set(*plans.values()))

    def fail(module: nn.Module, args: Any) -> None:
        raise KeyError("between regions")

    handle = model.base_model.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="between regions"):
        loss_of(model, batch)
    handle.remove()
    with pytest.raises(PlanSwitchError, match=r"runtime.reset\(\)"):
        runtime.use(plans["mid"])
    assert_same_step(gradients(model, batch), expected)
    handle = model.base_model.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="between regions"):
        loss_of(model, batch)
    handle.remove()
    runtime.disable()
    runtime.enable()
    runtime.use(plans["mid"])
    runtime.use(None)
    assert_same_step(gradients(model, batch), expected)
    runtime.detach()


def test_another_models_plan_is_refused(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, batch, expected = actor
    plan = plan_for(model, "R")
    runtime = attach_plan(model, plan)
    other = replace(plan, regions=plan.regions[:1])
    with pytest.raises(BindError, match=r"name other regions or units \(16 and 8 units\); solve them from one trace"):
        runtime.use(other)
    with pytest.raises(BindError, match=r"name other regions or units"):
        attach(models.qwen2_tiny_lora(), [plan, replace(other, length_bucket=2048)])
    assert_same_step(gradients(model, batch), expected)
    runtime.detach()


def test_nothing_is_left_of_a_demoted_step(actor: tuple[nn.Module, Microbatch, Step]) -> None:
    model, batch, _ = actor
    runtime = attach(model, plan_set(plan_for(model, ENCODED, regime=regime("high", 0.0, 2.0))))
    gc.collect()
    gc.disable()
    try:
        planned_step(runtime, model, batch, shift=1.5)
        assert len(runtime.stats._frames) == 0
    finally:
        gc.enable()
    runtime.detach()
