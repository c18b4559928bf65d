"""What an interrupted calibration has measured so far: one line per run, appended, so that it can go on from there.

The first line says which calibration it is; a file of another one is refused. A line that was cut short is dropped.
Numbers survive the file bit for bit, so that a resumed calibration ends in the same bytes as one that was not stopped.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

if sys.platform != "win32":
    import fcntl

import numpy as np

from hilore.planner.sketch import Sketch
from hilore.runtime.errors import HiloreError, HiloreWarning

STATE_VERSION = 1
SUFFIX = ".calibration"


class CalibrationStateError(HiloreError):
    """The state of an interrupted calibration cannot be used. Attributes: ``path``."""


class CalibrationState:
    """Measurements by key. ``path`` None: kept in memory alone."""

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        """Reads what is there. Raises CalibrationStateError for the state of another calibration."""
        self.path = path
        self._found: dict[str, Any] = {}
        self._file: IO[str] | None = None
        header = {"version": STATE_VERSION, **identity}
        if path is None:
            return
        with ExitStack() as opened:
            try:
                file = opened.enter_context(path.open("a", encoding="utf-8", newline="\n"))
            except OSError as error:
                raise _unusable(path, "written", error) from error
            _claim(file, path)
            try:
                good = self._read(path, header)
            except OSError as error:
                raise _unusable(path, "read", error) from error
            self._file = file
            try:
                file.truncate(good)
                if not good:
                    self._append(header)
            except OSError as error:
                raise _unusable(path, "written", error) from error
            opened.pop_all()

    @property
    def measured(self) -> int:
        """How many measurements there are."""
        return len(self._found)

    def get(self, key: str) -> Any | None:
        return self._found.get(key)

    def put(self, key: str, value: Any) -> Any:
        """Record one measurement (JSON values); returns it as it will be read again."""
        self._found[key] = json.loads(json.dumps(value, allow_nan=False))
        self._append({"key": key, "value": value})
        return self._found[key]

    def close(self) -> None:
        """The file stays, for whoever goes on from it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._file is None or self.path is None:
            return
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unusable(self.path, "written", error) from error

    def _read(self, path: Path, header: Mapping[str, Any]) -> int:
        """Fill in what the file holds; returns the bytes of it that are whole lines."""
        good = 0
        for number, raw in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if not raw.endswith(b"\n"):
                break
            try:
                line = json.loads(raw)
                key, value = ("", None) if number == 1 else (line["key"], line["value"])
            except (ValueError, TypeError, KeyError) as error:
                raise CalibrationStateError(
                    f"{path}:{number}: not a calibration's state ({error}); remove the file to start again",
                    path=str(path),
                ) from None
            if number == 1:
                _check_header(path, line, header)
            else:
                self._found[key] = value
            good += len(raw)
        return good


def sketch_as_json(sketch: Sketch) -> dict[str, Any]:
    return {
        "squares": sketch.squares.tolist(),
        "sums": base64.b64encode(sketch.sums.astype("<f4").tobytes()).decode("ascii"),
    }


def sketch_from_json(data: Mapping[str, Any]) -> Sketch:
    squares = np.array(data["squares"], dtype=np.float64)
    sums = np.frombuffer(base64.b64decode(data["sums"]), dtype="<f4").astype(np.float32)
    return Sketch(squares, sums.reshape(len(squares), -1))


def _unusable(path: Path, how: str, error: OSError) -> CalibrationStateError:
    return CalibrationStateError(f"{path}: cannot be {how}: {error.strerror}", path=str(path))


def _claim(file: IO[str], path: Path) -> None:
    """Two runs that go on from one file would each take what the other measured for an end that was cut short."""
    if sys.platform == "win32":
        return  # Has no advisory locks that end with the process.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CalibrationStateError(
            f"{path}: another run is measuring for it; let that one end, or stop it, and start again", path=str(path)
        ) from None
    except OSError as error:
        warnings.warn(
            f"{path}: cannot be locked ({error.strerror}); see to it that no other run measures for it",
            HiloreWarning,
            stacklevel=2,
        )


def _check_header(path: Path, found: Any, expected: Mapping[str, Any]) -> None:
    expected = json.loads(json.dumps(expected))
    if found == expected:
        return
    there = found if isinstance(found, dict) else {}
    differs = [key for key in expected if there.get(key) != expected[key]] or ["version"]
    raise CalibrationStateError(
        f"{path}:1: the state of another calibration ({', '.join(differs)} differ: {differs[0]} was "
        f"{there.get(differs[0])}, is {expected.get(differs[0])}); give the same arguments to go on with that one, or "
        "remove the file to start again",
        path=str(path),
    )
