"""The example script and its demo, on a tiny actor: the whole way from trace to a training under plans."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hilore.planner.actor import Actor, build_actor
from hilore.planner.tasks import build_dataset
from hilore.runtime.planfile import load_plans, save_plan
from tests.specs import spec_of
from tests.trl_fixtures import plan_for, quiet, tokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
CONFIG = (
    "{model_type: qwen2, vocab_size: 128, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 1024}"
)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module, its actor replaced by a tiny one; the current folder is a temporary one."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module("grpo_smollm2")
    spec_of(
        tmp_path,
        model=f"{{source: hf-config, config: {CONFIG}}}",
        adapter="{kind: lora, rank: 4, alpha: 8, targets: all-linear, dtype: float32}",
        batch="{microbatch: 2, prompt_tokens: 250, response_tokens: 34, accumulation: 4}",
        loss="{kind: grpo, head: trl}",
    )
    monkeypatch.setattr(script, "SPEC", tmp_path / "model.yaml")
    return script


def with_tokenizer(spec: Any, **options: Any) -> Actor:
    return replace(build_actor(spec, **options), tokenizer=tokenizer())


def test_the_script_trains_under_plans_from_files(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example, "build_actor", with_tokenizer)
    spec = example.load_spec(example.SPEC)
    model = build_actor(spec).model
    for label, high in (("null", 0.0), ("low", 0.5), ("mid", 1.0), ("high", 1e9)):
        hold = () if label == "null" else (1,)
        plan = plan_for(model, hold=hold, label=label, low=0.0 if high <= 0.5 else high / 2, high=high, rows=2)
        save_plan(replace(plan, length_bucket=284), tmp_path / f"tiny.{label}.json")
    with quiet():
        assert example.main(["--plans", str(tmp_path / "tiny.*.json"), "--steps", "2", "--task", "chain_sum"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [out.count(f"update {number}: reward ") for number in (1, 2, 3)] == [1, 1, 0]
    assert out.endswith("8 microbatches, 8 regions replayed and 8 held, 0 demotions")


def test_without_plans_the_script_says_what_to_type(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main(["--plans", "nowhere/*.json"]) == 2
    assert capsys.readouterr().err == (
        "nowhere/*.json: no such plan file; make plans with: hilore-plan solve --budget N --delta D\n"
    )


def test_the_demo_goes_the_whole_way(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = importlib.import_module("demo")
    monkeypatch.setattr(demo, "build_actor", with_tokenizer)
    monkeypatch.setattr(demo, "ROUNDS", 2)
    monkeypatch.setattr(demo, "SOLVE_LIMIT_S", 15.0)
    threads = torch.get_num_threads()
    with quiet():
        code = demo.run_demo(1, 0)
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert code in (0, demo.BREACH), out
    assert "4 microbatches, " in out
    for policy in ("GC", "No-GC", "plan delta 0", "plan delta 1"):
        assert f"│ {policy} " in out
    # On random weights the prior says nothing of a codec's error; all that is exact must hold.
    assert not [line for line in out.splitlines() if "BROKEN" in line and "gradient error" not in line]
    plans = load_plans("plans/tiny.*.json")
    assert [plan.regime.label for plan in sorted(plans.plans, key=lambda p: p.regime.exposure_high)] == [
        "null",
        "low",
        "mid",
        "high",
    ]
    assert (tmp_path / "tiny.trace.json").is_file()


def test_rollouts_are_padded_to_the_plans_bucket(example: Any) -> None:
    demo = importlib.import_module("demo")
    actor = with_tokenizer(example.load_spec(example.SPEC))

    class Trace:
        class calibration:
            psi_reference = 1.0

    class Trainer:
        _buffered_inputs = (
            {
                "prompt_ids": torch.full((2, 5), 7),
                "prompt_mask": torch.tensor([[0, 1, 1, 1, 1], [1] * 5]),
                "completion_ids": torch.full((2, 3), 9),
                "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
                "advantages": torch.tensor([0.0, 3.0, -3.0])[1:],
            },
            {
                "prompt_ids": torch.full((2, 4), 7),
                "prompt_mask": torch.ones(2, 4, dtype=torch.int64),
                "completion_ids": torch.full((2, 3), 9),
                "completion_mask": torch.ones(2, 3, dtype=torch.int64),
                "advantages": torch.zeros(2),
            },
        )

    (found,) = demo.rollouts_of(Trainer(), actor, Trace())
    assert (found.tokens, found.completion_mask.shape[1]) == (284, 34)
    assert found.attention_mask.sum(1).tolist() == [7, 6]
    assert found.completion_mask.sum(1).tolist() == [3, 1]
    assert torch.equal(found.attention_mask[:, 250:], found.completion_mask)
    assert not found.input_ids[:, :245].any()
    assert not found.input_ids[:, 253:].any()
    assert found.advantages.untyped_storage().nbytes() == 8
    assert found.advantages.tolist() == pytest.approx([1.0, -1.0], abs=1e-3)


def test_rewards(example: Any) -> None:
    entries = build_dataset(2, 0, None, ("chain_sum",))
    answers = [entry.record["answer"] for entry in entries]
    score = example.correct(entries)
    texts = [f"<answer>{answers[1]}</answer>", "<answer>no</answer>"]
    assert score(completions=texts, entry=[1, 0])[0] == 1.0
    assert score(completions=texts, entry=[1, 0])[1] < 1.0
    assert example.tagged(completions=["<answer>1</answer>", "1</answer>", "1"]) == [1.0, 0.5, 0.0]
    long, short = example.brief(completion_ids=[[5] * 32, [5] * 4])
    assert short > long


def test_the_demos_budget_lies_between_the_peaks(example: Any) -> None:
    demo = importlib.import_module("demo")
    assert demo.budget_between(800 * 2**20, 1600 * 2**20) == 900
    assert demo.budget_between(800 * 2**20 + 1, 800 * 2**20 + 9) == 801
