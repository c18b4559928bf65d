"""One microbatch of rollouts: what one forward and backward of the actor gets."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Microbatch:
    """``input_ids``, ``attention_mask`` int64 [B, T]; ``completion_mask`` int64 [B, Tr], the last Tr columns.

    ``advantages`` float32 [B]; ``old_logps``, ``ref_logps`` float32 [B, Tr], or None: the ratio is 1, no reference.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None
    ref_logps: Tensor | None
