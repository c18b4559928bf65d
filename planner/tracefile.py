"""The trace file: a Trace as JSON, written whole or not at all, read strictly."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hilore.planner.files import replace_file
from hilore.planner.trace import TRACE_VERSION, Trace
from hilore.planner.yaml_lines import place
from hilore.runtime.errors import HiloreError

_SHOWN_PROBLEMS = 10


class TraceFileError(HiloreError):
    """A trace file cannot be used. Attributes: ``path``."""


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write the trace; an earlier file of that name is replaced only once the new one is complete.

    Raises OutputFileError where the folder cannot be written to.
    """
    replace_file(path, json.dumps(asdict(trace), indent=1, allow_nan=False) + "\n")


def load_trace(path: str | Path) -> Trace:
    """Read a trace. Raises TraceFileError: missing, not JSON, another version, unknown, missing or wrong fields."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TraceFileError(
            f"{path}: no such file; make it with: hilore-plan trace model.yaml", path=str(path)
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{path}: cannot be read: {error}", path=str(path)) from error
    data = _parse(text, path)
    try:
        trace: Trace = TypeAdapter(Trace).validate_json(text, strict=True)
    except ValidationError as error:
        found = [f"{path}: {place(item['loc'])}: {item['msg']}" for item in error.errors()]
        if len(found) > _SHOWN_PROBLEMS:
            found = [*found[:_SHOWN_PROBLEMS], f"{path}: and {len(found) - _SHOWN_PROBLEMS} more problems"]
        raise TraceFileError("\n".join(found), path=str(path)) from None
    unknown = _unknown(data, json.loads(json.dumps(asdict(trace))), ())
    if unknown:
        raise TraceFileError(f"{path}: unknown fields: {', '.join(unknown)}", path=str(path))
    return trace


def newest_trace(folder: str | Path = ".") -> Path:
    """The ``*.trace.json`` in a folder that was written last. Raises TraceFileError where there is none."""
    found = sorted(Path(folder).glob("*.trace.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    if not found:
        text = "no *.trace.json in this folder; make one with: hilore-plan trace model.yaml"
        raise TraceFileError(text, path=str(folder))
    return found[-1]


def _parse(text: str, path: str | Path) -> dict[str, Any]:
    """First the things that would make every other message misleading."""
    try:
        data: Any = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant, parse_float=_finite
        )
    except json.JSONDecodeError as error:
        text = f"{path}:{error.lineno}: not valid JSON (cut short?): {error.msg}; trace again, or name another --trace"
        raise TraceFileError(text, path=str(path)) from None
    except ValueError as error:
        raise TraceFileError(f"{path}: {error}", path=str(path)) from None
    except RecursionError:
        raise TraceFileError(f"{path}: not a trace: lists within lists without end", path=str(path)) from None
    if not isinstance(data, dict):
        raise TraceFileError(f"{path}: not a trace: expected an object at the top level", path=str(path))
    version = data.get("trace_version")
    if version is None and "schema_version" in data:
        raise TraceFileError(f"{path}: a plan, not a trace; name the trace that it was solved from", path=str(path))
    if version != TRACE_VERSION:
        raise TraceFileError(
            f"{path}: trace_version is {version}, this hilore-plan reads {TRACE_VERSION}; trace the model again, "
            "or name another --trace",
            path=str(path),
        )
    return data


def _unknown(given: Any, known: Any, path: tuple[str | int, ...]) -> list[str]:
    """Places of the keys in ``given`` that ``known``, the same trace written again, does not have."""
    if isinstance(given, dict):
        stray = [place((*path, key)) for key in given if key not in known]
        inner = [name for key in given if key in known for name in _unknown(given[key], known[key], (*path, key))]
        return stray + inner
    if isinstance(given, list):
        return [name for i, item in enumerate(given) for name in _unknown(item, known[i], (*path, i))]
    return []


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key '{twice}'")
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a trace can hold")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_constant(text)
