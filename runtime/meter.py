"""A counter of live storages: the allocated bytes that every peak in this project is stated in.

Storages, not tensors: a view adds nothing, and a storage counts in full for as long as anything holds it, with the
size that it has (``resize_`` is seen: FSDP2 frees its gathered parameters by it). What an operator takes and gives
back inside itself is not seen: codecs stay one call each, and say how much at most (Codec.workspace_bytes). Their
workspace is thus declared and predicted, not counted: a count beside a prediction stays below it by that much.

The step that is counted is the step that runs without the counter: see runtime/inplace.py.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from hilore.runtime.inplace import in_place_variant, prepare


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
        self._node: tuple[str, int] | None = None
        self._turn = 0
        self._made_in: dict[int, int] = {}

    def __enter__(self) -> StorageMeter:
        prepare()
        _resizes_seen_by(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
        _resizes_no_longer_seen_by(self)

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors' storages from now on."""
        for tensor in tensors:
            self._add(tensor)

    def reset_peak(self) -> None:
        self._set_peak(self.live_bytes)

    def sizes(self) -> Counter[int]:
        """How many live storages there are of each size in bytes."""
        return Counter(size for size in self._sizes.values() if size)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note of a storage's size if it is counted."""
        key = id(storage)
        if key in self._sizes:
            self._grow(key, storage.nbytes())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor made of tensors (DTensor): its own dispatch comes back with those
        node = torch._C._current_autograd_node()
        run = func
        if node is not None:
            self._notice_turn(node)
            run = in_place_variant(func, args, node, self._is_of_this_turn(args)) or func
        result = run(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._add(result)
        else:
            for leaf in tree_iter(result):
                if isinstance(leaf, torch.Tensor):
                    self._add(leaf)
        return result

    def _notice_turn(self, node: Any) -> None:
        """Turns number the runs of autograd nodes, so that storages made in one can be told from earlier ones."""
        now = (node.name(), node._sequence_nr())
        if now != self._node:
            self._node = now
            self._turn += 1

    def _is_of_this_turn(self, args: tuple[Any, ...]) -> bool:
        return bool(args) and isinstance(args[0], torch.Tensor) and self._made_in.get(_key(args[0])) == self._turn

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return  # a shape without memory, which a rule is tried on
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                inner = getattr(tensor, name)
                if isinstance(inner, torch.Tensor):
                    self._add(inner)
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._references:
            self._sizes[key] = 0
            self._references[key] = weakref.ref(storage, functools.partial(self._drop, key))
            self._made_in[key] = self._turn
        self._grow(key, storage.nbytes())

    def _grow(self, key: int, size: int) -> None:
        self.live_bytes += size - self._sizes[key]
        self._sizes[key] = size
        if self.live_bytes > self.peak_bytes:
            self._set_peak(self.live_bytes)

    def _set_peak(self, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        if self.on_peak is not None:
            self.on_peak()

    def _drop(self, key: int, _reference: object) -> None:
        del self._references[key], self._made_in[key]
        self.live_bytes -= self._sizes.pop(key)


def _key(tensor: torch.Tensor) -> int:
    return id(tensor.untyped_storage())


_active: list[StorageMeter] = []


def _resizes_seen_by(meter: StorageMeter) -> None:
    """Show ``meter`` every ``UntypedStorage.resize_``, which no operator shows."""
    _active.append(meter)
    if len(_active) == 1:
        torch.UntypedStorage.resize_ = _resize  # type: ignore[assignment, method-assign]


def _resizes_no_longer_seen_by(meter: StorageMeter) -> None:
    _active.remove(meter)
    if not _active:
        del torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size: int) -> Any:
    result = super(torch.UntypedStorage, storage).resize_(size)
    for meter in _active:
        meter.resized(storage)
    return result
