"""``python -m bench.memory``: the peak of whole updates on real CPU tensors beside what trace and solve predicted.

Tiny random models of five architectures; gradients accumulated over four microbatches, then AdamW. Every prediction is
read from the trace (GC, No-GC) or from the plan. Times come from a table, so that plans are the same in every run.
Writes the table and the figures of docs/measurements/memory-cpu.md; exit code 6 where a prediction misses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from bench.memory_cases import Case, cases, spec_of
from bench.table import environment, versions, write_json
from hilore.planner.actor import Actor, build_actor, microbatch_of
from hilore.planner.composition import plan_compositions
from hilore.planner.devices import gpu_named
from hilore.planner.emit import solve_trace
from hilore.planner.estimate import Target
from hilore.planner.files import replace_file
from hilore.planner.handmade import handmade_plan
from hilore.planner.regionparts import WORKSPACE
from hilore.planner.rivals import Policy
from hilore.planner.sidebyside_runs import GC, NO_GC
from hilore.planner.stepping import idle_optimizer
from hilore.planner.trace import Bucket, Trace, UnitTrace
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import reference_peaks, verify_modes
from hilore.planner.wholeupdate import FixedPlan, peak_of_update
from hilore.runtime.plan import Plan

BREACH = 6
MIB = 2**20
LOOSE_SHARE, LOOSE_BYTES = 0.01, MIB
# Budgets as shares of the way from GC's to No-GC's peak, each with its delta; at the shorter length the last alone.
SOLVED = ((0.0, 0.0), (0.05, 4.0), (0.35, 0.0))
CODEC = "int8-g64"
TIMES_OF = "l40s-48gb"
COMMAND = "python -m bench.memory --out docs/measurements/memory-cpu.json --markdown docs/measurements/memory-cpu.md"
GAP_PERCENT = 2.0


@dataclass(frozen=True, slots=True)
class Row:
    """One policy of one configuration. ``fake_bytes``: of the same update under fake tensors, where that was asked.
    ``counted_bytes``: the prediction without the workspace that codecs declare, which no counter sees."""

    architecture: str
    training: str
    head: str
    tokens: int
    policy: str
    event: str
    measured_bytes: int
    predicted_bytes: int
    fake_bytes: int | None
    counted_bytes: int

    @property
    def over_bytes(self) -> int:
        return self.predicted_bytes - self.measured_bytes

    @property
    def holds(self) -> bool:
        """measured <= predicted <= 1.01 x measured, or 1 MiB above it; and fake tensors give the same peak."""
        allowed = max(LOOSE_SHARE * self.measured_bytes, LOOSE_BYTES)
        return 0 <= self.over_bytes <= allowed and self.fake_bytes in (None, self.measured_bytes)


@dataclass(frozen=True, slots=True)
class Contender:
    """``peak_bytes`` and ``event`` as predicted; ``counted_bytes`` see Row."""

    label: str
    policy: Policy
    peak_bytes: int
    event: str
    counted_bytes: int


def reproducible_target() -> Target:
    """The CPU's memory with times from the table of GPUs: no clock decides which plans are measured."""
    gpu = replace(gpu_named(TIMES_OF, where=""), launch_ns=0)
    return Target(torch.device("cpu"), gpu, True, "cpu", 0, 0)


def measure_case(case: Case, folder: Path, *, fake: bool = False) -> Iterator[Row]:
    """Every policy at every length of one configuration."""
    spec = spec_of(case, folder)
    trace = trace_spec(spec, target=reproducible_target())
    actors = [build_actor(spec, live_adapters=True)]
    if fake:
        actors.append(build_actor(spec, fake=True))
    for bucket in trace.buckets:
        found = list(contenders(trace, bucket))
        peaks = [_measure(actor, bucket.tokens, found) for actor in actors]
        for place, contender in enumerate(found):
            yield Row(
                case.architecture,
                case.training,
                case.head,
                bucket.tokens,
                contender.label,
                contender.event,
                peaks[0][place],
                contender.peak_bytes,
                peaks[1][place] if fake else None,
                contender.counted_bytes,
            )


def contenders(trace: Trace, bucket: Bucket) -> Iterator[Contender]:
    """GC, No-GC, solved plans; at the longest length also all that a codec takes encoded, and the same demoted."""
    gc_peak, no_gc_peak = reference_peaks(trace, bucket)
    yield Contender("GC", GC, gc_peak, "", gc_peak)
    yield Contender("No-GC", NO_GC, no_gc_peak, "", no_gc_peak)
    alone = replace(trace, buckets=(bucket,))
    longest = bucket.tokens == max(other.tokens for other in trace.buckets)
    for share, delta in SOLVED if longest else SOLVED[-1:]:
        budget = gc_peak + int(share * (no_gc_peak - gc_peak))
        plan = solve_trace(alone, budget_bytes=budget, delta=delta, gap_percent=GAP_PERCENT).plans[-1]
        predicted, counted = plan.predicted, _counted(alone, bucket, plan)
        yield Contender(_label(plan), FixedPlan("plan", plan), predicted.peak_bytes, predicted.peak_event, counted)
    if longest:
        plan = _encoded(alone)
        found = verify_modes(alone, bucket, plan.regions, risk_free=True)
        label = _label(plan).replace("delta 0", "encoded")
        counted = _counted(alone, bucket, plan)
        yield Contender(label, FixedPlan("plan", plan), found.peak_bytes, found.peak_event, counted)
        counted = _counted(alone, bucket, plan, demoted=True)
        demoted = FixedPlan("plan", plan, demoted=True)
        yield Contender(f"{label}, demoted", demoted, found.demoted_peak_bytes, "", counted)


def _counted(trace: Trace, bucket: Bucket, plan: Plan, *, demoted: bool = False) -> int:
    """The highest event where codecs have no workspace."""
    found = plan_compositions(trace, bucket, plan.regions, demoted=demoted)
    return max(event.live_bytes - dict(event.parts).get(WORKSPACE, 0) for event in found)


def _encoded(trace: Trace) -> Plan:
    """In every region the measured set with most units that ``CODEC`` takes: those at L, its others at H."""
    region_class = trace.buckets[0].classes[0]
    takes = {unit.name for unit in region_class.units if CODEC in (cost.codec for cost in unit.codecs)}
    sets = [set(found.kept) for found in region_class.keep_sets if not found.split]
    kept = max(sets, key=lambda names: (len(names & takes), -len(names)))

    def mode_of(_region: str, unit: UnitTrace) -> str:
        return "R" if unit.name not in kept else CODEC if unit.name in takes else "H"

    return handmade_plan(trace, mode_of)


def _label(plan: Plan) -> str:
    held = sum(region.hold for region in plan.regions)
    split = sum(region.split_at is not None for region in plan.regions)
    counts = [f"{plan.count(mode)} {mode}" for mode in "HLR" if plan.count(mode)]
    counts += [f"{held} held"] * (held > 0) + [f"{split} split"] * (split > 0)
    return f"delta {plan.delta:g}: {', '.join(counts)}"


def _measure(actor: Actor, tokens: int, found: Sequence[Contender]) -> list[int]:
    update = [microbatch_of(actor, tokens, seed=place) for place in range(actor.spec.batch.accumulation)]
    with actor.faked():
        optimizer = idle_optimizer(actor)
    return [peak_of_update(actor, contender.policy, update, optimizer).peak_bytes for contender in found]


def markdown(rows: Sequence[Row], command: str) -> str:
    """The document with its table."""
    worst = max(rows, key=lambda row: row.over_bytes / row.measured_bytes)
    under = sum(row.over_bytes >= 0 for row in rows)
    exact = sum(row.measured_bytes == row.counted_bytes for row in rows)
    large = sum(row.measured_bytes >= 30 * MIB for row in rows)
    lines = [
        "# Predicted and measured peaks on CPU",
        "",
        f"`{command}`",
        f"({versions()}, one thread). Random models of three layers, d 256; one or two rows per microbatch, gradients",
        "accumulated over four microbatches, then AdamW. Measured: highest bytes of live storages in the whole update",
        "on real CPU tensors (`hilore.runtime.meter.StorageMeter`). Predicted: what trace (GC, No-GC) and solve (plans)"
        ' write; "encoded" plans are not solved but encode all that a codec takes. "demoted": every L unit turned to R',
        "after each forward, against the peak that solve allows for that. Workspace that codecs declare is in",
        "predictions and in no count.",
        "",
        f"{len(rows)} configurations: measured <= predicted in {under}, equal to the byte (but for that workspace) "
        f"in {exact}; the largest excess is {worst.over_bytes / worst.measured_bytes:.2%} "
        f"({worst.over_bytes:,} B: {worst.architecture}, {worst.training}, {worst.head}, {worst.tokens} tokens, "
        f"{worst.policy}). {large} peaks are 30 MiB or more.",
        "",
        "| model | training | head | tokens | policy | measured B | predicted B | over |",
        "|---|---|---|--:|---|--:|--:|--:|",
    ]
    for row in rows:
        over = "0" if row.over_bytes == 0 else f"{row.over_bytes / row.measured_bytes:+.2%}"
        lines.append(
            f"| {row.architecture} | {row.training} | {row.head} | {row.tokens} | {row.policy} | "
            f"{row.measured_bytes:,} | {row.predicted_bytes:,} | {over} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--out", metavar="FILE", help="JSON with all figures")
    parser.add_argument("--markdown", metavar="FILE", help="the document with its table")
    parser.add_argument("--only", metavar="TEXT", default="", help="configurations whose name contains this")
    parser.add_argument("--resume", action="store_true", help="keep the configurations that --out has already")
    parser.add_argument("--fake", action="store_true", help="also under fake tensors, which must give the same peak")
    given = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = _rows_of(given.out) if given.resume and given.out else []
    done = {(row.architecture, row.training, row.head) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            if given.only not in case.name or (case.architecture, case.training, case.head) in done:
                continue
            for row in measure_case(case, Path(folder), fake=given.fake):
                rows.append(row)
                sys.stdout.write(
                    f"{case.name}, {row.tokens}, {row.policy}: measured {row.measured_bytes:,} predicted "
                    f"{row.predicted_bytes:,} ({row.over_bytes:+,}){'' if row.holds else ' MISSED'}\n"
                )
                sys.stdout.flush()
            if given.out:
                _write(rows, given.out)
    if given.out:
        _write(rows, given.out)
    if given.markdown:
        replace_file(given.markdown, markdown(rows, COMMAND))
    missed = sum(not row.holds for row in rows)
    sys.stdout.write(f"{len(rows)} configurations, {missed} missed\n")
    return BREACH if missed or not rows else 0


def _write(rows: Sequence[Row], path: str) -> None:
    data: dict[str, Any] = {"environment": environment(1, COMMAND), "rows": [asdict(row) for row in rows]}
    write_json(data, path)


def _rows_of(path: str) -> list[Row]:
    """The rows of an earlier run that was stopped, none where there is no file: whole configurations alone."""
    if not Path(path).exists():
        return []
    return [Row(**row) for row in json.loads(Path(path).read_text(encoding="utf-8"))["rows"]]


if __name__ == "__main__":
    sys.exit(main())
