"""Which kernels a piece of code runs, in order, as PyTorch's profiler saw them, and how much the allocator gave out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

# They look at memory and run nothing.
_VIEWS = {"aten::as_strided", "aten::detach", "aten::view", "aten::_reshape_alias", "aten::alias"}
# Operators of this project count as one kernel each, whatever is behind them.
_OWN = "hilore::"


@dataclass(frozen=True, slots=True)
class Profiled:
    """``kernels``: operators that call no other (views aside). ``peak_bytes``: of what was allocated inside."""

    kernels: tuple[str, ...]
    peak_bytes: int


def profiled(run: Callable[[], object]) -> Profiled:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    kernels: list[str] = []
    for event in results.experimental_event_tree():
        _collect(event, kernels)
    live = peak = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"):
        live += size
        peak = max(peak, live)
    return Profiled(tuple(kernels), peak)


def _collect(event: Any, kernels: list[str]) -> bool:
    """Add the kernels under ``event``; whether there are any."""
    if event.name.startswith(_OWN):
        kernels.append(event.name)
        return True
    inner = [_collect(child, kernels) for child in event.children]
    operator = event.name.startswith("aten::") and event.name not in _VIEWS
    if operator and not any(inner):
        kernels.append(event.name)
    return operator or any(inner)
