"""GRPO with LoRA on SmolLM2-135M-Instruct under plans, on puzzles of reasoning-gym, with TRL's trainer.

    hilore-plan trace examples/smollm2.yaml
    hilore-plan solve --budget N --delta 1.0
    python examples/grpo_smollm2.py --steps 20

or everything at once, with a comparison at the end: ``python examples/grpo_smollm2.py --demo``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights come out of an installed package
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")

from datasets import Dataset
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from hilore.planner.actor import Actor, build_actor
from hilore.planner.spec import load_spec
from hilore.planner.spec_types import ModelSpec
from hilore.planner.tasks import TASKS, Entry, build_dataset, score
from hilore.runtime import PlanSet, load_plans
from hilore.runtime.errors import HiloreError
from hilore.runtime.integrations.trl import attach_trainer

SPEC = Path(__file__).parent / "smollm2.yaml"
STEPS, DEMO_STEPS = 20, 2
GENERATIONS = 4  # completions of one prompt: the group that advantages are relative to
Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        if given.demo:
            from demo import run_demo

            return run_demo(given.steps or DEMO_STEPS, given.seed)
        plans = load_plans(given.plans)
        spec = load_spec(SPEC)
        tasks = (given.task,) if given.task else TASKS
        console = Console(highlight=False, soft_wrap=True)
        trainer = make_trainer(build_actor(spec), tasks, given.steps or STEPS, given.seed, spec.batch.response_tokens)
        train(trainer, plans, console.print)
    except HiloreError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--plans", default="plans/smollm2.*.json", help="plan files (default %(default)s)")
    result.add_argument("--steps", type=int, help=f"updates (default {STEPS}; {DEMO_STEPS} in the demo)")
    result.add_argument("--task", choices=TASKS, help="default: both, in turns")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--demo", action="store_true", help="trace, solve, train and compare; takes some minutes")
    return result


def train(trainer: GRPOTrainer, plans: PlanSet, say: Say) -> None:
    """The lines that a trainer needs, and what really ran."""
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Report(say))

    runtime = attach_trainer(trainer, plans)
    trainer.train()

    steps = runtime.stats.steps
    replayed, held = sum(step.regions_replayed for step in steps), sum(step.regions_held for step in steps)
    say(f"{len(steps)} microbatches, {replayed} regions replayed and {held} held, {runtime.stats.demotions} demotions")
    runtime.detach()


def make_trainer(actor: Actor, tasks: Sequence[str], steps: int, seed: int, completion_tokens: int) -> GRPOTrainer:
    """TRL's own trainer on the actor, with the batch section of the spec: what the plans were made for."""
    spec: ModelSpec = actor.spec
    batch = spec.batch
    prompts = steps * batch.microbatch * batch.accumulation // GENERATIONS
    entries = fitting(build_dataset(2 * prompts, seed, actor.tokenizer, tuple(tasks)), actor)[:prompts]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="grpo-smollm2-"),
        per_device_train_batch_size=batch.microbatch,
        gradient_accumulation_steps=batch.accumulation,
        num_generations=GENERATIONS,
        max_completion_length=completion_tokens,
        max_steps=steps,
        loss_type=spec.loss.kind,
        epsilon=spec.loss.clip_low,
        epsilon_high=spec.loss.clip_high,
        beta=spec.loss.beta,
        reward_weights=[1.0, 0.5, 0.2],
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        bf16=False,  # the weights are bfloat16 already, and the plans are for a model without autocast
        use_cpu=True,
        gradient_checkpointing=True,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return GRPOTrainer(
            model=actor.model,
            reward_funcs=[correct(entries), tagged, brief],
            args=config,
            train_dataset=Dataset.from_list([{"prompt": e.prompt, "entry": i} for i, e in enumerate(entries)]),
            processing_class=actor.tokenizer,
        )


def fitting(entries: list[Entry], actor: Actor) -> list[Entry]:
    """The entries whose prompts the plans have room for."""
    limit = actor.spec.batch.prompt_tokens
    return [entry for entry in entries if len(actor.tokenizer(entry.prompt).input_ids) <= limit]


def correct(entries: Sequence[Entry]) -> Callable[..., list[float]]:
    """reasoning-gym's score of the answer."""

    def correctness(completions: list[str], entry: list[int], **_: Any) -> list[float]:
        return [score(text, entries[index]) for text, index in zip(completions, entry, strict=True)]

    return correctness


def tagged(completions: list[str], **_: Any) -> list[float]:
    """1 for an answer between tags, a part of it for either tag."""
    return [0.5 * ("<answer>" in text) + 0.5 * ("</answer>" in text) for text in completions]


def brief(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Less for longer completions: differs within almost every group, so that few advantages are all zero."""
    return [1.0 / (1 + len(ids) / 16) + (sum(ids) % 5) / 50 for ids in completion_ids]


class Report(TrainerCallback):
    """A line per update: reward, exposure, and which regimes the microbatches chose."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not logs or "hilore/exposure" not in logs:
            return
        shares = {key.removeprefix("hilore/regime_"): value for key, value in logs.items() if "/regime_" in key}
        regimes = ", ".join(f"{label} {share:.0%}" for label, share in shares.items() if share)
        self._say(
            f"update {state.global_step}: reward {logs['reward']:.2f}, exposure {logs['hilore/exposure']:.2f}, "
            f"regimes {regimes}, predicted gain over GC {logs['hilore/gain']:+.1%}, took {logs['step_time']:.0f} s"
        )


if __name__ == "__main__":
    sys.exit(main())
