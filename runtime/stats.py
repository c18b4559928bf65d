"""What really ran: counters per unit and a line per step for the trainer's log."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hilore.runtime.audit import AuditLog
from hilore.runtime.notice import notice

if TYPE_CHECKING:
    from hilore.runtime.frame import Frame
    from hilore.runtime.region import Action
    from hilore.runtime.unit import UnitRecord

NO_EXPOSURE = "no exposure given"


@dataclass(slots=True)
class UnitStats:
    """Since attach: forwards that were recorded, and what replays did instead of running the call.

    ``kept_bytes`` and ``encoded_bytes`` are sums over those forwards. ``stored_raw``: encoded outputs whose codec took
    an exact copy (a NaN, values it cannot hold). ``unfit``: outputs that a lossless codec could not hold, so that its
    region ran demoted. ``not_encoded``: outputs of an L unit that are no activations of the
    compute dtype and were kept as they are.
    """

    recorded: int = 0
    kept_bytes: int = 0
    encoded_bytes: int = 0
    stored_raw: int = 0
    unfit: int = 0
    not_encoded: int = 0
    answered: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """One microbatch. ``gain`` is the predicted one over gradient checkpointing (0.1 = 10 %); 0 where L units are
    recomputed, which nothing is predicted of."""

    regime: str
    exposure: float | None
    exact_exposure: float | None
    demoted: bool
    regions_replayed: int
    regions_held: int
    gain: float
    fallback: str
    skipped: bool = False


@dataclass(slots=True)
class Stats:
    """Counters of one runtime. ``live_saved_bytes`` counts kept outputs that autograd still holds.

    ``demotions``: microbatches whose exact exposure, known after the forward (``confirm``), lay above the regime of
    their plan; ``over_exposure``: whose exposure lay above every regime beforehand. Either way L units are recomputed.
    ``outside``: forwards outside of ``runtime.microbatch``, whose L units are recomputed since nobody knows their
    exposure. ``encode_roles``: how many outputs of L units had which role (runtime/eligibility.py); activations were
    encoded.
    """

    units: dict[str, UnitStats] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)
    replays: int = 0
    frames: int = 0
    held: int = 0
    demotions: int = 0
    over_length: int = 0
    over_exposure: int = 0
    outside: int = 0
    null_skipped: int = 0
    accepted: tuple[str, ...] = ()
    audit: AuditLog = field(default_factory=AuditLog)
    encode_roles: Counter[str] = field(default_factory=Counter)
    _frames: weakref.WeakSet[Frame] = field(default_factory=weakref.WeakSet)

    @property
    def live_saved_bytes(self) -> int:
        return sum(frame.kept_bytes for frame in self._frames)

    def frame_opened(self, frame: Frame) -> None:
        self.frames += 1
        self._frames.add(frame)

    def ran_outside(self, reason: str) -> None:
        """A forward outside of every ``runtime.microbatch``; ``reason``: why its L units are recomputed."""
        self.outside += reason == NO_EXPOSURE
        if reason == NO_EXPOSURE and self.outside == 1:
            notice(
                f"a forward ran outside of runtime.microbatch(...): {reason}, so its plan's L units are recomputed, as "
                "in every such forward. Run the model inside `with runtime.microbatch(advantages, mask):`"
            )

    def unit_ran(self, unit_name: str, record: UnitRecord) -> None:
        stats = self.units.setdefault(unit_name, UnitStats())
        stats.recorded += 1
        if record.encode_role:
            self.encode_roles[record.encode_role] += 1
        if record.kept is None:
            return
        if record.kept.encoded is None:
            stats.kept_bytes += record.kept.nbytes
            stats.not_encoded += bool(record.encode_role)
        else:
            stats.encoded_bytes += record.kept.nbytes
            stats.stored_raw += record.kept.encoded.raw

    def unit_unfit(self, unit_name: str, *, kept_whole: bool) -> None:
        """``kept_whole``: its output is kept as it is instead, since ranks replay together."""
        if not any(unit.unfit for unit in self.units.values()):
            instead = "its output is kept whole, which no predicted peak has room for"
            if not kept_whole:
                instead = "the L units of its region run again in backward, exactly and within the predicted peak"
            notice(
                f"{unit_name}: its values do not fit its lossless codec; where that happens {instead}. "
                "runtime.stats.units[...].unfit counts how often; if it is often, leave the codec out of model.yaml's "
                "codecs, then trace and solve again"
            )
        self.units.setdefault(unit_name, UnitStats()).unfit += 1

    def call_left_out(self, unit_name: str, action: Action) -> None:
        stats = self.units.setdefault(unit_name, UnitStats())
        if action.kept:
            stats.answered += 1
        else:
            stats.dead += 1

    def log(self) -> dict[str, Any]:
        """The last step, flat, for a trainer's metrics."""
        if not self.steps:
            return {}
        last = self.steps[-1]
        return {
            "hilore/regime": last.regime,
            "hilore/exposure": last.exposure if last.exact_exposure is None else last.exact_exposure,
            "hilore/gain": last.gain,
            "hilore/demotions": self.demotions,
            "hilore/over_exposure": self.over_exposure,
            "hilore/replays": self.replays,
            "hilore/unfit": sum(unit.unfit for unit in self.units.values()),
            "hilore/null_skipped": self.null_skipped,
            "hilore/audit_error": self.audit.error,
            "hilore/audit_alarm": float(self.audit.alarm) if self.audit.audits else None,
        }
