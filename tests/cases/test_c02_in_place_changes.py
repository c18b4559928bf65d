"""C-02: a saved tensor that was changed in place is noticed as in eager: kept or encoded, in the region or after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hilore.runtime.errors import SavedTensorMutated
from hilore.runtime.plan import Plan, UnitPlan
from hilore.runtime.runtime import Runtime
from tests import models
from tests.plans import assert_same_step, attach_plan, gradients, loss_of, plan_for, units_of


class Exp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


class Changed(nn.Module):
    """y = exp(x), saved by exp itself; y += 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(64, 64)
        self.exp = Exp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.exp(self.scale(x))
        y.add_(1)
        return y.sin()


class Squared(nn.Module):
    """h * h saves h twice; then h += 1."""

    def __init__(self) -> None:
        super().__init__()
        self.exp = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.exp(x)
        out = h * h
        h.add_(1)
        return out.sin()


X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def planned(kind: type[nn.Module], mode: str, hold: bool = False) -> tuple[nn.Module, Runtime]:
    """Two regions; the second changes its unit ``1.exp``'s output in place."""
    with models.seeded(0):
        model = nn.Sequential(models.mlp(), kind()).train()
    twin = nn.Sequential(models.mlp(0), models.mlp(1)).train()
    plan: Plan = plan_for(model, "R", units=units_of(twin, X, regions=("0", "1")))
    unit = UnitPlan("1.exp", mode, "int8-g128" if mode == "L" else None, dead=False, dead_if_demoted=False)  # type: ignore[arg-type]
    regions = (plan.regions[0], replace(plan.regions[1], units=(unit,), hold=hold))
    plan = replace(plan, regions=regions, fingerprint={"world_size": 1})
    return model, attach_plan(model, plan)


@pytest.mark.parametrize("kind", [Changed, Squared])
def test_eager_raises(kind: type[nn.Module]) -> None:
    with models.seeded(0):
        model = nn.Sequential(models.mlp(), kind()).train()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, X)


@pytest.mark.parametrize("mode", ["H", "L"])
@pytest.mark.parametrize("kind", [Changed, Squared])
def test_kept_or_encoded_raises_naming_the_unit(kind: type[nn.Module], mode: str) -> None:
    model, runtime = planned(kind, mode)
    with pytest.raises(SavedTensorMutated) as caught:
        gradients(model, X)
    assert str(caught.value) == (
        "Tensor saved by unit 1.exp was changed in place after it was saved (version 0 -> 1). Make the change on a "
        "clone, or give the unit mode R"
    )
    assert isinstance(caught.value, RuntimeError)
    runtime.detach()


@pytest.mark.parametrize("kind", [Changed, Squared])
def test_held_raises_as_eager(kind: type[nn.Module]) -> None:
    model, runtime = planned(kind, "H", hold=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, X)
    runtime.detach()


@pytest.mark.parametrize("kind", [Changed, Squared])
def test_replayed_raises_naming_the_region(kind: type[nn.Module]) -> None:
    """The later sine makes the replay reach the change."""
    model, runtime = planned(kind, "R")
    with pytest.raises(SavedTensorMutated, match=r"Tensor saved by unit 1 was changed in place .*\(version 0 -> 1\)"):
        gradients(model, X)
    runtime.detach()


def region_model() -> nn.Module:
    return nn.Sequential(models.mlp(0), models.mlp(1)).train()


@pytest.mark.parametrize("mode", ["R", "H", "L"])
@pytest.mark.parametrize("what", ["input", "boundary", "parameter"])
def test_changes_after_the_forward_are_noticed(what: str, mode: str) -> None:
    """The region's input, the next one's, a weight: between forward and backward."""
    model = region_model()
    x = X.clone()
    units_of(model, x, regions=("0", "1"))
    expected = gradients(model, x)
    runtime = attach_plan(model, plan_for(model, mode))
    boundary = model[0](x)
    loss = model[1](boundary).float().square().mean()
    with torch.no_grad():
        target = {"input": x, "boundary": boundary, "parameter": model[1][2].weight}[what]
        target.add_(0.0)
    with pytest.raises(SavedTensorMutated, match=r"\(version \d+ -> \d+\)") as caught:
        loss.backward()
    assert caught.value.version == caught.value.saved_version + 1
    del loss, boundary
    runtime.use(plan_for(model, "R"))
    assert_same_step(gradients(model, X), expected)
    runtime.detach()


def test_a_mask_changed_after_the_forward_is_noticed() -> None:
    """Keyword tensors of a layer: transformers binds them into a partial."""
    model = models.qwen2_tiny()
    batch = models.microbatch_for(model)
    runtime = attach_plan(model, plan_for(model, "R"))
    seen: list[torch.Tensor] = []

    def note(module: nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        seen.append(kwargs["attention_mask"])

    handle = model.model.layers[1].register_forward_pre_hook(note, with_kwargs=True)
    loss = loss_of(model, batch)
    handle.remove()
    seen[0].logical_not_()
    with pytest.raises(SavedTensorMutated, match=r"Tensor saved by unit model.layers.1 was changed in place"):
        loss.backward()
    runtime.detach()


def test_encoding_does_not_write_into_its_input() -> None:
    model = region_model()
    units_of(model, X, regions=("0", "1"))
    outputs: list[torch.Tensor] = []
    handle = model[0][2].register_forward_hook(lambda module, args, output: outputs.append(output))
    runtime = attach_plan(model, plan_for(model, "L"))
    loss = loss_of(model, X)
    handle.remove()
    before = outputs[0].detach().clone()
    loss.backward()
    runtime.detach()
    assert torch.equal(outputs[0], before)
    assert outputs[0]._version == 0


class Glue(nn.Module):
    """exp saves its own result, which is then changed, with no unit in between and nothing saved after it."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).exp()
        return y.add_(1) if self.in_place else y + 1


def test_glue_that_a_replay_stops_before_gives_the_gradient_of_what_was_computed() -> None:
    """A replay stops at the last saved tensor, here before the change: the result is right where eager gives up."""
    with models.seeded(0):
        model = nn.Sequential(models.mlp(), Glue(in_place=False)).train()
    units_of(model, X, regions=("0", "1"))
    expected = gradients(model, X)
    plan = plan_for(model, "R")
    model[1].in_place = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, X)
    runtime = attach_plan(model, plan)
    assert_same_step(gradients(model, X), expected)
    runtime.detach()
