"""One rank of a real FSDP2 step on CPU (gloo), measured: run as a script by tests/test_sharded_step.py.

Arguments: rank, world size, rendezvous file, a JSON file with cases, the JSON file to write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hilore.planner.actor import Actor, build_actor, microbatch_of, policy_loss
from hilore.planner.microbatch import Microbatch
from hilore.planner.sharding import persistent_dtype
from hilore.planner.sources import torch_dtype
from hilore.planner.spec import spec_from_dict
from hilore.planner.spec_types import ModelSpec
from hilore.runtime.meter import StorageMeter

STEPS = 3


def measure(spec: ModelSpec, *, checkpointing: bool) -> int:
    """Peak bytes of forward and backward of the last of ``accumulation`` microbatches on this rank.

    The lowest of some steps: gloo's threads let go of buffers when they please, which only adds.
    """
    actor = build_actor(spec)
    microbatch = microbatch_of(actor, spec.batch.length_buckets[-1])
    model = shard(spec, actor.model)
    if checkpointing:
        base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    for _ in range(min(spec.batch.accumulation - 1, 1)):
        policy_loss(actor, microbatch).backward()  # type: ignore[no-untyped-call]
    peaks = []
    for _ in range(STEPS):
        if spec.batch.accumulation == 1:
            for parameter in model.parameters():
                parameter.grad = None
        peaks.append(metered(actor, microbatch))
    return min(peaks)


def shard(spec: ModelSpec, model: nn.Module) -> nn.Module:
    """Parameters in their persistent dtype, groups as accelerate makes them."""
    for name, parameter in model.named_parameters():
        adapter = any(part.startswith("lora_") for part in name.split("."))
        parameter.data = parameter.data.to(persistent_dtype(spec, adapter=adapter))
    mesh = init_device_mesh("cpu", (spec.parallel.world_size,))
    policy = MixedPrecisionPolicy(torch_dtype(spec.precision.compute), torch_dtype(spec.precision.grads))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    reshard = spec.parallel.reshard_after_forward
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        fully_shard(layer, reshard_after_forward=reshard, **options)
    embedding, norm, head = base.model.embed_tokens, base.model.norm, base.lm_head
    tied = embedding.weight is head.weight
    if not tied:
        fully_shard(embedding, reshard_after_forward=reshard, **options)
    fully_shard([norm, embedding, head] if tied else [norm, head], reshard_after_forward=False, **options)
    fully_shard(model, **options)
    return model


def metered(actor: Actor, microbatch: Microbatch) -> int:
    with StorageMeter() as meter, resizes_seen(meter):
        parameters = [parameter.to_local() for parameter in actor.model.parameters()]  # type: ignore[operator]
        gradients = [p.grad.to_local() for p in actor.model.parameters() if p.grad is not None]  # type: ignore[attr-defined]
        tensors = [getattr(microbatch, name) for name in microbatch.__slots__]
        meter.track([*parameters, *gradients, *actor.model.buffers()])
        meter.track([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])
        meter.reset_peak()
        policy_loss(actor, microbatch).backward()  # type: ignore[no-untyped-call]
        return meter.peak_bytes


@contextmanager
def resizes_seen(meter: StorageMeter) -> Iterator[None]:
    """FSDP2 frees and takes back gathered parameters by ``storage.resize_``, which no operator shows."""
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = plain(storage, size)
        key = id(storage)
        if key in meter._sizes:
            meter.live_bytes += storage.nbytes() - meter._sizes[key]
            meter._sizes[key] = storage.nbytes()
            meter.peak_bytes = max(meter.peak_bytes, meter.live_bytes)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


def main(rank: int, world_size: int, rendezvous: str, cases: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    found = {
        case["name"]: measure(spec_from_dict(case["spec"]), checkpointing=case["checkpointing"])
        for case in json.loads(Path(cases).read_text())
    }
    Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
