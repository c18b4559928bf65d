"""A set of plans for one model: one per exposure regime and length bucket, and which of them a microbatch takes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from hilore.runtime.errors import ExposureError, PlanFileError
from hilore.runtime.plan import Plan


@dataclass(frozen=True, slots=True)
class PlanSet:
    """Plans of one set_id and name. Raises PlanFileError for none, mixed models, mixed sets or doubles."""

    plans: tuple[Plan, ...]

    def __post_init__(self) -> None:
        if not self.plans:
            raise PlanFileError("no plans given")
        first = self.plans[0]
        seen: dict[tuple[int, str], Plan] = {}
        for plan in self.plans:
            _refuse_mixed(first, plan)
            key = (plan.length_bucket, plan.regime.label)
            if key in seen:
                raise PlanFileError(
                    f"{_where(seen[key])} and {_where(plan)} are both the {plan.regime.label} plan for "
                    f"{plan.length_bucket} tokens; load one of them",
                    path=plan.path,
                )
            seen[key] = plan

    @property
    def buckets(self) -> tuple[int, ...]:
        """Tokens per row that plans exist for, ascending."""
        return tuple(sorted({plan.length_bucket for plan in self.plans}))

    def select(
        self,
        exposure: float,
        tokens: int,
        rows: int = 1,
        *,
        completions: int | None = None,
        masked: bool | None = None,
    ) -> Plan | None:
        """The plan for a microbatch of this exposure with ``rows`` of ``tokens`` tokens.

        The smallest bucket that was planned for as much (plan.Plan.covers), in it the regime with ``exposure_low <
        exposure <= exposure_high``; above every regime the highest plan (its caller must demote it). None where no
        bucket is large enough: every unit is then to be recomputed. Raises ExposureError for NaN, infinity and
        negatives.
        """
        if not math.isfinite(exposure) or exposure < 0:
            raise ExposureError(f"exposure {exposure} is no finite number of at least 0", exposure=exposure)
        in_bucket = self._bucket(tokens, rows, completions, masked)
        if not in_bucket:
            return None
        for plan in in_bucket:
            if exposure <= plan.regime.exposure_high:
                return plan
        return in_bucket[-1]

    def highest(
        self, tokens: int, rows: int = 1, *, completions: int | None = None, masked: bool | None = None
    ) -> Plan | None:
        """The plan of the highest exposure regime for such a microbatch, None where no bucket was planned for it."""
        in_bucket = self._bucket(tokens, rows, completions, masked)
        return in_bucket[-1] if in_bucket else None

    def why_not_covered(self, tokens: int, rows: int, completions: int | None) -> str:
        """Why no plan was made for a microbatch that none covers, and what to change."""
        replayed = "it runs with every unit recomputed"
        if self.highest(tokens, rows) is None:
            largest = max(self.plans, key=lambda plan: plan.length_bucket)
            keys = "batch.prompt_tokens, response_tokens" if tokens > largest.length_bucket else "batch.microbatch"
            return (
                f"A microbatch of {rows} x {tokens} tokens is larger than any plan was made for "
                f"({largest.rows} x {largest.length_bucket}); {replayed}. Raise {keys} in model.yaml, then trace and "
                "solve again"
            )
        if self.highest(tokens, rows, completions=completions) is None:
            return (
                f"A microbatch of {rows} x {tokens} tokens has {completions} loss columns, more than any plan for it "
                f"was made for; {replayed}. Raise batch.response_tokens, then trace and solve again"
            )
        return (
            f"A microbatch of {rows} x {tokens} tokens comes with an attention mask (padding, or several sequences in "
            f"a row), and its plans were made without one; {replayed}. Trace with the batch.microbatch that trains "
            "(one row alone has no padding), then solve again"
        )

    def _bucket(self, tokens: int, rows: int, completions: int | None, masked: bool | None) -> list[Plan]:
        """Plans of the smallest bucket that covers the microbatch, by exposure."""
        for bucket in self.buckets:
            plans = [plan for plan in self.plans if plan.length_bucket == bucket]
            if all(plan.covers(rows, tokens, completions, masked) for plan in plans):
                return sorted(plans, key=lambda plan: plan.regime.exposure_high)
        return []


def _refuse_mixed(first: Plan, plan: Plan) -> None:
    if plan.name != first.name:
        raise PlanFileError(
            f"plans of two models: {_where(first)} is for {first.name!r}, {_where(plan)} for {plan.name!r}; load one "
            "model's",
            path=plan.path,
        )
    if plan.set_id != first.set_id:
        folders = [os.path.dirname(one.path) if one.path else "" for one in (first, plan)]
        advice = "solve again, which replaces the whole set"
        if folders[0] != folders[1]:
            advice = f"load one folder's plans, such as {os.path.join(folders[0] or folders[1], '*.json')}"
        raise PlanFileError(
            f"two sets of plans under the name {plan.name!r}: {_where(first)} has set_id {first.set_id}, "
            f"{_where(plan)} has {plan.set_id}; {advice}",
            path=plan.path,
        )


def _where(plan: Plan) -> str:
    return plan.path or f"the {plan.regime.label} plan of {plan.name}"
