"""attach: bind a plan set to a model, all or nothing, and install the runtime."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, overload

from torch import nn

from hilore.runtime.agreement import TIMEOUT_S, agreement_for, same_plans
from hilore.runtime.bind import (
    BindReport,
    bind_regions,
    checkpointable_names,
    refuse_attached,
    refuse_foreign_hooks,
    refuse_unsupported,
    same_units,
)
from hilore.runtime.codecs import get_codec
from hilore.runtime.errors import HiloreError, UnsupportedModelError
from hilore.runtime.fingerprint import RANKS_PLANS, check_fingerprint, model_fingerprint, refuse_unknown_fields
from hilore.runtime.install import install
from hilore.runtime.notice import notice
from hilore.runtime.plan import Plan
from hilore.runtime.planfile import PlanSet
from hilore.runtime.region import RegionBinding
from hilore.runtime.runtime import Runtime
from hilore.runtime.sharded import ranks_of, refuse_mixtures, refuse_nested


@overload
def attach(
    model: nn.Module, plans: PlanSet | Iterable[Plan], *, dry_run: Literal[True], accept: tuple[str, ...] = ()
) -> BindReport: ...


@overload
def attach(
    model: nn.Module,
    plans: PlanSet | Iterable[Plan],
    *,
    dry_run: Literal[False] = False,
    accept: tuple[str, ...] = (),
    audit_every: int | None = None,
    agree: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> Runtime: ...


def attach(
    model: nn.Module,
    plans: PlanSet | Iterable[Plan],
    *,
    dry_run: bool = False,
    accept: tuple[str, ...] = (),
    audit_every: int | None = None,
    agree: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> Runtime | BindReport:
    """Install ``plans`` on ``model`` and turn them on; the model keeps its module names and its state_dict.

    accept: fingerprint fields whose difference is only noted in ``stats.accepted``; ``"plans"``: ranks of
    torch.distributed may have different plans (else attach is collective over the ranks that train this model).
    audit_every: of microbatches that run through ``microbatch.audited``, compare the first and every so many-th with
    its exact run (runtime/audit.py); None: none.
    agree: ranks choose alike, by the largest exposure of all: True, or a process group with a CPU backend. None: only
    where replays of this model's regions issue collectives (tensor parallelism); False: never.
    timeout_s: how long ranks wait for each other, here and under an agreement.
    dry_run: report what would bind and what would be refused; the model stays untouched.
    Raises BindError, FingerprintError, AgreementError, UnsupportedModelError, CodecError; then nothing was installed.
    """
    refuse_unknown_fields(accept)
    plan_set = plans if isinstance(plans, PlanSet) else PlanSet(tuple(plans))
    if dry_run:
        return _report(model, plan_set, accept)
    if RANKS_PLANS not in accept:
        same_plans(plan_set, ranks_of(model), timeout_s)
    regions, accepted = _bind(model, plan_set, accept)
    runtime = Runtime(model, plan_set, regions)
    runtime.stats.accepted = accepted
    runtime.accept = accept
    runtime.audit_every = _at_least_one(audit_every)
    for line in accepted:
        notice(line)
    runtime.agreement, reason = agreement_for(model, regions, agree, timeout_s)
    if reason:
        notice(f"{reason}: before every forward ranks agree on one choice, and replays run to their end")
    try:
        install(runtime)
    except BaseException:
        runtime.detach()
        raise
    return runtime


def _at_least_one(audit_every: int | None) -> int | None:
    if audit_every is not None and audit_every < 1:
        raise UnsupportedModelError(f"audit_every is {audit_every}, must be 1 or more, or None", setting="audit_every")
    return audit_every


def _bind(
    model: nn.Module, plans: PlanSet, accept: tuple[str, ...]
) -> tuple[tuple[RegionBinding, ...], tuple[str, ...]]:
    first = plans.plans[0]
    for plan in plans.plans[1:]:
        same_units(first, plan)
    refuse_foreign_hooks(type(model).__name__)
    refuse_attached(model)
    refuse_unsupported(model)
    refuse_mixtures(model)
    found = model_fingerprint(model)
    if checkpointable_names(model):
        found["region_grain"] = "layer"  # what installing on Hugging Face's own switch gives
    lines = [line for plan in plans.plans for line in check_fingerprint(plan.fingerprint, found, accept)]
    regions = bind_regions(model, first)
    refuse_nested(regions)
    for codec in {u.codec for plan in plans.plans for region in plan.regions for u in region.units if u.codec}:
        get_codec(codec)  # raises CodecError here, not at the first encoding in the middle of a training
    return regions, tuple(dict.fromkeys(lines))


def _report(model: nn.Module, plans: PlanSet, accept: tuple[str, ...]) -> BindReport:
    try:
        regions, accepted = _bind(model, plans, accept)
    except HiloreError as error:
        return BindReport((), (), (error.message,))
    names = tuple(region.name for region in regions)
    units = tuple(name for region in regions for name in region.units)
    return BindReport(names, units, accepted)
