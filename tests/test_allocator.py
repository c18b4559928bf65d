"""Blocks and segments of CUDA's caching allocator against sums done by hand."""

from __future__ import annotations

import pytest

from hilore.planner.allocator import MIB, Rounding, block_bytes, rounding_of

KIB = 1024


@pytest.mark.parametrize(
    ("size", "blocks"), [(0, 0), (1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_sizes_come_in_blocks_of_512_bytes(size: int, blocks: int) -> None:
    assert block_bytes(size) == blocks


def test_small_storages_share_segments_of_2_mib() -> None:
    """4,096 scalars fill one segment; the next one needs another. 1 MiB is still small."""
    assert rounding_of({4: 4096}) == Rounding(4096, 4 * 4096, 2 * MIB, 2 * MIB)
    assert rounding_of({4: 4097}) == Rounding(4097, 4 * 4097, 2 * MIB + 512, 4 * MIB)
    assert rounding_of({MIB: 2}) == Rounding(2, 2 * MIB, 2 * MIB, 2 * MIB)


def test_up_to_10_mib_they_share_segments_of_20() -> None:
    """Two of 9 MiB leave 2 MiB, which takes one of 1.5; the rest of 0.5 MiB stays with it."""
    assert rounding_of({9 * MIB: 2}) == Rounding(2, 18 * MIB, 18 * MIB, 20 * MIB)
    assert rounding_of({9 * MIB: 2, 3 * MIB // 2: 1}) == Rounding(3, 39 * MIB // 2, 20 * MIB, 20 * MIB)
    assert rounding_of({9 * MIB: 2, 3 * MIB: 1}) == Rounding(3, 21 * MIB, 21 * MIB, 40 * MIB)


def test_from_10_mib_on_each_has_a_segment_of_its_own() -> None:
    """A rest of 1 MiB or less is not cut off, and counts as allocated."""
    assert rounding_of({10 * MIB: 3}) == Rounding(3, 30 * MIB, 30 * MIB, 30 * MIB)
    assert rounding_of({11 * MIB: 1}) == Rounding(1, 11 * MIB, 12 * MIB, 12 * MIB)
    assert rounding_of({11 * MIB - 512: 1}) == Rounding(1, 11 * MIB - 512, 11 * MIB - 512, 12 * MIB)


def test_rounding_is_apart_and_empty_storages_are_none() -> None:
    found = rounding_of({0: 5, 100: 3, 11 * MIB: 2})
    assert (found.storages, found.storage_bytes) == (5, 300 + 22 * MIB)
    assert found.rounding_bytes == 3 * 412 + 2 * MIB


@pytest.mark.parametrize(
    "sizes", [{4: 1000, 700: 3}, {3 * MIB: 7, 5 * MIB + 3: 2}, {11 * MIB: 4, 890 * MIB + KIB: 1, 8: 9}]
)
def test_blocks_hold_the_storages_and_segments_the_blocks(sizes: dict[int, int]) -> None:
    found = rounding_of(sizes)
    assert found.storage_bytes <= found.block_bytes <= found.reserved_bytes
