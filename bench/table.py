"""Tables and the JSON file of the benchmarks."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.measure import ModelReport
from bench.overhead import LARGEST_RATIO, LARGEST_SHARE, OverheadReport
from hilore.planner.budget import MIB
from hilore.planner.paired import Interval
from hilore.planner.sidebyside_view import plan_table, result_lines, result_table, share_interval
from hilore.runtime.fingerprint import versions

# Shares of No-GC's gain that the unit-grain plans must reach on examples/qwen2_shape.yaml, by ceiling and delta.
FLOORS = {
    ("+0 d", "plan delta 0"): 0.16,
    ("+2.5 d", "plan delta 0"): 0.45,
    ("+5 d", "plan delta 0"): 0.58,
    ("+0 d", "plan delta 1"): 0.20,
    ("+2.5 d", "plan delta 1"): 0.54,
    ("+5 d", "plan delta 1"): 0.75,
}
FLOORS_FOR = "qwen2-shape"


def model_parts(report: ModelReport) -> list[Table | str]:
    """What is printed of one model."""
    one = report.hidden_tensor_bytes / MIB
    title = (
        f"{report.name}: {report.layers} layers, d {report.hidden}, {report.tokens} tokens, {report.head} head; one "
        f"hidden-sized tensor per layer (1 d) is {one:g} MiB, ceilings are GC's measured peak + 0, 2.5 and 5 d"
    )
    parts: list[Table | str] = [title, result_table(report.result), plan_table(report.result)]
    parts += result_lines(report.result)
    for solved in report.solved:
        if solved.message:
            parts.append(f"no plan: {solved.policy} {solved.ceiling}: {solved.message}")
        elif solved.status != "optimal":
            parts.append(f"not proven: {solved.policy} {solved.ceiling}: {solved.status}, gap {solved.gap:.3%}")
    parts += [f"note: {note}" for note in report.trace_notes]
    if report.name == FLOORS_FOR:
        parts += floor_lines(report)
    return parts


def floor_lines(report: ModelReport) -> list[str]:
    """One line per floor: a floor is met by the interval's lower end."""
    lines = []
    shares = {(row.ceiling, row.policy): row.share for row in report.result.rows}
    for key, floor in FLOORS.items():
        share = shares.get(key)
        shown = "no plan" if key not in shares else "undefined" if share is None else share_interval(share)
        met = share is not None and share.low >= floor
        lines.append(f"floor {floor:.2f} for {key[1]} at {key[0]}: {shown}: {'met' if met else 'NOT MET'}")
    return lines


def overhead_parts(report: OverheadReport) -> list[Table | str]:
    """What is printed of the runtime's own cost."""
    ratio, share = report.ratio, report.bookkeeping_share
    return [
        f"{report.name}: full fine-tuning, {report.tokens} tokens; the runtime's own cost",
        result_table(report.result),
        *result_lines(report.result),
        f"all-R plan / Hugging Face GC: {_ratio(ratio)}; at most {LARGEST_RATIO}: "
        f"{'met' if ratio.high <= LARGEST_RATIO else 'NOT MET'}",
        f"the same with dead calls left out: {_ratio(report.ratio_dead)}",
        f"bookkeeping (exposure, choice, switch): {report.bookkeeping_ns / 1e3:,.0f} us, {share.value:.3%} of a step "
        f"({share.low:.3%} to {share.high:.3%}); under {LARGEST_SHARE:.1%}: "
        f"{'met' if share.high < LARGEST_SHARE else 'NOT MET'}",
    ]


def environment(threads: int) -> dict[str, Any]:
    """Where and with what a measurement was made."""
    return {
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "device": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: value for name, value in versions().items() if name.endswith("_patch")},
    }


def models_json(reports: Sequence[ModelReport], threads: int) -> dict[str, Any]:
    return {"environment": environment(threads), "models": [asdict(report) for report in reports]}


def overhead_json(report: OverheadReport, threads: int) -> dict[str, Any]:
    return {"environment": environment(threads), "overhead": asdict(report)}


def write_json(data: dict[str, Any], path: str) -> None:
    """Replace ``path`` whole or not at all; its folder is made where it is missing."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, allow_nan=False)
            file.write("\n")
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _ratio(interval: Interval) -> str:
    return f"{interval.value:.4f} ({interval.low:.4f} to {interval.high:.4f})"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
