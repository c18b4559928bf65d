"""One self-contained HTML page of a trace, its plans, their memory and time, and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from hilore.planner.allocator import APART
from hilore.planner.budget import MIB, mib
from hilore.planner.composition import highest, plan_compositions, reference_compositions
from hilore.planner.composition_view import part_names
from hilore.planner.frontier_plot import frontier_svg
from hilore.planner.frontier_points import Frontier
from hilore.planner.frontier_view import ABOUT
from hilore.planner.plan_view import gain_over_gc
from hilore.planner.report_inputs import BenchFile, BenchModel
from hilore.planner.report_map import map_legend, mode_map
from hilore.planner.report_timeline import timeline
from hilore.planner.trace import Bucket, Trace
from hilore.planner.verify import largest_bucket
from hilore.planner.view import fold, milliseconds, trace_last_line, trace_lines
from hilore.runtime.plan import Plan

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.45 system-ui,sans-serif;max-width:1040px;margin:2em auto;padding:0 1em;background:#fff;color:#1b1b1b}
h1{font-size:1.5em}h2{font-size:1.2em;margin-top:2em}
table{border-collapse:collapse;margin:1em 0;font-size:.9em}
th,td{padding:.25em .7em;border-bottom:1px solid #d5d5d5;text-align:right;vertical-align:top}
th:first-child,td:first-child{text-align:left}
figure{margin:1em 0;overflow-x:auto}
@media(prefers-color-scheme:dark){body{background:#161616;color:#e8e8e8}th,td{border-color:#444}}
"""


def report_html(
    trace: Trace, plans: Sequence[Plan], *, frontier: Frontier | None, bench: BenchFile | None, sources: Sequence[str]
) -> str:
    """The page. ``sources``: the files it was made from, in words."""
    sections = [
        f"<h1>{escape(trace.name)}</h1>",
        _paragraphs([f"made from {', '.join(sources)}", trace_last_line(trace)]),
        _trace(trace),
        _plans(trace, plans),
        _memory(trace, plans),
        _frontier(frontier),
        _measured(trace, bench),
    ]
    title = escape(f"{trace.name}: plans")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}</title><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


def _trace(trace: Trace) -> str:
    bucket = largest_bucket(trace)
    tables = []
    for index, region_class in enumerate(bucket.classes):
        names = [region.name for region in bucket.regions if region.class_index == index]
        rows = [
            (
                unit.name,
                unit.kind,
                f"{unit.output_bytes / MIB:,.2f}",
                milliseconds(unit.run_ns),
                "yes" if unit.keepable else f"no: {unit.reason}",
                ", ".join(f"{cost.codec} {cost.payload_bytes / MIB:,.2f}" for cost in unit.codecs) or "-",
            )
            for unit in region_class.units
        ]
        head = ("unit", "kind", "output MiB", "run ms", "keepable", "codecs (MiB)")
        caption = (
            f"{fold(names)}: held {mib(region_class.hold.retained_bytes)}, GC replay "
            f"{milliseconds(region_class.gc_replay_ns)} ms, {bucket.tokens} tokens x {bucket.rows} rows"
        )
        tables.append(f"<p>{escape(caption)}</p>" + _table(head, rows))
    return "<h2>Trace</h2>" + "".join(tables) + _paragraphs(trace_lines(trace))


def _plans(trace: Trace, plans: Sequence[Plan]) -> str:
    head = ("regime", "tokens", "H", "L", "R", "held", "peak MiB", "step ms", "gain over GC", "error %", "solver")
    rows = [
        (
            plan.regime.label,
            str(plan.length_bucket),
            *(str(plan.count(mode)) for mode in ("H", "L", "R")),
            str(sum(region.hold for region in plan.regions)),
            f"{plan.predicted.peak_bytes / MIB:,.1f}",
            milliseconds(plan.predicted.step_ns),
            f"{gain_over_gc(plan):+.1%}",
            f"{plan.predicted.risk:.3%}".removesuffix("%"),
            f"{plan.solver.status}, gap {plan.solver.gap:.3%}",
        )
        for plan in plans
    ]
    first = plans[0]
    calibrated = "calibrated" if trace.calibration.calibrated else "uncalibrated: risk from the prior table"
    lines = [
        f"budget {mib(first.budget_bytes)}, margin {mib(first.margin_bytes)}, delta {first.delta:g} of a reference "
        f"error of {first.delta_star:.3g} ({calibrated})"
    ]
    maps = [map_legend()]
    for group in _same(plans):
        labels = ", ".join(plan.regime.label for plan in group)
        maps.append(mode_map(group[0], f"{labels}: {group[0].length_bucket} tokens per row"))
    return "<h2>Plans</h2>" + _paragraphs(lines) + _table(head, rows) + "".join(map(_figure, maps))


def _same(plans: Sequence[Plan]) -> list[list[Plan]]:
    """Plans grouped by what they do, in order."""
    groups: dict[object, list[Plan]] = {}
    for plan in plans:
        groups.setdefault((plan.length_bucket, plan.regions), []).append(plan)
    return list(groups.values())


def _memory(trace: Trace, plans: Sequence[Plan]) -> str:
    """Of the plan with the highest peak in the longest bucket: every event, and the highest beside GC's and No-GC's."""
    longest = [plan for plan in plans if plan.length_bucket == plans[0].length_bucket]
    plan = max(longest, key=lambda plan: plan.predicted.peak_bytes)
    bucket = next(bucket for bucket in trace.buckets if bucket.tokens == plan.length_bucket)
    events = plan_compositions(trace, bucket, plan.regions)
    checkpointed = reference_compositions(trace, bucket, gc=True)
    top = max(highest(events).live_bytes, highest(checkpointed).live_bytes)
    drawings = [
        timeline(each, f"{name}: live memory by event", ceiling_bytes=plan.ceiling_bytes, highest_bytes=top)
        for name, each in ((f"plan {plan.regime.label}", events), ("GC", checkpointed))
    ]
    return "<h2>Memory</h2>" + _peaks(trace, bucket, plan) + "".join(map(_figure, drawings))


def _peaks(trace: Trace, bucket: Bucket, plan: Plan) -> str:
    columns = {
        f"plan {plan.regime.label}": highest(plan_compositions(trace, bucket, plan.regions)),
        "GC": highest(reference_compositions(trace, bucket, gc=True)),
        "No-GC": highest(reference_compositions(trace, bucket, gc=False)),
    }
    sizes = [dict(found.parts) for found in columns.values()]
    rows = [
        (name, *(f"{size[name] / MIB:,.2f}" if name in size else "-" for size in sizes))
        for name in part_names(columns.values())
    ]
    rows.append(("sum: the peak", *(f"{found.live_bytes / MIB:,.2f}" for found in columns.values())))
    head = ("what the peak is made of", *(f"{name}, MiB ({found.event})" for name, found in columns.items()))
    return _table(head, rows) + _paragraphs([APART])


def _frontier(frontier: Frontier | None) -> str:
    if frontier is None:
        return ""
    shown = {curve.policy for curve in frontier.curves}
    lines = [f"{name}: {about}" for name, about in ABOUT.items() if name in shown]
    return "<h2>Frontier</h2>" + _figure(frontier_svg(frontier)) + _paragraphs(lines)


def _measured(trace: Trace, bench: BenchFile | None) -> str:
    if bench is None:
        return ""
    where = bench.environment
    how = f"{where.command}, on {where.device}, {where.threads} threads"
    return "<h2>Measured</h2>" + _paragraphs([how]) + "".join(_bench(trace, model) for model in bench.models)


def _bench(trace: Trace, model: BenchModel) -> str:
    head = ("policy", "ceiling", "peak MiB", "predicted MiB", "step ms", "gain over GC", "share of No-GC", "error")
    rows = [
        (
            row.policy,
            row.ceiling or "-",
            f"{row.peak_bytes / MIB:,.2f}",
            "-" if row.predicted_peak_bytes is None else f"{row.predicted_peak_bytes / MIB:,.2f}",
            milliseconds(row.step_ns),
            f"{row.gain.value:+.1%} ({row.gain.low:.1%} to {row.gain.high:.1%})",
            "-" if row.share is None else f"{row.share.value:.2f} ({row.share.low:.2f} to {row.share.high:.2f})",
            "0 (bitwise)" if row.exact else f"{row.error:.3%}",
        )
        for row in model.result.rows
    ]
    other = "" if model.name == trace.name else f"; not the actor of this page, {trace.name}"
    lines = [f"{model.name}: {model.tokens} tokens per step, {model.result.rounds} rounds{other}"]
    lines += [f"BROKEN: {breach}" for breach in model.result.breaches]
    return _paragraphs(lines) + _table(head, rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _figure(drawing: str) -> str:
    return f"<figure>{drawing}</figure>"
