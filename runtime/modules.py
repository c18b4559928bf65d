"""Installation on models that are not Hugging Face's: the forward of each region's module, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from hilore.runtime.region import RegionBinding
    from hilore.runtime.runtime import Runtime


class RegionForward:
    """Stands in for a region module's ``forward``. A deep copy or a pickle of the module gets its class's own."""

    def __init__(self, runtime: Runtime, region: RegionBinding, forward: Callable[..., Any]) -> None:
        self._runtime = runtime
        self._region = region
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._runtime.run_region(self._region, self._forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self._region.module
        return plain_forward(memo.get(id(module), module))

    def __reduce__(self) -> tuple[Any, ...]:
        return plain_forward, (self._region.module,)


def plain_forward(module: nn.Module) -> Callable[..., Any]:
    """The forward that a copy of an attached module gets: its class's own."""
    method: Callable[..., Any] = type(module).forward.__get__(module)
    return method
