"""Tables and the JSON file of the benchmarks."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from typing import Any

from rich.table import Table

from bench.overhead import LARGEST_RATIO, LARGEST_SHARE, OverheadReport
from hilore.planner.files import replace_file
from hilore.planner.paired import Interval
from hilore.planner.sidebyside_model import ModelReport
from hilore.planner.sidebyside_report import environment, model_parts
from hilore.planner.sidebyside_view import result_lines, result_table, share_interval

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


def bench_parts(report: ModelReport) -> list[Table | str]:
    """What is printed of one model, with the floors where there are any for it."""
    return [*model_parts(report), *(floor_lines(report) if report.name == FLOORS_FOR else [])]


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


def versions() -> str:
    """Of the libraries that figures depend on: ``torch 2.13.0, transformers 5.24.0``."""
    found = environment(1, "")["versions"]
    return ", ".join(f"{name.removesuffix('_patch')} {version}" for name, version in found.items())


def command() -> str:
    """As it was typed."""
    return shlex.join(["python", "-m", "bench", *sys.argv[1:]])


def overhead_json(report: OverheadReport, threads: int) -> dict[str, Any]:
    return {"environment": environment(threads, command()), "overhead": asdict(report)}


def write_json(data: dict[str, Any], path: str) -> None:
    """Replace ``path`` whole or not at all; its folder is made where it is missing."""
    replace_file(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def _ratio(interval: Interval) -> str:
    return f"{interval.value:.4f} ({interval.low:.4f} to {interval.high:.4f})"
