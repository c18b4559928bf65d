"""Small drawings as SVG text: self-contained, readable on light and dark backgrounds, nothing to load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

# Distinct in hue and in lightness on white and on near-black.
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#b8860b",
    "#56a0d3",
    "#7a5fd0",
    "#8a8a8a",
    "#c23b3b",
    "#3f8f3f",
    "#a0522d",
    "#2aa6a6",
    "#e0a030",
    "#1f4e79",
    "#f0a08a",
    "#5a7d3a",
    "#e3b7d3",
    "#6b4c2a",
    "#9ad0c2",
    "#b0b84a",
    "#4a4a9a",
)
STYLE = """
svg{font:12px system-ui,sans-serif;background:var(--paper)}
svg{--ink:#1b1b1b;--faint:#d5d5d5;--paper:#ffffff}
@media(prefers-color-scheme:dark){svg{--ink:#e8e8e8;--faint:#444444;--paper:#161616}}
text{fill:var(--ink)}
.grid{stroke:var(--faint);stroke-width:1}
.axis{stroke:var(--ink);stroke-width:1}
"""


def svg(width: float, height: float, body: Sequence[str], *, title: str) -> str:
    """A whole drawing. ``title`` is what screen readers say."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img"><title>{escape(title)}</title><style>{STYLE}</style>{"".join(body)}</svg>'
    )


def text(x: float, y: float, content: str, *, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def path(points: Sequence[tuple[float, float]], colour: str, *, width: float, dash: str = "") -> str:
    """A line through points."""
    moves = " ".join(f"{'M' if place == 0 else 'L'}{x:.1f} {y:.1f}" for place, (x, y) in enumerate(points))
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{moves}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def box(x: float, y: float, width: float, height: float, colour: str, note: str = "") -> str:
    """A filled rectangle; ``note`` shows when pointed at."""
    inside = f"<title>{escape(note)}</title>" if note else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">{inside}</rect>'


def dot(x: float, y: float, colour: str, note: str, *, radius: float = 3) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"><title>{escape(note)}</title></circle>'


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round figures between two ends, about so many."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [place * step for place in range(first, math.floor(high / step) + 1)]
