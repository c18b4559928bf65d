"""The commands that read traces and plans and change nothing: show, explain, diff, frontier, report."""

from __future__ import annotations

from typing import Annotated

import typer

from hilore.cli_output import (
    JsonOption,
    PlanArgument,
    PlansArgument,
    PlanTraceOption,
    TraceOption,
    print_json,
    print_parts,
)


def show(plans: PlansArgument, trace_path: PlanTraceOption = None, as_json: JsonOption = False) -> None:
    """What plans do, folded over regions that do the same, and what their peak is made of."""
    from hilore.planner import plan_view
    from hilore.planner.peaks import plan_peaks
    from hilore.runtime.planfile import load_plan

    loaded = [(plan, plan_peaks(plan, trace_path)) for plan in map(load_plan, plans)]
    if as_json:
        print_json({"plans": [plan_view.plan_json(plan, peaks) for plan, peaks in loaded]})
        return
    for plan, peaks in loaded:
        print_parts(*plan_view.plan_lines(plan), plan_view.plan_table(plan), *plan_view.peak_parts(peaks))


def explain(
    plan: PlanArgument,
    unit: Annotated[str, typer.Argument(metavar="UNIT", help="As in the plan: model.layers.17.mlp.gate_proj")],
    trace_path: PlanTraceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Why a unit is what it is: what binds, and what each alternative costs and buys."""
    from hilore.planner import explain_view as view
    from hilore.planner.explain import explain_unit
    from hilore.planner.plantrace import trace_of_plan
    from hilore.runtime.planfile import load_plan

    loaded = load_plan(plan)
    found = explain_unit(loaded, trace_of_plan(loaded, trace_path)[0], unit)
    if as_json:
        print_json(view.explanation_json(found))
        return
    print_parts(*view.explanation_lines(found), view.explanation_table(found), *view.explanation_sums(found))


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A plan file.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The plan file to compare it with.")],
    as_json: JsonOption = False,
) -> None:
    """What changed from one plan to another."""
    from hilore.planner import plan_view
    from hilore.runtime.planfile import load_plan

    changed = plan_view.plan_differences(load_plan(first), load_plan(second))
    if as_json:
        print_json({"first": first, "second": second, "changed": changed})
        return
    print_parts(*(changed or ["the two plans do the same"]))


def frontier(
    budgets: Annotated[
        list[str] | None,
        typer.Option(
            "--budgets",
            metavar="MIB[,MIB...]",
            help="Ceilings as for solve. Default: 12 from the smallest feasible budget to No-GC's peak.",
        ),
    ] = None,
    deltas: Annotated[
        list[str] | None, typer.Option("--deltas", metavar="D[,D...]", help="As for solve. Default: 0,1.")
    ] = None,
    trace_path: TraceOption = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE.csv", help="Every point as CSV.")] = None,
    plot: Annotated[str | None, typer.Option("--plot", metavar="FILE.svg", help="The curves as one SVG.")] = None,
    time_limit: Annotated[float, typer.Option("--time-limit", metavar="S", help="Seconds for each solve.")] = 20.0,
    gap: Annotated[float, typer.Option("--gap", metavar="PCT", help="Allowed gap of each solve.")] = 0.1,
    rivals: Annotated[bool, typer.Option(help="Other policies too.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Peak against predicted step time: our plans and every other policy, from the smallest budget to No-GC."""
    from hilore.planner import frontier_view as view
    from hilore.planner.budget import parse_limit
    from hilore.planner.files import refuse_unwritable, replace_files
    from hilore.planner.frontier_options import frontier_budgets, frontier_deltas, plot_path
    from hilore.planner.progress import progress_bar
    from hilore.planner.tracefile import load_trace, newest_trace

    limit_s, gap_percent = parse_limit("--time-limit", time_limit, zero=False), parse_limit("--gap", gap, zero=True)
    wanted = frontier_deltas(deltas)
    plot = plot_path(plot)
    refuse_unwritable(*(path for path in (out, plot) if path))
    path = trace_path if trace_path is not None else str(newest_trace())
    found = load_trace(path)
    ceilings = frontier_budgets(budgets, found, delta=max(wanted))
    from hilore.planner import frontier as planning
    from hilore.planner.frontier_plot import frontier_svg

    with progress_bar() as progress:
        result = planning.frontier(
            found,
            budgets=ceilings,
            deltas=wanted,
            time_limit_s=limit_s,
            gap_percent=gap_percent,
            rivals=rivals,
            progress=progress,
        )
    texts = {out: view.frontier_csv(result)} if out else {}
    if plot:
        texts[plot] = frontier_svg(result)
    replace_files(texts)
    if as_json:
        print_json(view.frontier_json(result, path, list(texts)))
        return
    written = [f"written: {', '.join(texts)}"] if texts else []
    print_parts(view.gains_table(result), view.plans_table(result), *view.frontier_lines(result, path), *written)


def report(
    plans: Annotated[
        list[str] | None, typer.Argument(metavar="PLAN...", help="Default: those of the trace under plans/.")
    ] = None,
    trace_path: PlanTraceOption = None,
    bench_path: Annotated[
        str | None, typer.Option("--bench", metavar="FILE.json", help="Measured figures, as bench writes them.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE.html", help="Default: NAME.report.html here.")
    ] = None,
    frontier: Annotated[bool, typer.Option(help="Solve a frontier for it (a minute or two).")] = True,
    points: Annotated[int, typer.Option("--points", min=2, help="Budgets of the frontier.")] = 8,
    time_limit: Annotated[float, typer.Option("--time-limit", metavar="S", help="Seconds for each solve.")] = 20.0,
    as_json: JsonOption = False,
) -> None:
    """One self-contained HTML page: trace, plans, memory event by event, frontier, measured figures."""
    from hilore.planner import report_inputs as inputs
    from hilore.planner.budget import parse_limit
    from hilore.planner.files import refuse_unwritable, replace_file
    from hilore.planner.progress import progress_bar

    limit_s = parse_limit("--time-limit", time_limit, zero=False)
    found, path = inputs.report_trace(plans, trace_path)
    loaded = inputs.report_plans(found, path, plans)
    measured = inputs.load_bench(bench_path) if bench_path is not None else None
    target = out or f"{found.name}.report.html"
    refuse_unwritable(target)
    from hilore.planner import frontier as planning
    from hilore.planner.report import report_html

    curves = None
    if frontier:
        deltas = sorted({0.0, loaded[0].delta})
        budgets = planning.default_budgets(found, delta=deltas[-1], points=points)
        with progress_bar() as progress:
            curves = planning.frontier(found, budgets=budgets, deltas=deltas, time_limit_s=limit_s, progress=progress)
    sources = [path, *(plan.path for plan in loaded), *([bench_path] if bench_path else [])]
    replace_file(target, report_html(found, loaded, frontier=curves, bench=measured, sources=sources))
    if as_json:
        print_json({"trace": path, "plans": [plan.path for plan in loaded], "bench": bench_path, "written": target})
        return
    print_parts(f"written: {target}")
