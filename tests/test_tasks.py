"""reasoning-gym tasks: same seed same prompts, right answers score 1, wrong ones less."""

from __future__ import annotations

import sys

import pytest

from hilore.planner.tasks import TASKS, TaskError, answer_of, build_dataset, score


def test_entries_take_turns_and_are_reproducible() -> None:
    entries = build_dataset(5, seed=3)
    assert [entry.task for entry in entries] == ["knights_knaves", "chain_sum"] * 2 + ["knights_knaves"]
    assert [entry.prompt for entry in build_dataset(5, seed=3)] == [entry.prompt for entry in entries]
    assert [entry.prompt for entry in build_dataset(5, seed=4)] != [entry.prompt for entry in entries]
    assert len({entry.prompt for entry in entries}) == 5
    assert build_dataset(0, seed=3) == []


@pytest.mark.parametrize("task", TASKS)
def test_the_right_answer_scores_one_and_nonsense_nothing(task: str) -> None:
    for entry in build_dataset(3, seed=1, tasks=(task,)):
        right = entry.record["answer"]
        assert score(f"Let me think.\n<answer> {right} </answer>", entry) == 1.0
        assert score(f"I am sure.\n{right}", entry) == 1.0
        assert score("", entry) == 0.0
        assert score("<answer>perhaps</answer>", entry) == 0.0
        assert entry.record["question"] in entry.prompt


def test_last_tags_win() -> None:
    assert answer_of("<answer>1</answer> no, <answer>\n2 </answer> done") == "2"
    assert answer_of("first\nlast \n\n") == "last"


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match="pip install reasoning-gym"):
        build_dataset(1, seed=0)


class ChatTokenizer:
    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return f"<user>{messages[0]['content']}<assistant>"


def test_a_chat_template_is_used_where_there_is_one() -> None:
    (entry,) = build_dataset(1, seed=0, tokenizer=ChatTokenizer())
    assert entry.prompt.startswith("<user>")
    assert entry.prompt.endswith("</answer>.<assistant>")
