"""What a report is made from: a trace, its plans, and measured figures of a benchmark's JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from hilore.planner.plantrace import bucket_of_plan
from hilore.planner.trace import Trace
from hilore.planner.tracefile import load_trace, newest_trace
from hilore.planner.yaml_lines import place
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import REGIME_LABELS, Plan
from hilore.runtime.planfile import load_plan


class BenchFileError(HiloreError):
    """A benchmark's JSON cannot be used. Attributes: ``path``."""


class _Loose(BaseModel):
    """Fields that a report shows; the file has more."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Figure(_Loose):
    value: float
    low: float
    high: float


class BenchRow(_Loose):
    policy: str
    ceiling: str
    step_ns: int
    gain: Figure
    share: Figure | None
    peak_bytes: int
    predicted_peak_bytes: int | None
    exact: bool
    error: float


class BenchResult(_Loose):
    rows: tuple[BenchRow, ...]
    rounds: int
    breaches: tuple[str, ...]


class BenchModel(_Loose):
    name: str
    tokens: int
    result: BenchResult


class BenchEnvironment(_Loose):
    command: str
    device: str
    threads: int


class BenchFile(_Loose):
    """What `hilore-plan bench` and `python -m bench` write."""

    environment: BenchEnvironment
    models: tuple[BenchModel, ...]


def report_trace(plan_paths: Sequence[str] | None, trace_path: str | None) -> tuple[Trace, str]:
    """The trace that is named, else that of the first plan's name, else the newest one here."""
    if trace_path is None and plan_paths:
        own = Path(f"{load_plan(plan_paths[0]).name}.trace.json")
        trace_path = str(own) if own.is_file() else None
    path = trace_path if trace_path is not None else str(newest_trace())
    return load_trace(path), path


def report_plans(trace: Trace, trace_path: str, plan_paths: Sequence[str] | None) -> tuple[Plan, ...]:
    """The plans that are named, else those of the trace's name under plans/; longest bucket first, null first.

    Raises HiloreError where there is none, or where one is not of this trace.
    """
    if plan_paths:
        plans = [load_plan(path) for path in plan_paths]
    else:
        plans = [load_plan(path) for path in sorted(Path("plans").glob("*.json")) if _named(path, trace.name)]
        if not plans:
            raise HiloreError(
                f"plans/{trace.name}.*.json: no such plan files; name plans, or make them with: hilore-plan solve "
                f"--trace {trace_path} --budget N --delta D"
            )
    for plan in plans:
        bucket_of_plan(plan, trace, trace_path)
    return tuple(sorted(plans, key=lambda plan: (-plan.length_bucket, REGIME_LABELS.index(plan.regime.label))))


def load_bench(path: str) -> BenchFile:
    """Measured figures. Raises BenchFileError: missing, not JSON, not a benchmark's."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BenchFileError(
            f"{path}: no such file; make it with: hilore-plan bench model.yaml --out {path}", path=path
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BenchFileError(f"{path}: cannot be read: {error}", path=path) from error
    except json.JSONDecodeError as error:
        raise BenchFileError(f"{path}:{error.lineno}: not valid JSON (cut short?): {error.msg}", path=path) from None
    try:
        return BenchFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{place(first['loc'])}: " if first["loc"] else ""
        raise BenchFileError(
            f"{path}: {where}{first['msg']}: not a benchmark's JSON; make one with: hilore-plan bench model.yaml",
            path=path,
        ) from None


def _named(path: Path, name: str) -> bool:
    return path.name.startswith(f"{name}.") and path.name.split(".")[-2] in REGIME_LABELS
