"""Keep what the C allocator frees, while policies are timed on a CPU.

glibc maps large tensors anew each time and hands them back to the system when they are freed, so that every page of
what a policy keeps faults once per step: at a quarter of a gigabyte that took 6 % of a step, charged to whoever holds
more. CUDA's caching allocator has no such cost. Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = 2**31 - 1
# glibc's defaults: its thresholds cannot be read.
_DEFAULT_TRIM_BYTES, _DEFAULT_MAPS = 128 * 1024, 65536


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Whether it is so inside: only glibc can be told. Afterwards its defaults hold, and what is free is handed back.

    The limits of mallopt are C ints: a heap with more than 2 GiB free at its top is still trimmed.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        yield False
        return
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield True
    finally:
        library.mallopt(_MMAP_MAX, _DEFAULT_MAPS)
        library.mallopt(_TRIM_THRESHOLD, _DEFAULT_TRIM_BYTES)
        library.malloc_trim(0)
