"""Whole updates: predicted peaks are measured ones, under fake tensors and on real ones alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.memory import TIMES_OF, Row, contenders, markdown, measure_case, reproducible_target
from bench.memory_cases import ADAPTERS, ARCHITECTURES, Case, cases, spec_of
from hilore.planner.actor import build_actor, microbatch_of
from hilore.planner.allocator import rounding_of
from hilore.planner.checkfake import FakePeak, check_fake, fake_breaches, fake_update
from hilore.planner.devices import gpu_named
from hilore.planner.emit import solve_trace
from hilore.planner.estimate import estimated_target, target_of
from hilore.planner.fakerank import fake_ranks
from hilore.planner.sidebyside_runs import NO_GC
from hilore.planner.spec_types import Device, Parallel
from hilore.planner.stepping import gradients_of, idle_optimizer
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import reference_peaks
from hilore.planner.wholeupdate import FixedPlan, peak_of_update
from hilore.runtime.errors import HiloreError, UnsupportedModelError
from tests.plans import keepable, plan_for, units_of

LENGTH = 24
TESTED = (
    Case("phi3", "LoRA dropout", "naive", 2),
    Case("qwen3", "full, autocast", "chunked", 1),
    Case("gemma", "LoRA fp32, autocast", "naive", 2),
    Case("llama", "LoRA dropout, autocast", "chunked", 2),
)


@pytest.mark.parametrize("case", TESTED, ids=lambda case: case.name)
def test_predicted_measured_and_fake_peaks_are_one(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All microbatches and the optimizer step, every policy: GC, No-GC, solved plans, encoded ones, demoted ones."""
    # From the second microbatch on all are alike; four of them once.
    count = 4 if case is TESTED[0] else 2
    monkeypatch.setattr("bench.memory.spec_of", lambda case, folder: spec_of(case, folder, (LENGTH,), count))
    fake = case in TESTED[:2]
    rows = list(measure_case(case, tmp_path, fake=fake))
    assert len(rows) == 7
    for row in rows:
        assert row.fake_bytes == (row.measured_bytes if fake else None), row
        assert row.holds, row
        # Under autocast the highest moment of a forward may come before all of its payloads are there.
        loose = "encoded" in row.policy and "autocast" in row.training
        if not loose and "demoted" not in row.policy and "split" not in row.policy:
            assert row.measured_bytes == row.counted_bytes, row
        encodes = " L," in row.policy
        assert row.counted_bytes <= row.predicted_bytes
        assert encodes or row.counted_bytes == row.predicted_bytes, row


def test_the_table_covers_what_it_says() -> None:
    found = list(cases())
    everywhere = {(case.architecture, case.training) for case in found}
    for architecture in ARCHITECTURES:
        assert {case.head for case in found if case.architecture == architecture} == {"naive", "chunked"}
        for training in ("full", "LoRA bf16", "LoRA fp32", "LoRA dropout"):
            assert (architecture, training) in everywhere
    assert {case.training for case in found} == set(ADAPTERS)
    assert len(found) == len({case.name for case in found})


def test_a_row_holds_within_its_bounds_alone() -> None:
    row = Row("qwen2", "full", "naive", 8, "GC", "", 400 << 20, 400 << 20, None, 400 << 20)
    assert row.holds
    assert not replace(row, predicted_bytes=row.measured_bytes - 1).holds
    assert replace(row, predicted_bytes=404 << 20).holds
    assert not replace(row, predicted_bytes=(404 << 20) + 1).holds
    assert replace(row, measured_bytes=1000, predicted_bytes=1000 + (1 << 20)).holds
    assert not replace(row, measured_bytes=1000, predicted_bytes=1001 + (1 << 20)).holds
    assert not replace(row, fake_bytes=row.measured_bytes + 1).holds
    assert "| qwen2 | full | naive | 8 | GC | 419,430,400 | 419,430,400 | 0 |" in markdown([row], "command")


@pytest.mark.parametrize("training", ["full", "LoRA fp32"])
def test_a_rank_of_fsdp2_with_a_chunked_head_has_the_predicted_peak(training: str, tmp_path: Path) -> None:
    """PyTorch gathers the output layer within the model's forward alone, and makes a class of its own of it."""
    spec = spec_of(Case("qwen2", training, "chunked", 1), tmp_path, (LENGTH,))
    precision = replace(spec.precision, params="float32", grads="float32")
    # On CUDA collectives take no memory of their own, so that the two are one.
    spec = replace(spec, precision=precision, parallel=Parallel("fsdp2", 3, True), device=Device("cuda", TIMES_OF))
    trace = trace_spec(spec, target=estimated_target(gpu_named(TIMES_OF, where="")))
    budget = sum(reference_peaks(trace)) // 2
    plan = solve_trace(trace, budget_bytes=budget, delta=0.0).plans[-1]
    (found,) = check_fake([plan], spec, trace=trace)
    assert found.peak_bytes == plan.predicted.peak_bytes


def test_what_cannot_run_under_fake_ranks_is_refused(tmp_path: Path) -> None:
    spec = spec_of(Case("qwen2", "full", "naive", 1), tmp_path, (LENGTH,))
    wanted = replace(spec, parallel=Parallel("fsdp1", 2, True))
    with (
        pytest.raises(UnsupportedModelError, match=r"parallel.kind: fsdp1 cannot run under fake tensors"),
        fake_update(wanted, target_of(wanted), LENGTH),
    ):
        pass
    assert not torch.distributed.is_initialized()
    with fake_ranks(2), pytest.raises(HiloreError, match="a process group exists already"), fake_ranks(2):
        pass


def test_breaches_name_what_was_broken_and_by_how_much(tmp_path: Path) -> None:
    spec = spec_of(Case("llama", "LoRA bf16", "naive", 1), tmp_path, (LENGTH,))
    trace = trace_spec(spec, target=reproducible_target())
    (policy,) = [c.policy for c in contenders(trace, trace.buckets[0]) if "demoted" in c.label]
    assert isinstance(policy, FixedPlan)
    plan = policy.plan
    plan = replace(plan, name="p", budget_bytes=3000, predicted=replace(plan.predicted, peak_bytes=2000))
    assert list(fake_breaches(FakePeak(plan, 2000, 3000, rounding_of(Counter())), tight=True)) == []
    over, high, demoted = fake_breaches(FakePeak(plan, 3001, 3002, rounding_of(Counter())), tight=True)
    assert over == "p.high: peak 3,001 B under fake tensors is 1 B over the budget of 3,000 B"
    assert high == "p.high: peak 3,001 B under fake tensors is 1,001 B over the predicted peak of 2,000 B"
    assert demoted == (
        "p.high: with its L units recomputed peak 3,002 B under fake tensors is 2 B over the budget of 3,000 B"
    )
    loose = replace(plan, predicted=replace(plan.predicted, peak_bytes=(1 << 20) + 2001))
    assert list(fake_breaches(FakePeak(loose, 2000, None, rounding_of(Counter())), tight=False)) == []
    (line,) = fake_breaches(FakePeak(loose, 2000, None, rounding_of(Counter())), tight=True)
    assert "predicted peak 1,050,577 B is 1,048,577 B" in line


def test_a_demoted_plan_has_the_gradients_of_eager(tmp_path: Path) -> None:
    actor = build_actor(spec_of(Case("qwen2", "LoRA bf16", "naive", 1), tmp_path, (LENGTH,)), live_adapters=True)
    microbatch = microbatch_of(actor, LENGTH)
    plan = plan_for(actor.model, keepable(units_of(actor.model, microbatch), "L"))
    found = []
    for policy in (NO_GC, FixedPlan("p", plan), FixedPlan("p", plan, demoted=True)):
        with policy.applied(actor) as running:
            found.append(gradients_of(actor, running, microbatch))
    eager, encoded, demoted = found
    assert demoted.same_gradients(eager)
    assert not encoded.same_gradients(eager)


def test_an_update_counts_every_microbatch(tmp_path: Path) -> None:
    spec = spec_of(Case("qwen2", "LoRA bf16", "naive", 1), tmp_path, (LENGTH,))
    actor = build_actor(spec, fake=True)
    with actor.faked():
        optimizer = idle_optimizer(actor)
    update = [microbatch_of(actor, LENGTH, seed=place) for place in range(4)]
    tensors = [getattr(update[0], name) for name in update[0].__slots__]
    one = sum(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, torch.Tensor))
    three, four = (peak_of_update(actor, NO_GC, update[:count], optimizer).peak_bytes for count in (3, 4))
    assert four - three == one
