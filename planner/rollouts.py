"""Recorded rollouts (JSONL) -> microbatches, and back.

One line is one completion: ``{"group": 3, "prompt_ids": [..], "completion_ids": [..], "reward": 1.0}``; lines of one
``group`` are completions of one prompt. ``advantage`` may stand for ``reward``, or beside it; ``old_logps`` and
``ref_logps``, one number per completion token, are optional. Order in the file is the order of training.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from hilore.planner.files import replace_file
from hilore.planner.microbatch import Microbatch, group_advantages, packed_microbatch
from hilore.planner.packing import pack
from hilore.planner.spec_types import ModelSpec
from hilore.runtime.errors import HiloreError

_Ids = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


class RolloutFileError(HiloreError):
    """A file of recorded rollouts cannot be used. Attributes: ``path``, ``line``."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion. ``advantage``: what ``reward`` became in its group; where a file has none, GRPO's is computed."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    group: int
    prompt_ids: _Ids
    completion_ids: _Ids
    reward: float | None = None
    advantage: float | None = None
    old_logps: tuple[float, ...] | None = None
    ref_logps: tuple[float, ...] | None = None


_ADAPTER = TypeAdapter(Rollout)
# Squares of rewards and of advantages fit float32's range with room for sums; no softmax gives less than this.
MOST_REWARD, MOST_NATS = 1e15, 1e4


@dataclass(frozen=True, slots=True)
class Recorded:
    """The rollouts of a file with their advantages; ``places[i]`` names the line of ``rollouts[i]`` in messages."""

    rollouts: tuple[Rollout, ...]
    places: tuple[str, ...]


def read_rollouts(path: str | Path) -> tuple[Rollout, ...]:
    """All rollouts of a file with their advantages. Raises RolloutFileError, ``file:line: message``."""
    return read_recorded(path).rollouts


def read_recorded(path: str | Path) -> Recorded:
    """The same with the line of each. Raises RolloutFileError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RolloutFileError(f"{path}: cannot be read: {error}", path=str(path), line=0) from error
    rollouts = {number: _read_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()}
    if not rollouts:
        raise RolloutFileError(f"{path}: holds no rollouts", path=str(path), line=0)
    places = tuple(f"{path}:{number}" for number in rollouts)
    return Recorded(with_advantages(tuple(rollouts.values()), places), places)


def write_rollouts(path: str | Path, rollouts: Iterable[Rollout]) -> None:
    """Write a file that ``read_rollouts`` reads; an earlier one is replaced whole or not at all.

    Raises OutputFileError where it cannot be written, ValueError for numbers that JSON does not have.
    """
    kept = ({key: value for key, value in asdict(rollout).items() if value is not None} for rollout in rollouts)
    replace_file(path, "".join(json.dumps(values, allow_nan=False) + "\n" for values in kept))


def with_advantages(rollouts: Sequence[Rollout], places: Sequence[str] = ()) -> tuple[Rollout, ...]:
    """The same rollouts, GRPO advantages filled in for groups that have none. Raises RolloutFileError.

    ``places``: what to call each rollout in messages (a file and line).
    """
    groups: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(index)
    result = list(rollouts)
    for group, members in groups.items():
        given = sum(rollouts[index].advantage is not None for index in members)
        if given == len(members):
            continue
        missing = next(index for index in members if rollouts[index].advantage is None)
        where = f"{places[missing]}: " if places else ""
        if given:
            raise RolloutFileError(
                f"{where}group {group}: advantage is given for {given} of {len(members)} rows; give it for all or for "
                "none",
                path="",
                line=0,
            )
        rewards = [rollouts[index].reward for index in members]
        if None in rewards:
            missing = members[rewards.index(None)]
            where = f"{places[missing]}: " if places else ""
            raise RolloutFileError(f"{where}neither reward nor advantage is given", path="", line=0)
        _check_prompts(rollouts, members, places)
        advantages = group_advantages([reward for reward in rewards if reward is not None])
        for index, advantage in zip(members, advantages, strict=True):
            result[index] = replace(rollouts[index], advantage=advantage)
    return tuple(result)


def _check_prompts(rollouts: Sequence[Rollout], members: Sequence[int], places: Sequence[str]) -> None:
    """Rewards are compared within a group, which makes sense for answers to one prompt alone."""
    first = rollouts[members[0]]
    other = next((index for index in members if rollouts[index].prompt_ids != first.prompt_ids), None)
    if other is not None:
        where, earlier = (f"{places[other]}: ", f"that of {places[members[0]]}") if places else ("", "the first row's")
        raise RolloutFileError(
            f"{where}group {first.group}: its prompt is not {earlier}; number the groups so that each is one prompt "
            "(files that were joined count from 0 twice), or give advantage in place of reward",
            path="",
            line=0,
        )


def from_rollouts(
    rollouts: Sequence[Rollout],
    spec: ModelSpec,
    *,
    pad_token: int = 0,
    device: str | torch.device = "cpu",
    vocabulary: int | None = None,
    places: Sequence[str] = (),
) -> tuple[Microbatch, ...]:
    """Microbatches of ``spec.batch.microbatch`` rows in the order given, each as wide as its longest rows.

    Layout packed: one row of up to so many sequences, as long as they fit the longest length bucket. A last, smaller
    microbatch is kept. ``vocabulary``: token ids must lie below it. ``places``: what to call each rollout in messages
    (by default its number). Raises RolloutFileError for a row longer than the batch section allows, a token id out of
    range, and a microbatch in which some rows have ``old_logps`` (``ref_logps``) and others none.
    """
    places = places or [f"rollout {number}" for number in range(1, len(rollouts) + 1)]
    rollouts = with_advantages(rollouts, places)
    for place, rollout in zip(places, rollouts, strict=True):
        _check_row(place, rollout, spec, vocabulary)
    if spec.batch.layout == "packed":
        chunks = _packed_chunks(rollouts, spec)
        return tuple(_pack(rollouts[start:end], places[start]).to(device) for start, end in chunks)
    size = spec.batch.microbatch
    return tuple(
        _collate(rollouts[start : start + size], pad_token, places[start]).to(device)
        for start in range(0, len(rollouts), size)
    )


def _packed_chunks(rollouts: Sequence[Rollout], spec: ModelSpec) -> list[tuple[int, int]]:
    """Beginnings and ends of microbatches that fit one row of the longest bucket."""
    chunks, start, tokens = [], 0, 0
    for place, rollout in enumerate(rollouts):
        length = len(rollout.prompt_ids) + len(rollout.completion_ids)
        full = place - start == spec.batch.microbatch or tokens + length > spec.batch.length_buckets[-1]
        if full and place > start:
            chunks.append((start, place))
            start, tokens = place, 0
        tokens += length
    return [*chunks, (start, len(rollouts))] if rollouts else []


def _pack(rows: Sequence[Rollout], place: str) -> Microbatch:
    row = pack([(one.prompt_ids, one.completion_ids) for one in rows])
    width = row.completion_mask.shape[1]
    return packed_microbatch(
        row,
        torch.tensor([one.advantage or 0.0 for one in rows], dtype=torch.float32),
        _logps([one.old_logps for one in rows], width, f"{place}: old_logps"),
        _logps([one.ref_logps for one in rows], width, f"{place}: ref_logps"),
    )


def _check_row(place: str, rollout: Rollout, spec: ModelSpec, vocabulary: int | None) -> None:
    limits = (("prompt_ids", spec.batch.prompt_tokens), ("completion_ids", spec.batch.response_tokens))
    for name, limit in limits:
        ids = getattr(rollout, name)
        if len(ids) > limit:
            key = "prompt_tokens" if name == "prompt_ids" else "response_tokens"
            raise RolloutFileError(
                f"{place}: {name} has {len(ids)} tokens, batch.{key} is {limit}; raise batch.{key} to {len(ids)} or "
                "record shorter rollouts",
                path="",
                line=0,
            )
        if vocabulary is not None and max(ids) >= vocabulary:
            raise RolloutFileError(
                f"{place}: {name} holds token {max(ids)}, the model's vocabulary has {vocabulary}; these rollouts "
                "were made with another tokenizer",
                path="",
                line=0,
            )


def _collate(rows: Sequence[Rollout], pad_token: int, place: str) -> Microbatch:
    prompt = max(len(row.prompt_ids) for row in rows)
    response = max(len(row.completion_ids) for row in rows)
    ids, mask = [], []
    for row in rows:
        left, right = prompt - len(row.prompt_ids), response - len(row.completion_ids)
        ids.append([pad_token] * left + [*row.prompt_ids, *row.completion_ids] + [pad_token] * right)
        mask.append([0] * left + [1] * (prompt + response - left - right) + [0] * right)
    attention = torch.tensor(mask, dtype=torch.int64)
    return Microbatch(
        input_ids=torch.tensor(ids, dtype=torch.int64),
        attention_mask=attention,
        completion_mask=attention[:, prompt:].clone(),
        advantages=torch.tensor([row.advantage or 0.0 for row in rows], dtype=torch.float32),
        old_logps=_logps([row.old_logps for row in rows], response, f"{place}: old_logps"),
        ref_logps=_logps([row.ref_logps for row in rows], response, f"{place}: ref_logps"),
        padded=any(0 in row for row in mask),
    )


def _logps(rows: Sequence[tuple[float, ...] | None], width: int, name: str) -> Tensor | None:
    given = [row for row in rows if row is not None]
    if not given:
        return None
    if len(given) < len(rows):
        raise RolloutFileError(
            f"{name} is given for {len(given)} of {len(rows)} rows of one microbatch; give it for all or for none",
            path="",
            line=0,
        )
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in given], dtype=torch.float32)


def _read_line(path: str | Path, number: int, line: str) -> Rollout:
    try:
        rollout = _ADAPTER.validate_json(line)
        names = [key for key, _ in json.loads(line, object_pairs_hook=list)]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        raise RolloutFileError(f"{path}:{number}: {where}: {first['msg']}", path=str(path), line=number) from None
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RolloutFileError(f"{path}:{number}: {twice} is given twice", path=str(path), line=number)
    if rollout.reward is None and rollout.advantage is None:
        text = "neither reward nor advantage is given"
        raise RolloutFileError(f"{path}:{number}: {text}", path=str(path), line=number)
    for name in ("reward", "advantage"):
        value = getattr(rollout, name)
        if value is not None and abs(value) > MOST_REWARD:
            raise RolloutFileError(
                f"{path}:{number}: {name} is {value:g}, more than {MOST_REWARD:g}", path=str(path), line=number
            )
    for name in ("old_logps", "ref_logps"):
        values = getattr(rollout, name)
        wrong = next((value for value in values or () if abs(value) > MOST_NATS), None)
        if wrong is not None:
            raise RolloutFileError(
                f"{path}:{number}: {name} holds {wrong:g}, which is no log-prob (more than {MOST_NATS:g} nats from 0)",
                path=str(path),
                line=number,
            )
        if values is not None and len(values) != len(rollout.completion_ids):
            tokens = len(rollout.completion_ids)
            raise RolloutFileError(
                f"{path}:{number}: {name} has {len(values)} numbers for {tokens} completion tokens",
                path=str(path),
                line=number,
            )
    return rollout
