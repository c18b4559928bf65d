"""A frontier as one SVG: peak against predicted step time, a line per policy through what it takes at each budget."""

from __future__ import annotations

from dataclasses import dataclass

from hilore.planner import svg
from hilore.planner.budget import MIB
from hilore.planner.frontier_curves import GREEDY, PLAN
from hilore.planner.frontier_points import Curve, Frontier, Point

WIDTH, HEIGHT = 960.0, 520.0
LEFT, RIGHT, TOP, BOTTOM = 80.0, 250.0, 40.0, 60.0
DASHES = ("", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True, slots=True)
class _Scale:
    """Bytes and nanoseconds to places on the paper."""

    low_bytes: float
    high_bytes: float
    low_ns: float
    high_ns: float

    def x(self, count_bytes: float) -> float:
        span = max(self.high_bytes - self.low_bytes, 1)
        return LEFT + (count_bytes - self.low_bytes) / span * (WIDTH - LEFT - RIGHT)

    def y(self, ns: float) -> float:
        span = max(self.high_ns - self.low_ns, 1)
        return HEIGHT - BOTTOM - (ns - self.low_ns) / span * (HEIGHT - TOP - BOTTOM)


def frontier_svg(found: Frontier) -> str:
    """The whole plot. A point says its figures when pointed at."""
    scale = _scale(found)
    body = _axes(found, scale)
    shown = [curve for curve in found.curves if any(curve.points)]
    for place, curve in enumerate(shown):
        body += _curve(found, curve, place, scale)
    title = f"{found.name}: peak against predicted step time"
    return svg.svg(WIDTH, HEIGHT, body, title=title)


def _scale(found: Frontier) -> _Scale:
    times = [point.step_ns for curve in found.curves for point in curve.points if point is not None]
    low, high = min([*times, found.no_gc_step_ns]), max([*times, found.gc_step_ns])
    room = max(high - low, 1) * 0.05
    peaks = [point.peak_bytes for curve in found.curves for point in curve.points if point is not None]
    margin = (max(peaks) - min(peaks)) * 0.02
    return _Scale(min(peaks) - margin, max(peaks) + margin, low - room, high + room)


def _axes(found: Frontier, scale: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    kind = "estimated" if found.estimated else "measured times"
    body = [
        svg.text(LEFT, 22, f"{found.name}, {found.tokens} tokens per row: peak against predicted step time ({kind})"),
        svg.text((LEFT + right) / 2, HEIGHT - 16, "predicted peak: allocated MiB per GPU", anchor="middle"),
        svg.text(20, TOP - 8, "step, ms"),
        svg.line(LEFT, bottom, right, bottom, "axis"),
        svg.line(LEFT, TOP, LEFT, bottom, "axis"),
    ]
    for mib in svg.ticks(scale.low_bytes / MIB, scale.high_bytes / MIB):
        x = scale.x(mib * MIB)
        body += [svg.line(x, TOP, x, bottom, "grid"), svg.text(x, bottom + 18, f"{mib:,.6g}", anchor="middle")]
    for milliseconds in svg.ticks(scale.low_ns / 1e6, scale.high_ns / 1e6):
        y = scale.y(milliseconds * 1e6)
        body += [svg.line(LEFT, y, right, y, "grid"), svg.text(LEFT - 8, y + 4, f"{milliseconds:,.6g}", anchor="end")]
    return body


def _curve(found: Frontier, curve: Curve, place: int, scale: _Scale) -> list[str]:
    colour = svg.COLOURS[place % len(svg.COLOURS)]
    ours = curve.policy == PLAN
    dash, width = ("", 2.5) if ours else (DASHES[place % len(DASHES)], 1.5)
    points = list({(p.peak_bytes, p.step_ns): p for p in reversed(curve.points) if p is not None}.values())
    at = [(scale.x(point.peak_bytes), scale.y(point.step_ns)) for point in points]
    body = [svg.path(at, colour, width=width, dash=dash)] if len(at) > 1 else []
    if curve.policy != GREEDY:
        radius = 5 if len(at) == 1 else 3.5 if ours else 2
        body += [
            svg.dot(*where, colour, _note(found, curve, point), radius=radius)
            for where, point in zip(at, points, strict=True)
        ]
    y = TOP + 18 * place
    left = WIDTH - RIGHT + 16
    if len(at) == 1:
        key = svg.dot(left + 14, y, colour, curve.label, radius=5)
    else:
        key = svg.path([(left, y), (left + 28, y)], colour, width=width, dash=dash)
    return [*body, key, svg.text(left + 36, y + 4, curve.label)]


def _note(found: Frontier, curve: Curve, point: Point) -> str:
    return (
        f"{curve.label}: budget {point.budget_bytes / MIB:,.0f} MiB, peak {point.peak_bytes / MIB:,.1f} MiB, "
        f"{point.step_ns / 1e6:,.1f} ms, {found.gain(point):+.1%} over GC {point.detail}"
    ).strip()
