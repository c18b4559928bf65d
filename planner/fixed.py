"""What is live during a whole update: parameters, gradient buffers, optimizer state; and the optimizer step itself."""

from __future__ import annotations

import gc

import torch
from torch import nn

from hilore.planner.actor import Actor
from hilore.planner.optimizer import make_optimizer
from hilore.planner.trace import Fixed
from hilore.runtime.meter import StorageMeter


def measure_fixed(
    actor: Actor,
    parameters: nn.Module,
    region_gradient_bytes: int,
    *,
    gradients_exist: bool,
    other_bytes: int,
) -> tuple[Fixed, int]:
    """What is live during the whole update, and the optimizer step's working set on top of it and of gradients.

    ``parameters``: the actor's model, or one rank's shards of it. ``region_gradient_bytes``: gradients of all regions,
    which an update without accumulation has at that time beside ``Fixed``; those outside are in the working set.
    """
    trainable = [p for p in parameters.parameters() if p.requires_grad]
    with actor.faked():
        gc.collect()
        with StorageMeter() as meter:
            meter.track([*parameters.parameters(), *actor.model.buffers()])
            resident = meter.live_bytes
            for parameter in trainable:
                parameter.grad = torch.zeros_like(parameter)
            gradients = meter.live_bytes - resident
            optimizer = make_optimizer(parameters, actor.spec)
            optimizer.step()
            state = meter.live_bytes - resident - gradients
            meter.reset_peak()
            optimizer.step()
            working = meter.peak_bytes - resident - gradients - state
        for parameter in trainable:
            parameter.grad = None
    if gradients_exist:
        return Fixed(resident, gradients, state, other_bytes), working
    return Fixed(resident, 0, state, other_bytes), working + gradients - region_gradient_bytes
