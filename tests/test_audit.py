"""Audits: the gradients that train are exact, the error is the plan's, and too large a one turns encoding off."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hilore.runtime.attach import attach
from hilore.runtime.audit import LEAST_AUDITS, AuditLog, audited_loss, perturb
from hilore.runtime.errors import BindError, FingerprintError, UnsupportedModelError
from hilore.runtime.integrations.trl import attach_trainer
from hilore.runtime.notice import HiloreWarning
from tests.models import lora, microbatch_for, qwen2_tiny
from tests.plans import forget, gradients, loss_of, plan_for, plan_set
from tests.trl_fixtures import plan_for as trl_plan
from tests.trl_fixtures import policy, quiet, same_weights, trained, trainer_of, weights


def encoded(model: nn.Module, codec: str = "int8-g128", delta: float = 1.0) -> Any:
    def modes(unit: str) -> str:
        return "L" if unit.endswith(("gate_proj", "up_proj")) else "R"

    return replace(plan_for(model, modes, codec=codec), delta=delta)


def actor(dtype: torch.dtype = torch.float32, dropout: float = 0.1) -> nn.Module:
    return lora(qwen2_tiny(), dropout=dropout).to(dtype).train()


def one_step(runtime: Any, model: nn.Module, batch: Any, audit: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients after one microbatch on top of earlier gradients."""
    with runtime.microbatch(batch.advantages, batch.completion_mask, loss="bnpo") as microbatch:
        loss = microbatch.audited(lambda: loss_of(model, batch)) if audit else loss_of(model, batch)
        loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_audited_microbatch_trains_on_exact_gradients(dtype: torch.dtype) -> None:
    """Two microbatches, dropout and all, bitwise as under a plan without encoded units."""
    results = []
    for audit_every in (None, 1):
        model = actor(dtype)
        batch = microbatch_for(model)
        plan = encoded(model) if audit_every else plan_for(model)
        runtime = attach(model, plan_set(plan), audit_every=audit_every)
        torch.manual_seed(5)
        steps = [one_step(runtime, model, batch, audit=True) for _ in range(2)]
        results.append((steps, torch.get_rng_state()))
        forget(model)
    (plain, plain_state), (audited, state) = results
    assert torch.equal(state, plain_state)
    for (loss, grads), (expected_loss, expected) in zip(audited, plain, strict=True):
        assert torch.equal(loss, expected_loss)
        assert grads.keys() == expected.keys()
        assert all(torch.equal(grads[name], expected[name]) for name in grads)


def test_the_error_is_the_plans() -> None:
    model = actor(dropout=0.0)
    batch = microbatch_for(model)
    exact = gradients(model, batch).gradients
    plan = encoded(model)
    runtime = attach(model, plan_set(plan), audit_every=3)
    runtime.use(plan)
    approximate = gradients(model, batch).gradients
    runtime.use(None)
    squared = sum(float((approximate[name] - exact[name]).double().square().sum()) for name in exact)
    norm = sum(float(gradient.double().square().sum()) for gradient in exact.values())
    for _ in range(4):
        model.zero_grad()
        one_step(runtime, model, batch, audit=True)
    log = runtime.stats.audit
    assert log.audits == 2  # the first and the fourth
    assert log.squared_norm == pytest.approx(2 * norm, rel=1e-9)
    assert log.squared_error == pytest.approx(2 * squared, rel=1e-9)
    assert 0 < log.squared_control < log.squared_error / 10  # one bit of float32 against eight bits in all
    assert log.error == pytest.approx(((squared - log.squared_control / 2) / norm) ** 0.5, rel=1e-9)
    assert runtime.stats.log()["hilore/audit_error"] == log.error


def test_too_large_an_error_turns_encoding_off() -> None:
    model = actor(dropout=0.0)
    batch = microbatch_for(model)
    exact = gradients(model, batch).gradients
    runtime = attach(model, plan_set(encoded(model, "int4-g64", delta=1e-4)), audit_every=1)
    for _ in range(LEAST_AUDITS - 1):
        one_step(runtime, model, batch, audit=True)
    assert not runtime.stats.audit.alarm
    with pytest.warns(
        HiloreWarning, match=r"gradient error of \d\.\d+% over 4 microbatches where the plans allow 0\.000%"
    ):
        one_step(runtime, model, batch, audit=True)
    assert runtime.stats.audit.alarm
    model.zero_grad()
    _, found = one_step(runtime, model, batch, audit=False)
    assert all(torch.equal(found[name], exact[name]) for name in exact)
    assert runtime.stats.steps[-1].fallback == "audit alarm"
    assert runtime.stats.audit.audits == LEAST_AUDITS
    one_step(runtime, model, batch, audit=True)
    assert runtime.stats.audit.audits == LEAST_AUDITS  # nothing encoded is left to compare


def test_within_the_budget_there_is_no_alarm() -> None:
    log = AuditLog()
    for _ in range(50):
        log.add(error=1.4e-4, control=0.5e-4, norm=1.0, allowed=0.01)
    assert (log.alarm, log.audits) == (False, 50)
    assert log.error == pytest.approx(0.9e-4**0.5)
    for _ in range(12):
        log.add(error=1.9e-4, control=0.5e-4, norm=1.0, allowed=0.01)
    with pytest.warns(HiloreWarning, match="over 63 microbatches"):
        log.add(error=1.9e-4, control=0.5e-4, norm=1.0, allowed=0.01)
    assert log.alarm


def test_an_overflow_does_not_silence_audits() -> None:
    """As where a loss scaler skips the update."""
    log = AuditLog()
    for bad in (math.inf, math.nan):
        log.add(error=bad, control=bad, norm=bad, allowed=0.01)
        log.add(error=bad, control=0.0, norm=bad, allowed=0.01)
    assert (log.audits, log.unusable, log.error) == (0, 4, None)
    for _ in range(LEAST_AUDITS - 1):
        log.add(error=1.0, control=0.0, norm=1.0, allowed=0.01)
    assert not log.alarm
    with pytest.warns(HiloreWarning, match=f"over {LEAST_AUDITS} microbatches"):
        log.add(error=1.0, control=0.0, norm=1.0, allowed=0.01)
    assert log.alarm


def test_a_plan_alone_that_overflows_is_an_error() -> None:
    log = AuditLog()
    for bad in (math.nan, 0.0, 0.0):
        log.add(error=bad, control=0.0, norm=1.0, allowed=0.01)
    with pytest.warns(HiloreWarning, match="gradient error of inf%"):
        log.add(error=0.0, control=0.0, norm=1.0, allowed=0.01)
    assert log.alarm


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_what_was_accumulated_survives_a_run_that_fails(turn: int) -> None:
    """Under its plan, as control or exactly: trainers that catch it go on with the gradients that were there."""
    model = actor(dropout=0.0)
    batch = microbatch_for(model)
    runtime = attach(model, plan_set(encoded(model)), audit_every=1)
    _, earlier = one_step(runtime, model, batch, audit=False)
    turns = iter(range(1, 4))

    def failing() -> Tensor:
        if next(turns) == turn:
            raise torch.OutOfMemoryError("out of memory")
        return loss_of(model, batch)

    with (
        pytest.raises(torch.OutOfMemoryError),
        runtime.microbatch(batch.advantages, batch.completion_mask, loss="bnpo") as microbatch,
    ):
        microbatch.audited(failing)
    left = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert left.keys() == earlier.keys()
    assert all(torch.equal(left[name], earlier[name]) for name in earlier)
    assert runtime.stats.audit.audits == 0
    model.zero_grad()
    one_step(runtime, model, batch, audit=True)
    assert runtime.stats.audit.audits == 1


def test_a_plan_without_encoded_units_is_not_audited() -> None:
    model = actor()
    batch = microbatch_for(model)
    runtime = attach(model, plan_set(plan_for(model)), audit_every=1)
    one_step(runtime, model, batch, audit=True)
    assert runtime.stats.audit.audits == 0
    assert runtime.stats.log()["hilore/audit_error"] is None


def test_what_an_audit_cannot_do_is_refused() -> None:
    model = actor(dropout=0.0)
    batch = microbatch_for(model)
    with pytest.raises(UnsupportedModelError, match="audit_every is 0"):
        attach(model, plan_set(plan_for(model)), audit_every=0)
    runtime = attach(model, plan_set(encoded(model)), audit_every=1)
    with runtime.microbatch(batch.advantages, batch.completion_mask, loss="bnpo") as microbatch:
        loss = microbatch.audited(lambda: loss_of(model, batch))
        with pytest.raises(UnsupportedModelError, match=r"multiplied by 0\.25 after"):
            (loss / 4).backward()
    wrapped = nn.Sequential(nn.Linear(2, 2))
    wrapped[0].__class__ = type("DistributedDataParallel", (nn.Linear,), {})
    with pytest.raises(UnsupportedModelError, match="0: an audit runs a microbatch's backward several times"):
        audited_loss(wrapped, lambda: None, AuditLog(), lambda: torch.zeros(()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_control_changes_the_last_bit_of_every_sixteenth_value(dtype: torch.dtype) -> None:
    values = torch.linspace(1, 2, 64).to(dtype)
    changed = values.clone()
    perturb(changed)
    different = (changed != values).nonzero().flatten().tolist()
    assert different == [0, 16, 32, 48]
    assert ((changed - values).abs().max() <= 2 * torch.finfo(dtype).eps).item()


def test_trl_trains_to_the_weights_of_checkpointing(tmp_path: Path) -> None:
    expected = weights(trained(tmp_path, True, gradient_checkpointing=True).model)
    lengths = []
    for audit_every in (None, 1):
        trainer = trainer_of(tmp_path, policy(True))
        plan = trl_plan(trainer.model, lambda _, unit: "L" if unit.startswith("mlp.") and "down" not in unit else "R")
        runtime = attach_trainer(trainer, [plan], audit_every=audit_every)
        with quiet():
            trainer.train()
        assert same_weights(weights(trainer.model), expected) is (audit_every == 1)
        lengths.append([len(entry) for entry in trainer.state.log_history])
    assert runtime.stats.audit.audits == 4
    assert runtime.stats.audit.error is not None
    assert runtime.stats.audit.error > 0
    assert [after - before for before, after in zip(*lengths, strict=True)] == [2, 2, 0]


def test_new_plans_take_over_between_updates() -> None:
    model = actor(dropout=0.0)
    batch = microbatch_for(model)
    runtime = attach(model, plan_set(encoded(model, "int4-g64", delta=1e-4)), audit_every=1)
    for _ in range(LEAST_AUDITS - 1):
        one_step(runtime, model, batch, audit=True)
    with pytest.warns(HiloreWarning, match="audits found"):
        one_step(runtime, model, batch, audit=True)
    runtime.replace(plan_set(encoded(model, delta=50.0)))
    assert (runtime.stats.audit.audits, runtime.stats.audit.alarm) == (0, False)
    one_step(runtime, model, batch, audit=True)
    assert runtime.stats.audit.audits == 1
    assert runtime.stats.steps[-1].fallback == ""
    before = runtime.plans
    other = plan_for(model)
    with pytest.raises(FingerprintError, match="num_layers=7"):
        runtime.replace(plan_set(replace(other, fingerprint=other.fingerprint | {"num_layers": 7})))
    with pytest.raises(BindError):
        runtime.replace(plan_set(replace(other, regions=other.regions[:1])))
    assert runtime.plans is before
    runtime.detach()
