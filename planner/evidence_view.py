"""Tables and JSON of what was predicted and measured on held-out rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from hilore.planner.evidence import Coverage, Ranking
from hilore.planner.heldout import CandidateEvidence
from hilore.planner.heldout_regimes import RegimeRow


def candidates_table(rows: Sequence[CandidateEvidence], title: str) -> Table:
    """One row per set of plans: errors are medians over updates, in percent."""
    table = Table(title=title, title_justify="left")
    table.add_column("plans")
    for column in ("limit", "predicted", "measured", "worst region"):
        table.add_column(f"{column} %", justify="right")
    table.add_column("within the limit")
    table.add_column("within the bound")
    for column in ("measured/limit", "/quadrature", "/linear", "rank corr."):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            "-" if row.limit is None else f"{100 * row.limit:.2f}",
            f"{100 * row.predicted:.3f}",
            f"{100 * row.measured:.3f}",
            f"{100 * row.worst_region:.3f}",
            "-" if row.limit is None else _covered(row.coverage),
            _covered(row.bound_coverage),
            f"{row.coverage.median_ratio:.2f}",
            f"{row.over_quadrature:.2f}",
            f"{row.over_linear:.2f}",
            f"{row.spearman:.2f}",
        )
    return table


def limits_table(rows: Sequence[CandidateEvidence], title: str) -> Table:
    """How sure the coverage is: composed updates share microbatches, the others do not."""
    table = Table(title=title, title_justify="left")
    table.add_column("plans")
    for column in ("composed updates", "disjoint updates", "single microbatches", "largest measured/limit", "audit"):
        table.add_column(column)
    for row in rows:
        alarm = "no alarm" if row.audit.alarm_after is None else f"ALARM after {row.audit.alarm_after}"
        table.add_row(
            row.name,
            _covered(row.coverage),
            _covered(row.disjoint),
            _covered(row.alone),
            f"{row.coverage.largest_ratio:.2f}",
            f"{100 * row.audit.error:.3f} % over {row.audit.audits}, {alarm}",
        )
    return table


def rankings_table(by_codec: Mapping[str, Mapping[str, Ranking]], title: str) -> Table:
    """One row per score, three columns per codec."""
    table = Table(title=title, title_justify="left")
    table.add_column("score")
    for codec in by_codec:
        for column in ("Spearman", "top 10 %", "AUROC"):
            table.add_column(f"{codec} {column}", justify="right")
    for name in next(iter(by_codec.values()), {}):
        cells = []
        for found in by_codec.values():
            cells += [f"{found[name].spearman:.2f}", f"{found[name].recall:.2f}", f"{found[name].auroc:.2f}"]
        table.add_row(name, *cells)
    return table


def regimes_table(rows: Sequence[RegimeRow], title: str) -> Table:
    """What each kind of microbatch keeps, encodes and errs."""
    table = Table(title=title, title_justify="left")
    table.add_column("microbatches")
    for column in ("count", "|omega|", "exposure", "H %", "L %", "error %"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.kind,
            str(row.microbatches),
            f"{row.omega:.2f}",
            f"{row.exposure:.2f}",
            f"{100 * row.kept:.1f}",
            f"{100 * row.lossy:.1f}",
            f"{100 * row.drift:.3f}",
        )
    return table


def evidence_json(
    rows: Sequence[CandidateEvidence], regimes: Mapping[str, Sequence[RegimeRow]], spearman: float
) -> dict[str, Any]:
    """What one split of held-out rollouts gave."""
    return {
        "plans": [asdict(row) for row in rows],
        "regimes": {name: [asdict(row) for row in found] for name, found in regimes.items()},
        "spearman_of_all": spearman,
    }


def _covered(found: Coverage) -> str:
    return f"{found.within}/{found.updates} ({found.lower:.1%} or more)"
