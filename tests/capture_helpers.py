"""Small modules with regions, and how tests capture them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from hilore.planner.capture import Capture, capture
from tests import models


def captured(model: nn.Module, **options: Any) -> Capture:
    batch = models.microbatch_for(model)
    return capture(model, {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}, **options)


class Blocks(nn.Module):
    """Two regions ``blocks.0`` and ``blocks.1`` of one given kind after a linear."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x)))


def of_blocks(block: type[nn.Module]) -> Capture:
    return capture(Blocks(block), {"x": torch.randn(2, 8)}, region_names=("blocks.0", "blocks.1"))
