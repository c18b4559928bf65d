"""bench/: ceilings, rivals, floors, bookkeeping, the command end to end on a tiny model. Nothing here is timed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import overhead
from bench.__main__ import main
from bench.overhead import BOOKKEEPING, bookkeeping_of_steps, by_exposure, full_fine_tuning, stopwatch
from bench.table import FLOORS, floor_lines, write_json
from hilore.planner.actor import build_actor, microbatch_of
from hilore.planner.paired import Interval
from hilore.planner.rivals import HuggingFaceCheckpointing, NoCheckpointing, PlanPolicy, first_held, last_held
from hilore.planner.sidebyside import Measured, SideBySide, measure_peak
from hilore.planner.sidebyside_model import ModelReport, Options, tiny
from hilore.planner.sidebyside_policies import Ceiling, best_blocks, ceilings, every_n_layers
from hilore.planner.sidebyside_report import environment
from hilore.planner.spec import load_spec
from hilore.runtime.runtime import Runtime
from tests.plans import plan_for
from tests.specs import spec_of

ROOT = Path(__file__).parent.parent
PLANS = ["layer plan delta 0", "layer plan delta 1", "plan delta 0", "plan delta 1"]


def test_ceilings_are_hidden_sized_tensors_per_layer_above_gc() -> None:
    found = ceilings(1000, hidden=512, tokens=1024, layers=8)
    assert [limit.budget_bytes for limit in found] == [1000, 1000 + 20 * 2**20, 1000 + 40 * 2**20]
    assert [limit.label for limit in found] == ["+0 d", "+2.5 d", "+5 d"]


def test_the_best_block_holds_as_many_layers_as_fit() -> None:
    actor = build_actor(spec_of(adapter="{kind: lora, rank: 4, alpha: 8, targets: all-linear}"), live_adapters=True)
    microbatch = microbatch_of(actor, 16)

    def peak(held: frozenset[int]) -> int:
        policy = HuggingFaceCheckpointing(held=held)
        return measure_peak(actor, policy, microbatch, gradients_exist=False)

    none, one, both = (peak(last_held(2, count)) for count in range(3))
    no_gc = measure_peak(actor, NoCheckpointing(), microbatch, gradients_exist=False)
    assert none <= one < both == no_gc
    limits = tuple(Ceiling(extra, bytes_) for extra, bytes_ in enumerate((none - 1, one, both - 1, both)))
    found = best_blocks(actor, microbatch, limits, gradients_exist=False)
    held = [contender.policy.held for contender in found]  # type: ignore[attr-defined]
    # Under the last layer's peak the first layer fits nowhere that the last does not.
    assert held == [frozenset(), last_held(2, 1), last_held(2, 1), last_held(2, 2)]
    assert peak(first_held(2, 1)) >= one
    assert [contender.policy.name for contender in found][-1] == "best block (2 held)"
    reserved = best_blocks(actor, microbatch, limits[-1:], gradients_exist=False, other_bytes=1)
    assert reserved[0].policy.held == last_held(2, 1)  # type: ignore[attr-defined]


def test_every_second_layer_needs_two() -> None:
    assert every_n_layers(1) == ()
    assert every_n_layers(8)[0].policy == HuggingFaceCheckpointing("every 2 layers", every_n_layers=2)


def report(*rows: tuple[str, str, Interval | None]) -> ModelReport:
    nothing = Interval(0.0, 0.0, 0.0)
    measured = tuple(
        Measured(policy, ceiling, 1, nothing, share, 1, None, None, "", True, 0.0, 0.0, (), {}, "")
        for policy, ceiling, share in rows
    )
    result = SideBySide(measured, (), None, None, 1, 1, 1, 1, 1, 0, False, {})
    return ModelReport("qwen2-shape", "naive", 8, 512, 1024, 2**20, 1.0, (), (), result, ())


def test_a_floor_is_met_by_the_lower_end() -> None:
    lines = floor_lines(
        report(
            ("plan delta 0", "+0 d", Interval(0.20, 0.16, 0.25)),
            ("plan delta 0", "+2.5 d", Interval(0.45, 0.4499, 0.5)),
            ("plan delta 0", "+5 d", None),
        )
    )
    assert len(lines) == len(FLOORS) == 6
    assert lines[0] == "floor 0.16 for plan delta 0 at +0 d: 0.20 (0.16 to 0.25): met"
    assert lines[1].endswith("NOT MET")
    assert lines[2] == "floor 0.58 for plan delta 0 at +5 d: undefined: NOT MET"
    assert lines[3] == "floor 0.20 for plan delta 1 at +0 d: no plan: NOT MET"


def test_the_tiny_model_keeps_the_proportions() -> None:
    spec = load_spec(ROOT / "examples/qwen2_shape.yaml")
    small = tiny(spec)
    for values in (spec.model.config, small.model.config):
        assert values["intermediate_size"] / values["hidden_size"] == 5.375
        assert values["num_attention_heads"] / values["num_key_value_heads"] == 8
        assert values["vocab_size"] / values["hidden_size"] == 8
    assert small.name == "qwen2-shape-tiny"


def test_full_fine_tuning_trains_every_parameter() -> None:
    spec = full_fine_tuning(spec_of(adapter="{kind: lora, rank: 4, alpha: 8, targets: all-linear}"))
    actor = build_actor(spec)
    assert all(parameter.requires_grad for parameter in actor.model.parameters())
    assert spec.name == "tiny-full"


def test_bookkeeping_is_watched_once_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10_000, 10))
    monkeypatch.setattr(overhead.time, "perf_counter_ns", lambda: next(ticks))
    before = [owner.__dict__[name] for owner, name in BOOKKEEPING]
    with stopwatch() as watch:
        inner = watch.around(lambda: "inner")
        outer = watch.around(lambda: inner())
        assert outer() == "inner"
        # Readings at 0 (outer begins), 10 (inner begins) and 20 (outer ends): the inner call is not counted again.
        assert watch.spent_ns == 20
        assert Runtime.choose is not before[3]
    assert [owner.__dict__[name] for owner, name in BOOKKEEPING] == before


def test_bookkeeping_is_measured_in_real_steps_that_switch_plans() -> None:
    actor = build_actor(full_fine_tuning(spec_of()))
    microbatches = [microbatch_of(actor, 16)]
    regimes = by_exposure(plan_for(actor.model, "R"))
    assert [plan.regime.label for plan in regimes] == ["null", "low", "mid", "high"]
    steps = bookkeeping_of_steps(actor, regimes, microbatches, 4)
    assert len(steps) == 4
    assert all(0 < spent < step for spent, step in steps)
    with PlanPolicy("x", regimes).applied(actor) as running:
        labels = set()
        for scale in (0.3, 0.7, 1.1, 1.5):
            batch = replace(microbatches[0], advantages=microbatches[0].advantages.sign() * scale)
            with running.microbatch(batch):
                actor.model(batch.input_ids, batch.attention_mask)
            assert running.choice.plan is not None
            labels.add(running.choice.plan.regime.label)
    assert labels == {"low", "mid", "high"}


def test_the_json_replaces_its_file_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "bench.json"
    write_json({"environment": environment(1, "python -m bench")}, str(path))
    first = path.read_text(encoding="utf-8")
    assert json.loads(first)["environment"]["threads"] == 1
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"gain": float("nan")}, str(path))
    assert path.read_text(encoding="utf-8") == first
    assert [file.name for file in path.parent.iterdir()] == ["bench.json"]


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_quick_measures_every_policy_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    code = main(["--quick", "--model", str(ROOT / "examples/qwen2_shape.yaml"), "--out", str(path)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["environment"]["versions"].keys() == {"torch_patch", "transformers_patch"}
    (model,) = data["models"]
    result = model["result"]
    rows = result["rows"]
    assert (result["rounds"], result["resamples"], result["breaches"]) == (3, Options().resamples, [])
    assert [row["policy"] for row in rows[:4]] == ["GC", "No-GC", "plan, all held", "every 2 layers"]
    for label in ("+0 d", "+2.5 d", "+5 d"):
        names = [row["policy"] for row in rows if row["ceiling"] == label]
        assert names[0].startswith("best block")
        # A grain that has no plan under a ceiling says so instead of leaving its row out silently.
        refused = [plan["policy"] for plan in model["solved"] if plan["ceiling"] == label and plan["message"]]
        assert all(f"no plan: {name} {label}: infeasible" in printed for name in refused)
        assert sorted(names[1:] + refused) == PLANS
    assert "plan delta 0" in [row["policy"] for row in rows if row["ceiling"] == "+5 d"]
    for row in rows:
        promised = [row[key] for key in ("budget_bytes", "predicted_peak_bytes") if row[key] is not None]
        assert all(row["peak_bytes"] <= limit for limit in promised)
        assert row["exact"] or row["policy"].endswith("delta 1")
        assert row["error"] <= 0.01
        assert row["gain"]["low"] <= row["gain"]["value"] <= row["gain"]["high"]
        assert row["modes"] == {} or row["peak_event"]
    assert rows[2]["share_of_held"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert rows[0]["share_of_held"]["value"] == 0.0
    assert len(result["times_ns"]["GC"]) == 3
    assert all(row["policy"] in printed for row in rows)


def test_overhead_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "overhead.json"
    code = main(["overhead", "--quick", "--out", str(path)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    found = json.loads(path.read_text(encoding="utf-8"))["overhead"]
    rows = found["result"]["rows"]
    assert [row["policy"] for row in rows[2:]] == [overhead.ALL_R, overhead.ALL_R_DEAD]
    assert all(row["exact"] for row in rows)
    assert rows[2]["modes"]["dead"] == 0 < rows[3]["modes"]["dead"]
    assert 0 < found["bookkeeping_share"]["value"] < 1
    assert "all-R plan / Hugging Face GC" in printed
