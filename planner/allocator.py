"""What CUDA's caching allocator makes of live storages: blocks and segments, apart from the bytes that were asked for.

The rules are those of PyTorch 2.13 with its default settings (c10/core/AllocatorConfig.h for the sizes,
c10/cuda/CUDACachingAllocator.cpp for their use): a size is rounded up to blocks of 512 B. Up to 1 MiB it is cut from a
segment of 2 MiB, under 10 MiB from one of 20 MiB, else it has a segment of its own, rounded up to 2 MiB. A block of
more than 1 MiB keeps the rest of what it is cut from where that is 1 MiB or less; ``torch.cuda.memory_allocated``
counts it.

What is really reserved depends on the order of allocations. ``reserved_bytes`` is what live storages need when they
come largest first into empty memory: what a step reserves beyond that is fragmentation and cached blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20
APART = (
    "peaks and budgets are bytes of live storages; what CUDA's allocator adds in blocks of 512 B and segments of 2 MiB "
    "is apart from them, and counted by: hilore-plan verify --fake PLAN"
)
BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB
SEGMENT_MULTIPLE_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True)
class Rounding:
    """``storage_bytes``: as asked for. ``block_bytes``: the same in blocks, with rests that are not cut off.
    ``reserved_bytes``: in segments. ``storages``: how many, without empty ones.
    """

    storages: int
    storage_bytes: int
    block_bytes: int
    reserved_bytes: int

    @property
    def rounding_bytes(self) -> int:
        """What ``torch.cuda.memory_allocated`` shows beyond the storages."""
        return self.block_bytes - self.storage_bytes

    @property
    def segment_bytes(self) -> int:
        """What ``torch.cuda.memory_reserved`` shows beyond the storages, without fragmentation and cached blocks."""
        return self.reserved_bytes - self.storage_bytes


def rounding_of(sizes: Mapping[int, int]) -> Rounding:
    """Blocks and segments of live storages: size in bytes -> how many of it (``StorageMeter.sizes()`` at the peak)."""
    small = own_blocks = own_segments = storages = asked = 0
    large_sizes: list[int] = []
    for size, count in sorted(sizes.items(), reverse=True):
        if not size:
            continue
        storages += count
        asked += size * count
        block = block_bytes(size)
        if block <= SMALL_BYTES:
            small += block * count
        elif block < OWN_SEGMENT_BYTES:
            large_sizes += [block] * count
        else:
            segment = _up(block, SEGMENT_MULTIPLE_BYTES)
            own_segments += segment * count
            own_blocks += (segment if segment - block <= SMALL_BYTES else block) * count
    large, large_segments = _packed(large_sizes)
    reserved = own_segments + large_segments + _up(small, SMALL_SEGMENT_BYTES)
    return Rounding(storages, asked, own_blocks + large + small, reserved)


def block_bytes(size: int) -> int:
    """A size in whole blocks; nothing is 0."""
    return _up(size, BLOCK_BYTES)


def _packed(blocks: list[int]) -> tuple[int, int]:
    """Blocks of 1 to 10 MiB into segments of 20 MiB, each where least is left: bytes of blocks, of segments."""
    free: list[int] = []
    taken = segments = 0
    for block in blocks:
        rest = min((rest for rest in free if rest >= block), default=0)
        if rest:
            free.remove(rest)
        else:
            rest = LARGE_SEGMENT_BYTES
            segments += 1
        left = rest - block
        if left > SMALL_BYTES:
            free.append(left)
            taken += block
        else:
            taken += rest
    return taken, segments * LARGE_SEGMENT_BYTES


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
