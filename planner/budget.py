"""Words of the command line -> bytes and numbers: ``--budget``, ``--margin``, ``--delta``.

A wrong unit is the costliest slip here: 30318 MiB read as MB is 28913 MiB, which may leave a plan almost nothing. So
a bare number is MiB, MiB and GiB are exact, and MB and GB, on which people disagree, are refused with both readings.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from hilore.runtime.errors import HiloreError

MIB = 1 << 20
GIB = 1 << 30
LARGEST_MIB = 1 << 24
# Of a whole card, what is not for PyTorch's allocations: CUDA context, NCCL buffers and fragmentation. An assumption,
# printed wherever it is taken.
AUTO_MARGIN_BYTES = 1024 * MIB

_AMOUNT = re.compile(r"\s*(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)\s*")
_EXACT = {"": MIB, "mib": MIB, "gib": GIB}
# unit as written -> (decimal reading, binary reading, the exact unit's name)
_AMBIGUOUS = {
    "mb": (10**6, MIB, "MiB"),
    "m": (10**6, MIB, "MiB"),
    "gb": (10**9, GIB, "GiB"),
    "g": (10**9, GIB, "GiB"),
}


class BudgetError(HiloreError):
    """An amount on the command line cannot be read. Attributes: ``text``."""


def parse_budget(text: str, *, card_bytes: int = 0, margin_bytes: int = 0, option: str = "--budget") -> int:
    """``--budget`` in bytes, rounded down to a whole byte; ``auto`` is the card less the margin.

    Raises BudgetError for a unit that is not MiB or GiB, for less than 1 and more than 2^24 MiB, for what is no
    plain number, and for ``auto`` where the device has no card (``card_bytes`` 0).
    """
    if text.strip() == "auto":
        if card_bytes <= 0:
            raise BudgetError(f"{option} auto needs a GPU in the trace, and this one has none: give MiB", text=text)
        if margin_bytes >= card_bytes:
            raise BudgetError(
                f"{option} auto: the margin of {mib(margin_bytes)} leaves nothing of the card's {mib(card_bytes)}",
                text=text,
            )
        return card_bytes - margin_bytes
    amount = _parse_amount(text, option)
    if amount < MIB:
        raise BudgetError(
            f"{option} {text} is under 1 MiB; was GiB meant? A bare number is MiB, and 29.6GiB is exact", text=text
        )
    if amount > LARGEST_MIB * MIB:
        raise BudgetError(
            f"{option} {text} is over 2^24 MiB (16 TiB); were bytes meant? A bare number is MiB"
            + (f": {text.strip()} bytes are {mib(int(text))}" if text.strip().isdigit() else ""),
            text=text,
        )
    return amount


def parse_memory(budget: str, margin: str | None, *, card_bytes: int) -> tuple[int, int]:
    """``--budget`` (``auto``: the card) and ``--margin``, the part of it that is not for allocations, in bytes.

    Without ``--margin`` a budget in MiB is for allocations alone, and ``auto`` leaves AUTO_MARGIN_BYTES. Raises
    BudgetError as ``parse_budget``, and for a margin that leaves nothing.
    """
    auto = budget.strip() == "auto"
    usual_bytes = AUTO_MARGIN_BYTES if auto else 0
    margin_bytes = usual_bytes if margin is None else _parse_amount(margin, "--margin")
    ceiling_bytes = parse_budget(budget, card_bytes=card_bytes, margin_bytes=margin_bytes)
    budget_bytes = card_bytes if auto else ceiling_bytes
    if margin_bytes >= budget_bytes:
        raise BudgetError(
            f"--margin {margin}: {mib(margin_bytes)} leave nothing of the budget of {mib(budget_bytes)}", text=budget
        )
    return budget_bytes, margin_bytes


def parse_limit(option: str, value: float, *, zero: bool) -> float:
    """A finite number above 0 (``zero``: or 0). Raises BudgetError."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise BudgetError(f"{option} {value:g} must be a finite number {'of 0 or more' if zero else 'above 0'}")
    return value


def parse_delta(text: str, option: str = "--delta") -> float:
    """``--delta``: a finite multiple, 0 or more, of the reference error. Raises BudgetError."""
    try:
        delta = float(text)
    except ValueError:
        hint = "; it is a multiple of the reference error, not a percentage" if "%" in text else ""
        raise BudgetError(f"{option} {_shown(text)} is not a number{hint}", text=text) from None
    if not math.isfinite(delta) or delta < 0:
        raise BudgetError(f"{option} {_shown(text)} must be a finite number, 0 (no lossy units) or more", text=text)
    return delta + 0.0


def mib(count_bytes: int) -> str:
    """Bytes as MiB for people, to a tenth."""
    return f"{count_bytes / MIB:,.1f} MiB"


def _parse_amount(text: str, option: str) -> int:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise BudgetError(
            f"{option} {_shown(text)} is not an amount of memory: write MiB as a plain number (30318), or 30318MiB, "
            "29.6GiB",
            text=text,
        )
    number, unit = Fraction(match["number"]), match["unit"].lower()
    if unit in _EXACT:
        return math.floor(number * _EXACT[unit])
    if unit in _AMBIGUOUS:
        decimal, binary, exact = _AMBIGUOUS[unit]
        readings = (_whole_or_hundredths(number * decimal / MIB), _whole_or_hundredths(number * binary / MIB))
        raise BudgetError(
            f"{option} {text}: people disagree on {match['unit']}: write {match['number']}{exact} for powers of 1024 "
            f"({readings[1]} MiB), or {readings[0]} for powers of 1000 ({readings[0]} MiB)",
            text=text,
        )
    raise BudgetError(f"{option} {text}: unknown unit '{match['unit']}' (MiB or GiB; a bare number is MiB)", text=text)


def _whole_or_hundredths(mib_count: Fraction) -> str:
    """Rounded down; a few MiB keep two digits."""
    return f"{math.floor(mib_count)}" if mib_count >= 10 else f"{math.floor(mib_count * 100) / 100:g}"


def _shown(text: str) -> str:
    return text if text.strip() else "''"
