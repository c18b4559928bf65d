"""One microbatch of rollouts: what one forward and backward of the actor gets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hilore.planner.packing import PackedRow, pack, packed_lengths
from hilore.planner.spec_types import Batch, ModelSpec

GROUP_SIZE = 8  # completions of one prompt: the group that rewards are normalised over
FIRST_TOKEN = 3  # ids below are pad, begin and end of sequence in most vocabularies
DEFAULT_VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class Microbatch:
    """``input_ids``, ``attention_mask`` int64 [B, T]; ``completion_mask`` int64 [B, Tr], the last Tr columns.

    ``advantages`` float32 [B]; ``old_logps``, ``ref_logps`` float32 [B, Tr], or None: the ratio is 1, no reference.
    ``padded`` False says that the attention mask is all ones without having to read it (fake tensors cannot).
    Layout packed: ``input_ids``, ``attention_mask`` and ``position_ids`` int64 [1, T] hold all sequences in one row,
    ``places`` int64 [B, Tr] says where each completion token is predicted (planner/packing.py).
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    advantages: Tensor
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    padded: bool = True
    position_ids: Tensor | None = None
    places: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.position_ids is not None

    @property
    def rows(self) -> int:
        """Rows of ``input_ids``: one where sequences are packed."""
        return self.input_ids.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens per row, padding included."""
        return self.input_ids.shape[1]

    @property
    def prompt_mask(self) -> Tensor | None:
        """int64 [B, T - Tr], 0 at padding; None where sequences are packed."""
        return None if self.packed else self.attention_mask[:, : self.tokens - self.completion_mask.shape[1]]

    def to(self, device: str | torch.device) -> Microbatch:
        """The same microbatch with every tensor on ``device``."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            completion_mask=self.completion_mask.to(device),
            advantages=self.advantages.to(device),
            old_logps=None if self.old_logps is None else self.old_logps.to(device),
            ref_logps=None if self.ref_logps is None else self.ref_logps.to(device),
            position_ids=None if self.position_ids is None else self.position_ids.to(device),
            places=None if self.places is None else self.places.to(device),
        )


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO's advantages of one group: (r - mean) / (std + 1e-4), std with n - 1, 0 for a flat or single group."""
    count = len(rewards)
    # The mean of equal rewards may be off by its rounding, and a flat group would have an exposure.
    if count < 2 or max(rewards) == min(rewards):
        return [0.0] * count
    mean = sum(rewards) / count
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / (count - 1)) ** 0.5
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


def split_tokens(batch: Batch, tokens: int) -> tuple[int, int]:
    """Prompt and response columns of a row of ``tokens``: as long a response as the batch section allows.

    A length bucket holds every microbatch of up to so many columns. The head's memory grows with the response, so the
    bucket's peak is that of a short prompt with a long response.
    """
    response = min(batch.response_tokens, tokens - 1)
    return tokens - response, response


def synthetic_microbatch(
    spec: ModelSpec,
    tokens: int,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    vocabulary: int | None = None,
    pad_token: int = 0,
) -> Microbatch:
    """Random rollouts of the shape that ``spec.batch`` gives for a length bucket: [microbatch, tokens].

    With several rows: prompts of half to the whole of their columns, padded on the left, and completions of a quarter
    to the whole, padded on the right, the longest of each filling its columns as a collator leaves it. One row has no
    padding. Rewards are 0 or 1 in groups of ``GROUP_SIZE`` of which 1 to ``GROUP_SIZE - 1`` are right: the advantages
    of a group have a root mean square of 0.935. ``old_logps`` and ``ref_logps`` are None.
    Token ids lie below ``vocabulary`` (by default that of ``model.config``, else ``DEFAULT_VOCABULARY``).
    Layout packed: sequences of planner/packing.py's lengths, no padding.
    Uses no global random state; may be called under FakeTensorMode.
    """
    if spec.batch.layout == "packed":
        return _synthetic_packed(spec, tokens, random.Random(seed), device, vocabulary)
    rows = spec.batch.microbatch
    draw = random.Random(seed)
    prompt, response = split_tokens(spec.batch, tokens)
    limit = vocabulary or int(spec.model.config.get("vocab_size", DEFAULT_VOCABULARY))
    prompts = _lengths(draw, rows, (prompt + 1) // 2, prompt)
    responses = _lengths(draw, rows, (response + 3) // 4, response)
    mask = [
        [0] * (prompt - before) + [1] * (before + after) + [0] * (response - after)
        for before, after in zip(prompts, responses, strict=True)
    ]
    ids = [[draw.randrange(min(FIRST_TOKEN, limit - 1), limit) if real else pad_token for real in row] for row in mask]
    attention = torch.tensor(mask, dtype=torch.int64, device=device)
    return Microbatch(
        input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
        attention_mask=attention,
        completion_mask=attention[:, prompt:].clone(),
        advantages=torch.tensor(_advantages(draw, rows), dtype=torch.float32, device=device),
        padded=rows > 1,
    )


def _synthetic_packed(
    spec: ModelSpec, tokens: int, draw: random.Random, device: str | torch.device, vocabulary: int | None
) -> Microbatch:
    limit = vocabulary or int(spec.model.config.get("vocab_size", DEFAULT_VOCABULARY))
    first = min(FIRST_TOKEN, limit - 1)
    rows = [
        [[draw.randrange(first, limit) for _ in range(length)] for length in lengths]
        for lengths in packed_lengths(spec.batch, tokens)
    ]
    row = pack([(prompt, completion) for prompt, completion in rows], device)
    advantages = torch.tensor(_advantages(draw, len(rows)), dtype=torch.float32, device=device)
    return packed_microbatch(row, advantages)


def packed_microbatch(
    row: PackedRow, advantages: Tensor, old_logps: Tensor | None = None, ref_logps: Tensor | None = None
) -> Microbatch:
    """A microbatch of one packed row; ``advantages`` [B], log-probabilities [B, Tr]."""
    return Microbatch(
        input_ids=row.input_ids,
        attention_mask=torch.ones_like(row.input_ids),
        completion_mask=row.completion_mask,
        advantages=advantages,
        old_logps=old_logps,
        ref_logps=ref_logps,
        padded=False,
        position_ids=row.position_ids,
        places=row.places,
    )


def _lengths(draw: random.Random, rows: int, shortest: int, longest: int) -> list[int]:
    if rows == 1:
        return [longest]
    lengths = [draw.randint(shortest, longest) for _ in range(rows)]
    lengths[draw.randrange(rows)] = longest
    return lengths


def _advantages(draw: random.Random, rows: int) -> list[float]:
    advantages: list[float] = []
    while len(advantages) < rows:
        right = draw.randint(1, GROUP_SIZE - 1)
        group = group_advantages([1.0] * right + [0.0] * (GROUP_SIZE - right))
        draw.shuffle(group)
        advantages += group
    return advantages[:rows]
