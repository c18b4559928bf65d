"""The stages of ``python -m bench.evidence``: each reads and writes files of one folder."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from bench.evidence_policy import copy_trained, moved, spread, until_exposed
from bench.evidence_setting import SPLITS, Setting, identity_of, say, tell
from hilore.planner.actor import Actor, build_actor
from hilore.planner.calibrate import calibrate_trace
from hilore.planner.calibration_sources import generate_file, is_null, read_microbatches
from hilore.planner.calibration_state import CalibrationState
from hilore.planner.calibration_view import confirmation_parts
from hilore.planner.confirm import Target, confirm_trace
from hilore.planner.emit import solve_trace, write_plans
from hilore.planner.evidence import Ranking
from hilore.planner.evidence_view import (
    candidates_table,
    evidence_json,
    limits_table,
    rankings_table,
    regimes_table,
)
from hilore.planner.gradient_error import Instrument
from hilore.planner.heldout import (
    Candidate,
    HeldOut,
    all_spearman,
    evidence,
    measure_held_out,
    plan_candidates,
    random_candidates,
)
from hilore.planner.heldout_native import measure_native, native_errors
from hilore.planner.heldout_regimes import regime_rows
from hilore.planner.microbatch import Microbatch
from hilore.planner.region_errors import measure_regions, rankings
from hilore.planner.spec import load_spec
from hilore.planner.stepping import float32_twin
from hilore.planner.trace import Trace
from hilore.planner.tracefile import load_trace, save_trace
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import reference_peaks
from hilore.runtime.planfile import load_plan
from hilore.runtime.planset import PlanSet


def rollouts(setting: Setting) -> None:
    actor: Actor | None = None
    for split, place in SPLITS.items():
        path = setting.file(f"{split}.jsonl")
        if path.exists():
            continue
        actor = actor or build_actor(setting.spec, device=setting.spec.device.kind, seed=setting.given.seed)
        actor = replace(actor, spec=setting.of_split(split))
        task = setting.given.tasks[split == "other"]
        generate_file(actor, path, tell(), seed=setting.given.seed + place, tasks=(task,))
        say(f"written: {path}")


def calibrate(setting: Setting) -> None:
    plain = setting.file("plain.trace.json")
    if not plain.exists():
        prior = replace(setting.spec, calibration=replace(setting.spec.calibration, source="prior"))
        save_trace(trace_spec(prior, tell()), plain)
    path = setting.file("calibrated.trace.json")
    if path.exists():
        return
    found = calibrate_trace(
        setting.spec,
        load_trace(plain),
        tell(),
        rollouts=setting.file("calibration.jsonl"),
        state=setting.file("calibrated.trace.json.calibration"),
        seed=setting.given.seed,
    )
    save_trace(found, path)
    made = found.calibration
    say(
        f"interaction {made.interaction:.3f} (mean {made.mean_interaction:.3f}), noise {made.noise_floor}, own dtypes "
        f"{made.native_noise}, edges {made.psi_edges}, seen {made.frequencies}"
    )


def confirm(setting: Setting) -> None:
    """Settle the factor of each delta on rollouts of their own."""
    for delta in setting.given.deltas:
        trace = setting.trace
        target = Target(_budget_bytes(setting, trace), 0, delta)
        if any(one.is_for(target.budget_bytes, 0, delta) for one in trace.calibration.confirmed):
            continue
        rollouts = setting.file("confirmation.jsonl")
        # One for all deltas: their exact runs are the same.
        state = setting.file("confirmation.state")
        options: dict[str, Any] = {"rollouts": rollouts, "state": state, "seed": setting.given.seed}
        found = confirm_trace(setting.spec, trace, target, tell(), **options)
        save_trace(found.trace, setting.file("calibrated.trace.json"))
        for part in confirmation_parts(found):
            say(part)


def _budget_bytes(setting: Setting, trace: Trace) -> int:
    low, high = reference_peaks(trace)
    return int(low + setting.given.part * (high - low))


def solve(setting: Setting) -> None:
    trace = setting.trace
    budget = _budget_bytes(setting, trace)
    for delta in setting.given.deltas:
        for rule in ("each", "joint"):
            solved = solve_trace(trace, budget_bytes=budget, delta=delta, rule=rule)
            write_plans(solved, setting.file(f"plans-{rule}-{delta:g}"))
            row = solved.rows[-1]
            counts = f"H {row.kept}, L {row.lossy}, R {row.replayed}, held {row.held}"
            allowances = [round(plan.regime.allowance, 3) for plan in solved.plans[:4]]
            say(
                f"delta {delta:g}, {rule}: {counts}, risk {row.risk:.4%}, gain {row.gain:+.1%}, allowances {allowances}"
            )


def training_plans(setting: Setting) -> None:
    """Plans of delta 1 for ``python -m bench.training``: its padded microbatches have a trace of their own, the risk of
    units is that of the calibration."""
    given = setting.given
    spec = load_spec(given.training_model)
    path = setting.file("training.trace.json")
    if not path.exists():
        save_trace(trace_spec(replace(spec, calibration=replace(spec.calibration, source="prior")), tell()), path)
    trace = replace(load_trace(path), calibration=setting.trace.calibration)
    low, high = reference_peaks(trace)
    solved = solve_trace(trace, budget_bytes=int(low + given.part * (high - low)), delta=1.0)
    write_plans(solved, setting.file("plans-training"))
    row = solved.rows[-1]
    say(f"training: H {row.kept}, L {row.lossy}, R {row.replayed}, risk {row.risk:.4%}, gain {row.gain:+.1%}")


def solved_candidates(setting: Setting, rule: str) -> list[Candidate]:
    found = []
    for delta in setting.given.deltas:
        folder = setting.file(f"plans-{rule}-{delta:g}")
        plans = [load_plan(path) for path in sorted(folder.glob("*.json"))]
        name = f"delta {delta:g}" + (", joint" if rule == "joint" else "")
        found.append(plan_candidates(PlanSet(tuple(plans)).plans, name))
    return found


def further_candidates(setting: Setting) -> list[Candidate]:
    """Joint plans where that rule allows some regime more than the rule each, and random ones."""
    joint = [
        one for one in solved_candidates(setting, "joint") if any(plan.regime.allowance != 1 for plan in one.plans)
    ]
    count, seed = setting.given.random_plans, setting.given.seed + 1000
    return [*joint, *random_candidates(setting.trace, count, seed=seed)]


def held_out(setting: Setting, split: str) -> None:
    """The plans of each delta on every microbatch of a split, further ones on the first of them."""
    trace, given = setting.trace, setting.given
    native = build_actor(setting.spec, device=setting.spec.device.kind, live_adapters=True, seed=given.seed)
    twin = float32_twin(native)
    batches = moved(setting, native, twin, split)
    store = CalibrationState(setting.file(f"{split}.state"), identity_of(setting, split))
    regions = [region.name for region in trace.buckets[-1].regions]
    solved, further = solved_candidates(setting, "each"), further_candidates(setting)
    first = until_exposed(batches, given.further_microbatches)
    with Instrument(twin, regions, seed=given.seed) as instrument:
        some = measure_held_out(instrument, trace, first, [*solved, *further], store, tell())
        every = measure_held_out(instrument, trace, batches, solved, store, tell())
    setting.file(f"{split}.pickle").write_bytes(pickle.dumps((every, some)))
    data, tables = both_of(setting, split)
    for table in tables:
        say(table)
    data["native"] = {}
    if given.native and split == "same":
        copy_trained(twin, native)
        exposed = [batch for batch, one in zip(batches, every.measured, strict=True) if one.gradient.square > 0]
        with Instrument(native, regions, seed=given.seed) as instrument:
            chosen = spread(exposed, given.native)
            measured = measure_native(instrument, chosen, solved, store, tell())
        errors = native_errors(measured, setting.spec.loss.kind, accumulation=setting.spec.batch.accumulation)
        data["native"] = {one.name: asdict(error) for one, error in zip(solved, errors, strict=True)}
    store.close()
    setting.file(f"{split}.json").write_text(json.dumps(data, allow_nan=False, indent=1), encoding="utf-8")
    _print_split(split, data)


def evidence_of(setting: Setting, found: HeldOut, title: str) -> tuple[dict[str, Any], list[Table]]:
    """What a split gave, as JSON values and as tables."""
    options: dict[str, Any] = {
        "accumulation": setting.spec.batch.accumulation,
        "updates": setting.given.updates,
        "seed": setting.given.seed + 7,
    }
    rows = evidence(found, setting.trace, **options)
    solved = [place for place, candidate in enumerate(found.candidates) if candidate.limit is not None]
    regimes = {found.candidates[place].name: regime_rows(found, place) for place in solved}
    exposed = [one for one in found.features if one.psi > 0]
    tables = [
        candidates_table(rows, f"{title}: {len(exposed)} microbatches with exposure of {len(found.measured)}"),
        limits_table(rows, f"{title}: how sure that is"),
        *(regimes_table(made, f"{title}: {name}, by kind of microbatch") for name, made in regimes.items()),
    ]
    data = evidence_json(rows, regimes, all_spearman(found, setting.trace, **options))
    data["microbatches"], data["exposed"] = len(found.measured), len(exposed)
    clipped = [one.clipped for one in exposed]
    data["mean_clipped_share"] = sum(clipped) / len(clipped) if clipped else 0.0
    data["clipped_microbatches"] = sum(share > 0 for share in clipped)
    return data, tables


def both_of(setting: Setting, split: str) -> tuple[dict[str, Any], list[Table]]:
    """Of the solved plans on every microbatch, and of the further ones on the first of them."""
    every, some = pickle.loads(setting.file(f"{split}.pickle").read_bytes())
    data, tables = evidence_of(setting, every, split)
    if len(some.candidates) > len(every.candidates):
        count = setting.given.further_microbatches
        data["first"], more = evidence_of(setting, some, f"{split}, the first {count} with exposure")
        tables += more[:2]
    return data, tables


def exposed_of(actor: Actor, setting: Setting, split: str) -> list[Microbatch]:
    """The microbatches of a split that some gradient can pass, as they were recorded."""
    found = read_microbatches(actor, setting.file(f"{split}.jsonl"))
    return [batch for batch in found if not is_null(actor.spec.loss, batch)]


def risk(setting: Setting) -> None:
    trace, given = setting.trace, setting.given
    native = build_actor(setting.spec, device=setting.spec.device.kind, live_adapters=True, seed=given.seed)
    twin = float32_twin(native)
    split = given.risk_split
    batches = moved(setting, native, twin, split)
    chosen = as_they_come(twin, batches, given.risk_microbatches)
    references = spread(exposed_of(twin, setting, "calibration"), given.risk_references)
    identity = identity_of(setting, split) | {"microbatches": len(chosen), "references": len(references)}
    name = "risk" if split == "same" else f"risk-{split}"
    store = CalibrationState(setting.file(f"{name}.state"), identity)
    regions = [region.name for region in trace.buckets[-1].regions]
    found: dict[str, dict[str, dict[str, Any]]] = {"as they come": {}, "of exposure above 0": {}}
    shape, exposed = (0, 0), 0
    with Instrument(twin, regions, seed=given.seed) as instrument:
        for codec in given.risk_codecs:
            options: dict[str, int] = {"every": given.risk_every, "references": len(references)}
            errors = measure_regions(instrument, trace, [*references, *chosen], codec, store, tell(), **options)
            for population, made in found.items():
                by_name = rankings(errors, trace, exposed=population != "as they come")
                made[codec] = {score: asdict(one) for score, one in by_name.items()}
            shape = errors.absolute[len(references) :].shape
            exposed = int((errors.gradient2[len(references) :] > 0).sum())
    store.close()
    data = {
        "split": split,
        "microbatches": shape[0],
        "exposed": exposed,
        "regions": shape[1],
        "rankings": found,
    }
    setting.file(f"{name}.json").write_text(json.dumps(data, allow_nan=False, indent=1), encoding="utf-8")
    for table in risk_tables(data):
        say(table)


def as_they_come(actor: Actor, batches: Sequence[Microbatch], count: int) -> list[Microbatch]:
    """``count`` microbatches of exposure above 0, evenly, and of the others as large a part."""
    loss = actor.spec.loss
    exposed = [batch for batch in batches if not is_null(loss, batch)]
    others = [batch for batch in batches if is_null(loss, batch)]
    chosen = spread(exposed, count)
    return [*chosen, *spread(others, round(len(others) * len(chosen) / max(len(exposed), 1)))]


def risk_tables(data: dict[str, Any]) -> list[Table]:
    tables = []
    for population, rankings_of in data["rankings"].items():
        by_codec = {codec: {name: Ranking(**one) for name, one in made.items()} for codec, made in rankings_of.items()}
        count = data["microbatches"] if population == "as they come" else data["exposed"]
        pairs = f"{count} microbatches {population} x {data['regions']} regions"
        tables.append(rankings_table(by_codec, f"{data['split']}: absolute error of {pairs}, ranked by each score"))
    return tables


def _print_split(split: str, data: dict[str, Any]) -> None:
    for name, errors in data["native"].items():
        say(f"{split}, {name}, own dtypes: {errors['plans']:.2%} under plans, control {errors['control']:.2%}")
    clipped, spearman = data["mean_clipped_share"], data["spearman_of_all"]
    say(f"{split}: clipped {clipped:.1%} of loss tokens, rank correlation {spearman:.2f}")
