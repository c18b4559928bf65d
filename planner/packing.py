"""Layout packed: the sequences of a microbatch one after another in a single row, as trainers without padding do.

Positions start again at 0 with each sequence; transformers tells sequences apart by that and lets none attend to
another. The loss sees the completions in rows as always: their log-probabilities are picked out of the packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hilore.planner.microbatch import Microbatch
    from hilore.planner.spec_types import Batch

# A sequence is a prompt and a completion of at least one token each.
SHORTEST = 2


@dataclass(frozen=True, slots=True)
class PackedRow:
    """``input_ids``, ``position_ids`` int64 [1, T]; ``completion_mask`` int64 [B, Tr].

    ``places`` int64 [B, Tr]: where in the row each completion token is predicted (the token before it), else 0.
    """

    input_ids: Tensor
    position_ids: Tensor
    completion_mask: Tensor
    places: Tensor


def pack(rows: Sequence[tuple[Sequence[int], Sequence[int]]], device: str | torch.device = "cpu") -> PackedRow:
    """Prompts and completions (token ids, at least one each) of one microbatch in one row, in the order given."""
    widest = max(len(completion) for _, completion in rows)
    ids: list[int] = []
    positions: list[int] = []
    mask, places = [], []
    for prompt, completion in rows:
        first = len(ids) + len(prompt) - 1
        missing = [0] * (widest - len(completion))
        places.append([*range(first, first + len(completion)), *missing])
        mask.append([1] * len(completion) + missing)
        ids += [*prompt, *completion]
        positions += range(len(prompt) + len(completion))

    def tensor(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return PackedRow(tensor([ids]), tensor([positions]), tensor(mask), tensor(places))


def packed_lengths(batch: Batch, tokens: int) -> list[tuple[int, int]]:
    """Prompt and completion tokens of ``batch.microbatch`` sequences that fill a row of ``tokens``.

    The first has the longest completion that fits, so that no microbatch of the bucket has more loss columns; the
    others share what is left evenly, each in the proportion of the batch section.
    """
    others = batch.microbatch - 1
    longest = batch.prompt_tokens + batch.response_tokens
    completion = min(batch.response_tokens, tokens - SHORTEST * others - 1)
    left = tokens - completion - 1
    lengths = [left // others + (place < left % others) for place in range(others)] if others else []
    lengths = [min(length, longest) for length in lengths]
    prompt = tokens - completion - sum(lengths)
    return [(prompt, completion), *(_split(batch, length) for length in lengths)]


def picked(packed: Tensor, places: Tensor) -> Tensor:
    """Values of the packed row [1, T] in rows of completions [B, Tr]."""
    return packed[0].index_select(0, places.flatten()).view(places.shape)


def reversed_sequences(microbatch: Microbatch) -> Microbatch:
    """The same sequences packed in the opposite order (its rows of completions stay the same)."""
    assert microbatch.position_ids is not None
    assert microbatch.places is not None
    starts = (microbatch.position_ids[0] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], microbatch.tokens]
    order = list(reversed(list(zip(starts, ends, strict=True))))
    index = torch.tensor([at for start, end in order for at in range(start, end)], device=microbatch.input_ids.device)
    new_place = torch.empty_like(index)
    new_place[index] = torch.arange(len(index), device=index.device)
    return replace(
        microbatch,
        input_ids=microbatch.input_ids[:, index],
        position_ids=microbatch.position_ids[:, index],
        places=new_place[microbatch.places],
    )


def _split(batch: Batch, length: int) -> tuple[int, int]:
    prompt = round(length * batch.prompt_tokens / (batch.prompt_tokens + batch.response_tokens))
    prompt = min(max(prompt, 1, length - batch.response_tokens), length - 1, batch.prompt_tokens)
    return prompt, length - prompt
