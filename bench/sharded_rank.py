"""One rank of real FSDP updates on CPU (gloo), measured: run as a script by bench/sharded.py.

Arguments: rank, world size, rendezvous file, a JSON file with cases, the JSON file to write.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Optimizer

from hilore.planner.actor import Actor, build_actor, microbatch_of, policy_loss
from hilore.planner.microbatch import Microbatch
from hilore.planner.optimizer import make_optimizer
from hilore.planner.shardgroup import persistent_dtype
from hilore.planner.sources import torch_dtype
from hilore.planner.spec import spec_from_dict
from hilore.planner.spec_types import ModelSpec
from hilore.runtime.attach import attach
from hilore.runtime.meter import StorageMeter
from hilore.runtime.planfile import load_plan

# The thread of gloo that carried a collective out lets go of its buffers after it has woken the waiter: without a pause
# they are counted by chance in what comes next. It only adds, so on a busy machine the lowest of some updates counts.
PAUSE_S = 0.005
UPDATES = 3


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes of a whole update on this rank under each policy, and whether gradients are bitwise those of No-GC."""
    spec = spec_from_dict(case["spec"])
    actor = build_actor(spec, live_adapters=True)
    tokens = spec.batch.length_buckets[-1]
    update = [microbatch_of(actor, tokens, seed=seed) for seed in range(spec.batch.accumulation)]
    actor = replace(actor, model=shard(spec, actor.model))
    optimizer = make_optimizer(actor.model, spec, lr=0.0)
    _run(actor, update, optimizer)
    reference = _gradients(actor, update)
    result: dict[str, Any] = {}
    for policy, plan in case["policies"].items():
        undo = _apply(actor.model, policy, plan)
        pairs = zip(_gradients(actor, update), reference, strict=True)
        exact = all(torch.equal(found, expected) for found, expected in pairs)
        result[policy] = {"peak_bytes": _peak(actor, update, optimizer), "exact": exact}
        undo()
    return result


def shard(spec: ModelSpec, model: nn.Module) -> nn.Module:
    """The model under the FSDP of its spec, parameters in their persistent dtype; groups as accelerate makes them."""
    for name, parameter in model.named_parameters():
        adapter = any(part.startswith("lora_") for part in name.split("."))
        parameter.data = parameter.data.to(persistent_dtype(spec, adapter=adapter))
    base = base_of(model)
    compute, reduce = torch_dtype(spec.precision.compute), torch_dtype(spec.precision.grads)
    reshard = spec.parallel.reshard_after_forward
    if spec.parallel.kind == "fsdp1":
        strategy = ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP
        return FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({type(base.model.layers[0])}),
            mixed_precision=MixedPrecision(compute, reduce),
            device_id=torch.device("cpu"),
        )
    mesh = init_device_mesh("cpu", (spec.parallel.world_size,))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute, reduce)}
    for layer in base.model.layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    embedding, norm, head = base.model.embed_tokens, base.model.norm, base.lm_head
    tied = embedding.weight is head.weight
    if not tied:
        fully_shard(embedding, reshard_after_forward=reshard, **options)
    fully_shard([norm, embedding, head] if tied else [norm, head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    return model


def base_of(model: Any) -> Any:
    """The model inside of its wrappers."""
    if isinstance(model, FullyShardedDataParallel):
        return base_of(model.module)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _apply(model: nn.Module, policy: str, plan: str) -> Callable[[], None]:
    """Put a policy on the model; gives the undoing."""
    if plan:
        loaded = load_plan(plan)
        runtime = attach(model, (loaded,))
        runtime.use(loaded)
        return runtime.detach
    if policy == "gc":
        base_of(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return lambda: base_of(model).gradient_checkpointing_disable()
    return lambda: None


def _run(actor: Actor, update: list[Microbatch], optimizer: Optimizer | None) -> None:
    """All microbatches of an update; with ``optimizer``, its step too, and gradients are gone again."""
    model: Any = actor.model
    late = actor.spec.parallel.gradient_sync == "last_microbatch"
    for place, microbatch in enumerate(update):
        waits = late and place < len(update) - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(not waits)
        flat = waits and isinstance(model, FullyShardedDataParallel)
        with model.no_sync() if flat else nullcontext():
            policy_loss(actor, microbatch).backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def _gradients(actor: Actor, update: list[Microbatch]) -> list[Tensor]:
    """This rank's shards of the gradients of one update."""
    torch.manual_seed(0)
    _run(actor, update, None)
    found = []
    for parameter in actor.model.parameters():
        if parameter.grad is not None:
            found.append(_local(parameter.grad).clone())
            parameter.grad = None
    return found


def _peak(actor: Actor, update: list[Microbatch], optimizer: Optimizer) -> int:
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    inputs = [getattr(microbatch, name) for microbatch in update for name in microbatch.__slots__]
    peaks = []
    for _ in range(UPDATES):
        gc.collect()
        with StorageMeter() as meter, _pause_after_collectives():
            meter.track([*actor.model.parameters(), *actor.model.buffers(), *state])
            meter.track([tensor for tensor in inputs if isinstance(tensor, Tensor)])
            meter.reset_peak()
            _run(actor, update, optimizer)
            peaks.append(meter.peak_bytes)
    return int(min(peaks))


@contextmanager
def _pause_after_collectives() -> Iterator[None]:
    """Every wait for a collective takes ``PAUSE_S`` longer, in which gloo's thread lets go of its buffers."""
    wait = dist.Work.wait

    def wait_and_pause(work: dist.Work, *arguments: Any, **named: Any) -> bool:
        done = wait(work, *arguments, **named)
        time.sleep(PAUSE_S)
        return done

    dist.Work.wait = wait_and_pause  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def main(rank: int, world_size: int, rendezvous: str, cases: str, out: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", message="FSDP.* is deprecated|.*FullyShardedDataParallel.*", category=FutureWarning
    )
    warnings.filterwarnings("ignore", message=".gradient_checkpointing_enable. is deprecated", category=FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    found = {case["name"]: measure(case) for case in json.loads(Path(cases).read_text())}
    Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
