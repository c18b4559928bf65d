"""Does training under a delta 1 plan end where training under gradient checkpointing ends?

    python -m bench.training --updates 30 --seeds 0 1 2 --out docs/measurements/training-smollm2.json

GRPO with TRL on SmolLM2-135M (examples/smollm2.yaml), the same prompts and seeds once under gradient checkpointing and
once under the plans. Sampling amplifies any rounding difference, so two runs of one seed part ways; what is compared
are reward curves and the final score, against the spread between seeds. ``--runs FILE`` keeps finished runs, so that
it can go on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import torch
from grpo_smollm2 import SPEC, brief, correct, fitting, make_trainer, tagged
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback

from hilore.planner.actor import Actor, build_actor
from hilore.planner.spec import load_spec
from hilore.planner.tasks import build_dataset
from hilore.runtime import load_plans
from hilore.runtime.integrations.trl import attach_trainer

LAST = 10  # updates whose mean reward is called the end of a curve
HELD_OUT, HELD_OUT_SEED = 48, 10_007
GC, PLAN = "GC", "plan"


@dataclass(frozen=True, slots=True)
class Run:
    """One training. ``rewards``: mean reward per update; ``score``: mean reward on held-out prompts afterwards."""

    policy: str
    seed: int
    rewards: tuple[float, ...]
    score: float
    regimes: dict[str, int]
    update_s: float
    audits: int = 0
    audited_error: float | None = None

    @property
    def end(self) -> float:
        return mean(self.rewards[-LAST:])


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    console = Console(width=140)
    runs = read_runs(given)
    for seed in given.seeds:
        for plans in (None, given.plans):
            if any((run.policy, run.seed) == (GC if plans is None else PLAN, seed) for run in runs):
                continue
            last = train_once(plans, seed, given)
            runs.append(last)
            keep_run(given, last)
            console.print(f"{last.policy}, seed {seed}: end {last.end:.3f}, held-out score {last.score:.3f}")
    report = {"command": "python -m bench.training " + " ".join(sys.argv[1:]), **summary(runs)}
    report["runs"] = [asdict(run) for run in runs]
    console.print(table(runs))
    console.print({name: value for name, value in report.items() if name != "runs"})
    if given.out:
        write(Path(given.out), json.dumps(report, indent=1) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--plans", default="plans/smollm2/*.json")
    result.add_argument("--updates", type=int, default=30)
    result.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    result.add_argument("--tasks", nargs="+", default=["chain_sum"])
    result.add_argument("--model", default=str(SPEC), metavar="MODEL.YAML")
    result.add_argument("--accumulation", type=int, help="microbatches per update (default: the spec's)")
    result.add_argument("--response-tokens", type=int, help="of a completion (default: the spec's)")
    result.add_argument("--audit-every", type=int, help="microbatches; under the plans, two more runs each")
    result.add_argument("--runs", metavar="FILE.jsonl", help="finished runs, kept and gone on from")
    result.add_argument("--out")
    return result


def train_once(plans: str | None, seed: int, given: argparse.Namespace) -> Run:
    """One training from the same weights, adapters and prompts of its seed."""
    torch.manual_seed(seed)
    tasks, spec = tuple(given.tasks), load_spec(given.model)
    batch = replace(
        spec.batch,
        accumulation=given.accumulation or spec.batch.accumulation,
        response_tokens=given.response_tokens or spec.batch.response_tokens,
    )
    actor = build_actor(replace(spec, batch=batch))
    trainer = make_trainer(actor, tasks, given.updates, seed, batch.response_tokens)
    trainer.remove_callback(PrinterCallback)
    runtime = attach_trainer(trainer, load_plans(plans), audit_every=given.audit_every) if plans is not None else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL's own calls of names that transformers renamed
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    regimes: dict[str, int] = {}
    for step in runtime.stats.steps if runtime is not None else ():
        regimes[step.regime] = regimes.get(step.regime, 0) + 1
    audit = runtime.stats.audit if runtime is not None else None
    if runtime is not None:
        runtime.detach()
    return Run(
        policy=GC if plans is None else PLAN,
        seed=seed,
        rewards=tuple(float(entry["reward"]) for entry in logs),
        score=held_out_score(actor, tasks, batch.response_tokens),
        regimes=regimes,
        update_s=mean(float(entry["step_time"]) for entry in logs if "step_time" in entry),
        audits=0 if audit is None else audit.audits,
        audited_error=None if audit is None else audit.error,
    )


def read_runs(given: argparse.Namespace) -> list[Run]:
    """Runs of these settings that are finished already."""
    if not given.runs or not Path(given.runs).exists():
        return []
    lines = [json.loads(line) for line in Path(given.runs).read_text(encoding="utf-8").splitlines()]
    return [
        Run(**line["run"] | {"rewards": tuple(line["run"]["rewards"])})
        for line in lines
        if line["settings"] == settings(given)
    ]


def keep_run(given: argparse.Namespace, run: Run) -> None:
    if given.runs:
        with Path(given.runs).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"settings": settings(given), "run": asdict(run)}) + "\n")


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """What decides over a run, besides policy and seed."""
    return {name: value for name, value in vars(given).items() if name not in ("seeds", "out", "runs")}


@torch.no_grad()
def held_out_score(actor: Actor, tasks: tuple[str, ...], tokens: int) -> float:
    """Mean of the training's reward over greedy answers to prompts that no training saw."""
    entries = fitting(build_dataset(HELD_OUT, HELD_OUT_SEED, actor.tokenizer, tasks), actor)
    tokenizer: Any = actor.tokenizer
    tokenizer.padding_side = "left"
    model: Any = actor.model.eval()
    rewards: list[float] = []
    for start in range(0, len(entries), 16):
        part = entries[start : start + 16]
        batch = tokenizer([entry.prompt for entry in part], return_tensors="pt", padding=True)
        out = model.generate(
            **batch, max_new_tokens=tokens, do_sample=False, use_cache=True, pad_token_id=tokenizer.pad_token_id
        )
        ids = [row[batch.input_ids.shape[1] :].tolist() for row in out]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        ids = [[i for i in row if i != tokenizer.pad_token_id] for row in ids]
        right = correct(part)(texts, list(range(len(part))))
        parts = zip(right, tagged(texts), brief(ids), strict=True)
        rewards += [a + 0.5 * b + 0.2 * c for a, b, c in parts]
    return mean(rewards)


def summary(runs: list[Run]) -> dict[str, Any]:
    """Differences plan less GC per seed, and the spread between seeds (standard deviation) of each policy."""
    by = {(run.policy, run.seed): run for run in runs}
    seeds = sorted({run.seed for run in runs})
    result: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "seeds": seeds}
    for name in ("end", "score"):
        differences = [getattr(by[PLAN, seed], name) - getattr(by[GC, seed], name) for seed in seeds]
        result[f"{name}_differences"] = differences
        result[f"{name}_mean_difference"] = mean(differences)
        for policy in (GC, PLAN):
            values = [getattr(by[policy, seed], name) for seed in seeds]
            result[f"{name}_{policy}_mean"] = mean(values)
            result[f"{name}_{policy}_seed_deviation"] = stdev(values) if len(values) > 1 else None
    return result


def table(runs: list[Run]) -> Table:
    result = Table("policy", "seed", "first 10", "last 10", "held-out score", "regimes", "s per update")
    for run in runs:
        regimes = " ".join(f"{label} {count}" for label, count in sorted(run.regimes.items()))
        first = f"{mean(run.rewards[:LAST]):.3f}"
        result.add_row(
            run.policy, str(run.seed), first, f"{run.end:.3f}", f"{run.score:.3f}", regimes, f"{run.update_s:.1f}"
        )
    return result


def write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=".tmp") as file:
        file.write(text)
    os.replace(file.name, path)


if __name__ == "__main__":
    sys.exit(main())
