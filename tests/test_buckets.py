"""Length buckets: one trace, plans per bucket, and microbatches of every length under the plans they take."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hilore.cli import main
from hilore.planner.actor import Actor, build_actor
from hilore.planner.microbatch import Microbatch
from hilore.planner.rivals import PlanPolicy
from hilore.planner.sidebyside_runs import NO_GC
from hilore.planner.spec_types import ModelSpec
from hilore.planner.stepping import gradients_of, idle_optimizer, peak_of_step
from hilore.planner.trace import Trace
from hilore.planner.tracefile import save_trace
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import reference_peaks
from hilore.runtime.attach import attach
from hilore.runtime.errors import HiloreWarning, PlanFileError
from hilore.runtime.planfile import PlanSet, load_plans
from hilore.runtime.runtime import Runtime
from tests.specs import spec_of

MIB = 2**20
BUCKETS = (24, 48, 96)
PROMPT, RESPONSE = 32, 64
CONFIG = (
    "{model_type: qwen2, vocab_size: 512, hidden_size: 64, intermediate_size: 192, num_hidden_layers: 3, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512}"
)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_of(
        model=f"{{source: hf-config, config: {CONFIG}}}",
        adapter="{kind: lora, rank: 4, alpha: 8}",
        batch=f"{{microbatch: 2, prompt_tokens: {PROMPT}, response_tokens: {RESPONSE}, "
        f"length_buckets: {list(BUCKETS)}, accumulation: 2}}",
        codecs="[]",
    )


@pytest.fixture(scope="module")
def trace(spec: ModelSpec) -> Trace:
    return trace_spec(spec)


@pytest.fixture(scope="module")
def actor(spec: ModelSpec) -> Actor:
    return build_actor(spec, live_adapters=True)


def one_budget(trace: Trace) -> int:
    """For all buckets: a little over what checkpointing takes at the longest."""
    low, high = reference_peaks(trace)
    return low + (high - low) // 4


def solve(trace: Trace, folder: Path, *options: str) -> PlanSet:
    save_trace(trace, folder / "a.trace.json")
    budget = f"{-(-one_budget(trace) // MIB)}"
    out = str(folder / "plans")
    arguments = ["solve", "--trace", str(folder / "a.trace.json"), "--budget", budget, "--delta", "0", "--out", out]
    assert main([*arguments, *options]) == 0
    return load_plans(str(folder / "plans" / "*.json"))


@pytest.fixture(scope="module")
def plans(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> PlanSet:
    return solve(trace, tmp_path_factory.mktemp("buckets"))


def microbatch(prompt: int, response: int, *, rows: int = 2, seed: int = 0) -> Microbatch:
    """As a trainer's collator leaves it: the longest prompt and the longest response of its rows fill their columns."""
    draw = random.Random(seed)
    mask = torch.zeros(rows, prompt + response, dtype=torch.int64)
    for row in range(rows):
        before = prompt if row == 0 else draw.randint(1, prompt)
        after = response if row == rows - 1 else draw.randint(1, response)
        mask[row, prompt - before : prompt + after] = 1
    ids = torch.randint(3, 512, mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    completion = mask[:, prompt:].clone()
    advantages = torch.linspace(1.0, -0.5, rows)
    return Microbatch(ids, mask, completion, advantages, padded=True)


def bucket_taken(actor: Actor, runtime: Runtime, batch: Microbatch) -> int | None:
    """The length bucket of the plan that one forward runs under; None: every unit recomputed."""
    mask = batch.attention_mask if batch.padded else None
    with runtime.microbatch(batch.advantages, batch.completion_mask) as one:
        actor.model(input_ids=batch.input_ids, attention_mask=mask)
    assert one.choice is not None
    return None if one.choice.plan is None else one.choice.plan.length_bucket


def test_one_trace_has_every_bucket_and_says_what_it_was_made_for(trace: Trace, plans: PlanSet) -> None:
    assert [bucket.tokens for bucket in trace.buckets] == list(BUCKETS)
    assert [bucket.completions for bucket in trace.buckets] == [2 * 23, 2 * 47, 2 * 64]
    assert all(bucket.masked for bucket in trace.buckets), "two rows are padded"
    assert plans.buckets == BUCKETS
    assert len(plans.plans) == 12
    for plan in plans.plans:
        assert plan.microbatch is not None
        assert plan.microbatch.rows == 2
        assert plan.predicted.peak_bytes <= plan.ceiling_bytes
    kept = [sum(p.count("H") for p in plans.plans if p.length_bucket == bucket) for bucket in BUCKETS]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1], "the same budget keeps more of shorter rows"


# The bucket's own worst microbatch, one with a long prompt, and lengths that fall between buckets.
LENGTHS = [
    (1, 23, 24),
    (20, 4, 24),
    (2, 9, 24),
    (1, 47, 48),
    (32, 16, 48),
    (5, 20, 48),
    (32, 64, 96),
    (1, 64, 96),
    (32, 17, 96),
]


@pytest.mark.parametrize(("prompt", "response", "bucket"), LENGTHS)
def test_a_real_update_stays_within_the_prediction_of_its_bucket(
    actor: Actor, plans: PlanSet, prompt: int, response: int, bucket: int
) -> None:
    batch = microbatch(prompt, response)
    policy = PlanPolicy("plan", plans.plans)
    optimizer = idle_optimizer(actor)
    with policy.applied(actor) as running:
        found = gradients_of(actor, running, batch, exist=True)
        plan = running.choice.plan
    assert plan is not None
    assert plan.length_bucket == bucket
    with NO_GC.applied(actor) as running:
        expected = gradients_of(actor, running, batch, exist=True)
    assert found.same_loss(expected)
    assert found.same_gradients(expected)
    peak = peak_of_step(actor, policy, batch, optimizer, gradients_exist=True)
    assert peak <= plan.predicted.peak_bytes <= plan.ceiling_bytes
    if (prompt, response) == (bucket - min(RESPONSE, bucket - 1), min(RESPONSE, bucket - 1)):
        assert plan.predicted.peak_bytes <= 1.01 * peak, "the bucket's own microbatch needs what was predicted"


def test_microbatches_of_many_lengths_each_take_their_plan(actor: Actor, plans: PlanSet) -> None:
    draw = random.Random(1)
    runtime = attach(actor.model, plans)
    lengths = [(draw.randint(1, PROMPT), draw.randint(1, RESPONSE)) for _ in range(30)]
    for seed, (prompt, response) in enumerate(lengths):
        batch = microbatch(prompt, response, seed=seed)
        assert bucket_taken(actor, runtime, batch) == next(b for b in BUCKETS if b >= prompt + response)
    assert runtime.stats.over_length == 0
    runtime.detach()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((40, 60, 2), r"A microbatch of 2 x 100 tokens is larger than any plan was made for"),
        ((1, 70, 2), r"A microbatch of 2 x 71 tokens has 140 loss columns, more than any plan for it was made for"),
        ((20, 40, 4), r"A microbatch of 4 x 60 tokens is larger than any plan was made for"),
    ],
)
def test_more_than_any_plan_was_made_for_runs_replayed_with_one_warning(
    actor: Actor, plans: PlanSet, shape: tuple[int, int, int], message: str
) -> None:
    prompt, response, rows = shape
    batch = microbatch(prompt, response, rows=rows)
    runtime = attach(actor.model, plans)
    with pytest.warns(HiloreWarning, match=message) as caught:
        assert [bucket_taken(actor, runtime, batch) for _ in range(2)] == [None, None]
    assert len(caught) == 1
    assert runtime.stats.over_length == 2
    assert runtime.stats.steps[-1].regions_replayed == 3
    runtime.detach()


def test_several_short_rows_take_the_bucket_that_holds_as_many_tokens(actor: Actor, plans: PlanSet) -> None:
    batch = microbatch(16, 20, rows=4)
    runtime = attach(actor.model, plans)
    assert bucket_taken(actor, runtime, batch) == 96, "4 x 36 tokens are more than 2 x 48"
    runtime.detach()
    peak = peak_of_step(actor, PlanPolicy("plan", plans.plans), batch, idle_optimizer(actor), gradients_exist=True)
    assert peak <= max(p.predicted.peak_bytes for p in plans.plans if p.length_bucket == 96)


def test_a_plan_made_without_padding_does_not_serve_padded_rows(actor: Actor, plans: PlanSet) -> None:
    unmasked = tuple(
        replace(plan, microbatch=replace(plan.microbatch, masked=False)) for plan in plans.plans if plan.microbatch
    )
    runtime = attach(actor.model, unmasked)
    full = replace(microbatch(4, 12, rows=1), padded=False)
    assert bucket_taken(actor, runtime, full) == 24
    with pytest.warns(HiloreWarning, match=r"A microbatch of 2 x 16 tokens comes with an attention mask"):
        assert bucket_taken(actor, runtime, microbatch(4, 12)) is None
    runtime.detach()


def test_another_choice_of_buckets_leaves_nothing_of_the_earlier_set(trace: Trace, tmp_path: Path) -> None:
    first = solve(trace, tmp_path)
    folder = tmp_path / "plans"
    (folder / "tiny.notes.json.txt").write_text("mine")
    stale = (folder / "tiny.t24.low.json").read_text(encoding="utf-8")
    second = solve(replace(trace, buckets=trace.buckets[1:]), tmp_path)
    assert second.plans[0].set_id != first.plans[0].set_id
    assert second.buckets == BUCKETS[1:]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [f"tiny{length}.{regime}.json" for length in ("", ".t48") for regime in ("null", "low", "mid", "high")]
        + ["tiny.notes.json.txt"]
    )
    (folder / "tiny.t24.low.json").write_text(stale, encoding="utf-8")
    with pytest.raises(PlanFileError, match=r"two sets of plans under the name 'tiny': .*; solve again"):
        load_plans(str(folder / "*.json"))


def test_plans_of_two_folders_at_once_are_told_from_stale_ones(trace: Trace, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    solve(trace, tmp_path / "a")
    solve(replace(trace, buckets=trace.buckets[1:]), tmp_path / "b")
    advice = re.escape(f"load one folder's plans, such as {tmp_path / 'a' / 'plans' / '*.json'}")
    with pytest.raises(PlanFileError, match=advice):
        load_plans(str(tmp_path / "*" / "plans" / "*.json"))


def test_a_bucket_without_one_of_its_regimes_is_refused(trace: Trace, tmp_path: Path) -> None:
    solve(trace, tmp_path)
    (tmp_path / "plans" / "tiny.t48.mid.json").unlink()
    with pytest.raises(PlanFileError, match=r"for 48 tokens there is no mid plan among the 3 loaded"):
        load_plans(str(tmp_path / "plans" / "*.json"))


def test_a_budget_too_small_for_the_longest_writes_no_plan_at_all(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_trace(trace, tmp_path / "a.trace.json")
    out = tmp_path / "plans"
    code = main(
        ["solve", "--trace", str(tmp_path / "a.trace.json"), "--budget", "1", "--delta", "0", "--out", str(out)]
    )
    assert code == 4
    assert "needs at 96 tokens per row" in capsys.readouterr().err
    assert not out.exists()
