"""The commands that measure risk: calibrate, and verify on recorded rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hilore.cli_output import MOST_SEED, JsonOption, TraceOption, print_json, print_parts

if TYPE_CHECKING:
    from hilore.planner.spec_types import ModelSpec
    from hilore.planner.trace import Trace
    from hilore.runtime.plan import Plan

RolloutsOption = Annotated[str | None, typer.Option("--rollouts", metavar="FILE", help="Recorded rollouts (JSONL).")]


def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL.YAML", help="The actor that the trace is of.")],
    rollouts: RolloutsOption = None,
    trace_path: TraceOption = None,
    seed: Annotated[
        int,
        typer.Option("--seed", min=0, max=MOST_SEED, help="Of plans and adapters: the same seed gives the same bytes."),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure risk and exposure on rollouts and put them into the trace. Interrupted, it goes on where it was."""
    from dataclasses import replace

    from hilore.planner import calibration_view as view
    from hilore.planner.calibration_state import SUFFIX
    from hilore.planner.progress import progress_bar
    from hilore.planner.spec import load_spec
    from hilore.planner.tracefile import load_trace, newest_trace, save_trace

    spec = load_spec(model)
    if rollouts is not None and spec.calibration.source != "generate":
        spec = replace(spec, calibration=replace(spec.calibration, source="rollouts", path=rollouts))
    path = Path(trace_path) if trace_path is not None else newest_trace()
    found = load_trace(path)
    from hilore.planner.calibrate import calibrate_trace

    state = Path(f"{path}{SUFFIX}")
    with progress_bar() as progress:
        calibrated = calibrate_trace(
            spec,
            found,
            progress,
            rollouts=None if rollouts is None else Path(rollouts),
            state=state,
            seed=seed,
        )
    save_trace(calibrated, path)
    # Not before: hours of measurements are in it.
    state.unlink(missing_ok=True)
    if as_json:
        print_json(view.calibration_json(calibrated, str(path)))
        return
    tables = (view.risk_table(calibrated), view.regime_table(calibrated))
    print_parts(*tables, *view.calibration_lines(calibrated), f"written: {path}")


def confirm(
    model: Annotated[str, typer.Argument(metavar="MODEL.YAML", help="The actor that the trace is of.")],
    rollouts: Annotated[
        str, typer.Option("--rollouts", metavar="FILE", help="Recorded rollouts (JSONL), best not calibration's.")
    ],
    budget: Annotated[str, typer.Option("--budget", metavar="MIB|auto", help="As for solve.")],
    delta: Annotated[str, typer.Option("--delta", help="As for solve.")],
    margin: Annotated[str | None, typer.Option("--margin", metavar="MIB", help="As for solve.")] = None,
    drift: Annotated[
        float | None,
        typer.Option("--drift", help="What errors may rise by as training moves the policy, before delta; else 1.3."),
    ] = None,
    trace_path: TraceOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="Of adapters, as for calibrate.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure the plans that solve makes of a budget and delta, until updates keep delta; solve then makes those."""
    from dataclasses import replace

    from hilore.planner import calibration_view as view
    from hilore.planner.budget import parse_delta, parse_memory
    from hilore.planner.progress import progress_bar
    from hilore.planner.spec import load_spec
    from hilore.planner.tracefile import load_trace, newest_trace, save_trace

    spec = load_spec(model)
    spec = replace(spec, calibration=replace(spec.calibration, source="rollouts", path=rollouts))
    wanted_delta = parse_delta(delta)
    path = Path(trace_path) if trace_path is not None else newest_trace()
    found = load_trace(path)
    budget_bytes, margin_bytes = parse_memory(budget, margin, card_bytes=found.card_bytes)
    from hilore.planner.confirm import DRIFT, SUFFIX, Target, confirm_trace

    state = Path(f"{path}{SUFFIX}")
    with progress_bar() as progress:
        confirmation = confirm_trace(
            spec,
            found,
            Target(budget_bytes, margin_bytes, wanted_delta, DRIFT if drift is None else drift),
            progress,
            rollouts=Path(rollouts),
            state=state,
            seed=seed,
        )
    save_trace(confirmation.trace, path)
    state.unlink(missing_ok=True)
    if as_json:
        print_json(view.confirmation_json(confirmation, str(path)))
        return
    print_parts(*view.confirmation_parts(confirmation), f"written: {path}")


def verify_on_rollouts(
    plans: Sequence[Plan],
    spec: ModelSpec,
    trace: Trace,
    rollouts: str,
    *,
    microbatches: int | None,
    risk_microbatches: int,
    as_json: bool,
) -> int:
    """What `verify --rollouts` does; returns the exit code."""
    from hilore.planner import verify_rollouts as verifying
    from hilore.planner.progress import progress_bar

    with progress_bar() as progress:
        found = verifying.verify_rollouts(
            plans,
            spec,
            trace,
            Path(rollouts),
            microbatches=microbatches,
            risk_microbatches=risk_microbatches,
            progress=progress,
        )
    if as_json:
        print_json(verifying.verification_json(found))
    else:
        print_parts(*verifying.verification_parts(found))
    return found.exit_code
