"""Trace + budget + delta -> plans: one per exposure regime and length bucket, all or none, and their files."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import hilore
from hilore.planner.budget import AUTO_MARGIN_BYTES, mib
from hilore.planner.build import Offered, assemble, build_regions, risk_limit
from hilore.planner.compose import Job, Options, make_plan, region_plan, update_error
from hilore.planner.composition import Composition, composition_text, highest, plan_compositions
from hilore.planner.confirmed import confirmed_for, with_measured
from hilore.planner.cpsat import ORTOOLS_VERSION
from hilore.planner.greedy import greedy
from hilore.planner.leastpeak import LeastPeak, fitting_choice, least_peak
from hilore.planner.milp import solve
from hilore.planner.planwriter import write_plans
from hilore.planner.problem import Configuration, Problem, Solution
from hilore.planner.profile import spread_notes
from hilore.planner.regimes import ALLOWANCES, RULES, RegimeInterval, joint_regimes, regimes
from hilore.planner.solved import InfeasibleError, NoPlanError, SolveResult, SolveRow
from hilore.planner.tables import make_tables
from hilore.planner.trace import Bucket, Trace
from hilore.planner.verify import binding_event, largest_bucket, verify
from hilore.runtime.errors import HiloreError, InternalError
from hilore.runtime.plan import Plan

__all__ = ["InfeasibleError", "NoPlanError", "SolveResult", "SolveRow", "solve_trace", "update_error", "write_plans"]

MIB = 2**20
# A search gets this long, where so much is left, even if its share of the time limit is less.
LEAST_SHARE_S = 0.5


def solve_trace(
    trace: Trace,
    *,
    budget_bytes: int,
    delta: float,
    margin_bytes: int = 0,
    time_limit_s: float = 60.0,
    gap_percent: float = 0.1,
    granularity: str = "unit",
    rule: str = "each",
    command: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> SolveResult:
    """Plans for the regimes null, low, mid and high of every length bucket.

    The allocated peak stays within ``budget_bytes`` less ``margin_bytes`` (what a card needs beside allocations).
    ``time_limit_s`` is for all of them together. Within a bucket a lower regime's plan is never slower than a higher
    one's. ``rule``: how an update's error is spent over regimes (planner/regimes.py). The same input gives the same
    plans, apart from ``solver.wall_s`` and ``provenance.created_at``, unless the time limit cuts a search short.
    Raises InfeasibleError, NoPlanError; HiloreError for a trace that cannot be used; InternalError where solver and
    verifier disagree.
    """
    deadline = clock() + time_limit_s
    if rule not in RULES:
        raise HiloreError(f"rule {rule!r}: one of {', '.join(RULES)}", rule=rule)
    options = Options(budget_bytes, margin_bytes, delta, time_limit_s, gap_percent, granularity, rule)
    set_id = _set_id(trace, options)
    confirmed = confirmed_for(trace, options)
    if confirmed is not None:
        trace = replace(trace, calibration=replace(trace.calibration, interaction=confirmed.interaction))
    intervals = _intervals(trace, options)
    solved: list[tuple[Job, Solution]] = []
    buckets = sorted(trace.buckets, key=lambda bucket: -bucket.tokens)
    for done, bucket in enumerate(buckets):
        jobs = _jobs(trace, bucket, options, intervals)
        found = _solve_bucket(trace, jobs, deadline, len(buckets) - done, options, clock)
        solved += [(replace(job, problem=found[job.regime.label].problem), found[job.regime.label]) for job in jobs]
    created_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    provenance: dict[str, Any] = {
        "command": command,
        "versions": {**trace.versions, "hilore": hilore.__version__, "ortools": ORTOOLS_VERSION},
        "created_at": created_at,
    }
    made = [make_plan(trace, job, solution, options, set_id, provenance) for job, solution in solved]
    largest = largest_bucket(trace).tokens
    plans, risk_notes = with_measured([plan for plan, _ in made], largest, trace, confirmed)
    return SolveResult(
        name=trace.name,
        estimated=trace.estimated,
        notes=(*_notes(trace, options), *_held_note(plans), *risk_notes),
        set_id=set_id,
        largest_bucket=largest,
        plans=plans,
        rows=tuple(row for _, row in made),
    )


def _intervals(trace: Trace, options: Options) -> tuple[RegimeInterval, ...]:
    """The regimes. The rule joint weighs step times at each allowance: those of greedy plans of the largest bucket."""
    if options.rule == "each" or options.delta == 0:
        return regimes(trace.calibration)
    bucket = largest_bucket(trace)
    regions = build_regions(trace, bucket, lossy=True, risk_free=False, granularity=options.granularity)
    times_ns = []
    for allowance in ALLOWANCES:
        limit = risk_limit(trace.calibration, delta=options.delta, psi_high=1.0, allowance=allowance)
        tables = make_tables(assemble(trace, bucket, regions, budget_bytes=options.ceiling_bytes, limit=limit))
        start = fitting_choice(tables)
        if start is None:
            # Nothing fits, at this allowance or at a smaller one; what solving says of it holds under any rule.
            return regimes(trace.calibration)
        times_ns.append((allowance, tables.total_extra(greedy(tables, start))))
    return joint_regimes(trace.calibration, times_ns, accumulation=int(trace.spec["batch"]["accumulation"]))


def _notes(trace: Trace, options: Options) -> tuple[str, ...]:
    """How the budget stands to the card, and what to know of the times."""
    notes = [f"times are estimated for {trace.device}, not measured"] if trace.estimated else []
    notes += spread_notes(trace.time_spread)
    if not trace.card_bytes:
        return tuple(notes)
    left = trace.card_bytes - options.ceiling_bytes
    card = f"card {mib(trace.card_bytes)} ({trace.device})"
    if left < 0:
        notes.append(f"{card}: allocations of {mib(options.ceiling_bytes)} are more than it has")
    elif left < AUTO_MARGIN_BYTES:
        notes.append(
            f"{card}: only {mib(left)} of it are left for context, NCCL and fragmentation; --budget auto leaves "
            f"{mib(AUTO_MARGIN_BYTES)}, --margin any other"
        )
    else:
        notes.append(f"{card}: {mib(left)} of it are left for context, NCCL and fragmentation")
    return tuple(notes)


def _held_note(plans: Sequence[Plan]) -> tuple[str, ...]:
    if not all(region.hold for plan in plans for region in plan.regions):
        return ()
    return ("everything fits: no region is replayed, as in training with gradient checkpointing off",)


def _jobs(trace: Trace, bucket: Bucket, options: Options, intervals: Sequence[RegimeInterval]) -> list[Job]:
    """The regimes of one bucket, null first. At delta 0 all of them are one problem."""
    lossy = options.delta > 0
    grain, offered = options.granularity, Offered()
    exact = build_regions(trace, bucket, lossy=lossy, risk_free=True, granularity=grain, offered=offered)
    risky = exact
    if lossy:
        risky = build_regions(trace, bucket, lossy=True, risk_free=False, granularity=grain, offered=offered)
    jobs = []
    for regime in intervals:
        regions = exact if regime.high == 0 else risky
        limit = risk_limit(trace.calibration, delta=options.delta, psi_high=regime.high, allowance=regime.allowance)
        problem = assemble(trace, bucket, regions, budget_bytes=options.ceiling_bytes, limit=limit)
        jobs.append(Job(bucket, regime, problem))
    return jobs


def _solve_bucket(
    trace: Trace, jobs: Sequence[Job], deadline: float, buckets: int, options: Options, clock: Callable[[], float]
) -> dict[str, Solution]:
    """Solutions by regime, from the highest exposure to none; each starts from the one before, which fits it too.

    The highest starts from the plan of delta 0, so that a search cut short is never slower, and takes its place.
    ``buckets``: how many share the time that is left, this one included.
    """
    found: dict[str, Solution] = {}
    exact = _without_lossy(trace, jobs[-1], options) if options.delta > 0 else None
    queue = [*jobs, exact][::-1] if exact is not None else jobs[::-1]
    left = buckets * _distinct([job.problem for job in queue])
    solved: tuple[Job, Solution] | None = None
    for job in queue:
        if solved is not None and _equivalent(solved[0].problem, job.problem):
            found[job.regime.label] = solved[1]
            continue
        remaining_s = max(0.0, deadline - clock())
        solution = solve(
            job.problem,
            time_limit_s=min(remaining_s, max(remaining_s / left, LEAST_SHARE_S)),
            gap_percent=options.gap_percent,
            hints=() if solved is None else (_chosen(solved[1]),),
            clock=clock,
        )
        left -= 1
        if job is exact and solution.status in ("infeasible", "unknown"):
            continue
        if solution.status == "infeasible":
            raise _infeasible(trace, options, [job.regime for job in jobs])
        if solution.status == "unknown":
            raise _no_plan(job, options)
        found[job.regime.label] = solution
        solved = (job, solution)
    return found


def _without_lossy(trace: Trace, highest: Job, options: Options) -> Job:
    """The problem of the highest regime at delta 0."""
    regions = build_regions(trace, highest.bucket, lossy=False, risk_free=True, granularity=options.granularity)
    limit = highest.problem.risk_limit
    problem = assemble(trace, highest.bucket, regions, budget_bytes=options.ceiling_bytes, limit=limit)
    return replace(highest, problem=problem)


def _distinct(problems: Sequence[Problem]) -> int:
    """How many have to be solved, of problems of which an equivalent one's solution serves the next."""
    return 1 + sum(not _equivalent(first, second) for first, second in pairwise(problems))


def _equivalent(first: Problem, second: Problem) -> bool:
    """Whether two problems have the same regions, and risk limits that allow the same."""
    if first.regions is not second.regions:
        return False
    most = sum(region.most_risk for region in first.regions)
    return min(most, first.risk_limit) == min(most, second.risk_limit)


def _chosen(solution: Solution) -> tuple[Configuration, ...]:
    regions = solution.problem.regions
    return tuple(region.configurations[index] for region, index in zip(regions, solution.choice, strict=True))


def _infeasible(trace: Trace, options: Options, intervals: Sequence[RegimeInterval]) -> InfeasibleError:
    """Names the smallest budget that all buckets and regimes fit: what the highest regime of some bucket needs."""
    strictest = [_jobs(trace, bucket, options, intervals)[-1] for bucket in trace.buckets]
    least, job = max(((least_peak(job.problem), job) for job in strictest), key=lambda found: found[0].peak_bytes)
    event = binding_event(job.problem, least.choice)
    if event.live_bytes != least.peak_bytes:
        raise InternalError(f"least peak {least.peak_bytes} bytes, but its {event.name} has {event.live_bytes} bytes")
    smallest_bytes = least.peak_bytes + options.margin_bytes
    made_of = _made_of(trace, job, least)
    whole = -(-smallest_bytes // MIB)
    less = f" less the margin of {options.margin_bytes / MIB:,.1f} MiB" if options.margin_bytes else ""
    besides = " and the margin" if options.margin_bytes else ""
    return InfeasibleError(
        f"infeasible: no plan stays within {options.budget_bytes / MIB:,.1f} MiB{less}; the smallest feasible budget "
        f"is {whole} MiB ({smallest_bytes} bytes), which the {event.name}{besides} needs at {job.bucket.tokens} tokens "
        f"per row; use --budget {whole} or more\n{whole} MiB are made of: {composition_text(made_of)}"
        + (f" + margin {options.margin_bytes / MIB:,.1f} MiB" if options.margin_bytes else ""),
        smallest_budget_bytes=smallest_bytes,
        parts=dict(made_of.parts),
        event=event.name,
        tokens=job.bucket.tokens,
    )


def _made_of(trace: Trace, job: Job, least: LeastPeak) -> Composition:
    """The highest event of the plan with the least peak, taken apart."""
    chosen = zip(job.problem.regions, least.choice, strict=True)
    regions = [region_plan(region.name, region.configurations[index]) for region, index in chosen]
    both = (plan_compositions(trace, job.bucket, regions, demoted=demoted) for demoted in (False, True))
    found = highest([event for events in both for event in events])
    if found.live_bytes != least.peak_bytes:
        raise InternalError(f"least peak {least.peak_bytes} bytes, its parts add up to {found.live_bytes} bytes")
    return found


def _no_plan(job: Job, options: Options) -> NoPlanError:
    all_r = verify(job.problem, (0,) * len(job.problem.regions))
    fits = max(all_r.peak_bytes, all_r.demoted_peak_bytes) <= job.problem.budget_bytes
    message = f"no solution within the time limit of {options.time_limit_s:g} s"
    if fits:
        message += (
            f"; the all-R plan fits (every unit recomputed: peak {all_r.peak_bytes / MIB:,.1f} MiB, step "
            f"{all_r.step_ns / 1e6:,.1f} ms), and a longer --time-limit finds at least that"
        )
    else:
        message += "; the all-R plan does not fit, but some plan does: use a longer --time-limit"
    return NoPlanError(message, all_r_fits=fits, all_r_peak_bytes=all_r.peak_bytes, all_r_step_ns=all_r.step_ns)


def _set_id(trace: Trace, options: Options) -> str:
    """Hash of the trace and of everything that was asked."""
    text = json.dumps([asdict(trace), asdict(options)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
