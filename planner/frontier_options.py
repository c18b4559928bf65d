"""Words of the command line -> the budgets, deltas and files of a frontier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hilore.planner.budget import BudgetError, parse_budget, parse_delta
from hilore.planner.files import OutputFileError
from hilore.planner.frontier import default_budgets
from hilore.planner.trace import Trace

DELTAS = (0.0, 1.0)


def frontier_budgets(texts: Sequence[str] | None, trace: Trace, *, delta: float) -> tuple[int, ...]:
    """``--budgets`` in bytes, ascending; without it the default ones. Raises BudgetError as ``--budget`` does."""
    if not texts:
        return default_budgets(trace, delta=delta)
    found = {parse_budget(word, card_bytes=trace.card_bytes, option="--budgets") for word in _words("--budgets", texts)}
    return tuple(sorted(found))


def frontier_deltas(texts: Sequence[str] | None) -> tuple[float, ...]:
    """``--deltas``, ascending. Raises BudgetError as ``--delta`` does."""
    if not texts:
        return DELTAS
    return tuple(sorted({parse_delta(word, "--deltas") for word in _words("--deltas", texts)}))


def plot_path(path: str | None) -> str | None:
    """``--plot``. Raises OutputFileError unless it is an SVG."""
    if path is not None and Path(path).suffix.lower() != ".svg":
        raise OutputFileError(f"--plot {path}: plots are SVG; write {Path(path).with_suffix('.svg')}", path=path)
    return path


def _words(option: str, texts: Sequence[str]) -> list[str]:
    """``7000,8000`` and ``7000 --budgets 8000`` alike."""
    found = [word.strip() for text in texts for word in text.split(",")]
    if not all(found):
        given = ",".join(texts) or "''"
        raise BudgetError(f"{option} {given}: an empty entry; separate them by single commas", text=texts[0])
    return found
