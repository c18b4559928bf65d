"""Regions that are random programs of linears and glue, under random plans: bitwise eager, in any order of asking."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hilore.runtime.attach import attach
from tests import models
from tests.plans import (
    RegionUnits,
    Step,
    assert_exact,
    assert_same_step,
    attach_plan,
    gradients,
    keepable,
    loss_of,
    plan_for,
    plan_set,
    random_modes,
    units_of,
)

WIDTH = 16
REGIONS = ("0", "1", "2")
SEEDS = range(24)
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
OPERATIONS = (
    *("linear",) * 4,
    *("tanh", "multiply", "add", "relu in place", "dropout", "gelu", "softmax", "transpose", "cat", "chunk"),
    *("detach", "scale", "norm", "square", "view", "no grad", "sigmoid", "add in place"),
)


class Program(nn.Module):
    """A random straight-line program; some linears are frozen, some results feed several later steps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps = [(draw.choice(OPERATIONS), draw.random(), draw.random()) for _ in range(draw.randint(4, 12))]
        self.linears = nn.ModuleList()
        for operation, _, _ in self.steps:
            if operation == "linear":
                linear = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
                self.linears.append(linear.requires_grad_(draw.random() < 0.6))
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        values, linears = [x], iter(self.linears)
        for operation, a, b in self.steps:
            first = values[-1] if a < 0.5 else values[int(a * len(values))]
            other = values[int(b * len(values))]
            values.append(next(linears)(first) if operation == "linear" else self._glue(operation, first, other))
        return x + self.gain * values[-1] + values[-2]

    def _glue(self, operation: str, first: Tensor, other: Tensor) -> Tensor:
        half = WIDTH // 2
        if operation == "no grad":
            with torch.no_grad():
                gate = first.sigmoid()
            return other * gate
        results = {
            "tanh": lambda: first.tanh(),
            "multiply": lambda: first * other.tanh(),
            "add": lambda: first + other,
            "relu in place": lambda: (first * 1.5).relu_(),
            "dropout": lambda: nn.functional.dropout(first, 0.3, self.training),
            "gelu": lambda: nn.functional.gelu(first),
            "softmax": lambda: first.softmax(-1),
            "transpose": lambda: first.t().contiguous().t(),
            "cat": lambda: torch.cat([first[:, :half], other[:, half:]], 1),
            "chunk": lambda: torch.cat([first.chunk(2, 1)[1].sin(), first.chunk(2, 1)[0]], 1),
            "detach": lambda: first.detach().tanh() * other,
            "scale": lambda: first * 0.7,
            "norm": lambda: self.norm(first),
            "square": lambda: first.tanh().square(),
            "view": lambda: first.reshape(-1).reshape(first.shape),
            "sigmoid": lambda: first.sigmoid(),
            "add in place": lambda: (other + 1).add_(first),
        }
        result: Tensor = results[operation]()
        return result


Case = tuple[nn.Module, tuple[RegionUnits, ...], torch.dtype | None, str | None, Step]


@pytest.fixture(scope="module", params=SEEDS)
def case(request: pytest.FixtureRequest) -> Case:
    seed: int = request.param
    with models.seeded(seed):
        model = nn.Sequential(Program(seed), Program(seed + 1000), Program(seed)).train()
    autocast = torch.bfloat16 if seed % 3 == 0 else None
    units = units_of(model, X, regions=REGIONS, autocast=autocast)
    names = [{unit.name for unit in region.units} for region in units]
    shared = sorted(names[0] & names[1] & names[2])
    split = random.Random(seed).choice(shared) if shared else None
    return model, units, autocast, split, gradients(model, X, autocast=autocast)


def test_exact(case: Case) -> None:
    model, units, autocast, split, expected = case
    plans = [plan_for(model, "R"), plan_for(model, "R", split=split), plan_for(model, keepable(units))]
    for seed in range(3):
        modes, held = random_modes(units, seed)
        plans.append(plan_for(model, modes, hold=held, split=split if seed else None))
    for plan in plans:
        assert_exact(model, plan, X, expected, autocast=autocast)


def test_lossy_keeps_the_loss_and_demoted_is_exact(case: Case) -> None:
    model, units, autocast, split, expected = case
    draw = random.Random(1)
    modes = {name: draw.choice("HLR") if mode == "H" else mode for name, mode in keepable(units).items()}
    plan = plan_for(model, modes, split=split)
    runtime = attach(model, plan_set(plan))
    assert_same_step(gradients(model, X, autocast=autocast), expected)
    runtime.use(plan)
    found = gradients(model, X, autocast=autocast)
    runtime.detach()
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.rng_state, expected.rng_state)
    assert found.gradients.keys() == expected.gradients.keys()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_asked_in_pieces_in_any_order(case: Case) -> None:
    model, units, autocast, split, expected = case
    modes, _ = random_modes(units, 5)
    runtime = attach_plan(model, plan_for(model, modes, split=split))
    parameters = dict(model.named_parameters())
    names = list(expected.gradients)
    random.Random(2).shuffle(names)
    with models.seeded(0):
        loss = loss_of(model, X, autocast=autocast)
    for start in range(0, len(names), 3):
        asked = names[start : start + 3]
        found = torch.autograd.grad(loss, [parameters[name] for name in asked], retain_graph=True)
        for name, grad in zip(asked, found, strict=True):
            assert torch.equal(grad, expected.gradients[name]), name
    del loss
    assert len(runtime.stats._frames) == 0
    runtime.detach()
