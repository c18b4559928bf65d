"""Times of a region's calls on the device of the run: medians after warm-up, with their spread."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hilore.planner.regionrun import RegionRunner, Split
from hilore.planner.trace import CodecCost
from hilore.runtime.ambient import running
from hilore.runtime.codecs import get_codec, warm_up
from hilore.runtime.frame import Frame
from hilore.runtime.region import RegionBinding
from hilore.runtime.unitbinding import output_of

WARM_UP = 2
REPEATS = 7
# Spread of a measurement (interquartile range over median) from which `show` warns.
LOUD_SPREAD = 0.25

Clock = Callable[[], int]


def spread_notes(spread: float) -> tuple[str, ...]:
    """What to tell of times that spread so much; nothing of quiet ones."""
    if spread <= LOUD_SPREAD:
        return ()
    return (
        f"times spread by {spread:.0%} of their median (interquartile range): the machine was busy, or the model is so "
        "small that calls cost more than their work; predicted times and gains are as uncertain. Trace again when it "
        "is quiet",
    )


def device_clock(device: torch.device) -> Clock:
    """Nanoseconds once everything queued on ``device`` is done."""
    if device.type != "cuda":
        return time.perf_counter_ns

    def now() -> int:
        torch.cuda.synchronize(device)
        return time.perf_counter_ns()

    return now


@dataclass(frozen=True, slots=True)
class Timing:
    """Median of the repeats in nanoseconds, and their interquartile range as a share of it."""

    median_ns: int
    spread: float

    @classmethod
    def of(cls, samples: Iterable[int]) -> Timing:
        values = sorted(samples)
        median = statistics.median(values)
        if len(values) < 2 or median == 0:
            return cls(round(median), 0.0)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(round(median), (high - low) / median)


def timed(run: Callable[[], object], clock: Clock, *, warm_up_runs: int = WARM_UP, repeats: int = REPEATS) -> Timing:
    """Run ``warm_up_runs`` times unmeasured (first calls compile, allocate, page in), then measure ``repeats``."""
    samples = []
    for turn in range(warm_up_runs + repeats):
        began = clock()
        run()
        took = clock() - began
        if turn >= warm_up_runs:
            samples.append(took)
    return Timing.of(samples)


@dataclass(frozen=True, slots=True)
class RegionTimes:
    """``run_ns`` of each unit by relative name; ``outputs``: one output per unit, for timing codecs on real values.

    ``plan_extra_ns``: what forward and backward take more under a plan, replays aside (trace.RegionClass).
    """

    forward_ns: int
    backward_ns: int
    plan_extra_ns: int
    run_ns: dict[str, int]
    replay_fixed_ns: int
    gc_replay_ns: int
    early_fixed_ns: int
    spread: float
    outputs: dict[str, torch.Tensor]


def time_region(
    runner: RegionRunner,
    dead: Iterable[str],
    clock: Clock,
    *,
    split_at: str = "",
    warm_up_runs: int = WARM_UP,
    repeats: int = REPEATS,
) -> RegionTimes:
    """Times of one region. ``dead``: units (relative) that no replay needs once all others are kept."""
    left_out = frozenset(dead)
    plain = runner.without_units()
    kept = [name for name in runner.units if name not in left_out]
    samples: dict[str, list[int]] = {key: [] for key in ("forward", "backward", "fixed", "all", "gc", "early")}
    plan_extra: list[int] = []
    units: dict[str, list[int]] = {name: [] for name in runner.units}
    outputs: dict[str, torch.Tensor] = {}
    for turn in range(warm_up_runs + repeats):
        with timing_units(runner, clock) as stopwatch:
            began = clock()
            output = runner.call(runner.inputs.fresh_boundary())
            forward_ns = clock() - began
        # What a unit costs in a replay counts; of one that no replay runs to its end, the forward's time stands.
        unit_ns = stopwatch.took_ns | _units_in_a_replay(runner, clock)
        backward_ns = _backward(output, clock)
        extra_ns = _backward_under_a_plan(runner, clock) - backward_ns - _forward(runner, clock)
        framed_ns, fixed_ns = _replay(runner, kept, left_out, clock)
        _, all_ns = _replay(runner, (), left_out, clock)
        _, gc_ns = _replay(plain, (), frozenset(), clock)
        _, early_ns = _replay(runner, kept, left_out, clock, Split(split_at, ())) if split_at else (0, 0)
        if turn < warm_up_runs:
            continue
        outputs = stopwatch.outputs
        for key, value in zip(samples, (forward_ns, backward_ns, fixed_ns, all_ns, gc_ns, early_ns), strict=True):
            samples[key].append(value)
        plan_extra.append(framed_ns + extra_ns)
        for name, took in unit_ns.items():
            units[name].append(took)
    for parameter in runner.binding.module.parameters():
        parameter.grad = None
    timings = {key: Timing.of(values) for key, values in samples.items()}
    run_ns = {name: Timing.of(values).median_ns if values else 0 for name, values in units.items()}
    run_ns = _added_up(run_ns, kept, timings["all"].median_ns - timings["fixed"].median_ns)
    return RegionTimes(
        timings["forward"].median_ns,
        timings["backward"].median_ns,
        round(statistics.median(plan_extra)),
        run_ns,
        timings["fixed"].median_ns,
        timings["gc"].median_ns,
        timings["early"].median_ns,
        max(timing.spread for timing in timings.values()),
        outputs,
    )


def _added_up(run_ns: dict[str, int], running: Iterable[str], together_ns: int) -> dict[str, int]:
    """Times of units in proportion, so that the ``running`` ones take what a replay with them takes more.

    Timed one by one they add up to more: each reading of the clock costs, and a call's host time is hidden behind its
    device time when nothing waits for it. As they were where the difference is not positive, which only noise does.
    """
    apart_ns = sum(run_ns[name] for name in running)
    if together_ns <= 0 or apart_ns <= 0:
        return run_ns
    return {name: round(took * together_ns / apart_ns) for name, took in run_ns.items()}


def codec_costs(
    output: torch.Tensor, names: Iterable[str], clock: Clock, *, repeats: int = REPEATS
) -> tuple[CodecCost, ...]:
    """Encode and decode times of each codec on this output, its payload and its workspace on this device.

    Lossless codecs that cannot hold the output in fewer bytes are left out.
    """
    found = []
    warm_up(names := tuple(names), [output.dtype], output.device)
    with torch.no_grad():
        for name in names:
            codec = get_codec(name)
            if codec.lossless and not codec.shrinks(output.shape, output.dtype):
                continue
            encoded = codec.encode(output)
            if codec.lossless and encoded.raw:
                continue
            encode = timed(lambda codec=codec: codec.encode(output), clock, warm_up_runs=1, repeats=repeats)  # type: ignore[misc]
            decode = timed(
                lambda codec=codec, encoded=encoded: codec.decode(encoded),  # type: ignore[misc]
                clock,
                warm_up_runs=1,
                repeats=repeats,
            )
            shape = tuple(output.shape)
            payload = codec.nbytes(shape, output.dtype)
            workspace = codec.workspace_bytes(shape, output.dtype, output.device.type)
            found.append(CodecCost(name, payload, encode.median_ns, decode.median_ns, workspace))
    return tuple(found)


def _replay(
    runner: RegionRunner, kept: Iterable[str], dead: frozenset[str], clock: Clock, split: Split | None = None
) -> tuple[int, int]:
    """A planned forward of the region, and its replay; with ``split`` the replay's second stage alone."""
    frame = runner.frame(kept, dead, runner.inputs.fresh_boundary(), split)
    began = clock()
    output = frame.run()
    forward_ns = clock() - began
    began = clock()
    frame.replay(late=split is None)
    replay_ns = clock() - began
    del output
    return forward_ns, replay_ns


def _forward(runner: RegionRunner, clock: Clock) -> int:
    """The region's forward without anything of ours."""
    boundary = runner.inputs.fresh_boundary()
    began = clock()
    output = runner.call(boundary)
    took = clock() - began
    del output
    return took


def _backward(output: torch.Tensor, clock: Clock) -> int:
    root = output.float().sum()
    began = clock()
    root.backward()  # type: ignore[no-untyped-call]
    return clock() - began


def _backward_under_a_plan(runner: RegionRunner, clock: Clock) -> int:
    """The backward of what a plan's forward records, without a replay: that of a held region."""
    return _backward(runner.held(runner.inputs.fresh_boundary()), clock)


def _units_in_a_replay(runner: RegionRunner, clock: Clock) -> dict[str, int]:
    """What each unit took in one replay that runs all of them, by relative name."""
    frame = runner.frame((), (), runner.inputs.fresh_boundary(), kind=functools.partial(_TimedFrame, clock))
    output = frame.run()
    frame.replay(late=True)
    del output
    assert isinstance(frame, _TimedFrame)
    return {name: frame.took_ns[unit.name] for name, unit in runner.units.items() if unit.name in frame.took_ns}


class _TimedFrame(Frame):
    """Times every unit's call in its replay."""

    def __init__(self, clock: Clock, region: RegionBinding, *forward: Any) -> None:
        super().__init__(region, *forward)
        self.took_ns: dict[str, int] = {}
        self._clock = clock
        self._intercepted = frozenset(region.units)

    def unit_call(self, unit_name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        began = self._clock()
        result = super().unit_call(unit_name, call, args, kwargs)
        if self.replaying:
            self.took_ns[unit_name] = self._clock() - began
        return result


class Stopwatch:
    """Stands in for a frame: units are routed to it while their region runs, and it times each call."""

    def __init__(self, region: RegionBinding, relative: Mapping[str, str], clock: Clock) -> None:
        self.region = region
        self.took_ns: dict[str, int] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self._relative = relative
        self._clock = clock

    def unit_call(self, unit_name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._relative[unit_name]
        began = self._clock()
        result = call(*args, **kwargs)
        self.took_ns[name] = self._clock() - began
        self.outputs[name] = output_of(unit_name, result)[0].detach()
        return result

    def front_call(self, _unit_name: str, _module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Inside a unit that is timed as a whole."""
        return call(*args)


@contextmanager
def timing_units(runner: RegionRunner, clock: Clock) -> Iterator[Stopwatch]:
    """Time every unit's call of this region inside the block; glue runs as without a plan."""
    stopwatch = Stopwatch(runner.binding, {unit.name: name for name, unit in runner.units.items()}, clock)
    before = running.frame
    running.frame = stopwatch  # type: ignore[assignment]
    try:
        with runner.binding.installed(frozenset(runner.binding.units), glue=False):
            yield stopwatch
    finally:
        running.frame = before
