"""C-08, in a running plan: only activations are encoded, whatever the plan says of a unit; the rest stays exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hilore.runtime.codecs import get_codec
from hilore.runtime.codecs.base import Encoded
from hilore.runtime.plan import Plan, UnitPlan
from tests import models
from tests.plans import assert_same_step, attach_plan, gradients, loss_of, plan_for, units_of


class Route(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


class Mask(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x > 0


class Wide(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double().tanh()


class Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


class Roles(nn.Module):
    """Units that return an index, a mask, another dtype, a scalar, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.route, self.mask, self.wide, self.scale = Route(), Mask(), Wide(), Scale()
        self.table = nn.Embedding(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).sin()
        picked = self.table(self.route(hidden)) * self.mask(hidden) + self.wide(hidden).float().square()
        return x + picked * self.scale(hidden).cos()


ROLES = {"linear": "activation", "route": "index", "mask": "mask", "wide": "other dtype", "scale": "scalar"}


def every_unit_at_l(model: nn.Module) -> Plan:
    plan = plan_for(model, "R")
    regions = tuple(
        replace(
            region,
            units=tuple(
                UnitPlan(f"{region.name}.{name}", "L", "int8-g128", dead=False, dead_if_demoted=False) for name in ROLES
            ),
        )
        for region in plan.regions
    )
    return replace(plan, regions=regions)


@pytest.fixture
def roles() -> tuple[nn.Module, torch.Tensor]:
    with models.seeded(0):
        model = nn.Sequential(Roles(), Roles()).train()
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    units_of(model, x, regions=("0", "1"))
    return model, x


def test_only_the_activation_is_encoded_and_the_rest_counted(roles: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = roles
    expected = gradients(model, x)
    runtime = attach_plan(model, every_unit_at_l(model))
    found = gradients(model, x)
    assert runtime.stats.encode_roles == dict.fromkeys(ROLES.values(), 2)
    for name, role in ROLES.items():
        stats = runtime.stats.units[f"1.{name}"]
        assert (stats.recorded, stats.answered) == (1, 1)
        assert (stats.encoded_bytes > 0, stats.not_encoded) == ((True, 0) if role == "activation" else (False, 1))
    runtime.detach()
    assert torch.equal(found.loss, expected.loss)


def test_indices_masks_and_weights_are_untouched_by_a_codec_that_returns_zeros(
    roles: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = roles
    plan = every_unit_at_l(model)
    codec = get_codec("int8-g128")

    def zeros(encoded: Encoded) -> torch.Tensor:
        return torch.zeros(encoded.shape, dtype=encoded.dtype)

    without_linear = replace(plan, regions=tuple(replace(r, units=r.units[1:]) for r in plan.regions))
    expected = gradients(model, x)
    monkeypatch.setattr(codec, "decode", zeros)
    runtime = attach_plan(model, without_linear)
    assert_same_step(gradients(model, x), expected)
    runtime.detach()
    runtime = attach_plan(model, plan)
    found = gradients(model, x)
    runtime.detach()
    assert torch.equal(found.loss, expected.loss)
    assert not torch.equal(found.gradients["0.linear.weight"], expected.gradients["0.linear.weight"])
    # Which rows of the table have gradients is a matter of indices alone.
    for name in ("0.table.weight", "1.table.weight"):
        assert torch.equal(found.gradients[name].any(1), expected.gradients[name].any(1))


def test_a_linears_weight_is_an_alias_whatever_the_codec_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.qwen2_tiny()
    batch = models.microbatch_for(model)
    runtime = attach_plan(model, plan_for(model, "L"))
    loss = loss_of(model, batch)
    frames = list(runtime.stats._frames)
    for frame in frames:
        for record in frame.records.values():
            for role, reference in zip(record.roles, record.entries, strict=True):
                entry = reference()
                assert entry is not None
                if role.kind == "parameter":
                    weight = record.unit.module.weight
                    assert entry.value.untyped_storage()._cdata == weight.untyped_storage()._cdata
                else:
                    assert entry.value is None or role.layout.dtype != torch.float32 or role.kind == "rest"
    del loss, frame, frames, record, entry
    assert runtime.stats.live_saved_bytes == 0
    runtime.detach()
