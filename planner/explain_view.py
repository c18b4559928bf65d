"""How `explain` is shown: lines, the table of alternatives, and their sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.table import Table

from hilore.planner.budget import MIB, mib
from hilore.planner.explain import Alternative, Explanation
from hilore.planner.profile import spread_notes
from hilore.planner.view import milliseconds


def explanation_lines(found: Explanation) -> list[str]:
    """What the unit is, what its modes keep and take by themselves, and what binds."""
    limit = "no limit (exposure 0)" if found.risk_limit is None else f"limit {found.risk_limit:.3%}"
    mode = "held with its region" if found.held else found.mode + (", dead: no replay runs it" if found.dead else "")
    only = [f"its region can only be held: {found.hold_only}"] if found.hold_only else []
    mark = " (estimated)" if found.estimated else ""
    rest = f" and {found.rest_bytes:,} bytes of its own autograd" if found.rest_bytes else ""
    codecs = [
        f"{cost.codec} instead keeps {cost.payload_bytes:,} bytes; encoding takes {milliseconds(cost.encode_ns)} ms, "
        f"decoding {milliseconds(cost.decode_ns)} ms"
        for cost in found.codecs
    ]
    return [
        f"{found.unit} ({found.kind}): {mode}",
        *only,
        f"running it again takes {milliseconds(found.run_ns)} ms{mark}; keeping its output takes "
        f"{found.output_bytes:,} bytes ({mib(found.output_bytes)}){rest}",
        *codecs,
        f"memory: the peak is in the {found.peak_event}, {mib(found.spare_bytes)} under the budget",
        f"risk: {found.risk:.3%}, {limit}",
        f"binds: {found.binds}",
        *(f"note: {note}" for note in spread_notes(found.time_spread)),
    ]


def explanation_table(found: Explanation) -> Table:
    """One row per alternative: what it costs, what it buys, and whether the plan could have it."""
    times = ", times estimated" if found.estimated else ""
    table = Table(title=f"the same plan with one change{times}", title_justify="left")
    table.add_column("change")
    for column in ("step ms", "keeps MiB", "ns saved per MiB", "peak MiB", "room MiB", "risk %"):
        table.add_column(column, justify="right")
    table.add_column("peak would be in")
    table.add_column("allowed")
    for other in found.alternatives:
        allowed = f"no: {other.refused}" if other.refused else "yes"
        if not other.priced:
            table.add_row(other.change, *["-"] * 7, allowed)
            continue
        table.add_row(
            other.change,
            f"{other.step_ns / 1e6:+.3f}",
            f"{other.retained_bytes / MIB:+,.2f}",
            _price(other),
            f"{other.peak_bytes / MIB:+,.2f}",
            f"{-other.over_bytes / MIB:,.2f}",
            f"{other.risk:.3%}".removesuffix("%"),
            other.event,
            allowed,
        )
    return table


def explanation_sums(found: Explanation) -> list[str]:
    """Per alternative where its bytes and its nanoseconds come from; each sum is exact."""
    lines = []
    for other in found.alternatives:
        if other.priced:
            event = other.event + (" with L units run as R" if other.demoted else "")
            lines.append(f"{other.change}: {_added(other.event_bytes, f'bytes in the {event}', other.parts)}")
            lines.append(f"{other.change}: {_added(other.step_ns, 'ns in the step', other.times)}")
    return lines


def explanation_json(found: Explanation) -> dict[str, Any]:
    """``times`` and ``parts`` as pairs of name and figure, in the order of the sums."""
    return asdict(found)


def _price(other: Alternative) -> str:
    """Nanoseconds that each MiB buys, where a change keeps more and saves time (or the other way round)."""
    if other.step_ns * other.retained_bytes >= 0:
        return "-"
    return f"{-other.step_ns * MIB / other.retained_bytes:,.0f}"


def _added(total: int, what: str, terms: Iterable[tuple[str, int]]) -> str:
    added = ", ".join(f"{size:+,} {name}" for name, size in terms)
    return f"{total:+,} {what}" + (f": {added}" if added else "")
