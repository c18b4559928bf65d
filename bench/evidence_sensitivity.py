"""How much calibration is enough, and how long it holds: stages of ``python -m bench.evidence``."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from bench.evidence_policy import spread, train
from bench.evidence_setting import Setting, say, tell
from bench.evidence_stages import exposed_of, solved_candidates
from hilore.planner.actor import build_actor
from hilore.planner.calibrate import measurements_of
from hilore.planner.calibration_bound import Bound, Measurements, bound_errors, cross_fitted, folds_of
from hilore.planner.calibration_fit import RiskModel, fit
from hilore.planner.calibration_plans import lossy_units
from hilore.planner.conformal import Floats, resampled_updates
from hilore.planner.evidence import coverage, ranking
from hilore.planner.gradient_error import Instrument
from hilore.planner.heldout import Candidate, HeldOut, expected_by
from hilore.planner.microbatch import Microbatch
from hilore.planner.stepping import float32_twin
from hilore.planner.trace import Trace
from hilore.planner.tracefile import load_trace
from hilore.planner.updates import Composer

DRAWS = 4


@dataclass(frozen=True, slots=True)
class SizeRow:
    """Calibrations on ``microbatches`` of the one that there was, ``draws`` of them: means over them.

    ``confidence``: what so many carry, at most the one asked for. ``interaction``, ``least_interaction``,
    ``most_interaction``: the bound's factor. ``fit_error``: root mean square of ln(kappa of a plan / that of the whole
    calibration). Of held-out updates of a split: ``within`` the bound, on average and in the worst draw, the median
    of measured over bound, and the rank correlation of predicted and measured over all candidates.
    """

    microbatches: int
    draws: int
    confidence: float
    interaction: float
    least_interaction: float
    most_interaction: float
    fit_error: float
    within: dict[str, float]
    least_within: dict[str, float]
    tightness: dict[str, float]
    spearman: dict[str, float]


def sizes(setting: Setting) -> None:
    trace, given = setting.trace, setting.given
    found = measurements_of(
        setting.spec,
        load_trace(setting.file("plain.trace.json")),
        tell(),
        rollouts=setting.file("calibration.jsonl"),
        state=setting.file("calibrated.trace.json.calibration"),
        seed=given.seed,
    )
    splits = {name: pickle.loads(setting.file(f"{name}.pickle").read_bytes())[0] for name in ("same", "other")}
    whole = fit(found.observations, len(trace.buckets[-1].regions))
    line = tell()
    rows = []
    for count in sorted({*given.sizes, len(found.exposed)}):
        if count > len(found.exposed):
            continue
        draws = 1 if count == len(found.exposed) else DRAWS
        made = []
        for draw in range(draws):
            line("calibration sizes", len(rows) * DRAWS + draw, (len(given.sizes) + 1) * DRAWS)
            chosen = np.random.default_rng(draw).permutation(len(found.exposed))[:count]
            part = _part(found, sorted(found.exposed[place] for place in chosen))
            made.append(_calibrated_on(setting, part, trace))
        rows.append(_size_row(setting, count, made, found, whole, splits, trace))
    setting.file("sizes.json").write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    say(sizes_table([asdict(row) for row in rows]))


def _part(found: Measurements, places: Sequence[int]) -> Measurements:
    """The same calibration as if it had seen these microbatches alone."""
    index = {place: new for new, place in enumerate(places)}
    return Measurements(
        observations=tuple(
            replace(one, microbatch=index[one.microbatch]) for one in found.observations if one.microbatch in index
        ),
        plans=found.plans,
        measured=tuple(found.measured[place] for place in places),
        exposed=tuple(range(len(places))),
    )


def _calibrated_on(setting: Setting, part: Measurements, trace: Trace) -> tuple[RiskModel, Bound]:
    regions, folds, count = len(trace.buckets[-1].regions), folds_of(part.exposed), len(part.exposed)
    bound = bound_errors(
        part.measured,
        part.plans,
        cross_fitted(part.observations, regions, folds),
        folds,
        loss_kind=setting.spec.loss.kind,
        accumulation=setting.spec.batch.accumulation,
        confidence=_carried(setting, count),
    )
    return fit(part.observations, regions), bound


def _carried(setting: Setting, count: int) -> float:
    # Three decimals rounded down: n / (n + 1) itself has no short decimal form.
    return min(setting.given.confidence, math.floor(1000 * count / (count + 1)) / 1000)


def _size_row(
    setting: Setting,
    count: int,
    made: Sequence[tuple[RiskModel, Bound]],
    found: Measurements,
    whole: RiskModel,
    splits: dict[str, HeldOut],
    trace: Trace,
) -> SizeRow:
    interactions = [bound.interaction for _, bound in made]
    logs = [
        math.log(model.plan_kappa2(plan.units) / whole.plan_kappa2(plan.units)) / 2
        for model, _ in made
        for plan in found.plans
    ]
    scored = {name: [_on(setting, split, trace, *one) for one in made] for name, split in splits.items()}
    return SizeRow(
        microbatches=count,
        draws=len(made),
        confidence=_carried(setting, count),
        interaction=float(np.mean(interactions)),
        least_interaction=min(interactions),
        most_interaction=max(interactions),
        fit_error=math.sqrt(sum(log**2 for log in logs) / len(logs)),
        within={name: float(np.mean([one[0] for one in each])) for name, each in scored.items()},
        least_within={name: min(one[0] for one in each) for name, each in scored.items()},
        tightness={name: float(np.mean([one[1] for one in each])) for name, each in scored.items()},
        spearman={name: float(np.mean([one[2] for one in each])) for name, each in scored.items()},
    )


def _on(setting: Setting, split: HeldOut, trace: Trace, model: RiskModel, bound: Bound) -> tuple[float, float, float]:
    """Share of held-out updates within the bound, median of measured over bound, rank correlation."""
    accumulation, updates = setting.spec.batch.accumulation, setting.given.updates
    composer = Composer(split.measured, setting.spec.loss.kind)
    picks = resampled_updates(len(split.measured), accumulation, updates=updates, seed=setting.given.seed + 7)
    shares = composer.shares(picks)
    picks, shares = picks[shares.any(axis=1)], shares[shares.any(axis=1)]
    measured, predicted = [], []
    for column, candidate in enumerate(split.candidates):
        kappa2 = _kappa2(split, candidate, trace, model)
        measured.append(np.sqrt(composer.squared_errors(picks, np.full(picks.shape, column))))
        predicted.append(bound.interaction * np.sqrt((shares * kappa2[picks]).sum(axis=1)))
    every, allowed = np.concatenate(measured), np.concatenate(predicted)
    held = coverage(every, allowed)
    return held.share, held.median_ratio, ranking(allowed, every).spearman


def _kappa2(split: HeldOut, candidate: Candidate, trace: Trace, model: RiskModel) -> Floats:
    plans = [candidate.plan_for(one.psi) for one in split.measured]
    known = {id(plan): model.plan_kappa2(lossy_units(trace.buckets[-1], plan.regions)) for plan in plans if plan}
    return np.array([0.0 if plan is None else known[id(plan)] for plan in plans])


def sizes_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="calibration size", title_justify="left")
    for column in ("microbatches", "draws", "confidence", "interaction (least to most)", "fit error"):
        table.add_column(column, justify="right")
    for split in ("same", "other"):
        for column in ("within bound (worst draw)", "measured/bound", "rank corr."):
            table.add_column(f"{split}: {column}", justify="right")
    for row in rows:
        cells = [str(row["microbatches"]), str(row["draws"]), f"{row['confidence']:.3f}"]
        cells.append(f"{row['interaction']:.2f} ({row['least_interaction']:.2f} to {row['most_interaction']:.2f})")
        cells.append(f"{row['fit_error']:.1%}")
        for split in ("same", "other"):
            cells.append(f"{row['within'][split]:.1%} ({row['least_within'][split]:.1%})")
            cells += [f"{row['tightness'][split]:.2f}", f"{row['spearman'][split]:.2f}"]
        table.add_row(*cells)
    return table


def refresh(setting: Setting) -> None:
    """A plan on held-out microbatches as the policy is trained away from the one that was calibrated."""
    given, trace = setting.given, setting.trace
    native = build_actor(setting.spec, device=setting.spec.device.kind, live_adapters=True, seed=given.seed)
    actor = float32_twin(native)
    regions = [region.name for region in trace.buckets[-1].regions]
    training, held = (exposed_of(actor, setting, name) for name in ("calibration", "same"))
    held = spread(held, given.refresh_microbatches)
    candidate = next(one for one in solved_candidates(setting, "each") if one.name == "delta 1")
    rows: list[dict[str, float]] = []
    done, turn = 0, 0
    first_logps: list[Any] = []
    for updates in given.refresh_updates:
        part = [
            training[(turn + step) % len(training)] for step in range((updates - done) * given.refresh_accumulation)
        ]
        train(actor, part, lr=given.refresh_lr, seed=given.seed, accumulation=given.refresh_accumulation)
        turn, done = turn + len(part), updates
        with Instrument(actor, regions, seed=given.seed) as instrument:
            rows.append({"updates": updates, **_at(instrument, held, candidate, trace, first_logps)})
        setting.file("refresh.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    say(refresh_table(rows))


def _at(
    instrument: Instrument, held: Sequence[Microbatch], candidate: Candidate, trace: Trace, first: list[Any]
) -> dict[str, float]:
    expected, line = expected_by(trace), tell()
    error2 = allowed2 = predicted2 = 0.0
    moves, began = [], not first
    for place, batch in enumerate(held):
        line("refresh", place, len(held))
        exact = instrument.exact(batch)
        if began:
            first.append(exact.logps)
        moves.append(float((exact.logps - first[place])[batch.completion_mask != 0].abs().median()))
        plan = candidate.plan_for(exact.exposure)
        if plan is None:
            continue
        square = instrument.sketcher.sketch(exact.gradients).square
        error2 += instrument.error(batch, plan, exact).square
        allowed2 += (candidate.limit or 0.0) ** 2 * square
        predicted2 += square * sum(map(expected, lossy_units(trace.buckets[-1], plan.regions)))
    return {
        "log_move": float(np.median(moves)),
        "over_limit": math.sqrt(error2 / allowed2),
        "over_quadrature": math.sqrt(error2 / predicted2),
    }


def refresh_table(rows: Sequence[dict[str, float]]) -> Table:
    table = Table(title="the delta 1 plan, updates after its calibration", title_justify="left")
    for column in ("updates", "log-probs moved (nats)", "measured/limit", "measured/quadrature"):
        table.add_column(column, justify="right")
    for row in rows:
        moved = f"{row['log_move']:.3f}"
        table.add_row(f"{row['updates']:g}", moved, f"{row['over_limit']:.2f}", f"{row['over_quadrature']:.2f}")
    return table
