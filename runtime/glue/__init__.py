"""Parts of a region between its units that run otherwise under a plan, with the bits of their modules' own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from hilore.runtime.glue.gated import gated_forwards
from hilore.runtime.glue.rmsnorm import norm_forwards


class GlueForward(Protocol):
    """Stands in for the ``forward`` of ``module`` while its region runs; ``call`` is that forward."""

    module: nn.Module
    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def glue_forwards(region: nn.Module) -> list[GlueForward]:
    """Stand-ins for all modules of a region that may have one."""
    return [*gated_forwards(region), *norm_forwards(region)]
