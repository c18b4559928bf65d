"""The counter of live storages changes nothing that it counts: same kernels in order, same bits, same memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hilore.planner.actor import Actor, build_actor, microbatch_of, policy_loss
from hilore.planner.stepping import idle_optimizer, trainable
from hilore.runtime.meter import StorageMeter
from tests import models
from tests.kernels import profiled
from tests.plans import Batch, attach_plan, gradients, plan_for
from tests.specs import spec_of

LORA = "{kind: lora, rank: 4, dropout: 0.1}"
ACTORS = {
    "full": {},
    "full, autocast": {"precision": "{params: float32, autocast: true}"},
    "lora, bfloat16, chunked head": {
        "adapter": LORA,
        "precision": "{params: bfloat16}",
        "loss": "{kind: grpo, head: chunked}",
    },
    "trl's head": {"adapter": LORA, "loss": "{kind: grpo, head: trl}"},
}


def update_of(actor: Actor, *, checkpointing: bool) -> Callable[[], list[Tensor]]:
    """Two accumulated microbatches and an optimizer step (at learning rate 0); gives the gradients."""
    base = actor.model.get_base_model() if hasattr(actor.model, "get_base_model") else actor.model
    assert isinstance(base, nn.Module)
    if checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    microbatch = microbatch_of(actor, 16)
    optimizer = idle_optimizer(actor)

    def update() -> list[Tensor]:
        torch.manual_seed(0)
        for _ in range(2):
            policy_loss(actor, microbatch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found = [parameter.grad for parameter in trainable(actor.model) if parameter.grad is not None]
        optimizer.zero_grad()
        return found

    return update


def gradients_of(model: nn.Module, batch: Batch) -> Callable[[], list[Tensor]]:
    """One step's gradients; the model holds none before and after."""

    def step() -> list[Tensor]:
        found = list(gradients(model, batch).gradients.values())
        model.zero_grad()
        return found

    return step


def metered(run: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    def inside() -> list[Tensor]:
        with StorageMeter():
            return run()

    return inside


def assert_same_run(run: Callable[[], list[Tensor]]) -> tuple[str, ...]:
    """``run`` with the counter on and off; its kernels."""
    inside = metered(run)
    inside()  # the first of a process prepares itself
    found: list[list[Tensor]] = []
    without = profiled(lambda: found.append(run()))
    with_meter = profiled(lambda: found.append(inside()))
    assert Counter(with_meter.kernels) - Counter(without.kernels) == Counter()
    assert with_meter.kernels == without.kernels
    assert with_meter.peak_bytes == without.peak_bytes
    assert len(found[0]) == len(found[1]) > 0
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))
    return without.kernels


@pytest.mark.parametrize("checkpointing", [False, True], ids=["no-gc", "gc"])
@pytest.mark.parametrize("actor", ACTORS)
def test_an_update_runs_the_same_kernels_in_the_same_memory(actor: str, checkpointing: bool) -> None:
    built = build_actor(spec_of(**ACTORS[actor]), live_adapters=True)
    assert_same_run(update_of(built, checkpointing=checkpointing))


@pytest.mark.parametrize("family", ["qwen3_tiny", "llama_tiny", "phi3_tiny", "gemma2_tiny"])
def test_other_families(family: str) -> None:
    model = getattr(models, family)()
    batch = models.microbatch_for(model)
    assert_same_run(gradients_of(model, batch))


def test_codecs_stay_one_call_each_under_a_plan() -> None:
    """v_proj kept exactly, gate and up encoded, in each of the regions."""
    model = models.qwen2_tiny_lora()
    batch = models.microbatch_for(model)
    modes = {"self_attn.v_proj": "H", "mlp.gate_proj": "L", "mlp.up_proj": "L"}
    plan = plan_for(model, modes)
    runtime = attach_plan(model, plan)
    kernels = assert_same_run(gradients_of(model, batch))
    runtime.detach()
    encoded = 2 * len(plan.regions)
    assert kernels.count("hilore::encode_groups") == kernels.count("hilore::decode_groups") == encoded


def test_the_counter_agrees_with_the_allocator_where_operators_need_no_memory_of_their_own() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
    inputs = torch.randn(256, 64)

    def step() -> None:
        middle = model(inputs)
        (middle * middle + middle).sum().backward()

    step()
    for parameter in model.parameters():
        parameter.grad = None
    allocated = profiled(step).peak_bytes
    for parameter in model.parameters():
        parameter.grad = None
    with StorageMeter() as meter:
        meter.track([*model.parameters(), inputs])
        base = meter.live_bytes
        step()
    assert meter.peak_bytes - base == allocated
