"""A held region's forward: autograd keeps everything, and what runs in fewer passes elsewhere does so here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hilore.runtime.adaptersum import run_adapted
from hilore.runtime.ambient import RunningAs
from hilore.runtime.glue.decisions import Decisions
from hilore.runtime.region import RegionBinding


class HeldFrame:
    """What unit calls belong to while a held region runs (runtime/frame.py for the others)."""

    __slots__ = ("decisions", "region")

    def __init__(self, region: RegionBinding) -> None:
        self.region = region
        self.decisions = Decisions()

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.region.differs_held:
            return call(*args, **kwargs)
        with self.region.installed(self.region.adapted_units), RunningAs(self):
            return call(*args, **kwargs)

    def unit_call(self, unit_name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_adapted(self.region.units[unit_name], call, *args, **kwargs)

    def front_call(self, _unit_name: str, _module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return call(*args)
