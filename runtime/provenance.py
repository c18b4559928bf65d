"""From which of its sources a call computed each tensor: fake tensors have no values that could be compared."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# The origin of random numbers, which is the id of no storage.
_RANDOM = -1


class Provenance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, follows every storage back to the storages of those ``sources`` that it was computed from."""

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = [id(source.untyped_storage()) for source in sources]
        self._origins: dict[int, frozenset[int]] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        for source, key in zip(sources, self._sources, strict=True):
            self._note(source, frozenset({key}))

    def allows(self, tensor: torch.Tensor, place: int) -> bool:
        """Whether ``tensor`` may be made of source number ``place`` alone: False where it is known to come from others.

        Nothing is known of a tensor that was there before and is none of the sources (a cast that autocast remembers).
        """
        origins = self._origins_of(tensor)
        return not origins or origins == {self._sources[place]}

    def drawn(self, tensor: torch.Tensor) -> bool:
        """Whether random numbers are in ``tensor``."""
        return _RANDOM in self._origins_of(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        origins = frozenset[int]().union(*map(self._origins_of, inputs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            origins |= {_RANDOM}
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, origins | self._origins_of(leaf))
        return result

    def _origins_of(self, tensor: torch.Tensor) -> frozenset[int]:
        return self._origins.get(id(tensor.untyped_storage()), frozenset())

    def _note(self, tensor: torch.Tensor, origins: frozenset[int]) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._references:
            self._references[key] = weakref.ref(storage, functools.partial(self._drop, key))
        self._origins[key] = origins

    def _drop(self, key: int, _reference: object) -> None:
        del self._references[key], self._origins[key]
