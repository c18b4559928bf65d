"""FSDP1's groups: one flat parameter for each region and one, the root's, for all that is outside of regions.

As ``FullyShardedDataParallel`` of PyTorch 2.13 (torch/distributed/fsdp/_flat_param.py, _runtime_utils.py) with decoder
layers wrapped, BACKWARD_PRE prefetch and no forward prefetch does it:

- a gather casts the shard and writes into the flat parameter itself. The root is gathered from the begin of the forward
  to the end of the backward. In backward the next region is gathered before the region computes.
- a region's parameters are views of the flat one. When all of their gradients are there, one flat gradient is made
  of them, before the region's parameters go.
- the flat gradient is cast to the reduce dtype, padded where ranks do not divide it, and reduced; it stays until then.
- without a reduction (``no_sync``) the flat gradient stays, in the gathered dtype, and the next is added to it.

Sizes are those with ``use_orig_params``, which aligns every parameter to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hilore.planner.shardgroup import GroupBytes, distinct, syncs_last
from hilore.planner.sources import torch_dtype
from hilore.planner.spec_types import ModelSpec

_ALIGNED_BYTES = 16


def flat_group(spec: ModelSpec, parameters: list[Tensor]) -> GroupBytes:
    """One flat parameter on one rank; ``parameters`` in the dtype of the forward."""
    persists, reduces = torch_dtype(spec.precision.params), torch_dtype(spec.precision.grads)
    gathers = parameters[0].dtype if parameters else persists
    elements = _flat_elements(parameters, persists)
    shard = -(-elements // spec.parallel.world_size)
    padded = shard * spec.parallel.world_size
    cast = shard * gathers.itemsize if gathers != persists else 0
    if not any(parameter.requires_grad for parameter in parameters):
        return GroupBytes(padded * gathers.itemsize, cast, 0, 0, 0, 0, 0, 0, 0)
    flat = elements * gathers.itemsize
    copies = [reduces != gathers and elements, padded != elements and padded]
    return GroupBytes(
        gathered=padded * gathers.itemsize,
        cast=cast,
        gradients=sum(parameter.numel() for parameter in parameters) * gathers.itemsize,
        reduce_input=sum(copies) * reduces.itemsize,
        reduce_output=shard * reduces.itemsize,
        reduced=shard * persists.itemsize,
        recast=shard * persists.itemsize if persists != reduces else 0,
        reduce_copy=padded * reduces.itemsize if spec.device.kind == "cpu" else 0,
        kept_gradient=flat,
        flat_gradient=flat,
        accumulated=max(flat, shard * persists.itemsize) if syncs_last(spec) else 0,
    )


def flat_shards(spec: ModelSpec, model: nn.Module, regions: Iterable[nn.Module]) -> nn.ParameterList:
    """One rank's flat shards, empty, on the model's device: of each region, and of what is outside."""
    inside = [distinct(region.parameters()) for region in regions]
    known = {id(parameter) for group in inside for parameter in group}
    outside = [parameter for parameter in distinct(model.parameters()) if id(parameter) not in known]
    persists = torch_dtype(spec.precision.params)
    shards = nn.ParameterList()
    for group in (*inside, outside):
        if group:
            shard = -(-_flat_elements(group, persists) // spec.parallel.world_size)
            data = torch.empty(shard, dtype=persists, device=group[0].device)
            shards.append(nn.Parameter(data, requires_grad=any(parameter.requires_grad for parameter in group)))
    return shards


def _flat_elements(parameters: list[Tensor], dtype: torch.dtype) -> int:
    aligned = _ALIGNED_BYTES // dtype.itemsize
    return sum(-(-parameter.numel() // aligned) * aligned for parameter in parameters)
