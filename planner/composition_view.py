"""What a peak is made of, as a table, as one line, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from hilore.planner.budget import MIB
from hilore.planner.composition import STANDING, Composition


def composition_table(columns: Mapping[str, Composition]) -> Table:
    """One row per part, one column per peak; the first one also in bytes. The last row is the sum."""
    table = Table(title="what the peak is made of", title_justify="left", show_footer=True)
    first, *others = columns.items()
    title, main = first
    table.add_column("part", footer="sum: the peak")
    table.add_column(f"{title}, bytes", justify="right", footer=f"{main.live_bytes:,}")
    for name, found in (first, *others):
        heading = f"{name}, MiB\n({found.event})"
        table.add_column(heading, justify="right", footer=f"{found.live_bytes / MIB:,.2f}")
    sizes = [dict(found.parts) for found in columns.values()]
    for part in part_names(columns.values()):
        in_bytes = f"{sizes[0][part]:,}" if part in sizes[0] else "-"
        table.add_row(part, in_bytes, *(f"{size[part] / MIB:,.2f}" if part in size else "-" for size in sizes))
    return table


def composition_json(found: Composition) -> dict[str, Any]:
    """``parts`` add up to ``bytes``."""
    return {"event": found.event, "bytes": found.live_bytes, "parts": dict(found.parts)}


def part_names(compositions: Iterable[Composition]) -> list[str]:
    """All names that occur: what stands for several events first, in the ledger's order, then working sets."""
    found = dict.fromkeys(name for composition in compositions for name, _ in composition.parts)
    return [name for name in STANDING if name in found] + [name for name in found if name not in STANDING]
