"""Output files: replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hilore.runtime.errors import HiloreError


class OutputFileError(HiloreError):
    """A file cannot be written. Attributes: ``path``."""


def refuse_unwritable(*paths: str | Path) -> None:
    """Raise OutputFileError for a path that is a folder or lies in what is none or is closed to writing.

    For asking before work that takes minutes; what goes wrong later is still an error then.
    """
    for path in map(Path, paths):
        # os.path and not pathlib, which raises for a folder that may not be looked into
        if os.path.isdir(path):
            raise OutputFileError(f"{path}: cannot be written: is a folder", path=str(path))
        folder = next(folder for folder in path.absolute().parents if os.path.exists(folder))
        if not os.path.isdir(folder):
            raise OutputFileError(f"{path}: cannot be written: {folder} is not a folder", path=str(path))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OutputFileError(f"{path}: cannot be written: no permission to write in {folder}", path=str(path))


def replace_file(path: str | Path, text: str) -> None:
    """Write ``text`` beside ``path``, then put it in its place; its folder is made where it is missing.

    Raises OutputFileError, with an earlier file of that name as it was.
    """
    replace_files({str(path): text})


def replace_files(texts: Mapping[str, str]) -> None:
    """The same for several files (path -> text): each is complete beside its target before the first is replaced.

    Raises OutputFileError; unless the very last step failed for one of them, all are as they were.
    """
    temporaries: dict[Path, Path] = {}
    target = Path()
    try:
        for path, text in texts.items():
            target = Path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                raise IsADirectoryError(None, "is a folder")
            temporaries[target] = _temporary(target, text)
        for target, temporary in temporaries.items():
            os.replace(temporary, target)
    except OSError as error:
        raise OutputFileError(
            f"{target}: cannot be written: {error.strerror or error}; nothing was changed", path=str(target)
        ) from error
    finally:
        for temporary in temporaries.values():
            with contextlib.suppress(OSError):
                temporary.unlink()


def _temporary(target: Path, text: str) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    # mkstemp makes files that only their owner reads; these are shared like any other output.
    mask = os.umask(0)
    os.umask(mask)
    Path(name).chmod(0o666 & ~mask)
    return Path(name)
