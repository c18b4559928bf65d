"""Tables of what was measured on one device."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from bench.device_rows import DeviceRow
from bench.device_runs import DeviceReport
from hilore.planner.budget import MIB
from hilore.planner.sidebyside_view import percent_interval, share_interval


def report_parts(report: DeviceReport) -> Iterator[Table | str]:
    """All that is printed."""
    device = report.device.get("name", report.device["kind"])
    yield f"{report.name} on {device}: {report.tokens} tokens, {report.rounds} timed rounds"
    yield _memory(report)
    yield _speed(report)
    noise = f"{_share(report.run_to_run)} from run to run, {_share(report.layout)} in another layout"
    yield f"gradient noise of plain eager: {noise}"
    if report.bias:
        yield _bias(report)
    took = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report.stages.items())
    yield f"took {sum(report.stages.values()):.0f} s: {took}"
    yield from (f"note: {note}" for note in report.notes)
    yield from (f"BROKEN: {breach}" for breach in report.breaches)


def _memory(report: DeviceReport) -> Table:
    title = "peak MiB of one update; predicted by the trace made here, and by the estimate made without the device"
    table = Table(title=title, title_justify="left")
    table.add_column("policy")
    for column in ("budget", "predicted here", "estimated", "counted", "requested", "allocated", "reserved"):
        table.add_column(column, justify="right")
    for row in report.rows:
        device = row.device
        figures = (row.budget_bytes, row.predicted_bytes, row.predicted_elsewhere_bytes, row.counted_bytes)
        table.add_row(row.policy, *map(_mib, (*figures, device.requested, device.allocated, device.reserved)))
    return table


def _speed(report: DeviceReport) -> Table:
    table = Table(title="forward, loss and backward; gradients against plain eager", title_justify="left")
    table.add_column("policy")
    columns = ("step ms", "predicted", "estimated", "gain over GC", "share of No-GC's", "gradient error", "in float32")
    for column in columns:
        table.add_column(column, justify="right")
    for row in report.rows:
        table.add_row(
            row.policy,
            _ms(row.step_ns),
            _ms(row.predicted_step_ns),
            _ms(row.estimated_step_ns),
            percent_interval(row.gain),
            "-" if row.share is None else share_interval(row.share),
            _error(row),
            _share(row.float32_error),
        )
    return table


def _bias(report: DeviceReport) -> Table:
    title = "measured over estimated (roofline) time, by kind of call, all of one step"
    table = Table(title=title, title_justify="left")
    table.add_column("kind")
    for column in ("measured ms", "estimated ms", "measured / estimated"):
        table.add_column(column, justify="right")
    for bias in report.bias:
        table.add_row(bias.kind, _ms(bias.measured_ns), _ms(bias.estimated_ns), f"{bias.ratio:.2f}")
    return table


def _error(row: DeviceRow) -> str:
    return "0 (bitwise)" if row.exact else f"{row.error:.3%}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"


def _mib(count_bytes: int | None) -> str:
    return "-" if count_bytes is None else f"{count_bytes / MIB:,.1f}"


def _ms(nanoseconds: int | None) -> str:
    return "-" if nanoseconds is None else f"{nanoseconds / 1e6:,.2f}"
