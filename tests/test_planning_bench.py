"""The measuring scripts of planning: which commands they run, what they write, when they say that a promise broke."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench import planning, solver
from bench.peak_table import document
from bench.planning import Cost
from bench.solver import SolveTime, further_budgets, solve_times
from hilore.cli import main as cli
from hilore.planner.budget import MIB
from hilore.planner.composition import highest, reference_compositions
from hilore.planner.emit import solve_trace
from hilore.planner.tracefile import load_trace, save_trace
from hilore.planner.verify import reference_peaks
from hilore.runtime.errors import HiloreError
from hilore.runtime.planfile import load_plans
from tests.solver_fixtures import qwen_trace

TINY = """
name: tiny-actor
model:
  source: hf-config
  config: {model_type: qwen2, vocab_size: 4000, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2}
batch: {microbatch: 1, prompt_tokens: 16, response_tokens: 112}
loss: {kind: grpo, beta: 0.0, head: naive}
device: {kind: cuda, gpu: l40s-48gb}
"""


def test_every_example_is_traced_solved_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "tiny.yaml").write_text(TINY, encoding="utf-8")
    out = tmp_path / "made"

    def run(arguments: Sequence[str], folder: Path) -> Cost:
        monkeypatch.chdir(folder)
        return Cost(cli(arguments), 1.5, 1.0, 3 * MIB, "last")

    given = ["--folder", str(tmp_path / "examples"), "--examples", "tiny", "--out", str(out)]
    assert planning.main([*given, "--markdown", str(tmp_path / "cost.md")], run) == 0
    commands = json.loads((out / "costs.json").read_text())["commands"]
    assert [(one["what"], one["plans"], one["exit_code"]) for one in commands] == [
        ("trace", "", 0),
        ("solve", "tiny", 0),
        ("verify", "tiny", 0),
        ("solve", "tiny-tight", 0),
        ("verify", "tiny-tight", 0),
    ]
    gc_peak, _ = reference_peaks(load_trace(out / "tiny-actor.trace.json"))
    tight = load_plans(str(out / "plans" / "tiny-tight" / "*.json"))
    assert {plan.budget_bytes for plan in tight.plans} == {-(-int(1.05 * gc_peak) // MIB) * MIB}
    text = (tmp_path / "cost.md").read_text()
    assert "| `hilore-plan trace examples/tiny.yaml --out tiny-actor.trace.json` | 0 | 1.0 | 1.5 | 3 |" in text
    assert f"| tiny-tight | {-(-int(1.05 * gc_peak) // MIB)} | 4 | 4 |" in text
    assert "| `tiny/` | `hilore-plan trace examples/tiny.yaml" in (out / "plans" / "README.md").read_text()


def test_a_command_that_fails_ends_its_example(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")

    def run(arguments: Sequence[str], _folder: Path) -> Cost:
        return Cost(2, 0.0, 0.0, 0, "why")

    given = ["--folder", str(tmp_path), "--examples", "tiny", "--out", str(tmp_path / "made")]
    assert planning.main(given, run) == planning.BREACH
    (command,) = json.loads((tmp_path / "made" / "costs.json").read_text())["commands"]
    assert (command["what"], command["last_line"]) == ("trace", "why")


def test_solves_are_timed_and_bounded(tmp_path: Path) -> None:
    trace = qwen_trace(layers=4)
    path = tmp_path / "a.trace.json"
    save_trace(trace, path)
    gc_peak, no_gc_peak = reference_peaks(trace)
    least, middle = further_budgets(trace)
    assert (least - 1) * MIB < 1.05 * gc_peak <= least * MIB
    assert middle == (gc_peak + no_gc_peak) // 2 // MIB
    small, large = solve_times(trace, (1, no_gc_peak // MIB + 1), (0.0,), 10.0)
    assert (small.status, small.plans, small.holds) == ("infeasible", 0, True)
    assert small.peak_bytes > MIB
    assert (large.status, large.plans, large.peak_bytes) == ("optimal", 4, no_gc_peak)
    assert not replace(large, cpu_s=10.1).holds
    assert not replace(large, status="feasible").holds
    given = [str(path), str(path), "--budgets", str(middle), "--deltas", "0,1", "--out", str(tmp_path / "s.json")]
    assert solver.main([*given, "--markdown", str(tmp_path / "s.md")]) == 0
    rows = [SolveTime(**row) for row in json.loads((tmp_path / "s.json").read_text())["rows"]]
    assert [(row.budget_mib, row.delta) for row in rows] == [(b, d) for b in (middle, least, middle) for d in (0, 1)]
    assert "6 solves: 6 optimal, 0 infeasible" in (tmp_path / "s.md").read_text()
    assert solver.main([*given, "--seconds", "0"]) == solver.BREACH


def test_the_peak_table_adds_up_and_names_what_the_paper_has_beside_it() -> None:
    trace = qwen_trace(layers=4)
    trace = replace(trace, spec={**trace.spec, "model": {"config": {"vocab_size": 1000}}})
    gc_peak, no_gc_peak = reference_peaks(trace)
    plan = solve_trace(trace, budget_bytes=(gc_peak + no_gc_peak) // 2, delta=0.0).plans[-1]
    text = document(trace, plan, "command")
    assert f"| **peak** | **{gc_peak / MIB:,.1f}** | **{plan.predicted.peak_bytes / MIB:,.1f}** |" in text
    event = highest(reference_compositions(trace, trace.buckets[0], gc=True)).event
    assert f"| event | {event} |" in text
    assert f"{28_874 - gc_peak / MIB:,.1f} MiB lie between the two" in text
    with pytest.raises(HiloreError, match=r"planned for 7 tokens per row, the trace's longest is"):
        document(trace, replace(plan, length_bucket=7), "command")
