"""`verify --fake`: each plan's whole update by the real runtime under fake tensors, which take no memory.

Under ``parallel: fsdp2`` the update is that of one rank: PyTorch's own FSDP2 over ranks that are not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.optim import Optimizer

from hilore.planner.actor import Actor, build_actor, microbatch_of
from hilore.planner.allocator import Rounding, rounding_of
from hilore.planner.estimate import Target, kernels, target_of
from hilore.planner.fakerank import fake_ranks, shard_fake
from hilore.planner.microbatch import Microbatch
from hilore.planner.sidebyside_runs import Progress
from hilore.planner.spec_types import ModelSpec
from hilore.planner.stepping import idle_optimizer
from hilore.planner.trace import Trace
from hilore.planner.wholeupdate import FixedPlan, peak_of_update
from hilore.runtime.plan import Plan

MIB = 2**20
# A prediction may be above what is measured by this share, or by this much where peaks are small.
LOOSE_SHARE = 0.01
LOOSE_BYTES = MIB
# Of an update's microbatches: the first makes the gradients, the last may reduce them, all others do the same.
DISTINCT_MICROBATCHES = 3


@dataclass(frozen=True, slots=True)
class FakePeak:
    """``demoted_peak_bytes``: with every L unit turned to R after each forward; None without L units. ``rounding``: of
    the storages at the (undemoted) peak, without those of others."""

    plan: Plan
    peak_bytes: int
    demoted_peak_bytes: int | None
    rounding: Rounding


def check_fake(
    plans: Sequence[Plan], spec: ModelSpec, *, trace: Trace | None = None, progress: Progress | None = None
) -> list[FakePeak]:
    """The peak of every plan, largest length bucket first.

    ``trace`` gives the memory of others; without it, it follows from ``spec``. Raises UnsupportedModelError for what
    cannot run under fake tensors, and what building the actor and attaching raise.
    """
    tell = progress or (lambda _label, _done, _total: None)
    target = target_of(spec)
    found: list[FakePeak] = []
    for tokens in sorted({plan.length_bucket for plan in plans}, reverse=True):
        group = [plan for plan in plans if plan.length_bucket == tokens]
        with kernels(target), fake_update(spec, target, tokens) as (actor, update, optimizer):
            others = trace.fixed.other_bytes if trace is not None else _other_bytes(actor, target)
            waiting = spec.batch.accumulation - len(update)
            others += waiting * sum(_nbytes(update[0]))
            for done, plan in enumerate(group):
                tell(f"{tokens} tokens: fake updates", done, len(group))
                peaks = [
                    peak_of_update(actor, FixedPlan(plan_label(plan), plan, demoted), update, optimizer)
                    for demoted in (False, True)[: 1 + (plan.count("L") > 0)]
                ]
                heights = [others + peak.peak_bytes for peak in peaks]
                demoted_peak = heights[1] if len(heights) > 1 else None
                found.append(FakePeak(plan, heights[0], demoted_peak, rounding_of(peaks[0].sizes)))
            tell(f"{tokens} tokens: fake updates", len(group), len(group))
    return found


@contextmanager
def fake_update(
    spec: ModelSpec, target: Target, tokens: int
) -> Iterator[tuple[Actor, tuple[Microbatch, ...], Optimizer]]:
    """A fake actor (one rank's under FSDP2), its distinct microbatches and its optimizer with its state."""
    actor = build_actor(spec, device=target.device, fake=True)
    count = min(spec.batch.accumulation, DISTINCT_MICROBATCHES)
    update = tuple(microbatch_of(actor, tokens, seed=place) for place in range(count))
    sharded = spec.parallel.kind != "none"
    with fake_ranks(spec.parallel.world_size) if sharded else contextlib.nullcontext() as mesh:
        if mesh is not None:
            shard_fake(actor, mesh)
        with actor.faked():
            optimizer = idle_optimizer(actor)
        yield actor, update, optimizer


def fake_breaches(found: FakePeak, *, tight: bool) -> Iterator[str]:
    """A line for each promise that a fake update broke; with ``tight`` also for a prediction that is too high."""
    plan, label = found.plan, plan_label(found.plan)
    for what, promised in (("budget", plan.ceiling_bytes), ("predicted peak", plan.predicted.peak_bytes)):
        if found.peak_bytes > promised:
            over = found.peak_bytes - promised
            peak = f"{label}: peak {found.peak_bytes:,} B under fake tensors"
            yield f"{peak} is {over:,} B over the {what} of {promised:,} B"
    if found.demoted_peak_bytes is not None and found.demoted_peak_bytes > plan.ceiling_bytes:
        yield (
            f"{label}: with its L units recomputed peak {found.demoted_peak_bytes:,} B under fake tensors is "
            f"{found.demoted_peak_bytes - plan.ceiling_bytes:,} B over the budget of {plan.ceiling_bytes:,} B"
        )
    loose = plan.predicted.peak_bytes - found.peak_bytes
    if tight and loose > max(LOOSE_SHARE * found.peak_bytes, LOOSE_BYTES):
        yield (
            f"{label}: predicted peak {plan.predicted.peak_bytes:,} B is {loose:,} B ({loose / found.peak_bytes:.1%}) "
            f"over the {found.peak_bytes:,} B under fake tensors: budget is left unused; run `hilore-plan trace` and "
            "`hilore-plan solve` again"
        )


def plan_label(plan: Plan) -> str:
    """The plan's file, or its name and regime."""
    return plan.path or f"{plan.name}.{plan.regime.label}"


def _other_bytes(actor: Actor, target: Target) -> int:
    """What a trace calls ``fixed.other_bytes``: memory of others, cuBLAS's workspace, a resident reference model."""
    resident = actor.spec.resident
    local = [getattr(p, "_local_tensor", p) for p in actor.model.parameters()]
    frozen = sum(p.untyped_storage().nbytes() for p in local if not p.requires_grad)
    reference = frozen or sum(p.untyped_storage().nbytes() for p in local)
    return resident.other_mib * MIB + target.workspace_bytes + (reference if resident.reference else 0)


def _nbytes(microbatch: Microbatch) -> Iterator[int]:
    for name in microbatch.__slots__:
        value = getattr(microbatch, name)
        if hasattr(value, "untyped_storage"):
            yield value.untyped_storage().nbytes()
