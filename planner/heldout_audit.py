"""What the runtime's own audit would find on held-out microbatches: its rule, on errors that were measured anyway."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from hilore.planner.updates import MeasuredMicrobatch
from hilore.runtime.audit import AuditLog
from hilore.runtime.errors import HiloreWarning


@dataclass(frozen=True, slots=True)
class AuditOutcome:
    """``error``: pooled over all microbatches audited, relative. ``alarm_after``: audits until the alarm, None where
    there was none."""

    audits: int
    error: float
    alarm_after: int | None


def audited(measured: Sequence[MeasuredMicrobatch], plan: int, allowed: Sequence[float]) -> AuditOutcome:
    """Every microbatch that has a gradient and whose plan encoded something, in order; float32, so no control.

    ``allowed``: relative error allowed on each of ``measured``.
    """
    log = AuditLog()
    alarm_after: int | None = None
    with warnings.catch_warnings():
        # The alarm is what is reported here, not news to whoever runs this.
        warnings.simplefilter("ignore", HiloreWarning)
        for one, limit in zip(measured, allowed, strict=True):
            if one.errors[plan].square > 0:
                log.add(one.errors[plan].square, 0.0, one.gradient.square, limit)
                if log.alarm and alarm_after is None:
                    alarm_after = log.audits
    return AuditOutcome(log.audits, log.error or 0.0, alarm_after)
