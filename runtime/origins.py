"""Where each tensor that a unit's own autograd saved comes from: what gives its entry a role (runtime/saved.py)."""

from __future__ import annotations

import torch

from hilore.runtime.adapter import Front, Known
from hilore.runtime.derive import Derivation, derivation_of
from hilore.runtime.provenance import Provenance
from hilore.runtime.saved import Entry


class Origins:
    """What one call got and gave. Storages tell aliases; ``known`` remembers derivations between calls of the unit."""

    __slots__ = ("_argument_dtypes", "_arguments", "_front", "_known", "_output", "_own_state", "_owned", "_provenance")

    def __init__(
        self,
        output: torch.Tensor,
        arguments: list[torch.Tensor],
        own_state: list[torch.Tensor],
        provenance: Provenance | None,
        front: Front,
        known: Known,
    ) -> None:
        self._output = output
        self._arguments = [(argument, argument.untyped_storage()._cdata) for argument in arguments]
        self._argument_dtypes = tuple(argument.dtype for argument in arguments)
        self._own_state = own_state
        self._owned = {tensor.untyped_storage()._cdata for tensor in own_state}
        self._provenance = provenance
        self._front = front
        self._known = known

    def settle(self, index: int, entry: Entry) -> None:
        """The role of the tensor that was saved as number ``index``."""
        value = entry.value
        assert value is not None
        storage = value.untyped_storage()._cdata
        if storage in self._owned:
            entry.settle("parameter")
            return
        for place, (argument, held_by) in enumerate(self._arguments):
            if held_by == storage and argument.dtype == value.dtype:
                entry.settle("argument", place)
                return
        if self._output.untyped_storage()._cdata == storage and self._output.dtype == value.dtype:
            entry.settle("output")
            return
        remade = self._front.role_of(index, value, self._provenance)
        if remade is not None:
            entry.settle("front", remade[0], place=remade[1])
            return
        derivation = self._derivation(index, value)
        if derivation is None:
            entry.settle("rest")
        elif derivation.from_parameter:
            entry.settle("parameter", derive=derivation)
            entry.fill(self._own_state[derivation.source].detach())
        else:
            entry.settle("argument", derivation.source, derivation)

    def _derivation(self, index: int, value: torch.Tensor) -> Derivation | None:
        arguments = [argument for argument, _ in self._arguments]
        key = (index, value.dtype, value.dim(), self._argument_dtypes)
        remembered = self._known.get(key)
        if key in self._known and (remembered is None or remembered.fits(value, arguments, self._own_state)):
            return remembered
        derivation, certain = derivation_of(value, arguments, self._own_state, self._provenance)
        if certain:
            self._known[key] = derivation
        return derivation
