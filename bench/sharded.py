"""``python -m bench.sharded``: each rank's peak in real FSDP updates (two processes, gloo, CPU) and its prediction.

Whole updates: all microbatches, gradient accumulation, AdamW. GC and No-GC are predicted by the trace, the plans by
themselves. Prints the table of docs/measurements/memory-fsdp.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hilore.planner.emit import solve_trace
from hilore.planner.handmade import handmade_plan
from hilore.planner.spec import load_spec, spec_as_dict
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Trace, UnitTrace
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import largest_bucket, reference_peaks, verify_modes
from hilore.runtime.plan import Plan
from hilore.runtime.planfile import save_plan

RANKS = 2
ROOT = Path(__file__).parent.parent
LORA = "{kind: lora, rank: 8, dtype: float32}"
# Of the way from GC's to No-GC's peak.
BUDGET_SHARE = 0.3
CODEC = "int8-g64"
# Far more than they take, also on a busy machine.
STARTING_S, CASE_S = 120.0, 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration. ``params``: dtype in which parameters persist; they are gathered in ``compute``."""

    adapter: str
    tied: bool
    reshard: bool
    accumulation: int
    sync: str = "every_microbatch"
    kind: str = "fsdp2"
    params: str = "float32"
    compute: str = "bfloat16"

    @property
    def name(self) -> str:
        adapter = "full" if self.adapter == "none" else "LoRA"
        ends = "tied" if self.tied else "untied"
        reshard = "reshard" if self.reshard else "no reshard"
        many = "" if self.accumulation == 1 else f", {self.accumulation} microbatches"
        sync = "" if self.sync == "every_microbatch" else ", sync in the last"
        dtypes = "" if (self.params, self.compute) == ("float32", "bfloat16") else f", {self.params} in {self.compute}"
        return f"{self.kind} {adapter}, {ends}, {reshard}{many}{sync}{dtypes}"


@dataclass(frozen=True, slots=True)
class Row:
    """One policy of one case. ``exact``: gradients are bitwise those of FSDP without checkpointing."""

    case: str
    policy: str
    measured_bytes: int
    predicted_bytes: int
    exact: bool

    @property
    def over(self) -> float:
        """Prediction over measurement, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1


CASES = (
    *(
        Case(adapter, tied, reshard, accumulation)
        for adapter in ("none", LORA)
        for tied in (True, False)
        for reshard in (True, False)
        for accumulation in (1, 4)
    ),
    *(Case(adapter, tied, True, 4, "last_microbatch") for adapter in ("none", LORA) for tied in (True, False)),
    Case("none", False, True, 4, "last_microbatch", compute="float32"),
    Case("none", False, True, 4, compute="float32"),
    Case("none", True, True, 4, params="bfloat16"),
    Case(LORA, True, True, 4, params="bfloat16"),
    *(
        Case("none", tied, reshard, accumulation, kind="fsdp1")
        for tied in (True, False)
        for reshard in (True, False)
        for accumulation in (1, 4)
    ),
    Case("none", False, True, 4, "last_microbatch", "fsdp1"),
    Case("none", False, True, 4, kind="fsdp1", compute="float32"),
)


def spec_of(case: Case, folder: Path) -> ModelSpec:
    """A Qwen2 of 4 layers, d 128, in a model.yaml."""
    path = folder / "model.yaml"
    path.write_text(
        f"""
name: sharded
model:
  source: hf-config
  config:
    {{model_type: qwen2, vocab_size: 1000, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4,
     num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512,
     tie_word_embeddings: {str(case.tied).lower()}}}
adapter: {case.adapter}
precision: {{params: {case.params}, compute: {case.compute}, autocast: false, grads: float32}}
batch: {{microbatch: 1, prompt_tokens: 64, response_tokens: 64, accumulation: {case.accumulation}}}
loss: {{kind: grpo, beta: 0.001}}
parallel:
  {{kind: {case.kind}, world_size: {RANKS}, reshard_after_forward: {str(case.reshard).lower()},
   gradient_sync: {case.sync}}}
device: cpu
""",
        encoding="utf-8",
    )
    return load_spec(path)


def measure_cases(cases: Iterable[Case], folder: Path) -> list[Row]:
    """Trace, solve and run every case; ``folder`` takes plans and what the ranks write."""
    asked: list[dict[str, Any]] = []
    predicted: dict[str, dict[str, int]] = {}
    for number, case in enumerate(cases):
        spec = spec_of(case, folder)
        trace = trace_spec(spec)
        plans = {"plan, delta 0": _exact_plan(trace), "plan with L": _lossy_plan(trace)}
        paths = {"gc": "", "no-gc": ""}
        for label, (plan, _) in plans.items():
            paths[label] = str(folder / f"{number}.{label.replace(' ', '_')}.json")
            save_plan(plan, paths[label])
        gc_peak, no_gc_peak = reference_peaks(trace)
        predicted[case.name] = {"gc": gc_peak, "no-gc": no_gc_peak} | {
            label: peak for label, (_, peak) in plans.items()
        }
        asked.append({"name": case.name, "spec": spec_as_dict(spec), "policies": paths})
    (folder / "cases.json").write_text(json.dumps(asked))
    found = run_ranks(folder, "bench.sharded_rank", STARTING_S + CASE_S * len(asked))
    return [
        Row(
            case,
            policy,
            min(rank[case][policy]["peak_bytes"] for rank in found),
            peak,
            all(rank[case][policy]["exact"] for rank in found),
        )
        for case, policies in predicted.items()
        for policy, peak in policies.items()
    ]


def run_ranks(folder: Path, module: str, limit_s: float) -> list[Any]:
    """Run ``module`` once per rank on the cases in ``folder``; what each wrote.

    Raises RuntimeError as soon as one rank fails (the other would wait for it), or after ``limit_s`` seconds.
    """
    outs = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    logs = [out.with_suffix(".log") for out in outs]
    processes = []
    try:
        for rank, (out, log) in enumerate(zip(outs, logs, strict=True)):
            arguments = (str(rank), str(RANKS), str(folder / "rendezvous"), str(folder / "cases.json"), str(out))
            with log.open("w") as errors:
                processes.append(subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, stderr=errors))
        _wait_for(processes, logs, limit_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(out.read_text()) for out in outs]


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise RuntimeError(f"rank {rank} ended with code {code}:\n{logs[rank].read_text()[-3000:]}")
        if None not in codes:
            return
        if time.monotonic() > end:
            raise RuntimeError(f"rank {codes.index(None)} was not done after {limit_s:g} s")
        time.sleep(0.1)


def _exact_plan(trace: Trace) -> tuple[Plan, int]:
    """The solver's at delta 0, a part of the way from GC's to No-GC's peak."""
    gc_peak, no_gc_peak = reference_peaks(trace)
    budget = gc_peak + int(BUDGET_SHARE * max(no_gc_peak - gc_peak, 0))
    plan = solve_trace(trace, budget_bytes=budget, delta=0.0).plans[-1]
    return plan, plan.predicted.peak_bytes


def _lossy_plan(trace: Trace) -> tuple[Plan, int]:
    """Of the measured set with most units that a codec may take, those units encoded; the others exactly kept."""
    bucket = largest_bucket(trace)
    units = {unit.name: unit for unit in bucket.classes[0].units}

    def encodable(kept: Iterable[str]) -> set[str]:
        return {name for name in kept if CODEC in (cost.codec for cost in units[name].codecs)}

    sets = [keep_set.kept for keep_set in bucket.classes[0].keep_sets if not keep_set.split]
    kept = max(sets, key=lambda names: (len(encodable(names)), -len(names)))
    if not encodable(kept):
        raise RuntimeError(f"no unit of the trace is offered {CODEC}")

    def mode(_region: str, unit: UnitTrace) -> str:
        if unit.name not in kept:
            return "R"
        return CODEC if unit.name in encodable(kept) else "H"

    plan = handmade_plan(trace, mode)
    return plan, verify_modes(trace, bucket, plan.regions).peak_bytes


def table_of(rows: Sequence[Row]) -> Table:
    table = Table("configuration", "policy", "measured B", "predicted B", "over", "gradients")
    for row in rows:
        table.add_row(
            row.case,
            row.policy,
            f"{row.measured_bytes:,}",
            f"{row.predicted_bytes:,}",
            f"{row.over:+.2%}",
            "same bits" if row.exact else "other bits",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sharded", description=__doc__)
    parser.add_argument("--out", metavar="FILE", help="JSON with all figures")
    parser.add_argument("--only", metavar="TEXT", default="", help="configurations whose name contains this")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_cases([case for case in CASES if given.only in case.name], Path(folder))
    console = Console(width=160)
    console.print(table_of(rows))
    console.print(f"took {time.monotonic() - began:.0f} s")
    if given.out:
        Path(given.out).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
