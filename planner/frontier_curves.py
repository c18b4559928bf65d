"""The curves of a frontier: our plans at both grains, greedy, and the policies of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hilore.planner.build import build_problem, risk_limit
from hilore.planner.compose import region_plan, update_error
from hilore.planner.emit import solve_trace
from hilore.planner.frontier_dp import chain_choices
from hilore.planner.frontier_points import Curve, Point, running_best
from hilore.planner.frontier_rivals import Candidate, rival_candidates
from hilore.planner.problem import Configuration, Problem
from hilore.planner.regimes import RegimeInterval
from hilore.planner.solved import InfeasibleError, NoPlanError, SolveResult
from hilore.planner.trace import Bucket, Trace
from hilore.planner.verify import verify_modes
from hilore.runtime.errors import InternalError

PLAN, GREEDY, LAYER, UNIFORM, CHAIN = "plan", "greedy", "layer H/L/R", "uniform codec", "Rockmate-like"
UNIT_GRAIN, LAYER_GRAIN = "unit", "layer"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all curves share. ``trace`` has the one bucket; ``budgets`` ascend; ``regimes`` are null, low, mid, high."""

    trace: Trace
    bucket: Bucket
    budgets: tuple[int, ...]
    regimes: tuple[RegimeInterval, ...]
    time_limit_s: float
    gap_percent: float
    tell: Progress

    def expected_ns(self, regime_ns: Sequence[int]) -> int:
        """Mean over regimes by how often calibration saw each; of the highest alone where it saw none."""
        total = sum(regime.frequency for regime in self.regimes)
        if total == 0:
            return regime_ns[-1]
        return round(sum(regime.frequency * ns for regime, ns in zip(self.regimes, regime_ns, strict=True)) / total)


def solved_curves(setting: Setting, deltas: Sequence[float], grain: str) -> list[Curve]:
    """Our plans of one grain; of unit grain also greedy's, which each solve starts from. ``deltas`` ascend."""
    curves: list[Curve] = []
    before: dict[str, Curve] = {}
    for delta in deltas:
        found = [_solve(setting, place, delta, grain) for place in range(len(setting.budgets))]
        made = {PLAN if grain == UNIT_GRAIN else LAYER: _plan_point}
        if grain == UNIT_GRAIN:
            made[GREEDY] = _greedy_point
        for policy, point in made.items():
            own = [None if result is None else point(setting, result) for result in found]
            below = before.get(policy)
            points = running_best(
                setting.budgets, own, below.points if below else (), f"found under {below.label}" if below else ""
            )
            before[policy] = Curve(policy, delta, points)
            curves.append(before[policy])
    return curves


def _solve(setting: Setting, place: int, delta: float, grain: str) -> SolveResult | None:
    setting.tell(f"{grain} plans, delta {delta:g}", place, len(setting.budgets))
    try:
        return solve_trace(
            setting.trace,
            budget_bytes=setting.budgets[place],
            delta=delta,
            time_limit_s=setting.time_limit_s,
            gap_percent=setting.gap_percent,
            granularity=grain,
        )
    except (InfeasibleError, NoPlanError):
        return None


def _plan_point(setting: Setting, result: SolveResult) -> Point:
    for plan in result.plans:
        found = verify_modes(setting.trace, setting.bucket, plan.regions, risk_free=plan.regime.exposure_high == 0)
        if (found.peak_bytes, found.step_ns) != (plan.predicted.peak_bytes, plan.predicted.step_ns):
            raise InternalError(
                f"{plan.regime.label}: a plan of {plan.predicted.peak_bytes} bytes and {plan.predicted.step_ns} ns, "
                f"verified {found.peak_bytes} bytes and {found.step_ns} ns"
            )
    highest = max(result.rows, key=lambda row: row.peak_bytes)
    regime_ns = tuple(row.step_ns for row in result.rows)
    return Point(
        budget_bytes=result.plans[0].budget_bytes,
        peak_bytes=highest.peak_bytes,
        peak_event=highest.peak_event,
        step_ns=setting.expected_ns(regime_ns),
        regime_ns=regime_ns,
        error=max(row.risk for row in result.rows),
        status="optimal" if all(row.status == "optimal" for row in result.rows) else "feasible",
        gap=max(row.gap for row in result.rows),
    )


def _greedy_point(setting: Setting, result: SolveResult) -> Point:
    regime_ns = tuple(row.greedy_step_ns for row in result.rows)
    highest = max(row.greedy_peak_bytes for row in result.rows)
    return Point(result.plans[0].budget_bytes, highest, "", setting.expected_ns(regime_ns), regime_ns, error=None)


def exact_curves(setting: Setting) -> list[Curve]:
    """The policies of others that change no gradient: settings that the budget only chooses among, then the chain's."""
    families = rival_candidates(setting.trace, setting.bucket)
    curves = [_exact_curve(setting, name, [found] * len(setting.budgets)) for name, found in families.items()]
    chains = []
    for place, budget in enumerate(setting.budgets):
        setting.tell(CHAIN, place, len(setting.budgets))
        chains.append(_chain_candidates(setting, budget))
    return [*curves, _exact_curve(setting, CHAIN, chains)]


def _exact_curve(setting: Setting, policy: str, offers: Sequence[Sequence[Candidate]]) -> Curve:
    """``offers``: what there is to choose from under each budget."""
    found = []
    for budget, offered in zip(setting.budgets, offers, strict=True):
        best = _fastest(offered, budget)
        found.append(None if best is None else _point(setting, budget, [best] * len(setting.regimes)))
    return Curve(policy, None, running_best(setting.budgets, found))


def _chain_candidates(setting: Setting, budget_bytes: int) -> list[Candidate]:
    classes = (
        replace(one, units=tuple(replace(unit, codecs=()) for unit in one.units)) for one in setting.bucket.classes
    )
    bare = replace(setting.bucket, classes=tuple(classes))  # this rival encodes nothing
    problem = build_problem(setting.trace, bare, budget_bytes=budget_bytes, delta=0.0, psi_high=0.0)
    return [_candidate(setting, problem, name, choice) for name, choice in chain_choices(problem)]


def uniform_curves(setting: Setting, deltas: Sequence[float]) -> list[Curve]:
    """One codec, and one configuration for all regions: the best of them under each budget, for each delta above 0."""
    lossy = [delta for delta in deltas if delta > 0]
    if not lossy:
        return []
    problem = build_problem(setting.trace, setting.bucket, budget_bytes=0, delta=lossy[-1], psi_high=1.0)
    offered = [_candidate(setting, problem, *made) for made in _uniform_choices(problem)]
    curves = []
    for delta in lossy:
        limits = [
            risk_limit(setting.trace.calibration, delta=delta, psi_high=regime.high, allowance=regime.allowance)
            for regime in setting.regimes
        ]
        found = []
        for budget in setting.budgets:
            best = [_fastest(offered, budget, limit) for limit in limits]
            chosen = [candidate for candidate in best if candidate is not None]
            found.append(_point(setting, budget, chosen) if len(chosen) == len(best) else None)
        curves.append(Curve(UNIFORM, delta, running_best(setting.budgets, found)))
    return curves


def _uniform_choices(problem: Problem) -> list[tuple[str, tuple[int, ...]]]:
    """Configurations that every region offers, with L units of one codec."""
    places: list[dict[tuple[object, ...], int]] = []
    for region in problem.regions:
        places.append({_modes(found): index for index, found in enumerate(region.configurations)})
    seen = Counter(key for offered in places for key in offered)
    made = []
    for key, times in seen.items():
        codecs = {codec for _, _, codec in key[1] if codec}  # type: ignore[attr-defined]
        if times == len(places) and len(codecs) == 1:
            made.append((f"{codecs.pop()} alone, every region the same", tuple(offered[key] for offered in places)))
    return made


def _modes(found: Configuration) -> tuple[object, ...]:
    return (found.hold, tuple((unit.name, unit.mode, unit.codec) for unit in found.units), found.split_at)


def _candidate(setting: Setting, problem: Problem, detail: str, choice: Sequence[int]) -> Candidate:
    """A choice of configurations as the verifier reads its modes."""
    regions = [
        region_plan(region.name, region.configurations[index])
        for region, index in zip(problem.regions, choice, strict=True)
    ]
    found = verify_modes(setting.trace, setting.bucket, regions)
    peak = max(found.peak_bytes, found.demoted_peak_bytes)
    return Candidate(detail, peak, found.peak_event, found.step_ns, found.risk)


def _fastest(offers: Iterable[Candidate], budget_bytes: int, limit: int = 0) -> Candidate | None:
    fitting = [found for found in offers if found.peak_bytes <= budget_bytes and found.risk <= limit]
    return min(fitting, key=lambda found: (found.step_ns, found.peak_bytes), default=None)


def _point(setting: Setting, budget_bytes: int, chosen: Sequence[Candidate]) -> Point:
    """``chosen``: one candidate per regime. At exposure 0 no error passes."""
    highest = max(chosen, key=lambda found: found.peak_bytes)
    regime_ns = tuple(found.step_ns for found in chosen)
    return Point(
        budget_bytes=budget_bytes,
        peak_bytes=highest.peak_bytes,
        peak_event=highest.peak_event,
        step_ns=setting.expected_ns(regime_ns),
        regime_ns=regime_ns,
        error=update_error(max(found.risk for found in chosen[1:])),
        detail=chosen[-1].detail,
    )
