"""Seeds of stochastic rounding: the same for the same unit, step and rank, and different for any other."""

from __future__ import annotations

import hashlib

from torch import distributed


def rounding_seed(unit: str, step: int, rank: int = 0) -> int:
    """A 63-bit seed for ``Codec.encode``. ``unit``: canonical name; ``step``: any count of forwards or microbatches."""
    digest = hashlib.blake2b(f"{unit}\0{step}\0{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def own_rank() -> int:
    """This process's rank, 0 where nothing is distributed."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
