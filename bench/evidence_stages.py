"""The stages of ``python -m bench.evidence``: each reads and writes files of one folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.table import environment, write_json
from hilore.planner.actor import Actor, build_actor, with_reference
from hilore.planner.calibrate import calibrate_trace
from hilore.planner.calibration_sources import generate_file, recorded
from hilore.planner.calibration_state import CalibrationState
from hilore.planner.emit import solve_trace, write_plans
from hilore.planner.evidence_view import candidates_table, evidence_json, rankings_table, regimes_table
from hilore.planner.gradient_error import Instrument
from hilore.planner.head import grpo_loss, policy_logps
from hilore.planner.heldout import (
    Candidate,
    HeldOut,
    all_spearman,
    evidence,
    measure_held_out,
    plan_candidates,
    random_candidates,
    regime_rows,
)
from hilore.planner.heldout_native import measure_native, native_errors
from hilore.planner.microbatch import Microbatch
from hilore.planner.optimizer import make_optimizer
from hilore.planner.region_errors import measure_regions, rankings
from hilore.planner.spec_types import ModelSpec
from hilore.planner.stepping import float32_twin
from hilore.planner.trace import Trace
from hilore.planner.tracefile import load_trace, save_trace
from hilore.planner.tracing import trace_spec
from hilore.planner.verify import reference_peaks
from hilore.runtime.planfile import load_plan
from hilore.runtime.planset import PlanSet

SPLITS = {"calibration": 0, "same": 1, "other": 2}
LINE_EVERY_S = 20.0


@dataclass(frozen=True, slots=True)
class Setting:
    spec: ModelSpec
    folder: Path
    given: argparse.Namespace

    def file(self, name: str) -> Path:
        return self.folder / name

    def of_split(self, split: str) -> ModelSpec:
        """With as many microbatches as that split's file is to have."""
        count = self.given.calibration_microbatches if split == "calibration" else self.given.microbatches
        return replace(self.spec, calibration=replace(self.spec.calibration, microbatches=count))

    @property
    def trace(self) -> Trace:
        return load_trace(self.file("calibrated.trace.json"))


def rollouts(setting: Setting) -> None:
    actor: Actor | None = None
    for split, place in SPLITS.items():
        path = setting.file(f"{split}.jsonl")
        if path.exists():
            continue
        actor = actor or build_actor(setting.spec, device=setting.spec.device.kind, seed=setting.given.seed)
        actor = replace(actor, spec=setting.of_split(split))
        task = setting.given.tasks[split == "other"]
        generate_file(actor, path, _tell(), seed=setting.given.seed + place, tasks=(task,))
        _say(f"written: {path}")


def calibrate(setting: Setting) -> None:
    plain = setting.file("plain.trace.json")
    if not plain.exists():
        prior = replace(setting.spec, calibration=replace(setting.spec.calibration, source="prior"))
        save_trace(trace_spec(prior, _tell()), plain)
    path = setting.file("calibrated.trace.json")
    if path.exists():
        return
    found = calibrate_trace(
        setting.spec,
        load_trace(plain),
        _tell(),
        rollouts=setting.file("calibration.jsonl"),
        state=setting.file("calibrated.trace.json.calibration"),
        seed=setting.given.seed,
    )
    save_trace(found, path)
    made = found.calibration
    _say(
        f"interaction {made.interaction:.3f} (mean {made.mean_interaction:.3f}), noise {made.noise_floor}, own dtypes "
        f"{made.native_noise}, edges {made.psi_edges}, seen {made.frequencies}"
    )


def solve(setting: Setting) -> None:
    trace = setting.trace
    low, high = reference_peaks(trace)
    budget = int(low + setting.given.part * (high - low))
    for delta in setting.given.deltas:
        for rule in ("each", "joint"):
            solved = solve_trace(trace, budget_bytes=budget, delta=delta, rule=rule)
            write_plans(solved, setting.file(f"plans-{rule}-{delta:g}"))
            row = solved.rows[-1]
            counts = f"H {row.kept}, L {row.lossy}, R {row.replayed}, held {row.held}"
            allowances = [round(plan.regime.allowance, 3) for plan in solved.plans[:4]]
            _say(
                f"delta {delta:g}, {rule}: {counts}, risk {row.risk:.4%}, gain {row.gain:+.1%}, allowances {allowances}"
            )


def _candidates(setting: Setting) -> list[Candidate]:
    found = []
    for delta in setting.given.deltas:
        for rule in ("each", "joint"):
            folder = setting.file(f"plans-{rule}-{delta:g}")
            plans = [load_plan(path) for path in sorted(folder.glob("*.json"))]
            name = f"delta {delta:g}" + (", joint" if rule == "joint" else "")
            found.append(plan_candidates(PlanSet(tuple(plans)).plans, name))
    count, seed = setting.given.random_plans, setting.given.seed + 1000
    return [*found, *random_candidates(setting.trace, count, seed=seed)]


def held_out(setting: Setting, split: str) -> None:
    trace, candidates = setting.trace, _candidates(setting)
    native = build_actor(setting.spec, device=setting.spec.device.kind, live_adapters=True, seed=setting.given.seed)
    twin = float32_twin(native)
    batches = _moved(setting, native, twin, split)
    store = CalibrationState(setting.file(f"{split}.state"), _identity(setting, split))
    regions = [region.name for region in trace.buckets[-1].regions]
    with Instrument(twin, regions, seed=setting.given.seed) as instrument:
        found = measure_held_out(instrument, trace, batches, candidates, store, _tell())
    _copy_trained(twin, native)
    data = _evidence_of(setting, found, split)
    if setting.given.native:
        exposed = [batch for batch, one in zip(batches, found.measured, strict=True) if one.gradient.square > 0]
        with Instrument(native, regions, seed=setting.given.seed) as instrument:
            for candidate in candidates[: 2 * len(setting.given.deltas) : 2]:
                some = exposed[: setting.given.native]
                measured = measure_native(instrument, some, candidate, store, _tell())
                accumulation = setting.spec.batch.accumulation
                errors = native_errors(measured, setting.spec.loss.kind, accumulation=accumulation)
                data["native"][candidate.name] = asdict(errors)
    store.close(done=False)
    setting.file(f"{split}.json").write_text(json.dumps(data, allow_nan=False, indent=1), encoding="utf-8")
    _print_split(setting, split, data)


def _evidence_of(setting: Setting, found: HeldOut, split: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "accumulation": setting.spec.batch.accumulation,
        "updates": setting.given.updates,
        "seed": setting.given.seed + 7,
    }
    rows = evidence(found, setting.trace, **options)
    solved = [place for place, candidate in enumerate(found.candidates) if candidate.limit is not None]
    regimes = {found.candidates[place].name: regime_rows(found, place) for place in solved}
    _say(candidates_table(rows, f"{split}: {len(found.measured)} microbatches"))
    for name, made in regimes.items():
        _say(regimes_table(made, f"{split}, {name}"))
    clipped = [one.clipped for one in found.features if one.psi > 0]
    data = evidence_json(rows, regimes, all_spearman(found, setting.trace, **options))
    data["microbatches"] = len(found.measured)
    data["mean_clipped_share"] = sum(clipped) / len(clipped) if clipped else 0.0
    data["one_of_eight"] = sum(abs(one.advantage - 1.75) < 0.1 for one in found.features)
    data["native"] = {}
    return data


def risk(setting: Setting) -> None:
    trace = setting.trace
    native = build_actor(setting.spec, device=setting.spec.device.kind, live_adapters=True, seed=setting.given.seed)
    twin = float32_twin(native)
    moved = _moved(setting, native, twin, "same")
    exposed = [batch for batch in moved if bool(batch.advantages.any())][: setting.given.risk_microbatches]
    store = CalibrationState(setting.file("risk.state"), _identity(setting, "same"))
    regions = [region.name for region in trace.buckets[-1].regions]
    found = {}
    with Instrument(twin, regions, seed=setting.given.seed) as instrument:
        for codec in setting.given.risk_codecs:
            errors = measure_regions(instrument, trace, exposed, codec, store, _tell())
            found[codec] = rankings(errors, trace)
    store.close(done=False)
    _say(rankings_table(found, f"absolute error of {len(exposed) - 1} x {len(regions)} pairs of microbatch and region"))
    data = {codec: {name: asdict(one) for name, one in made.items()} for codec, made in found.items()}
    setting.file("risk.json").write_text(json.dumps(data, allow_nan=False, indent=1), encoding="utf-8")


def report(setting: Setting) -> None:
    command = "python -m bench.evidence"
    data: dict[str, Any] = {"environment": environment(torch.get_num_threads(), command), "given": vars(setting.given)}
    made = setting.trace.calibration
    data["calibration"] = {key: value for key, value in asdict(made).items() if key not in ("risks", "samples")}
    for name in ("same", "other", "risk"):
        path = setting.file(f"{name}.json")
        if path.exists():
            data[name] = json.loads(path.read_text(encoding="utf-8"))
    path = setting.given.out or str(setting.file("evidence.json"))
    write_json(data, path)
    _say(f"written: {path}")


def _moved(setting: Setting, native: Actor, actor: Actor, split: str) -> tuple[Microbatch, ...]:
    """A split's batches with the log-probs of now as old ones, after one epoch of them has trained ``actor``.

    What is measured then is a later inner epoch: ratios are not 1, and some tokens are clipped.
    """
    reading = replace(native, spec=setting.of_split(split))
    found = recorded(reading, setting.file(f"{split}.jsonl")).microbatches
    batches = tuple(with_reference(native, batch) for batch in found)
    lr, seed = setting.given.lr, setting.given.seed
    if not lr:
        return batches
    model, loss = actor.model, actor.spec.loss
    with torch.no_grad():
        old = [policy_logps(model, batch, loss.head).detach() for batch in batches]
    batches = tuple(replace(batch, old_logps=logps) for batch, logps in zip(batches, old, strict=True))
    optimizer = make_optimizer(model, actor.spec, lr=lr)
    accumulation = actor.spec.batch.accumulation
    tell = _tell()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for place, batch in enumerate(batches):
            tell("inner epoch", place, len(batches))
            if bool(batch.advantages.any()):
                grpo_loss(policy_logps(model, batch, loss.head), batch, loss, accumulation).backward()  # type: ignore[no-untyped-call]
            if (place + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    optimizer.zero_grad(set_to_none=True)
    return batches


def _copy_trained(source: Actor, target: Actor) -> None:
    with torch.no_grad():
        for mine, its in zip(target.model.parameters(), source.model.parameters(), strict=True):
            if mine.requires_grad:
                mine.copy_(its)


def _identity(setting: Setting, split: str) -> dict[str, Any]:
    given = setting.given
    trace = setting.file("calibrated.trace.json").read_bytes()
    rollouts = setting.file(f"{split}.jsonl").read_bytes()
    return {
        "trace": _hash(trace),
        "rollouts": _hash(rollouts),
        "lr": given.lr,
        "seed": given.seed,
        "threads": torch.get_num_threads(),
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _print_split(setting: Setting, split: str, data: dict[str, Any]) -> None:
    for name, errors in data["native"].items():
        _say(f"{split}, {name}, own dtypes: {errors['plans']:.2%} under plans, control {errors['control']:.2%}")
    clipped, spearman = data["mean_clipped_share"], data["spearman_of_all"]
    _say(f"{split}: clipped {clipped:.1%} of loss tokens, rank correlation {spearman:.2f}")


def _tell() -> Callable[[str, int, int], None]:
    """A line now and then: these runs are long, and mostly watched through a file."""
    state = {"last": 0.0, "began": time.monotonic()}

    def tell(label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - state["last"] > LINE_EVERY_S:
            state["last"] = now
            sys.stderr.write(f"{now - state['began']:8.0f} s  {label}: {done} of {total}\n")

    return tell


def _say(part: str | Table) -> None:
    Console(markup=False, highlight=False, width=200).print(part, soft_wrap=isinstance(part, str))
