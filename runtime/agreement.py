"""Ranks that train one model together: the same plans at attach, and one choice per forward where that is needed.

Choices may be local to a rank as long as a replay issues no collective. Where regions hold collectives, every rank has
to replay alike: before each forward ranks take the largest exposure (and microbatch) of all, over a CPU group, so that
no device waits for it. A rank that does not come is named after a timeout.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from hilore.runtime.errors import AgreementError, UnsupportedModelError
from hilore.runtime.naming import canonical_names
from hilore.runtime.planset import PlanSet
from hilore.runtime.region import RegionBinding
from hilore.runtime.sharded import FSDP2, sharding_kind

TIMEOUT_S = 300.0
_attaches = itertools.count()
_agreements = itertools.count()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one rank's choice depends on; ``exposure`` None: not known, which counts as above every other.

    ``alarm``: audits found that plans do not hold, so that L units run as R.
    """

    exposure: float | None
    tokens: int
    rows: int
    completions: int | None
    masked: bool | None
    alarm: bool = False


class Agreement:
    """One group of ranks whose choices are to be the same. Every method is collective over it."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._ranks = dist.get_process_group_ranks(group)
        self._turn = 0
        self._store = _store(f"agree/{next(_agreements)}")

    def largest(self, wanted: Wanted) -> Wanted:
        """The largest of each of the ranks' figures. Raises AgreementError naming the ranks that did not come."""
        completions = -1 if wanted.completions is None else wanted.completions
        masked = -1 if wanted.masked is None else int(wanted.masked)
        exposure = float("inf") if wanted.exposure is None else wanted.exposure
        found = self._maximum([exposure, wanted.tokens, wanted.rows, completions, masked, wanted.alarm])
        return Wanted(
            exposure=None if found[0] == float("inf") else found[0],
            tokens=int(found[1]),
            rows=int(found[2]),
            completions=None if found[3] < 0 else int(found[3]),
            masked=None if found[4] < 0 else bool(found[4]),
            alarm=bool(found[5]),
        )

    def largest_exposure(self, exposure: float) -> float:
        """The largest of the ranks' exposures. Raises AgreementError naming the ranks that did not come."""
        return self._maximum([exposure])[0]

    def _maximum(self, values: list[float]) -> list[float]:
        self._turn += 1
        self._store.set(str(dist.get_rank()), str(self._turn))
        tensor = torch.tensor(values, dtype=torch.float64)
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise self._missing_error() from error
        found: list[float] = tensor.tolist()
        return found

    def _missing_error(self) -> AgreementError:
        missing = [rank for rank in self._ranks if self._came(rank) < self._turn]
        who = f"rank {_listed(missing)} did not come" if missing else "the group broke although every rank came"
        return AgreementError(
            f"forward {self._turn} under agreement: {who} within {self._timeout_s:g} s. Every rank must run the same "
            "number of forwards and confirms; a rank that skips a microbatch must skip it on all",
            missing=tuple(missing),
            waited_s=self._timeout_s,
        )

    def _came(self, rank: int) -> int:
        key = str(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0


def agreement_for(
    model: nn.Module, regions: tuple[RegionBinding, ...], agree: Any, timeout_s: float
) -> tuple[Agreement | None, str]:
    """The agreement that ``attach(agree=...)`` asks for, and why where it was not asked for.

    ``agree``: None for where regions hold collectives, a bool, or a process group with a CPU backend. Making one is
    collective over all ranks. Raises UnsupportedModelError for a group without a CPU backend.
    """
    if agree is False or not _together():
        return None, ""
    reason = collectives_in(model, regions) if agree is None else ""
    if agree is None and not reason:
        return None, ""
    if agree is None or agree is True:
        group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    elif "gloo" in str(dist.get_backend_config(agree)):
        group = agree
    else:
        raise UnsupportedModelError(
            f"agree: the group's backend is {dist.get_backend(agree)}, which has no CPU side; pass agree=True, or a "
            'group made by torch.distributed.new_group(backend="gloo")',
            setting="agree",
        )
    return Agreement(group, timeout_s), reason


def collectives_in(model: nn.Module, regions: tuple[RegionBinding, ...]) -> str:
    """Why a replay of the regions issues collectives; empty where nothing that is known of does."""
    for module in model.modules():
        size = getattr(module, "_tp_size", None)
        if isinstance(size, int) and size > 1:
            return f"{type(module).__name__} runs on {size} tensor-parallel ranks"
    names = canonical_names(model)
    inside = {id(m): names[full] for full, m in model.named_modules()}
    for region in regions:
        for module in region.module.modules():
            if module is not region.module and sharding_kind(module) == FSDP2:
                return f"{inside.get(id(module), region.name)} is gathered inside of {region.name} (fully_shard)"
        if any(_splits_compute(p, region.module) for p in region.module.parameters()):
            return f"parameters of {region.name} are split over ranks that compute together (DTensor)"
    return ""


def same_plans(plans: PlanSet, ranks: Sequence[int] | None, timeout_s: float) -> None:
    """Compare the plans of ``ranks`` (None: all) by hash; nothing to do without several ranks. Collective over them.

    Raises AgreementError naming ranks, set_ids and hashes that differ, or the ranks that did not come.
    """
    number = next(_attaches)
    if not _together():
        return
    ranks = range(dist.get_world_size()) if ranks is None else ranks
    store = _store(f"plans/{number}")
    store.set(str(dist.get_rank()), f"{plans.plans[0].set_id} {plan_hash(plans)}")
    _wait_for(store, ranks, timeout_s)
    missing = [rank for rank in ranks if not store.check([str(rank)])]
    if missing:
        raise AgreementError(
            f"attach: rank {_listed(missing)} did not come within {timeout_s:g} s, though all ranks that train "
            'this model attach together; timeout_s waits longer, accept=("plans",) compares nothing',
            missing=tuple(missing),
        )
    found: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        found[store.get(str(rank)).decode()].append(rank)
    if len(found) > 1:
        lines = [_plans_of(text, having) for text, having in found.items()]
        raise AgreementError(
            f"ranks were given different plans: {'; '.join(lines)}. Load the same files on every rank; "
            'accept=("plans",) where each rank is to run its own',
            plans={text: tuple(having) for text, having in found.items()},
        )


def _wait_for(store: Any, ranks: Sequence[int], timeout_s: float) -> None:
    """Until every rank has come, or the time is over: who is missing then is looked up by the caller."""
    with suppress(RuntimeError):
        store.wait([str(rank) for rank in ranks], timedelta(seconds=timeout_s))


def plan_hash(plans: PlanSet) -> str:
    """Of all that decides what runs: regimes, lengths, regions; not of how long solving took."""
    parts = [
        [plan.name, plan.set_id, plan.length_bucket, asdict(plan.regime), [asdict(region) for region in plan.regions]]
        for plan in sorted(plans.plans, key=lambda plan: (plan.length_bucket, plan.regime.label))
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _plans_of(text: str, ranks: Sequence[int]) -> str:
    set_id, _, digest = text.partition(" ")
    return f"rank {_listed(ranks)}: set_id {set_id}, hash {digest}"


def _together() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _store(name: str) -> Any:
    from torch.distributed import distributed_c10d  # not in every build of torch

    return distributed_c10d.PrefixStore(f"hilore/{name}", distributed_c10d._get_default_store())


def _splits_compute(parameter: Any, region: nn.Module) -> bool:
    """Whether a DTensor parameter is sharded by more than FSDP2, which gathers it before the region runs."""
    placements = getattr(parameter, "placements", ())
    sharded = sum(bool(placement.is_shard()) for placement in placements)
    return sharded > (1 if sharding_kind(region) == FSDP2 else 0)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
