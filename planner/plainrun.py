"""Fake runs that take the branches of plain ones.

transformers looks into its inputs to see that rows hold one sequence each, and then passes no attention mask. Fake
tensors have nothing to look at, so it would build a mask of T x T and expand k and v, which no real run does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MASKS = "transformers.masking_utils"


@contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """transformers' masks take rows for single sequences inside the block (layout packed is refused elsewhere)."""
    if "transformers" not in sys.modules:
        yield
        return
    masks: Any = importlib.import_module(_MASKS)
    original = masks.find_packed_sequence_indices
    masks.find_packed_sequence_indices = _one_sequence
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = original


def _one_sequence(position_ids: Any) -> None:
    return None
