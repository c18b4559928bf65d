"""Live memory event by event, stacked by what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hilore.planner import svg
from hilore.planner.budget import MIB
from hilore.planner.composition import Composition
from hilore.planner.composition_view import part_names

WIDTH, HEIGHT = 1000.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 340.0, 34.0, 44.0


def timeline(events: Sequence[Composition], title: str, *, ceiling_bytes: int, highest_bytes: int) -> str:
    """One SVG: events from the first forward to the optimizer step; the line is the budget less its margin.

    ``highest_bytes``: top of the scale, so that several drawings can share it.
    """
    names = part_names(events)
    top = max(highest_bytes, ceiling_bytes) * 1.03
    step = (WIDTH - LEFT - RIGHT) / max(len(events), 1)

    def y(count_bytes: float) -> float:
        return HEIGHT - BOTTOM - count_bytes / top * (HEIGHT - TOP - BOTTOM)

    body = [svg.text(LEFT, 16, title), *_scale(top, y(0), y)]
    for place, event in enumerate(events):
        sizes, under = dict(event.parts), 0
        for number, name in enumerate(names):
            size = sizes.get(name, 0)
            if size > 0:
                note = f"{event.event}: {name} {size / MIB:,.1f} of {event.live_bytes / MIB:,.1f} MiB"
                low, high = y(under), y(under + size)
                colour = svg.COLOURS[number % len(svg.COLOURS)]
                body.append(svg.box(LEFT + step * place, high, step + 0.3, low - high, colour, note))
            # What is given back within an event (a part below 0) lowers what stands on it.
            under += size
    if ceiling_bytes:
        body.append(svg.line(LEFT, y(ceiling_bytes), WIDTH - RIGHT, y(ceiling_bytes), "axis"))
        body.append(svg.text(WIDTH - RIGHT - 4, y(ceiling_bytes) - 4, "budget", anchor="end"))
    body += _phases(events, step)
    for number, name in enumerate(names):
        row = TOP + 17 * number
        body.append(svg.box(WIDTH - RIGHT + 14, row, 12, 12, svg.COLOURS[number % len(svg.COLOURS)]))
        body.append(svg.text(WIDTH - RIGHT + 32, row + 10, name))
    return svg.svg(WIDTH, max(HEIGHT, TOP + 17 * len(names) + 10), body, title=title)


def _scale(top: float, bottom: float, y: Callable[[float], float]) -> list[str]:
    body = [svg.text(0, TOP - 6, "MiB")]
    for mib in svg.ticks(0, top / MIB, about=5):
        height = y(mib * MIB)
        body.append(svg.line(LEFT, height, WIDTH - RIGHT, height, "grid"))
        body.append(svg.text(LEFT - 6, height + 4, f"{mib:,.6g}", anchor="end"))
    return [*body, svg.line(LEFT, bottom, WIDTH - RIGHT, bottom, "axis")]


def _phases(events: Sequence[Composition], step: float) -> list[str]:
    """Forward, head, backward, and what follows, named under their events."""
    body = []
    regions = (len(events) - 3) // 2
    spans = {"forward": (0, regions), "head": (regions, regions + 1), "backward": (regions + 1, 2 * regions + 1)}
    for name, (first, last) in spans.items():
        x = LEFT + step * (first + last) / 2
        body.append(svg.text(x, HEIGHT - BOTTOM + (30 if name == "head" else 16), name, anchor="middle"))
    return body
