"""Where a stand-in takes a module's place: decided in a forward, kept for its replays, and by what it may depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import nn

# More is seen only of modules that count something at every call; these run their own forward.
KNOWN_AT_MOST = 32
_PLAIN = (bool, int, float, str, type(None))


class Decisions:
    """Which calls of a region's glue a stand-in ran. A replay saves what its forward saved only where it decides alike,
    also when hooks, say, were there for the forward alone."""

    __slots__ = ("_made", "_next")

    def __init__(self) -> None:
        self._made: dict[int, list[bool]] = {}
        self._next: dict[int, int] | None = None

    def rewind(self) -> None:
        """From here on the same calls come again."""
        self._next = {}

    def take(self, stand_in: object, decide: Callable[[], bool]) -> bool:
        """Whether this call of ``stand_in``, an object that outlives the frame, is to run it."""
        made = self._made.setdefault(id(stand_in), [])
        place = len(made) if self._next is None else self._next.get(id(stand_in), 0)
        if self._next is not None:
            self._next[id(stand_in)] = place + 1
        if place == len(made):
            made.append(decide())
        return made[place]


def state_of(module: nn.Module) -> tuple[object, ...]:
    """What a module's forward may look up, short of tensors and of other modules: another state is probed again."""
    attributes = (value for name, value in vars(module).items() if not name.startswith("_") and name != "forward")
    return (type(module).forward, *map(_identity, attributes))


def _identity(value: object) -> object:
    """Numbers and names by value, functions without being kept alive, and everything else by its address."""
    if isinstance(value, FunctionType):
        return ref(value)
    return value if isinstance(value, _PLAIN) else id(value)


def with_parts(module: nn.Module, parts: Mapping[str, Any]) -> Any:
    """A module of this class and its attributes, but for these; other threads find the module itself as it was."""
    copy = object.__new__(type(module))
    own = vars(module)
    vars(copy).update({name: parts.get(name, value) for name, value in own.items() if name != "forward"})
    for table in ("_parameters", "_buffers", "_modules"):
        vars(copy)[table] = {name: parts.get(name, value) for name, value in own[table].items()}
    return copy


def transformed() -> bool:
    """Whether torch.func transforms the running call, which autograd functions of ours do not take part in."""
    return torch._C._are_functorch_transforms_active()
