"""A unit of the plan bound to a module of the model, and the one tensor that its calls return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hilore.runtime.adapter import Known, front_modules
from hilore.runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    from hilore.runtime.rerun import Sum


@dataclass(frozen=True, slots=True)
class UnitBinding:
    """A unit of the plan bound to the model. ``module`` runs the call (attention: the module that calls it).

    ``front``: of a linear with its adapter the modules that a replay may run although the unit is left out.
    ``derivations`` and ``sums``: what earlier calls showed (runtime/derive.py, rerun.py). ``encodings`` counts outputs
    encoded since attach: stochastic rounding falls differently each time, and the same in every run.
    """

    name: str
    kind: str
    module: nn.Module
    derivations: Known
    front: tuple[nn.Module, ...] = ()
    sums: dict[tuple[Any, ...], Sum | None] = field(default_factory=dict)
    encodings: Iterator[int] = field(default_factory=count)

    @classmethod
    def of(cls, name: str, kind: str, module: nn.Module) -> UnitBinding:
        return cls(name, kind, module, {}, front_modules(module) if kind != "attention" else ())

    def own_state(self) -> list[torch.Tensor]:
        """Parameters and buffers that its calls may save: of an adapter layer also those of its parts."""
        modules = self.module.modules() if self.front else (self.module,)
        state = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()))
        return [t for t in state if t is not None]


def output_of(unit_name: str, result: Any) -> tuple[torch.Tensor, int]:
    """The one tensor in a call's result and its place (-1: the result itself)."""
    if isinstance(result, torch.Tensor):
        return result, -1
    places = [i for i, item in enumerate(result) if isinstance(item, torch.Tensor)] if isinstance(result, tuple) else []
    if len(places) != 1:
        raise UnsupportedModelError(
            f"{unit_name}: a unit must return one tensor, this one returned "
            f"{len(places) if isinstance(result, tuple) else type(result).__name__}; leave it out of the plan",
            unit=unit_name,
        )
    return result[places[0]], places[0]
