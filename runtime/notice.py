"""Warnings that name the caller's line, not one of ours."""

from __future__ import annotations

import sys
import warnings

from hilore.runtime.errors import HiloreWarning

_OURS = "hilore."


def notice(message: str) -> None:
    """Warn with HiloreWarning, at the first frame outside of this package."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith(_OURS):
        frame = frame.f_back
        level += 1
    warnings.warn(message, HiloreWarning, stacklevel=level)
