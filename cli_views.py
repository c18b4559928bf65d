"""The commands that read traces and plans and change nothing: show, explain, diff."""

from __future__ import annotations

from typing import Annotated

import typer

from hilore.cli_output import JsonOption, PlanArgument, PlansArgument, PlanTraceOption, print_json, print_parts


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
