"""`verify --rollouts`: do plans keep their limits on recorded rollouts that calibration never saw?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hilore.planner.actor import build_actor, with_reference
from hilore.planner.calibration_plans import codecs_of
from hilore.planner.calibration_sources import is_null, read_microbatches
from hilore.planner.calibration_state import CalibrationState
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
    CandidateEvidence,
    all_spearman,
    evidence,
    measure_held_out,
    plan_candidates,
    random_candidates,
)
from hilore.planner.heldout_regimes import RegimeRow, regime_rows
from hilore.planner.plantrace import with_factor_of
from hilore.planner.region_errors import measure_regions, rankings
from hilore.planner.spec_types import ModelSpec
from hilore.planner.stepping import float32_twin
from hilore.planner.trace import Trace
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan

Progress = Callable[[str, int, int], None]

VERIFICATION_FAILED = 6
RANDOM_PLANS = 2
# One in so many microbatches whose regions are run alone tells scores what is usual, and is not ranked.
REFERENCES = 4


@dataclass(frozen=True, slots=True)
class HeldOutVerification:
    """``rows``: the plans first, then random ones. ``rankings``: by codec, empty where no region was measured alone.

    ``breaches``: a line where fewer updates kept their limit than the plans' confidence says.
    """

    microbatches: int
    accumulation: int
    rows: tuple[CandidateEvidence, ...]
    regimes: tuple[RegimeRow, ...]
    rankings: Mapping[str, Mapping[str, Ranking]]
    spearman: float
    breaches: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        return VERIFICATION_FAILED if self.breaches else 0


def verify_rollouts(
    plans: Sequence[Plan],
    spec: ModelSpec,
    trace: Trace,
    path: Path,
    *,
    microbatches: int | None = None,
    risk_microbatches: int = 0,
    updates: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> HeldOutVerification:
    """Updates composed of the file's microbatches (the first ``microbatches`` of them), float32 compute.

    ``plans``: one set; those of its longest bucket are measured. ``risk_microbatches``: so many microbatches also run
    with each region alone at L, one codec at a time, to rank the risk scores; the first quarter are their references.
    Raises HiloreError where the trace has no risk for what the plans encode, RolloutFileError.
    """
    tell = progress or (lambda _label, _done, _total: None)
    trace = with_factor_of(plans[0], trace)
    native = build_actor(spec, device=spec.device.kind, live_adapters=True, seed=seed)
    found = read_microbatches(native, path)[:microbatches]
    batches = [with_reference(native, batch) for batch in found]
    exposed = [batch for batch in batches if not is_null(spec.loss, batch)]
    if not exposed:
        raise HiloreError(f"{path}: every microbatch has exposure 0 (flat groups): there is nothing to verify")
    _check_risk_microbatches(risk_microbatches, len(exposed), path)
    twin = float32_twin(native)
    del native
    regions = [region.name for region in trace.buckets[-1].regions]
    candidates = [plan_candidates(plans, plans[0].name), *random_candidates(trace, RANDOM_PLANS, seed=seed + 1)]
    ranked: dict[str, Mapping[str, Ranking]] = {}
    with Instrument(twin, regions, seed=seed) as instrument:
        held_out = measure_held_out(instrument, trace, batches, candidates, CalibrationState(None, {}), tell)
        if not any(one.gradient.square > 0 for one in held_out.measured):
            raise HiloreError(f"{path}: every token is clipped, so that no gradient passes: there is nothing to verify")
        if risk_microbatches:
            for codec in codecs_of(trace.buckets[-1]):
                some = exposed[:risk_microbatches]
                store, references = CalibrationState(None, {}), max(1, len(some) // REFERENCES)
                errors = measure_regions(instrument, trace, some, codec, store, tell, references=references)
                ranked[codec] = rankings(errors, trace)
    accumulation = spec.batch.accumulation
    rows = evidence(held_out, trace, accumulation=accumulation, updates=updates, seed=seed + 1)
    return HeldOutVerification(
        microbatches=len(batches),
        accumulation=accumulation,
        rows=rows,
        regimes=regime_rows(held_out, 0),
        rankings=ranked,
        spearman=all_spearman(held_out, trace, accumulation=accumulation, updates=updates, seed=seed + 1),
        breaches=_breaches(plans[0], rows[0]),
    )


def _check_risk_microbatches(asked: int, exposed: int, path: Path) -> None:
    """Of those that are ranked at least one must be left beside the references."""
    if asked and min(asked, exposed) < 2:
        raise HiloreError(
            f"--risk-microbatches {asked}: {path} has {exposed} with exposure, and scores need two at least (one tells "
            "them what is usual); use 0, or record more"
        )


def verification_parts(found: HeldOutVerification) -> list[Table | str]:
    """Tables and lines for the terminal."""
    title = f"updates of {found.accumulation} of {found.microbatches} microbatches"
    parts: list[Table | str] = [
        candidates_table(found.rows, title),
        limits_table(found.rows, "how sure that is"),
        regimes_table(found.regimes, found.rows[0].name),
    ]
    if found.rankings:
        parts.append(rankings_table(found.rankings, "absolute error of single regions on single microbatches"))
    parts.append(f"rank correlation of predicted and measured errors over all updates: {found.spearman:.2f}")
    return [*parts, *(found.breaches or ["every promise was kept"])]


def verification_json(found: HeldOutVerification) -> dict[str, Any]:
    return evidence_json(found.rows, {found.rows[0].name: found.regimes}, found.spearman) | {
        "microbatches": found.microbatches,
        "accumulation": found.accumulation,
        "rankings": {codec: {name: asdict(one) for name, one in by.items()} for codec, by in found.rankings.items()},
        "breaches": list(found.breaches),
    }


def _breaches(plan: Plan, row: CandidateEvidence) -> tuple[str, ...]:
    """Without a stated confidence half of the updates are to keep the limit: then the median does."""
    wanted = plan.confidence or 0.5
    if row.limit is None or row.coverage.share >= wanted:
        return ()
    return (
        f"{row.name}: {row.coverage.within} of {row.coverage.updates} updates stay within {row.limit:.3%} "
        f"({row.coverage.share:.1%}), {wanted:.1%} should; calibrate on rollouts like these",
    )
