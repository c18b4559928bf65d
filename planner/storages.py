"""What autograd saves, counted by unique storage.

A tensor is not what memory holds: views and aliases share one storage, and parameters reach the saved-tensor hook as
transposed views. Everything here compares storages, kept alive while they are compared, since addresses are reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """One storage that autograd saved inside a region, listed once per region however often it was saved there.

    ``region``: canonical name, '' outside of all regions. ``saver``: the first fx node that saved it. ``producer``:
    the fx node whose result it is, the saver itself where it was made inside of it. ``outside``: produced before the
    region (its boundary, rotary tables, masks). Parameters and buffers are left out.
    """

    region: str
    saver: str
    producer: str
    nbytes: int
    outside: bool


class StorageBook:
    """Gives every storage a number and keeps it alive.

    ``fixed`` holds the numbers of parameters and buffers, ``producer`` the node that first had a storage as its
    result, ``copied_from`` the storage that another is a plain copy or cast of.
    """

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        self.fixed: set[int] = set()
        self.producer: dict[int, str] = {}
        self.copied_from: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = len(self._storages)
            self._numbers[storage._cdata] = number
            self._storages.append(storage)
        return number

    def nbytes(self, number: int) -> int:
        return self._storages[number].nbytes()

    def fix(self, tensors: Iterable[Tensor]) -> None:
        """Declare ``tensors`` to be parameters or buffers."""
        self.fixed.update(self.number(tensor) for tensor in tensors)

    def origins(self, number: int) -> Iterator[int]:
        """``number`` and what it is a copy of, nearest first."""
        yield number
        while number in self.copied_from:
            number = self.copied_from[number]
            yield number


class CopyWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes in a book which storages are copies or casts of others, also where an operator makes them inside."""

    def __init__(self, book: StorageBook) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._book = book

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _COPIES:
            made, source = self._book.number(result), self._book.number(args[0])
            if made != source:
                self._book.copied_from.setdefault(made, source)
        return result


@dataclass(slots=True)
class SavedCount:
    """What a piece of eager code saved: ``naive_bytes`` adds up tensors, parameters among them (``fixed_bytes``);
    ``unique_bytes`` adds up storages that are neither parameters nor buffers."""

    tensors: int = 0
    storages: int = 0
    naive_bytes: int = 0
    fixed_bytes: int = 0
    unique_bytes: int = 0


@contextmanager
def count_saved(fixed: Iterable[Tensor]) -> Iterator[SavedCount]:
    """Count what autograd saves inside the block. ``fixed``: parameters and buffers, not counted as saved."""
    book = StorageBook()
    book.fix(fixed)
    seen: set[int] = set()
    count = SavedCount()

    def pack(tensor: Tensor) -> Tensor:
        number = book.number(tensor)
        count.tensors += 1
        count.naive_bytes += tensor.numel() * tensor.element_size()
        if number in book.fixed:
            count.fixed_bytes += tensor.numel() * tensor.element_size()
        elif number not in seen:
            seen.add(number)
            count.storages += 1
            count.unique_bytes += book.nbytes(number)
        # Handing the tensor itself back would tie its graph into a cycle.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield count


def tensors_of(value: object) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
