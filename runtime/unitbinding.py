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
    from hilore.runtime.adaptersum import Sum


@dataclass(frozen=True, slots=True)
class UnitBinding:
    """A unit of the plan bound to the model. ``module`` runs the call (attention: the module that calls it).

    ``front``: of a linear with its adapter the modules that a replay may run although the unit is left out.
    ``derivations`` and ``sums``: what earlier calls showed (runtime/derive.py, adaptersum.py). ``encodings`` counts
    outputs encoded since attach: stochastic rounding falls differently each time, and the same in every run.
    ``parts``: the modules that hold its parameters and buffers.
    """

    name: str
    kind: str
    module: nn.Module
    derivations: Known
    front: tuple[nn.Module, ...] = ()
    sums: dict[tuple[Any, ...], Sum | None] = field(default_factory=dict)
    encodings: Iterator[int] = field(default_factory=count)
    parts: tuple[nn.Module, ...] = ()

    @classmethod
    def of(cls, name: str, kind: str, module: nn.Module) -> UnitBinding:
        front = front_modules(module) if kind != "attention" else ()
        within = module.modules() if front else (module,)
        # Containers have no state of their own, now or later.
        parts = tuple(part for part in within if not isinstance(part, (nn.ModuleDict, nn.ModuleList)))
        return cls(name, kind, module, {}, front, parts=parts)

    def own_state(self) -> list[torch.Tensor]:
        """Parameters and buffers that its calls may save: of an adapter layer also those of its parts."""
        found = []
        for module in self.parts:
            for tensors in (module._parameters, module._buffers):
                found += [tensor for tensor in tensors.values() if tensor is not None]
        return found


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
