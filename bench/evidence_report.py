"""The stage report of ``python -m bench.evidence``: JSON with everything, and the tables as markdown."""

from __future__ import annotations

import io
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from bench.evidence_sensitivity import refresh_table, sizes_table
from bench.evidence_setting import Setting, say
from bench.evidence_stages import both_of, risk_table
from bench.table import environment, write_json
from hilore.planner.files import replace_file


def report(setting: Setting) -> None:
    command = "python -m bench.evidence " + shlex.join(sys.argv[1:])
    data: dict[str, Any] = {"environment": environment(torch.get_num_threads(), command), "given": vars(setting.given)}
    made = setting.trace.calibration
    data["calibration"] = {key: value for key, value in asdict(made).items() if key not in ("risks", "samples")}
    tables: list[Table] = []
    for split in ("same", "other"):
        if setting.file(f"{split}.pickle").exists():
            data[split], more = both_of(setting, split)
            data[split]["native"] = _read(setting, split)["native"]
            tables += more
            if data[split]["native"]:
                tables.append(native_table(data[split]["native"]))
    for name, table in (("risk", risk_table), ("sizes", sizes_table), ("refresh", refresh_table)):
        if setting.file(f"{name}.json").exists():
            data[name] = _read(setting, name)
            tables.append(table(data[name]))
    path = setting.given.out or str(setting.file("evidence.json"))
    write_json(data, path)
    replace_file(Path(path).with_suffix(".tables.md"), markdown(tables))
    say(f"written: {path}")


def native_table(native: dict[str, dict[str, float]]) -> Table:
    table = Table(title="updates in the actor's own dtypes", title_justify="left")
    for column in ("plans", "error under plans %", "error of another layout %"):
        table.add_column(column)
    for name, errors in native.items():
        table.add_row(name, f"{100 * errors['plans']:.2f}", f"{100 * errors['control']:.2f}")
    return table


def markdown(tables: list[Table]) -> str:
    parts = []
    for table in tables:
        table.box = box.MARKDOWN
        title, table.title = table.title, None
        out = io.StringIO()
        Console(file=out, width=400, markup=False).print(table)
        lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
        parts.append("\n".join([f"{title}:", "", *lines]))
    return "\n\n".join(parts) + "\n"


def _read(setting: Setting, name: str) -> Any:
    return json.loads(setting.file(f"{name}.json").read_text(encoding="utf-8"))
