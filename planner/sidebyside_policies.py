"""The rivals of one ceiling, chosen for it: the best block of held layers, and solved plans of both grains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hilore.planner.actor import Actor
from hilore.planner.emit import SolveResult, solve_trace
from hilore.planner.handmade import handmade_plan
from hilore.planner.microbatch import Microbatch
from hilore.planner.rivals import HuggingFaceCheckpointing, PlanPolicy, checkpointed_layers, first_held, last_held
from hilore.planner.sidebyside import HELD, Contender
from hilore.planner.stepping import idle_optimizer, peak_of_step
from hilore.planner.trace import Trace
from hilore.runtime.errors import HiloreError

# Hidden-sized tensors (tokens x d x 2 bytes) per layer above GC's own peak: the paper's 1.00x, 1.05x and 1.10x.
EXTRA_TENSORS = (0.0, 2.5, 5.0)
GRAINS = ("layer", "unit")
DELTAS = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """``extra``: hidden-sized tensors per layer above GC's measured peak."""

    extra: float
    budget_bytes: int

    @property
    def label(self) -> str:
        return f"+{self.extra:g} d"


@dataclass(frozen=True, slots=True)
class Solved:
    """How one plan was found, or why there is none."""

    policy: str
    ceiling: str
    status: str
    gap: float
    wall_s: float
    message: str


def ceilings(gc_peak_bytes: int, *, hidden: int, tokens: int, layers: int) -> tuple[Ceiling, ...]:
    """The three ceilings of an actor; ``tokens`` in all rows of a microbatch."""
    tensor_bytes = hidden * tokens * 2
    return tuple(Ceiling(extra, gc_peak_bytes + int(extra * tensor_bytes * layers)) for extra in EXTRA_TENSORS)


def every_n_layers(layers: int) -> tuple[Contender, ...]:
    """transformers' own option at its smallest step: every second layer is replayed. No ceiling: it has one peak."""
    return (Contender(HuggingFaceCheckpointing("every 2 layers", every_n_layers=2)),) if layers > 1 else ()


def all_held(trace: Trace) -> Contender:
    """A plan that replays nothing: No-GC with the runtime attached, so with adapters and glue in fewer passes."""
    plan = handmade_plan(trace, lambda _region, _unit: "H", held=lambda _region: True, name="all-held")
    return Contender(PlanPolicy(HELD, (plan,)))


def best_blocks(
    actor: Actor, microbatch: Microbatch, limits: tuple[Ceiling, ...], *, gradients_exist: bool, other_bytes: int = 0
) -> list[Contender]:
    """Per ceiling the most layers that Hugging Face's checkpointing can hold under it, at either end of the model.

    Peaks are measured, not predicted. With none held this is GC itself.
    """
    layers = len(checkpointed_layers(actor.model))
    optimizer = idle_optimizer(actor)

    def peak(held: frozenset[int]) -> int:
        policy = HuggingFaceCheckpointing("block", held=held)
        found = peak_of_step(actor, policy, microbatch, optimizer, gradients_exist=gradients_exist)
        return other_bytes + found

    peaks = _peaks_under(peak, layers, max(limit.budget_bytes for limit in limits))
    found = []
    for limit in limits:
        fitting = [held for held, peak_bytes in peaks.items() if peak_bytes <= limit.budget_bytes]
        held = max(fitting, key=len, default=frozenset[int]())
        policy = HuggingFaceCheckpointing(f"best block ({len(held)} held)", held=held)
        found.append(Contender(policy, limit.label, limit.budget_bytes))
    return found


def _peaks_under(peak: Callable[[frozenset[int]], int], layers: int, budget_bytes: int) -> dict[frozenset[int], int]:
    """Peaks of ever more held layers from either end, until one is over the budget."""
    found: dict[frozenset[int], int] = {}
    for end in (last_held, first_held):
        for count in range(layers + 1):
            held = end(layers, count)
            if held not in found:
                found[held] = peak(held)
            if found[held] > budget_bytes:
                break
    return found


def solved_plans(
    trace: Trace,
    limits: tuple[Ceiling, ...],
    *,
    grains: tuple[str, ...] = GRAINS,
    deltas: tuple[float, ...] = DELTAS,
    time_limit_s: float,
    command: str = "",
) -> tuple[list[Contender], list[Solved]]:
    """Plans of every grain and delta under every ceiling. Where there is none, the reason stands for it."""
    contenders, solved = [], []
    for limit in limits:
        for grain in grains:
            for delta in deltas:
                name = f"{'layer plan' if grain == 'layer' else 'plan'} delta {delta:g}"
                try:
                    result = solve_trace(
                        trace,
                        budget_bytes=limit.budget_bytes,
                        delta=delta,
                        margin_bytes=0,
                        time_limit_s=time_limit_s,
                        gap_percent=0.1,
                        granularity=grain,
                        command=command,
                    )
                except HiloreError as error:
                    if error.exit_code not in (4, 5):
                        raise
                    solved.append(Solved(name, limit.label, "none", 0.0, 0.0, error.message))
                    continue
                solved.append(_solved(name, limit, result))
                error_limit = delta * trace.calibration.delta_star
                policy = PlanPolicy(name, tuple(result.plans))
                contenders.append(Contender(policy, limit.label, limit.budget_bytes, error_limit=error_limit))
    return contenders, solved


def _solved(name: str, limit: Ceiling, result: SolveResult) -> Solved:
    reports = [plan.solver for plan in result.plans]
    worst = max(reports, key=lambda report: report.gap)
    return Solved(name, limit.label, worst.status, worst.gap, sum(report.wall_s for report in reports), "")
