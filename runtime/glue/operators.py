"""What operators code issues: two pieces of code that issue the same ones on the same values compute the same."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator with what it gets and gives: a tensor by its storage's number and how it lies there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[object] = []
        self._numbers = count()
        # Storages stay alive here: another one would get the identity of one that is gone.
        self._seen: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tree_map(self._noted, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.operators.append((func, given, tree_map(self._noted, result)))
        return result

    def _noted(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        storage = item.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = (next(self._numbers), storage)
        number, _ = self._seen[storage._cdata]
        return number, item.dtype, tuple(item.shape), item.stride(), item.storage_offset()
