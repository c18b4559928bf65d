"""The exposure of a loss that has no closed form here, measured on its log-probs while backward runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from hilore.runtime.errors import ExposureError
from hilore.runtime.exposure import exposure_from_gradient


class LogprobHook:
    """Measures the exposure of any loss: a hook on the log-probs, which fires before any layer's backward.

    ``exposure`` is None until then. ``when_known`` is called with it. ``remove()`` takes the hook off.
    """

    def __init__(
        self,
        logps: Tensor,
        mask: Tensor,
        normaliser: Tensor | None = None,
        when_known: Callable[[float], object] | None = None,
    ) -> None:
        self.exposure: float | None = None
        if not logps.requires_grad:
            raise ExposureError(
                "The log-probs do not require a gradient, so no hook on them can fire; attach it to "
                "those of the forward that backward runs through.",
                missing="logps",
            )
        self._mask, self._normaliser, self._when_known = mask, normaliser, when_known
        self._handle = cast(Any, logps).register_hook(self._fire)

    def _fire(self, gradient: Tensor) -> None:
        self.exposure = exposure_from_gradient(gradient, self._mask, self._normaliser)
        if self._when_known is not None:
            self._when_known(self.exposure)

    def remove(self) -> None:
        self._handle.remove()
