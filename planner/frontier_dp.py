"""A Rockmate-like policy: dynamic programming over the chain of layers, each with its exact options.

After Rockmate (arXiv 2307.01236): per block a set of options (time, saved bytes, peak), then a program over the chain
with memory in slots. Options here are the exact configurations that the trace offers, without split replays; bytes of
a layer are rounded up to slots, so that what the program allows fits, and some of what fits is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hilore.planner.pareto import needed_backward_bytes
from hilore.planner.problem import Problem, RegionProblem

MIB = 2**20
SLOTS = (1 * MIB, 4 * MIB)
ALLOWANCES = (1.0, 0.95, 0.9)
# A slot is no finer than this part of the room.
MOST_SLOTS = 4096
NEVER = np.iinfo(np.int64).max // 4

Integers = NDArray[np.int64]


def chain_choices(problem: Problem) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The choice of every grid point (slot size, part of the room that is used) that has one, with its name."""
    room = problem.budget_bytes - problem.base_bytes
    for slot in SLOTS:
        size = max(slot, -(-room // MOST_SLOTS))
        for allowance in ALLOWANCES:
            found = _chain(problem, int(allowance * room), size)
            if found is not None:
                yield f"slots of {size / MIB:,.3g} MiB, {allowance:.0%} of the room", found


def _chain(problem: Problem, room: int, slot: int) -> tuple[int, ...] | None:
    """Least time for each number of slots that the layers so far retain, layer by layer; None where nothing fits."""
    casts = sum(max(c.cast_bytes for c in region.configurations) for region in problem.regions)
    last = (room - max(problem.head_bytes, problem.head_forward_bytes + casts)) // slot
    later_gradients = sum(region.gradient_bytes for region in problem.regions)
    if last < 0 or room < later_gradients + max(problem.tail_bytes, problem.optimizer_bytes):
        return None
    best: Integers = np.full(last + 1, NEVER, dtype=np.int64)
    best[0] = 0
    picks: list[NDArray[np.int32]] = []
    for region in problem.regions:
        later_gradients -= region.gradient_bytes
        backward_room = room - problem.head_left_bytes - later_gradients
        best, pick = _step(best, region, slot, room - casts, backward_room)
        picks.append(pick)
    if int(best.min()) >= NEVER:
        return None
    return _trace_back(problem, picks, int(best.argmin()), slot)


def _step(
    before: Integers, region: RegionProblem, slot: int, forward_room: int, backward_room: int
) -> tuple[Integers, NDArray[np.int32]]:
    """``before[s]``: least time with s slots retained; the same after the region, and the option taken for each."""
    after = np.full_like(before, NEVER)
    pick = np.full(len(before), -1, dtype=np.int32)
    for index in _options(region):
        option = region.configurations[index]
        slots = -(-max(option.retained_bytes, 0) // slot)
        fits = min(
            (forward_room - option.forward_bytes) // slot,
            (backward_room - option.retained_bytes - needed_backward_bytes(option)) // slot,
            len(before) - 1 - slots,
        )
        if fits < 0:
            continue
        moved = before[: fits + 1] + option.extra_ns
        target = after[slots : slots + fits + 1]
        better = moved < target
        target[better] = moved[better]
        pick[slots : slots + fits + 1][better] = index
    return np.minimum(after, NEVER), pick


def _options(region: RegionProblem) -> list[int]:
    """Exact options without a split replay; all-R first."""
    return [
        index for index, option in enumerate(region.configurations) if not option.split_at and not option.lossy_units
    ]


def _trace_back(problem: Problem, picks: list[NDArray[np.int32]], at: int, slot: int) -> tuple[int, ...]:
    choice = []
    for region, pick in zip(reversed(problem.regions), reversed(picks), strict=True):
        index = int(pick[at])
        choice.append(index)
        at -= -(-max(region.configurations[index].retained_bytes, 0) // slot)
    return tuple(reversed(choice))
