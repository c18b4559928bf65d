"""What `calibrate` prints: what compression costs by kind of unit, the bound, the regimes."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.table import Table

from hilore.planner.budget import mib
from hilore.planner.confirm import ENOUGH, Confirmation
from hilore.planner.regimes import regimes
from hilore.planner.trace import Confirmed, Trace


def risk_table(trace: Trace) -> Table:
    """Error in percent with every region's unit of a kind at L: over contexts, the least and the most."""
    found = _by_kind(trace)
    codecs = sorted({codec for by_codec in found.values() for codec in by_codec})
    table = Table(title="update error in percent, all regions' units of a kind at L", title_justify="left")
    table.add_column("kind")
    for codec in codecs:
        table.add_column(codec, justify="right")
    for kind, by_codec in found.items():
        cells = []
        for codec in codecs:
            least, most = by_codec.get(codec, (math.nan, math.nan))
            same = f"{least:.3f}" == f"{most:.3f}"
            cells.append("-" if math.isnan(least) else f"{least:.3f}" if same else f"{least:.3f} to {most:.3f}")
        table.add_row(kind, *cells)
    return table


def regime_table(trace: Trace) -> Table:
    """Exposure regimes and how often calibration saw them."""
    table = Table(title="exposure regimes", title_justify="left")
    table.add_column("regime")
    table.add_column("exposure", justify="right")
    table.add_column("seen", justify="right")
    for interval in regimes(trace.calibration):
        edges = "0" if interval.high == 0 else f"{interval.low:g} to {interval.high:g}"
        table.add_row(interval.label, edges, f"{interval.frequency:.1%}")
    return table


def calibration_lines(trace: Trace) -> list[str]:
    """The bound, the noise, what the user should know."""
    found = trace.calibration
    exposed = sum(sample.psi > 0 for sample in found.samples)
    lines = [
        f"{len(found.samples)} microbatches, {exposed} with exposure; source {found.source}",
        f"errors of updates: {found.mean_interaction:.3f} times the quadrature of their units on average, at most "
        f"{found.interaction:.3f} times with a confidence of {found.confidence:g}",
    ]
    lines += [
        f"confirmed: {_asked(one)}: updates within {one.error:.3%} with a confidence of {one.confidence:g}, measured "
        f"on {one.microbatches} microbatches; solved with a factor of {one.interaction:.3f}"
        for one in found.confirmed
    ]
    if found.noise_floor is not None:
        native = "" if found.native_noise is None else f", {found.native_noise:.2%} in the actor's own dtypes"
        lines.append(f"noise of another layout of the same rollouts: {found.noise_floor:.1e} in float32{native}")
    return [*lines, *(f"note: {note}" for note in trace.notes if note.startswith("calibration: "))]


def calibration_json(trace: Trace, path: str) -> dict[str, Any]:
    """What ``calibrate --json`` prints."""
    found = trace.calibration
    return {
        "trace": path,
        "source": found.source,
        "calibrated": found.calibrated,
        "confidence": found.confidence,
        "delta_star": found.delta_star,
        "interaction": found.interaction,
        "mean_interaction": found.mean_interaction,
        "noise_floor": found.noise_floor,
        "native_noise": found.native_noise,
        "microbatches": len(found.samples),
        "psi_edges": list(found.psi_edges),
        "frequencies": list(found.frequencies),
        "errors_percent": {
            kind: {codec: list(ends) for codec, ends in by_codec.items()} for kind, by_codec in _by_kind(trace).items()
        },
        "confirmed": [asdict(one) for one in found.confirmed],
        "hold_only": {r.name: r.hold_only for r in trace.buckets[-1].regions if r.hold_only},
    }


def _asked(one: Confirmed) -> str:
    margin = f" (margin {mib(one.margin_bytes)})" if one.margin_bytes else ""
    return f"budget {mib(one.budget_bytes)}{margin}, delta {one.delta:g}"


def confirmation_parts(found: Confirmation) -> list[Table | str]:
    """What ``confirm`` prints."""
    table = Table(
        title="sets of plans: a new update's error, at most, times the drift, over delta's", title_justify="left"
    )
    for column in ("factor", "bound x drift / delta", "regimes with L", "high regime: gain over GC"):
        table.add_column(column, justify="right")
    for trial in found.trials:
        high = trial.plans[-1].predicted
        lossy = sum(plan.lossy for plan in trial.plans)
        gain = f"{high.gc_step_ns / high.step_ns - 1:+.1%}"
        table.add_row(f"{trial.interaction:.3f}", f"{trial.bound:.3f}", str(lossy), gain)
    one = found.confirmed
    lines = [
        f"{_asked(one)}: updates stay within {one.error:.3%} with a confidence of {one.confidence:g}, measured on "
        f"{one.microbatches} microbatches in float32 compute; {one.drift:g} times as much is within delta, for what "
        f"errors rise by as training goes on; solve uses a factor of {one.interaction:.3f} from now on"
    ]
    if not found.encodes:
        lines.append("none of these plans encodes anything, so there was nothing to measure; a smaller budget would")
    elif one.error * one.drift < ENOUGH * one.delta * found.trace.calibration.delta_star:
        lines.append("it stays further under delta than it would have to: no smaller factor gives other plans that fit")
    return [table, *lines]


def confirmation_json(found: Confirmation, path: str) -> dict[str, Any]:
    """What ``confirm --json`` prints."""
    trials = [{"interaction": trial.interaction, "bound_times_drift_over_delta": trial.bound} for trial in found.trials]
    return {"trace": path, "confirmed": asdict(found.confirmed), "trials": trials, "passes": found.passes}


def _by_kind(trace: Trace) -> dict[str, dict[str, tuple[float, float]]]:
    """Per kind and codec the least and the most over contexts, percent; kinds in unit order."""
    bucket = trace.buckets[-1]
    kind_of = {unit.name: unit.kind for region_class in bucket.classes for unit in region_class.units}
    sums: dict[tuple[str, str], dict[tuple[str, ...] | None, float]] = {}
    for risk in trace.calibration.risks:
        by_context = sums.setdefault((kind_of[risk.unit], risk.codec), {})
        by_context[risk.tainted] = by_context.get(risk.tainted, 0.0) + risk.kappa2
    result: dict[str, dict[str, tuple[float, float]]] = {}
    for (kind, codec), by_context in sums.items():
        percents = [100 * math.sqrt(kappa2) for kappa2 in by_context.values()]
        result.setdefault(kind, {})[codec] = (min(percents), max(percents))
    return result
