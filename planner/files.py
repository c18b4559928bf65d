"""Output files: replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from hilore.runtime.errors import HiloreError


class OutputFileError(HiloreError):
    """A file cannot be written. Attributes: ``path``."""


def replace_file(path: str | Path, text: str) -> None:
    """Write ``text`` beside ``path``, then put it in its place; its folder is made where it is missing.

    Raises OutputFileError, with an earlier file of that name as it was.
    """
    target = Path(path)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        temporary = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp makes files that only their owner reads; these are shared like any other output.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise OutputFileError(
            f"{path}: cannot be written: {error.strerror or error}; nothing was changed", path=str(path)
        ) from error
