"""A set of plans -> its files, all or none."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from hilore.planner.solved import SolveResult
from hilore.runtime.errors import PlanFileError
from hilore.runtime.plan import REGIME_LABELS, Plan
from hilore.runtime.planfile import plan_text


def plan_file_name(plan: Plan, largest_bucket: int) -> str:
    """``<name>.<regime>.json`` for the largest length bucket, ``<name>.t<tokens>.<regime>.json`` for the others."""
    length = "" if plan.length_bucket == largest_bucket else f".t{plan.length_bucket}"
    return f"{plan.name}{length}.{plan.regime.label}.json"


def write_plans(result: SolveResult, out_dir: str | Path) -> tuple[Path, ...]:
    """Write all plans of a result into ``out_dir``, which is made if absent; returns their paths.

    They replace the earlier set of the same name: every file is complete beside its target before the first one is
    replaced, and files that the new set no longer has are removed. Raises PlanFileError, with everything as it was.
    """
    folder = Path(out_dir)
    texts = {folder / plan_file_name(plan, result.largest_bucket): plan_text(plan) for plan in result.plans}
    temporaries: dict[Path, Path] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            temporaries[path] = _temporary(path, text)
        _replace(temporaries, _stale(folder, result.name, texts))
    except OSError as error:
        raise PlanFileError(
            f"{error.filename or folder}: plans cannot be written: {error.strerror or error}; earlier ones are as they "
            "were",
            path=str(folder),
        ) from error
    finally:
        for temporary in temporaries.values():
            with contextlib.suppress(OSError):
                temporary.unlink()
    return tuple(texts)


def _temporary(path: Path, text: str) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    # mkstemp makes files that only their owner reads; plans are shared like any other output.
    mask = os.umask(0)
    os.umask(mask)
    Path(name).chmod(0o666 & ~mask)
    return Path(name)


def _stale(folder: Path, name: str, wanted: Iterable[Path]) -> list[Path]:
    """Earlier plan files of this name that the new set does not replace."""
    pattern = re.compile(rf"{re.escape(name)}(\.t[0-9]+)?\.({'|'.join(REGIME_LABELS)})\.json")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name) and path not in set(wanted))


def _replace(temporaries: Mapping[Path, Path], stale: Iterable[Path]) -> None:
    """Move every temporary to its target and remove what is stale; on an error put everything back and raise it."""
    stale = list(stale)
    earlier = {path: path.read_bytes() if path.exists() else None for path in [*temporaries, *stale]}
    touched: list[Path] = []
    try:
        for path, temporary in temporaries.items():
            touched.append(path)
            os.replace(temporary, path)
        for path in stale:
            touched.append(path)
            path.unlink()
    except OSError:
        for path in touched:
            _restore(path, earlier[path])
        raise


def _restore(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    elif not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)
