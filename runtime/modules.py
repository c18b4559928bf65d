"""Installation on models that are not Hugging Face's: the forward of each region's module, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
        module = memo.get(id(self._region.module), self._region.module)
        return type(module).forward.__get__(module)

    def __reduce__(self) -> tuple[Any, ...]:
        # When a copy is unpickled it has no attributes yet, so this finds its class's own.
        return getattr, (self._region.module, "forward")
