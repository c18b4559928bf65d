"""Tasks of the package reasoning-gym as training prompts, with their rewards: knights_knaves and chain_sum."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

from hilore.runtime.errors import HiloreError

TASKS = ("knights_knaves", "chain_sum")
_SIZES: dict[str, dict[str, int]] = {
    "knights_knaves": {"n_people": 2, "depth_constraint": 2, "width_constraint": 2},
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
}
_INSTRUCTION = "Give the final answer between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class TaskError(HiloreError):
    """The tasks cannot be made here; the message holds the command to type."""


@dataclass(frozen=True, slots=True)
class Entry:
    """``prompt``: chat-formatted text; ``record``: what reasoning-gym's own scorer needs (question, answer, ...)."""

    task: str
    prompt: str
    record: dict[str, Any]


def build_dataset(n: int, seed: int, tokenizer: Any | None = None, tasks: tuple[str, ...] = TASKS) -> list[Entry]:
    """``n`` entries, the tasks taking turns; the same ``n``, ``seed`` and ``tasks`` give the same entries.

    With a tokenizer that has a chat template the prompt is its chat format with the generation prompt; otherwise the
    question itself. Raises TaskError where reasoning-gym is not installed.
    """
    gym = _gym()
    size = -(-n // len(tasks))
    sources = [gym.create_dataset(task, size=size, seed=seed, **_SIZES.get(task, {})) for task in tasks] if n else []
    return [
        Entry(tasks[index % len(tasks)], prompt_text(record["question"], tokenizer), record)
        for index in range(n)
        for record in (sources[index % len(tasks)][index // len(tasks)],)
    ]


def prompt_text(question: str, tokenizer: Any | None) -> str:
    """The question with the instruction on how to answer, in the tokenizer's chat format where it has one."""
    content = f"{question}\n{_INSTRUCTION}"
    if getattr(tokenizer, "chat_template", None) is None:
        return content + "\n"
    messages = [{"role": "user", "content": content}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)  # type: ignore[union-attr]
    return text


def answer_of(completion: str) -> str:
    """What stands between the last pair of answer tags; without tags, the last line that is not empty."""
    tagged = _ANSWER.findall(completion)
    if tagged:
        return str(tagged[-1]).strip()
    lines = [line.strip() for line in completion.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def score(completion: str, entry: Entry) -> float:
    """reasoning-gym's reward of the answer in a completion, in [0, 1]."""
    scorer = _gym().get_score_answer_fn(entry.task)
    return float(scorer(answer_of(completion), entry.record))


def _gym() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise TaskError(
            f"the tasks {', '.join(TASKS)} need reasoning-gym ({error}); type: pip install reasoning-gym"
        ) from error
