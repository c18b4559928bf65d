"""C-19: a replay that takes another path than its forward is an error that names the region, not another gradient.

Where only values differ (the router flips and counts match), no check of shapes can see it: the calibration finds it
beforehand, by running each region twice.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from hilore.planner.repeatable import watched
from hilore.runtime.errors import ReplayMismatchError
from hilore.runtime.plan import Plan, UnitPlan
from tests import models
from tests.plans import assert_exact, assert_same_step, attach_plan, gradients, plan_for, units_of

X = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))


class Experts(nn.Module):
    """Two experts; from the second call on the router sends ``moved`` tokens of the first expert to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.moved = 0
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        first = 6 - (self.moved if self.calls > 1 else 0)
        out = torch.zeros_like(x)
        for expert, rows in enumerate((torch.arange(first), torch.arange(first, 12))):
            if rows.numel():
                out = out.index_add(0, rows, self.experts[expert](x[rows].tanh()).sin())
        return x + out


def experts_model(moved: int) -> tuple[nn.Module, Plan]:
    with models.seeded(1):
        model = nn.Sequential(nn.Linear(16, 16), Experts()).train()
    units_of(model, X, regions=("0", "1"))
    model[1].calls = 0
    model[1].moved = moved
    return model, plan_for(model, "R")


def reset(model: nn.Module) -> None:
    model[1].calls = 0


def test_a_router_that_stays_is_exact() -> None:
    model, plan = experts_model(moved=0)
    expected = gradients(model, X)
    reset(model)
    assert_exact(model, plan, X, expected)


@pytest.mark.parametrize("moved", [1, 5, 6])
def test_other_counts_are_an_error_that_names_the_region(moved: int) -> None:
    model, plan = experts_model(moved=moved)
    runtime = attach_plan(model, plan)
    reset(model)
    with pytest.raises(ReplayMismatchError) as caught:
        gradients(model, X)
    assert isinstance(caught.value, CheckpointError)
    assert caught.value.region == "1"
    assert str(caught.value).startswith("1: its replay took another path than its forward: ")
    assert "such a region can only be held" in str(caught.value)
    runtime.detach()


def test_the_runtime_is_usable_after_it() -> None:
    model, plan = experts_model(moved=1)
    runtime = attach_plan(model, plan)
    reset(model)
    with pytest.raises(ReplayMismatchError):
        gradients(model, X)
    model[1].moved = 0
    found = gradients(model, X)
    runtime.detach()
    assert_same_step(found, gradients(model, X))


def test_held_it_is_exact_whatever_the_router_would_do() -> None:
    model, plan = experts_model(moved=1)
    expected = gradients(model, X)
    reset(model)
    held = replace(plan, regions=(plan.regions[0], replace(plan.regions[1], hold=True)))
    runtime = attach_plan(model, held)
    assert_same_step(gradients(model, X), expected)
    assert (runtime.stats.held, runtime.stats.replays) == (1, 1)
    runtime.detach()


def with_expert_units(plan: Plan, mode: str) -> Plan:
    units = tuple(
        UnitPlan(f"1.experts.{place}", mode, None, dead=False, dead_if_demoted=False)  # type: ignore[arg-type]
        for place in range(2)
    )
    return replace(plan, regions=(plan.regions[0], replace(plan.regions[1], units=units)))


@pytest.mark.parametrize("moved", [1, 6])
def test_a_kept_expert_whose_tokens_moved_is_an_error(moved: int) -> None:
    model, plan = experts_model(moved=moved)
    runtime = attach_plan(model, with_expert_units(plan, "H"))
    reset(model)
    with pytest.raises(ReplayMismatchError) as caught:
        gradients(model, X)
    assert caught.value.region == "1"
    runtime.detach()


class Slices(nn.Module):
    """Cuts its input in two, elsewhere on the second call; glue saves nothing before the units."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        cut = 6 if self.calls == 1 else 5
        return torch.cat([self.experts[0](x[:cut]), self.experts[1](x[cut:])]).sin()


def test_a_kept_unit_that_gets_other_arguments_is_named() -> None:
    with models.seeded(1):
        model = nn.Sequential(nn.Linear(16, 16), Slices()).train()
    units_of(model, X, regions=("0", "1"))
    runtime = attach_plan(model, with_expert_units(plan_for(model, "R"), "H"))
    model[1].calls = 0
    with pytest.raises(ReplayMismatchError) as caught:
        gradients(model, X)
    assert (caught.value.region, caught.value.unit) == ("1", "1.experts.0")
    assert "its arguments had shapes [(6, 16)] in forward and have [(5, 16)] in the replay" in str(caught.value)
    runtime.detach()


def test_an_error_of_the_models_own_in_a_replay_says_where_it_happened() -> None:
    class Counter(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                raise IndexError("second call")
            return x.sin()

    model = nn.Sequential(models.mlp(), Counter()).train()
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    units_of(model, x, regions=("0", "1"))
    plan = plan_for(model, "R")
    model[1].calls = 0
    runtime = attach_plan(model, plan)
    with pytest.raises(IndexError, match="second call") as caught:
        gradients(model, x)
    assert caught.value.__notes__ == ["This happened in the replay of 1, whose forward had gone well."]
    runtime.detach()


def flipping(moved: int) -> tuple[nn.Module, list[str]]:
    model, _ = experts_model(moved=moved)
    reset(model)
    return model, ["0", "1"]


@pytest.mark.parametrize(
    ("moved", "reason"),
    [(0, ""), (1, "its forward gave other values when it was run again with the same inputs and random state")],
)
def test_calibration_finds_it_beforehand(moved: int, reason: str) -> None:
    """Counts of tokens may match or not: what counts is the bits of what comes out."""
    model, regions = flipping(moved)
    before = torch.get_rng_state()
    with watched(model, regions) as checks:
        model(X)
    found = {check.name: check.reason for check in checks if check.reason}
    assert found.keys() == ({"1"} if reason else set())
    assert found.get("1", "").startswith(reason)
    assert torch.equal(torch.get_rng_state(), before)


class Swapping(nn.Module):
    """A router that takes as many tokens for each expert the second time, but others: no check of shapes sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        order = torch.arange(12) if self.calls == 1 else torch.arange(12).roll(1)
        first, second = x[order[:6]], x[order[6:]]
        made = torch.cat([self.experts[0](first), self.experts[1](second)])
        return x + torch.zeros_like(x).index_add(0, order, made.sin())


def test_a_silent_flip_gives_wrong_gradients_and_is_found() -> None:
    with models.seeded(1):
        model = nn.Sequential(nn.Linear(16, 16), Swapping()).train()
    units_of(model, X, regions=("0", "1"))
    plan = plan_for(model, "R")
    model[1].calls = 0
    expected = gradients(model, X)
    runtime = attach_plan(model, plan)
    model[1].calls = 0
    silent = gradients(model, X)
    runtime.detach()
    assert torch.equal(silent.loss, expected.loss)
    changed = [name for name, found in silent.gradients.items() if not torch.equal(found, expected.gradients[name])]
    assert changed, "the flip of this test does nothing"
    model[1].calls = 0
    with watched(model, ["0", "1"]) as checks:
        model(X)
    assert [bool(check.reason) for check in checks] == [False, True]


def test_dropout_repeats_itself() -> None:
    with models.seeded(1):
        model = nn.Sequential(models.drop(), models.drop()).train()
    with watched(model, ["0", "1"]) as checks:
        model(torch.randn(4, 8))
    assert [check.reason for check in checks] == ["", ""]
