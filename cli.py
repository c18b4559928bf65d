"""The command line: parse, call, print, exit code. No arithmetic.

Exit codes: 0 done, 1 a bug of ours, 2 usage or input file, 3 feasible but the gap was not closed in time,
4 infeasible, 5 nothing found in time, 6 verification failed.
"""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(f"hilore-plan needs {missing.name}: pip install 'hilore-plan[planner]'") from None

from hilore import cli_calibrate, cli_measures, cli_views
from hilore.cli_output import JsonOption, TraceOption, complain, print_json, print_parts

DEBUG = "HILORE_DEBUG"
EXTRAS = {
    **dict.fromkeys(("ortools", "networkx", "rich", "yaml"), "planner"),
    **dict.fromkeys(("transformers", "peft", "gguf", "safetensors"), "hf"),
    "trl": "trl",
}

app = typer.Typer(
    name="hilore-plan",
    help="Plan which activations a GRPO update keeps, compresses or recomputes.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; messages of errors go to stderr, without a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=given, prog_name="hilore-plan", obj=shlex.join(["hilore-plan", *given]))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BrokenPipeError:
        # The reader of a pipe has seen enough; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        complain("interrupted; files are as they were")
        return 130
    except Exception as error:  # noqa: BLE001 - the last place before the user, who gets a line and an exit code
        return _report(error)
    return 0


def _report(error: Exception) -> int:
    # Imported here because it brings torch, and --help should answer at once.
    from hilore.runtime.errors import HiloreError, InternalError

    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    if isinstance(error, HiloreError) and not isinstance(error, InternalError):
        complain(error.message)
        return error.exit_code
    if isinstance(error, ModuleNotFoundError):
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is not None:
            complain(f"this command needs {error.name}: pip install 'hilore-plan[{extra}]'")
            return 2
    complain(f"internal error: {type(error).__name__}: {error} (set {DEBUG}=1 for the traceback)")
    return InternalError.exit_code


@app.command()
def trace(
    model: Annotated[str, typer.Argument(metavar="MODEL.YAML", help="The actor, as examples/*.yaml describe it.")],
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="Default: NAME.trace.json here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Capture and profile the actor: regions, units, bytes and times, into a trace file."""
    from hilore.planner import view
    from hilore.planner.files import refuse_unwritable
    from hilore.planner.progress import progress_bar
    from hilore.planner.spec import load_spec
    from hilore.planner.tracefile import save_trace

    spec = load_spec(model)
    path = out or f"{spec.name}.trace.json"
    refuse_unwritable(path)
    from hilore.planner.tracing import trace_spec

    with progress_bar() as progress:
        found = trace_spec(spec, progress)
    save_trace(found, path)
    if as_json:
        print_json(view.trace_json(found, path))
        return
    print_parts(*view.trace_tables(found), *view.trace_lines(found), f"written: {path}", view.trace_last_line(found))


@app.command()
def solve(
    context: typer.Context,
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            metavar="MIB|auto",
            help="Peak of allocated memory per GPU. A bare number is MiB (1024 x 1024 bytes); 30318MiB and 29.6GiB "
            "are exact; MB and GB are refused. auto: the card. What --margin names is taken off.",
        ),
    ],
    delta: Annotated[
        str,
        typer.Option("--delta", help="Allowed update error, as a multiple of the reference error; 0 forbids L."),
    ],
    trace_path: TraceOption = None,
    out: Annotated[str, typer.Option("--out", metavar="FOLDER", help="Where the plan files go.")] = "plans",
    margin: Annotated[
        str | None,
        typer.Option(
            "--margin",
            metavar="MIB",
            help="Part of the budget that is not for allocations (context, NCCL, fragmentation): plans stay that much "
            "under it. Default: 0, and 1024 with --budget auto.",
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="S", help="Seconds, for all regimes together.")
    ] = 60.0,
    gap: Annotated[
        float, typer.Option("--gap", metavar="PCT", help="Allowed gap, percent of the step; 0 asks for proof.")
    ] = 0.1,
    granularity: Annotated[
        Literal["unit", "layer"], typer.Option("--granularity", help="Grain of decisions: calls, or whole regions.")
    ] = "unit",
    rule: Annotated[
        Literal["each", "joint"],
        typer.Option(
            "--rule",
            help="How an update's error is spent: the same limit in each exposure regime, or jointly, more where "
            "exposure is low and less where it is high, as calibration saw them.",
        ),
    ] = "each",
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plans under the budget: four regimes of each length bucket, one file each."""
    from hilore.planner import view
    from hilore.planner.budget import parse_delta, parse_limit, parse_memory
    from hilore.planner.files import refuse_unwritable
    from hilore.planner.spec import spec_from_dict
    from hilore.planner.tracefile import load_trace, newest_trace

    wanted_delta = parse_delta(delta)
    limit_s = parse_limit("--time-limit", time_limit, zero=False)
    gap_percent = parse_limit("--gap", gap, zero=True)
    refuse_unwritable(Path(out) / "plan.json")
    path = Path(trace_path) if trace_path is not None else newest_trace()
    found = load_trace(path)
    spec_from_dict(found.spec)
    budget_bytes, margin_bytes = parse_memory(budget, margin, card_bytes=found.card_bytes)
    from hilore.planner.emit import solve_trace, write_plans

    result = solve_trace(
        found,
        budget_bytes=budget_bytes,
        delta=wanted_delta,
        margin_bytes=margin_bytes,
        time_limit_s=limit_s,
        gap_percent=gap_percent,
        granularity=granularity,
        rule=rule,
        command=str(context.obj),
    )
    written = write_plans(result, out)
    if as_json:
        print_json(view.solve_json(result, str(path), written, gap=gap_percent, limit_s=limit_s))
    else:
        lines = view.solve_lines(result, str(path), written, gap=gap_percent, limit_s=limit_s)
        print_parts(*view.solve_tables(result), *lines)
    raise typer.Exit(result.exit_code)


for command in (
    cli_calibrate.calibrate,
    cli_calibrate.confirm,
    cli_measures.verify,
    cli_measures.bench,
    cli_views.show,
    cli_views.explain,
    cli_views.diff,
    cli_views.frontier,
    cli_views.report,
):
    app.command()(command)


if __name__ == "__main__":
    sys.exit(main())
