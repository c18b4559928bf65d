"""C-16: a replay draws what its forward drew, and leaves the generator where eager leaves it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hilore.runtime.ambient import RandomState
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.plan import Plan, UnitPlan
from tests import models
from tests.plans import Step, assert_exact, assert_same_step, attach_plan, gradients, loss_of, plan_for, units_of

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def drop_model() -> nn.Module:
    model = nn.Sequential(models.drop(0), models.drop(1)).train()
    units_of(model, X, regions=("0", "1"))
    return model


@pytest.mark.parametrize("mode", ["R", "H"])
def test_drop(mode: str) -> None:
    model = drop_model()
    assert_exact(model, plan_for(model, mode), X, gradients(model, X))


@pytest.mark.parametrize("mode", ["R", "H"])
def test_qwen2_with_lora_dropout(mode: str) -> None:
    model = models.qwen2_tiny_lora(dropout=0.1)
    batch = models.microbatch_for(model)
    assert_exact(model, plan_for(model, mode), batch, gradients(model, batch))


def test_only_gradients_show_a_generator_that_was_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = drop_model()
    expected = gradients(model, X)
    monkeypatch.setattr(RandomState, "restore", lambda self: None)
    runtime = attach_plan(model, plan_for(model, "R"))
    found = gradients(model, X)
    runtime.detach()
    assert torch.equal(found.loss, expected.loss)
    assert any(not torch.equal(found.gradients[name], grad) for name, grad in expected.gradients.items())


class Draws(nn.Module):
    """Dropout as a module between two others that draw: any of them may be a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.early, self.middle, self.late = nn.Dropout(0.3), nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.early(self.linear(x).tanh())
        return x + self.late(self.middle(hidden).sin()).tanh()


def with_units(plan: Plan, modes: dict[str, str]) -> Plan:
    units = {
        region.name: tuple(
            UnitPlan(f"{region.name}.{name}", mode, None, dead=False, dead_if_demoted=False)  # type: ignore[arg-type]
            for name, mode in modes.items()
        )
        for region in plan.regions
    }
    return replace(plan, regions=tuple(replace(region, units=units[region.name]) for region in plan.regions))


@pytest.mark.parametrize("kept", [["early"], ["middle"], ["late"], ["early", "middle"], ["middle", "late"]])
def test_a_kept_call_that_drew_leaves_the_generator_as_if_it_had_run(kept: list[str]) -> None:
    with models.seeded(0):
        model = nn.Sequential(Draws(), Draws()).train()
    units_of(model, X, regions=("0", "1"))
    expected: Step = gradients(model, X)
    modes = {name: "H" if name in kept else "R" for name in ("early", "middle", "late")}
    runtime = attach_plan(model, with_units(plan_for(model, "R"), modes))
    assert_same_step(gradients(model, X), expected)
    assert all(runtime.stats.units[f"1.{name}"].answered == 1 for name in kept if name != "late")
    runtime.detach()


def test_a_replay_does_not_move_the_generator_of_what_runs_beside_it() -> None:
    """Draws between forward and backward, and after it, are those of a run without plans."""
    model = drop_model()

    def run() -> list[torch.Tensor]:
        with models.seeded(5):
            loss = model(X).sum()
            between = torch.rand(3)
            loss.backward()
            return [between, torch.rand(3)]

    expected = run()
    runtime = attach_plan(model, plan_for(model, "R"))
    found = run()
    runtime.detach()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Counts(nn.Module):
    """Counts its calls in a buffer, as BatchNorm and balanced experts do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if kind == "BatchNorm" else nn.Identity()
        self.kind = kind
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.linear(x)).tanh()
        if self.kind == "counter":
            self.calls += hidden.detach().abs().sum(0)  # type: ignore[misc, operator]
        return x + hidden


@pytest.mark.parametrize(
    ("kind", "buffer"),
    [("counter", r"calls in place \(add_"), ("BatchNorm", r"norm.num_batches_tracked in place \(add_")],
)
def test_a_buffer_that_a_replay_would_change_again_is_refused_when_traced(kind: str, buffer: str) -> None:
    model = nn.Sequential(Counts(kind), Counts(kind)).train()
    with pytest.raises(UnsupportedModelError, match=rf"region '0' changes 0.{buffer}.*change it a second time"):
        units_of(model, X, regions=("0", "1"))
    for counting in model:
        counting.kind = "none"
        if kind == "BatchNorm":
            counting.norm = nn.BatchNorm1d(8, track_running_stats=False)
    units_of(model, X, regions=("0", "1"))
    expected = gradients(model, X)
    for mode in ("R", "H"):
        assert_exact(model, plan_for(model, mode), X, expected)


@pytest.mark.parametrize("mode", ["R", "H", "held"])
@pytest.mark.parametrize("make", ["drop", "lora"])
def test_eval_mode_before_backward_changes_nothing(make: str, mode: str) -> None:
    """Whoever switches to eval mode to generate or log before backward: the replay drops what its forward dropped."""
    model = drop_model() if make == "drop" else models.qwen2_tiny_lora(dropout=0.1)
    batch = X if make == "drop" else models.microbatch_for(model)
    expected = gradients(model, batch)
    held = mode == "held"
    runtime = attach_plan(model, plan_for(model, "H" if held else mode, hold=held))
    model.zero_grad(set_to_none=True)
    with models.seeded(0):
        loss = loss_of(model, batch)
    model.eval()
    first = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    first.train()
    loss.backward()
    assert [module for module in model.modules() if module.training] == [first]
    runtime.detach()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.gradients.keys()
    assert [name for name, grad in expected.gradients.items() if not torch.equal(grad, found[name])] == []
