"""Synthetic microbatches and recorded rollouts: shapes, padding, advantages, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hilore.planner.microbatch import Microbatch, group_advantages, split_tokens, synthetic_microbatch
from hilore.planner.rollouts import (
    Rollout,
    RolloutFileError,
    from_rollouts,
    read_recorded,
    read_rollouts,
    write_rollouts,
)
from tests.specs import spec_of

WIDE = "{microbatch: 6, prompt_tokens: 10, response_tokens: 30, length_buckets: [20, 40]}"


def padding_is_outside(microbatch: Microbatch) -> bool:
    """Each row of the mask is zeros, ones, zeros; ids are 0 exactly where the mask is."""
    for row in microbatch.attention_mask.tolist():
        text = "".join(str(value) for value in row)
        if "1" not in text or "0" in text.strip("0"):
            return False
    return torch.equal(microbatch.attention_mask == 0, microbatch.input_ids == 0)


@pytest.mark.parametrize(("tokens", "response"), [(40, 30), (35, 30), (20, 19), (2, 1)])
def test_a_bucket_holds_the_longest_response_that_fits_it(tokens: int, response: int) -> None:
    microbatch = synthetic_microbatch(spec_of(batch=WIDE), tokens)
    assert microbatch.input_ids.shape == microbatch.attention_mask.shape == (6, tokens)
    assert microbatch.completion_mask.shape == (6, response)
    assert torch.equal(microbatch.completion_mask, microbatch.attention_mask[:, -response:])
    assert microbatch.advantages.shape == (6,)
    assert microbatch.advantages.dtype == torch.float32
    assert microbatch.old_logps is None
    assert microbatch.ref_logps is None
    assert (microbatch.rows, microbatch.tokens) == (6, tokens)
    assert split_tokens(spec_of(batch=WIDE).batch, tokens) == (tokens - response, response)


def test_rows_vary_and_the_longest_fill_their_columns() -> None:
    for seed in range(20):
        microbatch = synthetic_microbatch(spec_of(batch=WIDE), 40, seed=seed)
        assert padding_is_outside(microbatch)
        assert microbatch.padded
        prompts = microbatch.attention_mask[:, :10].sum(1)
        responses = microbatch.completion_mask.sum(1)
        assert prompts.max() == 10
        assert responses.max() == 30
        assert prompts.min() >= 5
        assert responses.min() >= 8
        assert len(set(responses.tolist())) > 1


def test_one_row_has_no_padding() -> None:
    spec = spec_of(batch="{microbatch: 1, prompt_tokens: 10, response_tokens: 30}")
    microbatch = synthetic_microbatch(spec, 40)
    assert microbatch.attention_mask.min() == 1
    assert not microbatch.padded


def test_seeds_decide_everything_and_the_global_state_nothing() -> None:
    spec = spec_of(batch=WIDE)
    before = torch.get_rng_state()
    first, same, other = (synthetic_microbatch(spec, 40, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.input_ids, same.input_ids)
    assert torch.equal(first.advantages, same.advantages)
    assert not torch.equal(first.input_ids, other.input_ids)


def test_ids_lie_in_the_vocabulary() -> None:
    for vocabulary in (4, 50):
        ids = synthetic_microbatch(spec_of(batch=WIDE), 40, vocabulary=vocabulary).input_ids
        assert ids.max() == vocabulary - 1
    assert 100 < synthetic_microbatch(spec_of(batch=WIDE), 40).input_ids.max() < 128


def test_advantages_of_whole_groups_have_mean_zero_and_the_stated_mean_square() -> None:
    spec = spec_of(batch="{microbatch: 64, prompt_tokens: 4, response_tokens: 4}")
    advantages = synthetic_microbatch(spec, 8).advantages.view(8, 8)
    assert torch.allclose(advantages.mean(1), torch.zeros(8), atol=1e-6)
    assert torch.allclose(advantages.square().mean(1).sqrt(), torch.full((8,), 0.9354), atol=1e-3)


def test_single_rows_see_different_advantages() -> None:
    spec = spec_of(batch="{microbatch: 1, prompt_tokens: 4, response_tokens: 4}")
    values = {round(abs(synthetic_microbatch(spec, 8, seed=seed).advantages.item()), 3) for seed in range(40)}
    assert len(values) > 4
    assert min(values) > 0.3


@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0] * 3, [0.7], [0.1] * 8, [0.7] * 8])
def test_a_flat_group_has_advantage_zero(rewards: list[float]) -> None:
    assert group_advantages(rewards) == [0.0] * len(rewards)


def test_group_advantages_are_those_of_trl() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.3, 1.0])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert torch.allclose(torch.tensor(group_advantages(rewards.tolist())), expected)


def test_synthetic_works_under_fake_tensors() -> None:
    with FakeTensorMode():
        microbatch = synthetic_microbatch(spec_of(batch=WIDE), 40)
    assert microbatch.completion_mask.shape == (6, 30)


ROLLOUTS = (
    Rollout(group=0, prompt_ids=(5, 6), completion_ids=(7, 8, 9), reward=1.0, old_logps=(-1.0, -2.0, -3.0)),
    Rollout(group=0, prompt_ids=(5, 6), completion_ids=(7,), reward=0.0, old_logps=(-1.5,)),
    Rollout(group=1, prompt_ids=(4, 5, 6), completion_ids=(8, 9), reward=1.0),
    Rollout(group=1, prompt_ids=(4, 5, 6), completion_ids=(8,), reward=1.0),
    Rollout(group=2, prompt_ids=(4,), completion_ids=(8,), reward=1.0, advantage=0.25),
)


def test_rollouts_survive_the_file_and_collate_to_their_longest_rows(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, ROLLOUTS)
    first, second, last = from_rollouts(read_rollouts(path), spec_of())
    assert first.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]
    assert first.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert first.completion_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert first.old_logps is not None
    assert first.old_logps.tolist() == [[-1, -2, -3], [-1.5, 0, 0]]
    assert first.advantages.tolist() == pytest.approx([0.70701, -0.70701], abs=1e-4)
    assert second.input_ids.tolist() == [[4, 5, 6, 8, 9], [4, 5, 6, 8, 0]]
    assert second.advantages.tolist() == [0, 0]
    assert second.old_logps is None
    assert second.padded
    assert last.rows == 1
    assert not last.padded
    assert last.advantages.tolist() == [0.25]


def test_prompts_are_padded_on_the_left() -> None:
    rows = [Rollout(0, (5,), (6,), 1.0), Rollout(1, (7, 8, 9), (4,), 0.0)]
    (microbatch,) = from_rollouts(rows, spec_of(), pad_token=2)
    assert microbatch.input_ids.tolist() == [[2, 2, 5, 6], [7, 8, 9, 4]]
    assert microbatch.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"group": 0, "prompt_ids": [1], "reward": 1.0}', "completion_ids: Field required"),
        ('{"group": 0, "prompt_ids": [1], "completion_ids": [2], "reward": NaN}', "reward: Input should be a finite"),
        ('{"group": 0, "prompt_ids": [], "completion_ids": [2], "reward": 1.0}', "prompt_ids: Tuple should have at"),
        ('{"group": 0, "prompt_ids": [1], "completion_ids": [2], "reward": 1.0, "rewad": 2}', "rewad: Unexpected"),
        (
            '{"group": 0, "prompt_ids": [1], "completion_ids": [2], "reward": 1.0, "old_logps": [1.0, 2.0]}',
            "old_logps has 2 numbers for 1 completion tokens",
        ),
        ('{"group": 0, "prompt_ids": [1], "completion_ids": [2]}', "neither reward nor advantage is given"),
        ('{"group": 0, "prompt_ids": [1], "completion_ids": [2], "reward": 1, "reward": 0}', "reward is given twice"),
        ("not json", "the line: Invalid JSON"),
        (
            '{"group": 0, "prompt_ids": [1], "completion_ids": [2], "reward": 1e200}',
            "reward is 1e+200, more than 1e+15",
        ),
        (
            '{"group": 0, "prompt_ids": [1], "completion_ids": [2], "reward": 1, "old_logps": [-1e30]}',
            "old_logps holds -1e+30, which is no log-prob",
        ),
        (
            '{"group": 0, "prompt_ids": [3], "completion_ids": [2], "reward": 1}',
            "group 0: its prompt is not that of ",
        ),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps({"group": 0, "prompt_ids": [1], "completion_ids": [2], "reward": 1.0}) + f"\n{line}\n")
    with pytest.raises(RolloutFileError) as caught:
        read_rollouts(path)
    assert str(caught.value).startswith(f"{path}:2: {message}")
    assert caught.value.exit_code == 2


def test_advantages_may_stand_for_rewards(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text('\n{"group": 0, "prompt_ids": [1], "completion_ids": [2], "advantage": -0.5}\n')
    found = read_recorded(path)
    assert found.places == (f"{path}:2",)
    assert [(row.reward, row.advantage) for row in found.rollouts] == [(None, -0.5)]


def test_a_row_that_does_not_fit_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [Rollout(0, (1,), (2,), 1.0), Rollout(1, (1, 500), (2,), 1.0)])
    found = read_recorded(path)
    message = rf"^{path}:2: prompt_ids holds token 500, the model's vocabulary has 128"
    with pytest.raises(RolloutFileError, match=message):
        from_rollouts(found.rollouts, spec_of(), places=found.places, vocabulary=128)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(RolloutFileError, match="cannot be read"):
        read_rollouts(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RolloutFileError, match="holds no rollouts"):
        read_rollouts(tmp_path / "empty.jsonl")


def test_rows_that_do_not_fit_are_refused_and_not_cut() -> None:
    with pytest.raises(RolloutFileError, match=r"^rollout 1: completion_ids has 9 tokens, batch\.response_tokens is 8"):
        from_rollouts([Rollout(0, (1,), tuple(range(9)), 1.0)], spec_of())
    mixed = [ROLLOUTS[0], ROLLOUTS[2]]
    with pytest.raises(RolloutFileError, match=r"^rollout 1: old_logps is given for 1 of 2 rows"):
        from_rollouts(mixed, spec_of())
    half = [Rollout(0, (1,), (2,), 1.0, advantage=1.0), Rollout(0, (1,), (2,), 1.0)]
    with pytest.raises(RolloutFileError, match=r"^rollout 2: group 0: advantage is given for 1 of 2 rows"):
        from_rollouts(half, spec_of())


def test_a_failed_write_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, ROLLOUTS)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_rollouts(path, [Rollout(0, (1,), (2,), float("nan"))])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["rollouts.jsonl"]
