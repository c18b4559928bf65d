"""One group of parameters that FSDP gathers and reduces together: its bytes on one rank (planner/sharding.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hilore.planner.sources import torch_dtype
from hilore.planner.spec_types import ModelSpec


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """One group of parameters on one rank.

    ``gathered``: all its parameters in the dtype of the forward, padded; also the size of the flat buffer. ``cast``:
    the shards that a gather casts first. ``gradients``: unsharded, as autograd makes them. ``reduce_input``: the same
    in the reduce dtype, padded; ``reduce_output``: the rank's part of it; ``reduced``: that part in the persistent
    dtype, ``recast`` the same where it is another tensor than the output, else 0. ``reduce_copy``: what the collective
    itself takes: gloo, on the CPU, reduces a copy of its input. ``kept_gradient``: of the last parameter, which a loop
    variable of PyTorch's ``foreach_reduce`` holds until the reduction is over. ``flat_gradient``: of FSDP1, which
    first joins the gradients into one, beside parameters that are still gathered. ``accumulated``: unsharded gradients
    that stay from microbatch to microbatch where only the last one reduces.
    """

    gathered: int
    cast: int
    gradients: int
    reduce_input: int
    reduce_output: int
    reduced: int
    recast: int
    reduce_copy: int
    kept_gradient: int
    flat_gradient: int = 0
    accumulated: int = 0

    @property
    def reducing(self) -> int:
        """Highest bytes of a gradient reduction: gradients and input, then input, output and what is made of it.

        Beside ``accumulated``. FSDP2 adds to it first and then is done with it; FSDP1 is while autograd still holds
        what was added.
        """
        later = self.reduce_input + self.reduce_output + max(self.reduce_copy, self.recast) + self.kept_gradient
        if self.flat_gradient:
            return max(self.gathered + self.gradients + self.flat_gradient, later)
        first = self.reduce_input + (0 if self.accumulated else self.gradients)
        return max(first, later - self.accumulated)


def persistent_dtype(spec: ModelSpec, *, adapter: bool) -> torch.dtype:
    """The dtype in which a parameter persists (its shard and its gradient's), unlike the one it is gathered in."""
    return torch_dtype(str(spec.adapter.dtype) if adapter else spec.precision.params)


def syncs_last(spec: ModelSpec) -> bool:
    """Whether unsharded gradients stay until the last microbatch of an update."""
    return spec.parallel.gradient_sync == "last_microbatch" and spec.batch.accumulation > 1


def distinct(parameters: Iterable[Tensor]) -> list[Tensor]:
    return list({id(parameter): parameter for parameter in parameters}.values())


def sharded_group(spec: ModelSpec, parameters: Iterable[Tensor], adapters: set[int]) -> GroupBytes:
    """An FSDP2 group; ``parameters`` in the dtype of the forward, ``adapters`` the ids of those of adapters."""
    ranks = spec.parallel.world_size
    reduce_dtype = torch_dtype(spec.precision.grads)
    gathered = cast = gradients = reduce_input = reduced = recast = last = 0
    parameters = distinct(parameters)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in parameters:
        persists = persistent_dtype(spec, adapter=id(parameter) in adapters)
        padded = -(-parameter.shape[0] // ranks) * ranks * (parameter.numel() // max(parameter.shape[0], 1))
        gathered += padded * parameter.element_size()
        if persists != parameter.dtype:
            cast += padded // ranks * parameter.element_size()
        if parameter.requires_grad:
            last = parameter.numel() * parameter.element_size()
            gradients += last
            reduce_input += padded * reduce_dtype.itemsize
            reduced += padded // ranks * persists.itemsize
            if persists != reduce_dtype:
                recast += padded // ranks * persists.itemsize
    copy = reduce_input if spec.device.kind == "cpu" and ranks > 1 else 0
    accumulated = 0
    if syncs_last(spec):
        last = last // trainable[-1].element_size() * reduce_dtype.itemsize if trainable else 0
        accumulated = max(sum(p.numel() for p in trainable) * reduce_dtype.itemsize, reduced)
    return GroupBytes(
        gathered, cast, gradients, reduce_input, reduce_input // ranks, reduced, recast, copy, last, 0, accumulated
    )
