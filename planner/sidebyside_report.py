"""What is printed and stored of one model's policies side by side."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from hilore.planner.budget import MIB
from hilore.planner.sidebyside_model import ModelReport
from hilore.planner.sidebyside_view import plan_table, result_lines, result_table
from hilore.runtime.fingerprint import versions


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
    return parts


def models_json(reports: Sequence[ModelReport], threads: int, command: str) -> dict[str, Any]:
    """What a benchmark's JSON file holds; `report` reads it."""
    return {"environment": environment(threads, command), "models": [asdict(report) for report in reports]}


def environment(threads: int, command: str) -> dict[str, Any]:
    """Where and with what a measurement was made."""
    return {
        "command": command,
        "device": _device_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {name: value for name, value in versions().items() if name.endswith("_patch")},
    }


def _device_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
