"""One of the two ranks of C-33, run as a script; test_c33_ranks_choose_differently.py checks what scenarios return."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from hilore.runtime.attach import attach
from hilore.runtime.errors import AgreementError, HiloreWarning
from hilore.runtime.plan import Regime
from hilore.runtime.planset import PlanSet
from hilore.runtime.runtime import Runtime
from tests import models
from tests.plans import loss_of, plan_for, units_of
from tests.ranks import serve

LOW, HIGH = Regime("low", 0.0, 1.0, 0.5), Regime("high", 1.0, 10.0, 0.5)
# By rank: far above and far below the edge between the regimes.
ADVANTAGES = (5.0, 0.1)
SHORT_S = 3.0


class Collectives(TorchDispatchMode):
    """Notes every collective in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(str(func))
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        return func(*args, **(kwargs or {}))


class Gathering(nn.Module):
    """A region whose forward gathers over ranks: what TP, EP and sequence parallelism do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        parts = [torch.empty_like(hidden) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, hidden.detach())
        result: Tensor = self.second(hidden + torch.stack(parts).mean(0)).tanh()
        return result


def gathering_model() -> nn.Module:
    with models.seeded(0):
        return nn.Sequential(Gathering(), Gathering()).train()


def regimes(model: nn.Module, low: Any, high: Any, **more: Any) -> PlanSet:
    """Two plans: ``low`` modes under exposure 1, ``high`` above it."""
    plans = [
        replace(plan_for(model, modes, hold=modes == "hold", **more), regime=regime)
        for modes, regime in ((low, LOW), (high, HIGH))
    ]
    return PlanSet(tuple(plans))


def step(
    model: nn.Module, run: Callable[[], Tensor], runtime: Runtime | None, rank: int
) -> tuple[list[Tensor], list[str]]:
    """Gradients (local shards) of one microbatch whose exposure is this rank's, and the collectives it issued."""
    model.zero_grad()
    with Collectives() as collectives:
        if runtime is None:
            loss = run()
        else:
            advantages = torch.full((2,), ADVANTAGES[rank])
            with runtime.microbatch(advantages, torch.ones(2, 4)):
                loss = run()
        loss.backward()
    grads = [getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in model.parameters() if p.grad is not None]
    return [grad.clone() for grad in grads], collectives.seen


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def sharded(seed: int = 0) -> tuple[nn.Module, PlanSet, Callable[[], Tensor]]:
    model = models.qwen2_tiny()
    units_of(model)
    plans = regimes(model, {"self_attn:attention": "H", "mlp.gate_proj": "H"}, "hold", fingerprint={"rows": 8})
    batch = models.microbatch_for(model, seed=dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, plans, lambda: loss_of(model, batch)


def choices_are_local_under_fsdp2(rank: int) -> Any:
    model, plans, run = sharded()
    plain, plain_collectives = step(model, run, None, rank)
    runtime = attach(model, plans)
    found, collectives = step(model, run, runtime, rank)
    again, _ = step(model, run, runtime, rank)
    runtime.detach()
    return {
        "regimes": [entry.regime for entry in runtime.stats.steps],
        "held": runtime.stats.held,
        "frames": runtime.stats.frames,
        "exact": same(found, plain) and same(again, plain),
        "same_collectives": collectives == plain_collectives,
        "agreement": runtime.agreement is not None,
    }


def other_plans_are_refused(rank: int) -> Any:
    model, plans, run = sharded()
    plain, _ = step(model, run, None, rank)
    own = PlanSet(tuple(replace(plan, set_id=f"set{rank}") for plan in plans.plans))
    try:
        attach(model, own)
        message, found = "", {}
    except AgreementError as error:
        message, found = error.message, error.data["plans"]
    untouched = same(step(model, run, None, rank)[0], plain)
    runtime = attach(model, own, accept=("plans",))
    accepted, _ = step(model, run, runtime, rank)
    runtime.detach()
    return {
        "message": message,
        "ranks": sorted(ranks for ranks in found.values()),  # type: ignore[attr-defined]
        "untouched": untouched,
        "accepted": same(accepted, plain),
    }


def plans_solved_twice_are_the_same(rank: int) -> bool:
    """How long a solver took, and when, is no difference."""
    model, plans, _ = sharded()
    own = [replace(p, provenance={"at": rank}, solver=replace(p.solver, wall_s=float(rank))) for p in plans.plans]
    attach(model, PlanSet(tuple(own))).detach()
    return True


def one_choice_where_regions_hold_collectives(rank: int) -> Any:
    model = gathering_model()
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    units_of(model, x, regions=("0", "1"))
    plans = regimes(model, "hold", {"first": "H"}, fingerprint={"rows": 8})

    def run() -> Tensor:
        result: Tensor = model(x).square().sum()
        return result

    plain, plain_collectives = step(model, run, None, rank)
    runtime = attach(model, plans, agree=True, timeout_s=60)
    found, collectives = step(model, run, runtime, rank)
    runtime.detach()
    gathers = [name for name in collectives if "allgather" in name]
    return {
        "regimes": [entry.regime for entry in runtime.stats.steps],
        "frames": runtime.stats.frames,
        "exact": same(found, plain),
        "gathers": [len(gathers), len(plain_collectives)],
    }


def confirm_is_collective(rank: int) -> Any:
    """Rank 0's exact exposure is above the regime, rank 1's is not: both demote, and their gradients are exact."""
    model = gathering_model()
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    units_of(model, x, regions=("0", "1"))
    lossy = replace(plan_for(model, {"first": "L"}, fingerprint={"rows": 8}), regime=Regime("high", 0.0, 9.0, 1.0))
    runtime = attach(model, (lossy,), agree=True, timeout_s=60)

    def run() -> Tensor:
        result: Tensor = model(x).square().sum()
        return result

    plain, _ = step(model, run, None, rank)
    # The ratio exp(1.0), unclipped for negative advantages, takes rank 0's exposure of 5 beyond the 9 that the bound
    # before the forward (0.5 nats) stays under, and rank 1's of 0.1 nowhere near it.
    advantages = torch.full((2,), -ADVANTAGES[rank])
    model.zero_grad()
    with runtime.microbatch(advantages, torch.ones(2, 4), old_logps=torch.zeros(2, 4)) as microbatch:
        loss = run()
        microbatch.confirm(torch.ones(2, 4))
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    runtime.detach()
    return {"demotions": runtime.stats.demotions, "exact": same(grads, plain), "exposure": microbatch.exact_exposure}


def an_audit_runs_on_all_or_none(rank: int) -> Any:
    model, _, run = sharded()
    units = {"mlp.gate_proj": "L"}
    low, high = regimes(model, units, "hold", fingerprint={"rows": 8}).plans
    plain, _ = step(model, run, None, rank)
    audits = []
    for pair in ((low, high), (low, replace(low, regime=HIGH))):
        runtime = attach(model, pair, audit_every=1)
        model.zero_grad()
        with runtime.microbatch(torch.full((2,), ADVANTAGES[rank]), torch.ones(2, 4)) as microbatch:
            microbatch.audited(run).backward()
        runtime.detach()
        audits.append(runtime.stats.audit.audits)
        exact = same([p.grad.to_local() for p in model.parameters() if p.grad is not None], plain)
    return {"apart": audits[0], "together": audits[1], "exact": exact}


def an_alarm_is_everybodys(rank: int) -> list[str]:
    """Rank 1's audits alone raise it, until its plans are replaced."""
    model = gathering_model()
    x = torch.randn(2, 8, 8, requires_grad=True)
    units_of(model, x, regions=("0", "1"))
    plans = regimes(model, {"first": "L"}, {"first": "L"}, fingerprint={"rows": 8})
    runtime = attach(model, plans, agree=True, timeout_s=60)
    found = []
    for alarm in (False, True, False):
        if rank == 1:
            runtime.stats.audit.alarm = alarm
        step(model, lambda: model(x).sum(), runtime, rank)
        found.append(runtime.stats.steps[-1].fallback)
    runtime.detach()
    return found


def a_gradient_that_waits_is_noticed(rank: int) -> Any:
    model, plans, run = sharded()
    assert isinstance(model, FSDPModule)
    every = [replace(p, fingerprint=p.fingerprint | {"gradient_sync": "every_microbatch"}) for p in plans.plans]
    runtime = attach(model, PlanSet(tuple(every)))
    notices = []
    for sync in (True, False, False):
        model.set_requires_gradient_sync(sync)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model, run, runtime, rank)
        notices.append([str(w.message) for w in caught if w.category is HiloreWarning])
    runtime.detach()
    return notices


def a_rank_that_skips_is_named(rank: int) -> str:
    model = gathering_model()
    x = torch.randn(2, 8, 8, requires_grad=True)
    units_of(model, x, regions=("0", "1"))
    runtime = attach(model, regimes(model, "hold", "R", fingerprint={"rows": 8}), agree=True, timeout_s=SHORT_S)
    message = ""
    if rank == 0:
        try:
            model(x)
        except AgreementError as error:
            message = error.message
    dist.barrier()
    runtime.detach()
    return message


def a_rank_that_does_not_attach_is_named(rank: int) -> str:
    model, plans, _ = sharded()
    message = ""
    if rank == 0:
        try:
            attach(model, plans, timeout_s=SHORT_S)
        except AgreementError as error:
            message = error.message
    dist.barrier()
    return message


if __name__ == "__main__":
    serve(
        {
            scenario.__name__: scenario
            for scenario in (
                choices_are_local_under_fsdp2,
                other_plans_are_refused,
                plans_solved_twice_are_the_same,
                one_choice_where_regions_hold_collectives,
                confirm_is_collective,
                an_audit_runs_on_all_or_none,
                an_alarm_is_everybodys,
                a_gradient_that_waits_is_noticed,
                a_rank_that_skips_is_named,
                a_rank_that_does_not_attach_is_named,
            )
        }
    )
