"""Held-out microbatches by kind: by advantage, clipped, active; what plans keep and encode, and its cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hilore.planner.heldout import HeldOut
from hilore.runtime.plan import Plan


@dataclass(frozen=True, slots=True)
class RegimeRow:
    """Microbatches of one kind: how strongly the loss weighs them, what they keep and encode, what it costs them.

    ``omega``, ``exposure``: mean |omega| and psi over all microbatches' mean. ``kept``, ``lossy``: mean shares of the
    units of the plan that each ran under. ``drift``: root mean square of the microbatches' own relative errors.
    """

    kind: str
    microbatches: int
    omega: float
    exposure: float
    kept: float
    lossy: float
    drift: float


def regime_rows(found: HeldOut, candidate: int) -> tuple[RegimeRow, ...]:
    """Of the microbatches with a gradient: low and high |A| (below and above the median), clipped (more than the
    median share of those that are clipped at all) and active unclipped (of the quarter that is clipped least, where
    exposure is above the median)."""
    there = [place for place, one in enumerate(found.measured) if one.gradient.square > 0]
    if not there:
        return ()
    advantage = np.array([found.features[place].advantage for place in there])
    psi = np.array([found.features[place].psi for place in there])
    clipped = np.array([found.features[place].clipped for place in there])
    touched = clipped[clipped > 0]
    kinds = {
        "low |A|": advantage <= np.median(advantage),
        "high |A|": advantage > np.median(advantage),
        "clipped": clipped > (np.median(touched) if len(touched) > 1 else 0),
        "active unclipped": (clipped <= np.quantile(clipped, 0.25)) & (psi > np.median(psi)),
    }
    omega = np.array([found.features[place].mean_omega for place in there])
    rows = []
    for kind, members in kinds.items():
        if not members.any():
            continue
        places = [place for place, inside in zip(there, members, strict=True) if inside]
        plans = [found.candidates[candidate].plan_for(found.features[place].psi) for place in places]
        highest = found.candidates[candidate].plans[-1]
        squares = [found.measured[place].squared_error(candidate) for place in places]
        rows.append(
            RegimeRow(
                kind=kind,
                microbatches=len(places),
                omega=float(omega[members].mean() / omega.mean()),
                exposure=float(psi[members].mean() / psi.mean()),
                kept=_mean_share([plan or highest for plan in plans], "H"),
                lossy=_mean_share(plans, "L"),
                drift=math.sqrt(sum(squares) / len(squares)),
            )
        )
    return tuple(rows)


def _mean_share(plans: Sequence[Plan | None], mode: str) -> float:
    """None (above every regime: L units run as R) has no unit of the mode."""
    shares = [plan.count(mode) / len(plan.unit_names) for plan in plans if plan is not None]
    return sum(shares) / len(plans)
