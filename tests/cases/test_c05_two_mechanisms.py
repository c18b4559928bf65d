"""C-05: nothing lossy surrounds the model, so what is replayed is exact, however its input is passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hilore.runtime.attach import attach
from hilore.runtime.errors import UnsupportedModelError
from tests import models
from tests.plans import attach_plan, gradients, plan_for, plan_set, units_of

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


class Holder(nn.Module):
    """A region that takes its input positionally, in a tuple, or as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.mlp(3)

    def forward(self, x: Any = None, *, hidden: Tensor | None = None) -> Tensor:
        if hidden is not None:
            x = hidden
        if isinstance(x, tuple):
            (x,) = x
        out: Tensor = self.body(x)
        return out.tanh()


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second, self.third = Holder(), Holder(), Holder()

    def forward(self, x: Tensor) -> Tensor:
        for region in (self.first, self.second, self.third):
            if self.how == "positional":
                x = x + region(x)
            elif self.how == "tuple":
                x = x + region((x,))
            else:
                x = x + region(hidden=x)
        return x


REGIONS = ("first", "second", "third")


def model_of(how: str) -> nn.Module:
    model = Model(how).train()
    units_of(model, X, regions=REGIONS)
    return model


@pytest.mark.parametrize("how", ["positional", "tuple", "keyword"])
def test_a_replayed_region_beside_encoded_ones_is_exact(how: str) -> None:
    """The last region is replayed, the others are encoded: its own gradients, and what it hands back, are bitwise."""
    model = model_of(how)
    expected = gradients(model, X)
    plan = plan_for(model, lambda name: "R" if name.startswith("third") else "L")
    runtime = attach_plan(model, plan)
    found = gradients(model, X)
    assert (runtime.stats.frames, runtime.stats.replays) == (3, 3)
    runtime.detach()
    assert torch.equal(found.loss, expected.loss)
    for name, grad in expected.gradients.items():
        assert torch.equal(found.gradients[name], grad) == name.startswith("third"), name


@pytest.mark.parametrize("how", ["positional", "tuple", "keyword"])
def test_the_boundary_is_found_wherever_it_is(how: str) -> None:
    model = model_of(how)
    runtime = attach_plan(model, plan_for(model, "R"))
    loss = model(X).sum()
    frames = {frame.region_name: frame for frame in runtime.stats._frames}
    for name in REGIONS:
        ((boundary, version),) = frames[name].input_versions
        assert (boundary.shape, version) == (X.shape, 0)
    assert frames["first"].input_versions[0][0] is X
    del loss, frames
    runtime.detach()


def test_attaching_inside_foreign_hooks_is_refused() -> None:
    model = model_of("positional")
    plan = plan_for(model, "R")
    before = [dict(vars(module)) for module in model.modules()]
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())
    with hooks, pytest.raises(UnsupportedModelError, match=r"two mechanisms would treat the same tensors. Leave that"):
        attach(model, plan_set(plan))
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_forward_inside_foreign_hooks_is_refused() -> None:
    model = model_of("positional")
    runtime = attach_plan(model, plan_for(model, "R"))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())
    with hooks, pytest.raises(UnsupportedModelError, match=r"^first: saved_tensors_hooks of something else"):
        model(X)
    runtime.detach()


def test_a_checkpoint_of_the_users_around_the_model_is_refused() -> None:
    model = model_of("positional")
    runtime = attach_plan(model, plan_for(model, "R"))
    with pytest.raises(UnsupportedModelError, match=r"^first: saved_tensors_hooks of something else"):
        torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False)
    runtime.detach()
