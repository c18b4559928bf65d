"""C-48: times are medians after warm-up, by the clock alone; their spread is stored, and a loud one is said."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from hilore.planner import estimate
from hilore.planner.profile import LOUD_SPREAD, REPEATS, WARM_UP, Timing, codec_costs, time_region, timed
from hilore.planner.regionrun import RegionInputs, RegionRunner
from hilore.planner.tracefile import load_trace, save_trace
from hilore.planner.tracing import trace_spec
from hilore.planner.view import trace_lines
from tests.specs import spec_of

MS = 1_000_000


class FakeClock:
    """Stands still but for what ``spend`` adds."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def spend(self, nanoseconds: int) -> None:
        self.now += nanoseconds


class Takes(nn.Module):
    """A linear whose calls take these times, in order; the last one again and again."""

    def __init__(self, clock: FakeClock, times_ms: Iterable[int]) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.clock = clock
        self.times_ms = list(times_ms)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.spend(self.times_ms[min(self.calls, len(self.times_ms) - 1)] * MS)
        self.calls += 1
        result: torch.Tensor = self.inner(x)
        return result


def runs(clock: FakeClock, times_ms: Iterable[int]) -> Any:
    times = iter(times_ms)
    return lambda: clock.spend(next(times) * MS)


def test_a_slow_first_call_is_no_part_of_the_median() -> None:
    clock = FakeClock()
    first = timed(runs(clock, [50]), clock, warm_up_runs=0, repeats=1)
    assert first.median_ns == 50 * MS
    found = timed(runs(clock, [50, 9, *[2] * REPEATS]), clock)
    assert found == Timing(2 * MS, 0.0)
    assert WARM_UP == 2
    assert clock.now == (50 + 50 + 9 + 2 * REPEATS) * MS


def test_it_is_the_median_and_not_the_mean_or_the_least() -> None:
    clock = FakeClock()
    found = timed(runs(clock, [50, 50, 1, 2, 3, 4, 5, 6, 500]), clock, repeats=7)
    assert found.median_ns == 4 * MS
    assert found.spread == (5.5 - 2.5) / 4, "the quartiles' distance as a share of the median"


def test_spread_of_one_sample_and_of_no_time_is_zero() -> None:
    assert Timing.of([7]) == Timing(7, 0.0)
    assert Timing.of([0, 0, 0]) == Timing(0, 0.0)


def test_a_unit_whose_first_call_takes_50_ms() -> None:
    clock = FakeClock()
    slow, steady = Takes(clock, [50, 1]), Takes(clock, [3])
    region = nn.Sequential(slow, nn.Tanh(), steady).train()
    runner = RegionRunner.of(
        "region",
        region,
        RegionInputs(torch.randn(4, 64), True, (), {}),
        {"0": ("linear", slow), "2": ("linear", steady)},
    )
    found = time_region(runner, (), clock, repeats=3)
    assert slow.calls > 3
    assert found.run_ns == {"0": 1 * MS, "2": 3 * MS}
    assert (found.forward_ns, found.gc_replay_ns) == (4 * MS, 4 * MS), "every call of the region runs both units"
    assert found.replay_fixed_ns == 0, "with both kept no unit runs in a replay"
    assert found.spread == 0.0


def test_one_measurement_of_many_that_spreads_is_the_spread() -> None:
    clock = FakeClock()
    # Per turn: forward, a timed frame's forward and replay, a held forward, a plain one, the fixed replay's forward,
    # forward and replay of an all-R frame, GC's forward and replay.
    unit = Takes(clock, itertools.chain.from_iterable([turn, 1, 1, 1, 1, 1, 1, 1, 1, 1] for turn in (1, 2, 3)))
    region = nn.Sequential(unit).train()
    runner = RegionRunner.of("region", region, RegionInputs(torch.randn(4, 64), True, (), {}), {"0": ("linear", unit)})
    found = time_region(runner, (), clock, warm_up_runs=0, repeats=3)
    forwards = [1, 2, 3]
    low, _, high = statistics.quantiles(forwards, n=4, method="inclusive")
    assert found.forward_ns == 2 * MS
    assert found.spread == (high - low) / 2


def test_codecs_are_timed_by_the_same_clock_after_a_warm_up() -> None:
    ticks = itertools.count(step=1000)
    (cost,) = codec_costs(torch.ones(16, 64), ("int8-g128",), lambda: next(ticks), repeats=3)
    assert (cost.encode_ns, cost.decode_ns) == (1000, 1000)


@pytest.mark.parametrize(("steps", "loud"), [((1000,), False), ((1000, 5000, 100, 90_000), True)])
def test_a_loud_spread_is_stored_and_said(
    steps: tuple[int, ...], loud: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    clock = itertools.accumulate(itertools.cycle(steps))
    monkeypatch.setattr(estimate, "device_clock", lambda _device: lambda: next(clock))
    trace = trace_spec(spec_of())
    assert (trace.time_spread > LOUD_SPREAD) == loud
    save_trace(trace, tmp_path / "tiny.trace.json")
    kept = load_trace(tmp_path / "tiny.trace.json")
    assert kept.time_spread == trace.time_spread
    said = [line for line in trace_lines(kept) if "times spread by" in line]
    assert len(said) == loud
    if loud:
        assert said[0].startswith(f"note: times spread by {trace.time_spread:.0%} of their median")
    else:
        assert trace.time_spread == 0.0
