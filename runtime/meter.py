"""A counter of live storages: the allocated bytes that every peak in this project is stated in.

Storages, not tensors: a view adds nothing, and a storage counts in full for as long as anything holds it. Memory
that an operator takes and gives back inside itself is not seen.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of live storages while it is active: ``live_bytes`` and ``peak_bytes``.

    Tensors made before it is entered count only once given to ``track`` (or met in an operator's result). ``on_peak``
    is called whenever the peak rises or is reset.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self.on_peak: Callable[[], None] | None = None
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors' storages from now on."""
        for tensor in tensors:
            self._add(tensor)

    def reset_peak(self) -> None:
        self._set_peak(self.live_bytes)

    def sizes(self) -> Counter[int]:
        """How many live storages there are of each size in bytes."""
        return Counter(self._sizes.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._add(result)
        else:
            for leaf in tree_iter(result):
                if isinstance(leaf, torch.Tensor):
                    self._add(leaf)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._references:
            return
        size = storage.nbytes()
        self._sizes[key] = size
        self._references[key] = weakref.ref(storage, functools.partial(self._drop, key))
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self._set_peak(self.live_bytes)

    def _set_peak(self, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        if self.on_peak is not None:
            self.on_peak()

    def _drop(self, key: int, _reference: object) -> None:
        del self._references[key]
        self.live_bytes -= self._sizes.pop(key)
