"""Fake runs that take the branches of plain ones.

transformers looks into its inputs to see whether rows hold one sequence each, and then passes no attention mask. Fake
tensors have nothing to look at: what the plain run would find is said here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MASKS = "transformers.masking_utils"


@contextmanager
def sequences_in_rows(*, packed: bool) -> Iterator[None]:
    """transformers' masks take rows for single sequences inside the block, or (``packed``) for several each."""
    if "transformers" not in sys.modules:
        yield
        return
    masks: Any = importlib.import_module(_MASKS)
    original = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = _several_sequences if packed else _one_sequence
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = original


def _one_sequence(position_ids: Any) -> None:
    return None


def _several_sequences(position_ids: Any) -> Any:
    """The number of each token's sequence, int64 [B, T]: what transformers computes before it looks at the last one."""
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)
