"""The commands that run updates and measure them: verify, bench."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hilore import cli_calibrate
from hilore.cli_output import MOST_SEED, JsonOption, PlansArgument, TraceOption, print_json, print_parts

if TYPE_CHECKING:
    from hilore.planner.trace import Trace

BROKEN_PROMISE = 6


def verify(
    plans: PlansArgument,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL.YAML", help="The actor. Default: the one of the trace.")
    ] = None,
    trace_path: TraceOption = None,
    fake: Annotated[
        bool, typer.Option("--fake", help="Under fake tensors: peaks alone, of any size of model.")
    ] = False,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Timed rounds, policies interleaved.")] = 5,
    rollouts: Annotated[
        str | None,
        typer.Option(
            "--rollouts", metavar="FILE", help="Gradient errors alone, of updates of recorded rollouts (JSONL)."
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", min=1, help="Of --rollouts; default: all of the file.")
    ] = None,
    risk_microbatches: Annotated[
        int,
        typer.Option(
            "--risk-microbatches", min=0, help="Of --rollouts: rank the risk of single regions on so many (slow)."
        ),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run updates under plans; compare measured with predicted peak, time and gradient error. Exit 6 on a breach."""
    from hilore.planner import plan_view
    from hilore.planner.plantrace import likely_trace
    from hilore.planner.progress import progress_bar
    from hilore.planner.spec import load_spec, spec_from_dict
    from hilore.planner.tracefile import load_trace
    from hilore.runtime.planfile import load_plan

    loaded = [load_plan(path) for path in plans]
    found: Trace | None = None
    if model is None:
        found = load_trace(trace_path if trace_path is not None else likely_trace(loaded[0]))
        spec = spec_from_dict(found.spec)
    else:
        spec = load_spec(model)
        if trace_path is not None:
            found = load_trace(trace_path)
    if rollouts is not None:
        trace = found or load_trace(likely_trace(loaded[0]))
        code = cli_calibrate.verify_on_rollouts(
            loaded,
            spec,
            trace,
            rollouts,
            microbatches=microbatches,
            risk_microbatches=risk_microbatches,
            as_json=as_json,
        )
        raise typer.Exit(code)
    from hilore.planner.check import verify_plans

    with progress_bar() as progress:
        checked = verify_plans(loaded, spec, trace=found, fake=fake, rounds=rounds, progress=progress)
    if as_json:
        print_json(plan_view.check_json(checked))
    else:
        print_parts(plan_view.check_table(checked), *plan_view.check_lines(checked))
    raise typer.Exit(checked.exit_code)


def bench(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL.YAML", help="The actor; it is built and trained here.")],
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, help="Timed rounds, policies interleaved. Default: 15, or 3 with --quick."),
    ] = None,
    microbatches: Annotated[int, typer.Option("--microbatches", min=1, help="Of the update that is measured.")] = 2,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Of torch.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="Of weights, rollouts and resampling.")] = 0,
    time_limit: Annotated[float, typer.Option("--time-limit", metavar="S", help="Seconds for each solve.")] = 20.0,
    grain: Annotated[
        Literal["unit", "layer"] | None,
        typer.Option("--grain", help="Of plans. Default: both, unit alone with a chunked head."),
    ] = None,
    deltas: Annotated[
        list[str] | None, typer.Option("--delta", help="Of plans; may be given more than once. Default: 0 and 1.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="Default: NAME.bench.json here.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model of the same shape: does everything work?")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure GC, No-GC, the best layers held, and plans side by side on this device. Exit 6 on a broken promise."""
    import json

    from hilore.planner.budget import parse_delta, parse_limit
    from hilore.planner.files import refuse_unwritable, replace_file
    from hilore.planner.progress import progress_bar
    from hilore.planner.spec import load_spec

    limit_s = parse_limit("--time-limit", time_limit, zero=False)
    wanted = tuple(map(parse_delta, deltas or ("0", "1")))
    spec = load_spec(model)
    refuse_unwritable(out or f"{spec.name}.bench.json")
    from hilore.planner import sidebyside_report as report
    from hilore.planner.sidebyside_model import QUICK_ROUNDS, ROUNDS, Options, measure_model, tiny

    options = Options(
        rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
        microbatches=microbatches,
        seed=seed,
        threads=threads,
        time_limit_s=limit_s,
        grains=(grain,) if grain else None,
        deltas=wanted,
        command=str(context.obj),
    )
    with progress_bar() as progress:
        found = measure_model(tiny(spec) if quick else spec, options, progress)
    data = report.models_json([found], threads, str(context.obj))
    path = out or f"{found.name}.bench.json"
    replace_file(path, json.dumps(data, indent=1, allow_nan=False) + "\n")
    if as_json:
        print_json(data | {"written": path})
    else:
        print_parts(*report.model_parts(found), f"written: {path}")
    raise typer.Exit(BROKEN_PROMISE if found.result.breaches else 0)
