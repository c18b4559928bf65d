"""Side-by-side measurement: statistics on known numbers, policies that leave no trace, exactness, peaks, breaches."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hilore.planner.actor import Actor, build_actor, microbatch_of
from hilore.planner.head import base_model
from hilore.planner.paired import median_interval, paired_gain, paired_ratio, paired_share, resampled_rounds
from hilore.planner.rivals import (
    HuggingFaceCheckpointing,
    NoCheckpointing,
    PlanPolicy,
    Policy,
    Running,
    checkpointed_layers,
    counts,
    first_held,
    last_held,
)
from hilore.planner.sidebyside import Contender, SideBySide, measure_peak, measure_policies
from hilore.planner.sidebyside_runs import order_of_round
from hilore.planner.sidebyside_view import plan_table, result_json, result_lines, result_table
from hilore.planner.steadyheap import freed_memory_kept
from hilore.planner.stepping import (
    Gradients,
    at_exposure,
    float32_twin,
    gradients_of,
    idle_optimizer,
    relative_error,
    reshuffled,
    trainable,
)
from hilore.runtime.errors import HiloreError
from hilore.runtime.exposure import exposure_before_forward
from hilore.runtime.plan import Plan
from tests.plans import keepable, plan_for, units_of
from tests.specs import spec_of

LORA = "{kind: lora, rank: 4, alpha: 8, targets: all-linear, dtype: bfloat16}"
BFLOAT16 = "{params: bfloat16}"


def known_picks(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def test_a_gain_is_the_median_of_paired_ratios() -> None:
    picks = known_picks([0, 0, 0], [1, 1, 1], [2, 2, 2])
    gain = paired_gain([300, 200, 600], [200, 100, 500], picks)
    assert gain.value == 0.5
    # Resampled medians are 0.5, 1.0 and 0.2; percentiles 2.5 and 97.5 lie a twentieth of the way from the ends.
    assert gain.low == pytest.approx(0.2 + 0.05 * (0.5 - 0.2), abs=1e-12)
    assert gain.high == pytest.approx(1.0 - 0.05 * (1.0 - 0.5), abs=1e-12)


def test_a_ratio_is_the_other_way_round() -> None:
    ratio = paired_ratio([100, 200, 400], [102, 204, 408], resampled_rounds(3))
    assert (ratio.value, ratio.low, ratio.high) == (1.02, 1.02, 1.02)


def test_the_share_resamples_rounds_jointly() -> None:
    """GC's drift over rounds is in numerator and denominator: a fixed proportion has an interval without width."""
    gc = [1000, 1500, 900, 4000, 1200]
    no_gc = [time // 2 for time in gc]
    policy = [time * 2 // 3 for time in [3 * time for time in gc]]
    share = paired_share([3 * time for time in gc], policy, [3 * time for time in no_gc], resampled_rounds(5))
    assert share is not None
    assert (share.value, share.low, share.high) == (0.5, 0.5, 0.5)


def test_no_share_of_a_gain_that_is_not_there() -> None:
    assert paired_share([100, 100], [90, 90], [100, 100], resampled_rounds(2)) is None


def test_unpaired_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="3 and 2 rounds"):
        paired_gain([1, 2, 3], [1, 2], resampled_rounds(3))


def test_resamples_are_seeded_and_in_range() -> None:
    picks = resampled_rounds(7, seed=3)
    assert picks.shape == (2000, 7)
    assert (picks.min(), picks.max()) == (0, 6)
    assert np.array_equal(picks, resampled_rounds(7, seed=3))
    assert not np.array_equal(picks, resampled_rounds(7, seed=4))


def test_the_interval_of_a_median() -> None:
    found = median_interval([5.0, 1.0, 3.0], known_picks([0, 1, 2], [0, 1, 2]))
    assert (found.value, found.low, found.high) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_round_runs_every_policy_once_in_another_order(count: int) -> None:
    orders = [order_of_round(count, turn) for turn in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert orders[:2] == [list(range(count)), list(range(count))[::-1]]
    # Over two full rotations each policy leads as often as any other.
    assert sorted(order[0] for order in orders) == sorted(list(range(count)) * 2)


def step(*values: float) -> Gradients:
    return Gradients(torch.tensor(0.0), (torch.tensor(values[:1]), torch.tensor(values[1:])))


def test_the_relative_error_is_that_of_the_summed_gradient() -> None:
    reference = [step(1.0, 2.0), step(2.0, 2.0)]
    assert relative_error(reference, reference) == 0.0
    assert relative_error([step(1.0, 2.5), step(2.0, 2.0)], reference) == 0.1
    # Errors that cancel within an update are none.
    assert relative_error([step(2.0, 2.0), step(1.0, 2.0)], reference) == 0.0
    assert relative_error([step(0.0, 1.0)], [step(0.0, 0.0)]) == float("inf")


def test_bitwise_means_bits() -> None:
    zero, minus, nan = step(0.0, 1.0), step(-0.0, 1.0), step(float("nan"), 1.0)
    assert zero.same_gradients(zero)
    assert nan.same_gradients(nan)
    assert not zero.same_gradients(minus)


@pytest.fixture
def actor() -> Actor:
    return build_actor(spec_of(adapter=LORA, precision=BFLOAT16), live_adapters=True)


def state_of(actor: Actor) -> list[object]:
    """Everything that a policy may touch."""
    causal = base_model(actor.model)
    return [
        [layer.gradient_checkpointing for layer in checkpointed_layers(actor.model)],
        [
            sorted(name for name in vars(module) if name in ("forward", "_set_gradient_checkpointing"))
            for module in actor.model.modules()
        ],
        len(causal.get_input_embeddings()._forward_hooks),
        [parameter.requires_grad for parameter in actor.model.parameters()],
    ]


def policies(actor: Actor) -> list[Policy]:
    plan = plan_for(actor.model, keepable(units_of(actor.model)))
    return [
        NoCheckpointing(),
        HuggingFaceCheckpointing(),
        HuggingFaceCheckpointing("every 2", every_n_layers=2),
        HuggingFaceCheckpointing("block", held=last_held(2, 1)),
        PlanPolicy("plan", (plan,)),
    ]


@pytest.mark.parametrize("index", range(5))
def test_a_policy_leaves_the_actor_as_it_was(actor: Actor, index: int) -> None:
    before = state_of(actor)
    policy = policies(actor)[index]
    microbatch = microbatch_of(actor, 16)
    for _ in range(2):
        with policy.applied(actor) as running:
            gradients_of(actor, running, microbatch)
        assert state_of(actor) == before


def test_what_each_policy_replays(actor: Actor) -> None:
    microbatch, actions = microbatch_of(actor, 16), []
    for policy in policies(actor)[:4]:
        with policy.applied(actor) as running:
            gradients_of(actor, running, microbatch)
        actions.append(running.choice.actions)
    assert actions == [("eager",), ("checkpoint", (0, 1)), ("checkpoint", (0,)), ("checkpoint", (0,))]


def test_held_places() -> None:
    assert (last_held(5, 2), first_held(5, 2)) == (frozenset({3, 4}), frozenset({0, 1}))


class Clock:
    """Every step of a policy takes what the test says, in the order of the steps."""

    def __init__(self, *, tick: int = 10) -> None:
        self.now, self.tick = 0, tick

    def __call__(self) -> int:
        self.now += self.tick
        return self.now


def measure(actor: Actor, contenders: list[Contender], **options: object) -> SideBySide:
    microbatches = [microbatch_of(actor, 16, seed=seed) for seed in range(2)]
    defaults = {"gradients_exist": False, "rounds": 2, "clock": Clock(), "resamples": 50}
    return measure_policies(actor, microbatches, contenders, **(defaults | options))  # type: ignore[arg-type]


def plans(actor: Actor) -> tuple[Plan, Plan, Plan]:
    """All recomputed; all kept; gate and up encoded."""
    units = keepable(units_of(actor.model))
    lossy = {name: "L" if name.endswith(("gate_proj", "up_proj")) else mode for name, mode in units.items()}
    return plan_for(actor.model, "R"), plan_for(actor.model, units), plan_for(actor.model, lossy)


def predicted(plan: Plan, peak_bytes: int) -> Plan:
    return replace(plan, predicted=replace(plan.predicted, peak_bytes=peak_bytes))


@pytest.mark.parametrize("exist", [False, True])
def test_exact_policies_are_bitwise_equal_and_lossy_ones_are_measured(actor: Actor, exist: bool) -> None:
    replayed, kept, lossy = (predicted(plan, 2**30) for plan in plans(actor))
    result = measure(
        actor,
        [
            Contender(HuggingFaceCheckpointing("every 2", every_n_layers=2)),
            Contender(PlanPolicy("all R", (replayed,)), "a", 2**30),
            Contender(PlanPolicy("all H", (kept,)), "a", 2**30),
            Contender(PlanPolicy("all H", (kept,)), "b", 2**30),
            Contender(PlanPolicy("lossy", (lossy,)), "b", 2**30),
        ],
        gradients_exist=exist,
    )
    assert [row.policy for row in result.rows] == ["GC", "No-GC", "every 2", "all R", "all H", "all H", "lossy"]
    assert [row.exact for row in result.rows] == [True] * 6 + [False]
    assert [row.error for row in result.rows[:6]] == [0.0] * 6
    assert 1e-5 < result.rows[6].error < 0.02
    assert result.rows[6].native_error > 0
    assert result.breaches == ()
    # Layouts differ by rounding alone: by little in float32, by much more in bfloat16.
    assert result.control_float32 is not None
    assert result.control_error is not None
    assert 0 < result.control_float32 < 1e-5 < result.control_error < 0.1
    peaks = {row.policy: row.peak_bytes for row in result.rows}
    assert peaks["GC"] < peaks["every 2"] < peaks["No-GC"]
    assert peaks["all R"] <= peaks["GC"] < peaks["all H"]
    twin = result.rows[5]
    assert (twin.same_as, twin.peak_bytes, twin.modes) == ("all H a", peaks["all H"], counts(kept.regions))
    assert set(result.times_ns) == {"GC", "No-GC", "every 2", "all R a", "all H a", "lossy b"}


def test_times_come_from_the_clock_alone(actor: Actor) -> None:
    result = measure(actor, [], rounds=3)
    assert result.times_ns == {"GC": (10, 10, 10), "No-GC": (10, 10, 10)}
    row = result.rows[1]
    assert (row.step_ns, row.gain.value, row.gain.low, row.gain.high, row.share) == (10, 0.0, 0.0, 0.0, None)


def test_broken_promises_are_named(actor: Actor) -> None:
    replayed, _, lossy = plans(actor)
    policy = PlanPolicy("all R", (replayed,))
    # A first step also looks at the layers on a few tokens, which shows in the peak of so small a model.
    _, peak = (measure_peak(actor, policy, microbatch_of(actor, 16), gradients_exist=False) for _ in range(2))
    result = measure(
        actor,
        [
            Contender(PlanPolicy("all R", (predicted(replayed, peak - 2),)), "", peak - 1),
            Contender(PlanPolicy("lossy", (predicted(lossy, 2**30),)), error_limit=1e-6),
        ],
    )
    error = result.rows[3].error
    assert result.breaches == (
        f"all R: measured peak {peak:,} B is 1 B over the budget of {peak - 1:,} B",
        f"all R: measured peak {peak:,} B is 2 B over the predicted peak of {peak - 2:,} B",
        f"lossy: gradient error {error:.3%}, allowed {1e-6:.3%}",
    )


def test_a_plan_with_wrong_gradients_is_a_breach(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = predicted(plans(actor)[0], 2**30)
    policy = PlanPolicy("all R", (replayed,))

    original = PlanPolicy.applied

    @contextmanager
    def disturbed(self: PlanPolicy, given: Actor) -> Iterator[Running]:
        handle = trainable(given.model)[0].register_hook(lambda gradient: gradient + 1)
        try:
            with original(self, given) as running:
                yield running
        finally:
            handle.remove()

    monkeypatch.setattr(PlanPolicy, "applied", disturbed)
    result = measure(actor, [Contender(policy)])
    assert not result.rows[2].exact
    assert result.breaches[0].startswith("all R: gradients are not bitwise those of eager although nothing is encoded")


def test_two_rows_of_one_name_are_refused(actor: Actor) -> None:
    with pytest.raises(HiloreError, match="policy 'GC': there are 2 rows"):
        measure(actor, [Contender(HuggingFaceCheckpointing())])


def test_the_plan_is_chosen_by_exposure(actor: Actor) -> None:
    """Two regimes, two microbatches: the row names both, its peak is that of the hungrier plan."""
    low, high = plans(actor)[1], plans(actor)[0]
    low = predicted(replace(low, regime=replace(low.regime, label="low", exposure_high=0.5)), 2**30)
    high = predicted(replace(high, regime=replace(high.regime, label="high", exposure_low=0.5)), 2**30)
    microbatches = [at_exposure(actor, microbatch_of(actor, 16, seed=seed), psi) for seed, psi in ((0, 0.4), (1, 2.0))]
    result = measure_policies(
        actor, microbatches, [Contender(PlanPolicy("plan", (low, high)))], gradients_exist=False, rounds=1,
        clock=Clock(), resamples=10,
    )  # fmt: skip
    row = result.rows[2]
    assert row.regimes == ("low", "high")
    assert row.modes == counts(low.regions)


def test_microbatches_are_scaled_to_an_exposure(actor: Actor) -> None:
    microbatch = at_exposure(actor, microbatch_of(actor, 16), 1.0)
    psi = exposure_before_forward("grpo", microbatch.advantages, microbatch.completion_mask)
    assert 1 - 2e-4 < psi < 1.0


def test_reshuffled_rollouts_are_the_same_rollouts(actor: Actor) -> None:
    microbatch = microbatch_of(actor, 16)
    other = reshuffled(microbatch, padding=3)
    assert other.input_ids.shape == (2, 19)
    assert other.attention_mask[:, :3].sum() == 0
    assert torch.equal(other.input_ids[:, 3:], microbatch.input_ids.flip(0))
    assert torch.equal(other.advantages, microbatch.advantages.flip(0))


def test_the_idle_optimizer_changes_no_parameter(actor: Actor) -> None:
    before = [parameter.clone() for parameter in actor.model.parameters()]
    optimizer = idle_optimizer(actor)
    for parameter in trainable(actor.model):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(map(torch.equal, before, actor.model.parameters()))
    assert all(optimizer.state[parameter] for parameter in trainable(actor.model))


def test_the_float32_twin_has_the_same_weights(actor: Actor) -> None:
    twin = float32_twin(actor)
    pairs = list(zip(actor.model.parameters(), twin.model.parameters(), strict=True))
    assert all(mine.dtype == torch.bfloat16 and theirs.dtype == torch.float32 for mine, theirs in pairs)
    assert all(torch.equal(mine.float(), theirs) for mine, theirs in pairs)
    assert (twin.spec.precision.params, twin.spec.precision.compute) == ("float32", "float32")


def test_tables_and_json_hold_every_row(actor: Actor) -> None:
    kept = predicted(plans(actor)[1], 2**30)
    result = measure(actor, [Contender(PlanPolicy("all H", (kept,)), "+0 d", 2**30)])
    assert result_table(result).row_count == 3
    assert plan_table(result).row_count == 1
    data = result_json(result)
    assert [row["policy"] for row in data["rows"]] == ["GC", "No-GC", "all H"]
    assert data["rows"][2]["modes"] == counts(kept.regions)
    assert result_lines(result)[0].startswith("2 rounds of interleaved steps")


class Library:
    """Notes what the C library is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def mallopt(self, option: int, value: int) -> None:
        self.calls.append((option, value))

    def malloc_trim(self, pad: int) -> None:
        self.calls.append(("trim", pad))


class Glibc(Library):
    def gnu_get_libc_version(self) -> str:
        return "2.36"


def test_freed_memory_is_kept_while_policies_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Glibc()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    monkeypatch.setattr(sys, "platform", "linux")
    with freed_memory_kept() as kept:
        assert kept
        # mallopt(3): M_MMAP_MAX 0, M_TRIM_THRESHOLD the largest int.
        assert library.calls == [(-4, 0), (-1, 2**31 - 1)]
    assert library.calls[2:] == [(-4, 65536), (-1, 131072), ("trim", 0)]


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_other_c_libraries_are_left_alone(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    monkeypatch.setattr(sys, "platform", platform)
    with freed_memory_kept() as kept:
        assert not kept
    assert library.calls == []
