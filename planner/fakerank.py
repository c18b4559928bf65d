"""One rank of FSDP2 under fake tensors: PyTorch's own ``fully_shard`` over a process group that sends nothing.

Nothing of planner/sharding.py is used here: what a rank gathers, when it lets go of it and what a reduction takes is
what PyTorch does, so that a prediction is checked against something else than itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hilore.planner.actor import Actor
from hilore.planner.head import base_model
from hilore.planner.rivals import checkpointed_layers
from hilore.planner.shardgroup import persistent_dtype
from hilore.planner.shardparameters import untied_embeddings
from hilore.planner.sources import torch_dtype
from hilore.planner.spec_types import ModelSpec
from hilore.runtime.errors import HiloreError, UnsupportedModelError

_FAKE_STORE = "torch.testing._internal.distributed.fake_pg"


@contextmanager
def fake_ranks(world_size: int) -> Iterator[DeviceMesh]:
    """A mesh of ``world_size`` ranks of which this process is the first; collectives return at once.

    Raises HiloreError where a process group exists already.
    """
    if dist.is_initialized():
        raise HiloreError(
            "a process group exists already in this process, and fake ranks need one of their own; run "
            "`hilore-plan verify --fake` in a process of its own"
        )
    store = importlib.import_module(_FAKE_STORE).FakeStore()
    dist.init_process_group("fake", rank=0, world_size=world_size, store=store)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def shard_fake(actor: Actor, mesh: DeviceMesh) -> None:
    """Shard a fake actor over ``mesh`` in the groups that accelerate makes (planner/sharding.py says which).

    Microbatches come before: their reference log-probabilities are those of the whole model.
    Raises UnsupportedModelError for a model without the modules that are grouped.
    """
    spec, model = actor.spec, actor.model
    if spec.parallel.kind != "fsdp2":
        raise UnsupportedModelError(
            f"parallel.kind: {spec.parallel.kind} cannot run under fake tensors; set parallel.kind: fsdp2 or none",
            field="parallel.kind",
            found=spec.parallel.kind,
        )
    policy = MixedPrecisionPolicy(
        param_dtype=None if spec.precision.autocast else torch_dtype(spec.precision.compute),
        reduce_dtype=torch_dtype(spec.precision.grads),
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    reshard = spec.parallel.reshard_after_forward
    with actor.faked():
        _persist(spec, model)
        for layer in checkpointed_layers(model):
            fully_shard(layer, reshard_after_forward=reshard, **options)
        first, last = _ends(model)
        if first:
            fully_shard(first, reshard_after_forward=reshard, **options)
        fully_shard(last, reshard_after_forward=False, **options)
        fully_shard(model, **options)


def _persist(spec: ModelSpec, model: nn.Module) -> None:
    """Parameters in the dtype in which they persist; what was shared stays shared."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                adapter = any(part.startswith("lora_") for part in f"{path}.{name}".split("."))
                dtype = persistent_dtype(spec, adapter=adapter)
                data = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
                made[id(parameter)] = (parameter, nn.Parameter(data, requires_grad=parameter.requires_grad))
            module._parameters[name] = made[id(parameter)][1]


def _ends(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """What is gathered before the first region and, apart from it, around the head."""
    causal = base_model(model)
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    norm = getattr(causal.base_model, "norm", None)
    if not isinstance(norm, nn.Module) or embedding is None or head is None:
        raise UnsupportedModelError(
            f"{type(causal).__name__}: its embeddings, last norm or output layer is not where FSDP2's groups are made; "
            "set parallel.kind: none",
            unit=type(causal).__name__,
        )
    return ([embedding], [norm, head]) if untied_embeddings(model) else ([], [norm, embedding, head])
