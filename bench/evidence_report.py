"""The stage report of ``python -m bench.evidence``: JSON with everything, and the tables as markdown."""

from __future__ import annotations

import json
import pickle
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bench.evidence_sensitivity import refresh_table, sizes_table
from bench.evidence_setting import Setting, say
from bench.evidence_stages import both_of, risk_tables
from bench.table import environment, write_json
from hilore.planner.calibration_view import risk_table as risk_of_kinds
from hilore.planner.files import replace_file
from hilore.planner.heldout import HeldOut
from hilore.planner.heldout_audit import audited


def report(setting: Setting) -> None:
    command = "python -m bench.evidence " + shlex.join(sys.argv[1:])
    data: dict[str, Any] = {"environment": environment(torch.get_num_threads(), command), "given": vars(setting.given)}
    made = setting.trace.calibration
    data["calibration"] = {key: value for key, value in asdict(made).items() if key not in ("risks", "samples")}
    tables: list[Table] = [risk_of_kinds(setting.trace)]
    for split in ("same", "other"):
        if setting.file(f"{split}.pickle").exists():
            data[split], more = both_of(setting, split)
            data[split]["native"] = _read(setting, split)["native"]
            data[split]["audit_at_half_the_limit"] = halved = at_half(setting, split)
            tables += [*more, half_table(halved, split)]
            if data[split]["native"]:
                tables.append(native_table(data[split]["native"]))
    for name, made_of in (
        ("risk", risk_tables),
        ("risk-other", risk_tables),
        ("risk-confirmation", risk_tables),
        ("risk-pairs", risk_tables),
        ("sizes", lambda found: [sizes_table(found)]),
        ("refresh", lambda found: [refresh_table(found)]),
    ):
        if setting.file(f"{name}.json").exists():
            data[name] = _read(setting, name)
            tables += made_of(data[name])
    path = setting.given.out or str(setting.file("evidence.json"))
    write_json(data, path)
    replace_file(Path(path).with_suffix(".tables.md"), markdown(tables))
    say(f"written: {path}")


def at_half(setting: Setting, split: str) -> dict[str, dict[str, Any]]:
    """The audit of the same microbatches had the plans promised half of what they do: then it has to say so."""
    every: HeldOut = pickle.loads(setting.file(f"{split}.pickle").read_bytes())[0]
    return {
        one.name: asdict(audited(every.measured, place, [(one.limit or 0.0) / 2] * len(every.measured)))
        for place, one in enumerate(every.candidates)
    }


def half_table(halved: dict[str, dict[str, Any]], split: str) -> Table:
    table = Table(title=f"{split}: the same audits, had half of the limit been promised", title_justify="left")
    for column in ("plans", "error found %", "alarm"):
        table.add_column(column)
    for name, one in halved.items():
        alarm = "none" if one["alarm_after"] is None else f"after {one['alarm_after']} audits"
        table.add_row(name, f"{100 * one['error']:.3f}", alarm)
    return table


def native_table(native: dict[str, dict[str, float]]) -> Table:
    table = Table(title="updates in the actor's own dtypes", title_justify="left")
    for column in ("plans", "error under plans %", "error of another layout %"):
        table.add_column(column)
    for name, errors in native.items():
        table.add_row(name, f"{100 * errors['plans']:.2f}", f"{100 * errors['control']:.2f}")
    return table


def markdown(tables: list[Table]) -> str:
    return "\n\n".join("\n".join([f"{table.title}:", "", *_lines(table)]) for table in tables) + "\n"


def _lines(table: Table) -> list[str]:
    heads = [str(column.header) for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return [_line(heads), "|" + "---|" * len(heads), *(_line([str(cell) for cell in row]) for row in rows)]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _read(setting: Setting, name: str) -> Any:
    return json.loads(setting.file(f"{name}.json").read_text(encoding="utf-8"))
