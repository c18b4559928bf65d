"""Running a linear with its adapter again in a replay: the same values with fewer passes over memory.

In forward PEFT makes a scaled copy of the adapter's output and a third tensor for the sum. A replay's outputs have no
backward, so the frozen linear's output can take the sum in place. Where the scaling is a power of two, scaling and
adding are one pass: the product is exact, so that only the sum is rounded, as in forward.

Nothing of this is assumed of PEFT's code: before the first run of a unit, the layer's own forward runs on a few tokens
and shows what its parts get and give, and whether the sum in place has the bits of the layer's result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from hilore.runtime.adapter import last_modules, part_modules
from hilore.runtime.alias import non_leaf_alias
from hilore.runtime.derive import derivation_of, same_bits

if TYPE_CHECKING:
    from hilore.runtime.unitbinding import UnitBinding

_PROBED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Sum:
    """base(x) + scaling * parts(x). ``parts``: dropout, lora_A, lora_B, one after the other; ``dtype``: what x is cast
    to for the first of them."""

    parts: tuple[nn.Module, ...]
    dtype: torch.dtype
    scaling: float

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Everything that autograd saves in the layer's own forward is saved here in the same order."""
        base: torch.Tensor = layer.base_layer(x)  # type: ignore[operator]
        result = x.to(self.dtype)
        for part in self.parts:
            result = part(result)
        requires_grad = base.requires_grad or result.requires_grad
        total = base.detach()
        with torch.no_grad():
            self.add(total, result.detach())
        return non_leaf_alias(total, requires_grad)

    def add(self, total: torch.Tensor, result: torch.Tensor) -> None:
        """``total += scaling * result`` with forward's rounding; ``result`` may be changed."""
        exact = self.scaling >= 1 and math.frexp(self.scaling)[0] == 0.5 and result.dtype != torch.float16
        if exact:
            total.add_(result, alpha=self.scaling)
        else:
            total.add_(result.mul_(self.scaling))


def run_again(unit: UnitBinding, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A unit's call in a replay that must run it. ``call``: the module's own forward."""
    layer: Any = unit.module
    if not unit.front or kwargs or len(args) != 1:
        return call(*args, **kwargs)
    (x,) = args
    adapters = tuple(layer.active_adapters)
    scaling = tuple(layer.scaling.get(name) for name in adapters)
    key = (x.dtype, layer.disable_adapters, layer.merged, adapters, scaling)
    if key not in unit.sums:
        unit.sums[key] = _Probe(layer, call, x).sum_of(scaling)
    known = unit.sums[key]
    return call(x) if known is None else known.run(layer, x)


class _Probe:
    """A run of a layer's own forward on a few tokens, with made-up values for lora_B's result.

    lora_B starts at zero, where any scaling would fit.
    """

    def __init__(self, layer: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> None:
        self._layer = layer
        self._call = call
        self._x = x.detach()[..., :_PROBED_TOKENS, :]
        self._chained = True
        self._parts: list[nn.Module] = []
        self._dtype = x.dtype
        self._given: torch.Tensor | None = None
        self._base: torch.Tensor | None = None

    def sum_of(self, scaling: tuple[float | None, ...]) -> Sum | None:
        """The layer's sum; None where its result is something else."""
        devices = [self._x.device] if self._x.device.type != "cpu" else []
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=self._fork_type()), self._watching():
            result = self._call(self._x)
        if not self._chained or self._base is None or self._given is None or len(scaling) != 1 or scaling[0] is None:
            return None
        found = Sum(tuple(self._parts), self._dtype, scaling[0])
        if isinstance(result, FakeTensor):
            return found
        found.add(self._base, self._given)
        return found if same_bits(self._base, result) else None

    def _fork_type(self) -> str:
        return self._x.device.type if self._x.device.type != "cpu" else "cuda"

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """See every call of the layer's parts and of its frozen linear."""
        base: nn.Module = self._layer.base_layer  # type: ignore[assignment]
        last = last_modules(self._layer)
        handles = [base.register_forward_hook(self._base_ran)]
        handles += [part.register_forward_hook(self._part_ran) for part in part_modules(self._layer)]
        handles += [part.register_forward_hook(self._made_up) for part in last]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _part_ran(self, module: nn.Module, args: tuple[Any, ...], result: torch.Tensor) -> None:
        (x,) = args
        self._chained &= x is self._given if self._parts else self._is_argument(x)
        if not self._parts:
            self._dtype = x.dtype
        self._parts.append(module)
        self._given = result

    def _made_up(self, _module: nn.Module, _args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
        values = torch.arange(result.numel(), device=result.device).mul(1.7).sin()
        self._given = values.to(result.dtype).reshape(result.shape)
        return self._given.clone()

    def _base_ran(self, _module: nn.Module, args: tuple[Any, ...], result: torch.Tensor) -> None:
        self._chained &= len(args) == 1 and args[0] is self._x and self._base is None and not self._parts
        self._base = result.clone()

    def _is_argument(self, x: torch.Tensor) -> bool:
        if x is self._x:
            return True
        cast, _ = derivation_of(x, [self._x], [])
        return cast is not None and cast.rule == "cast" and x.shape == self._x.shape
