"""A plan as a map: regions down, units across, coloured by mode."""

from __future__ import annotations

from hilore.planner import svg
from hilore.runtime.plan import Plan, RegionPlan, UnitPlan

# Mode -> colour, and what the legend says. Lightness differs too, for those who see no hue.
KINDS = {
    "H": ("#0072b2", "H: output kept"),
    "L": ("#e0a030", "L: output kept encoded"),
    "R": ("#d4d9de", "R: run again"),
    "dead": ("#8a8f96", "R, dead: no replay runs it"),
    "held": ("#003f63", "region held: autograd keeps all"),
}
CELL_WIDTH, CELL_HEIGHT, LEFT, TOP = 46.0, 9.0, 150.0, 92.0


def mode_map(plan: Plan, title: str) -> str:
    """One SVG. A cell says its unit, mode and codec when pointed at; a split replay is marked at the right."""
    columns = list(dict.fromkeys(_relative(region, unit) for region in plan.regions for unit in region.units))
    height = TOP + CELL_HEIGHT * len(plan.regions) + 40
    width = LEFT + CELL_WIDTH * len(columns) + 120
    body = [svg.text(0, 14, title)]
    for place, name in enumerate(columns):
        x = LEFT + CELL_WIDTH * (place + 0.5)
        body.append(svg.text(x, TOP - 8, name, extra=f' transform="rotate(-30 {x:.1f} {TOP - 8:.1f})"'))
    step = -(-len(plan.regions) // 40)
    for row, region in enumerate(plan.regions):
        y = TOP + CELL_HEIGHT * row
        if row % step == 0:
            body.append(svg.text(LEFT - 6, y + CELL_HEIGHT - 1, region.name, anchor="end", extra=' font-size="8"'))
        for unit in region.units:
            x = LEFT + CELL_WIDTH * columns.index(_relative(region, unit))
            kind, note = _kind(region, unit), _note(region, unit)
            body.append(svg.box(x, y, CELL_WIDTH - 1, CELL_HEIGHT - 1, KINDS[kind][0], note))
        if region.split_at is not None:
            x = LEFT + CELL_WIDTH * len(columns) + 6
            body.append(svg.text(x, y + CELL_HEIGHT - 1, "split", extra=' font-size="8"'))
    return svg.svg(width, height, body, title=title)


def map_legend() -> str:
    """The colours of all maps, once."""
    body, x = [], 0.0
    for colour, label in KINDS.values():
        body += [svg.box(x, 4, 14, 14, colour), svg.text(x + 20, 15, label)]
        x += 34 + 7 * len(label)
    return svg.svg(x, 24, body, title="colours of the maps")


def _kind(region: RegionPlan, unit: UnitPlan) -> str:
    if region.hold:
        return "held"
    return "dead" if unit.dead else unit.mode


def _note(region: RegionPlan, unit: UnitPlan) -> str:
    mode = KINDS[_kind(region, unit)][1] + (f" ({unit.codec})" if unit.codec else "")
    return f"{unit.name}: {mode}"


def _relative(region: RegionPlan, unit: UnitPlan) -> str:
    return unit.name.removeprefix(region.name + ".")
