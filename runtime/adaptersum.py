"""A linear with its adapter in fewer passes over memory: forward, backward and replay with the bits of PEFT's own code.

PEFT makes a scaled copy of the adapter's output and a third tensor for the sum; backward makes a scaled copy of the
gradient. Here the frozen linear's output takes the sum in place. Where the scaling is a power of two, multiplying by it
is exact wherever it stands (short of overflow, and of what lies under the smallest normal number, which float16's
gradients do reach), so that neither copy is made: the sum's term is scaled as it is added, and in backward the small
products (tokens x rank, and lora_B's own) are scaled instead of the gradient.

Nothing of this is assumed of PEFT's code: before the first run of a unit, the layer's own forward and backward run on
a few tokens and show what its parts get and give, and whether output and gradients have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor

from hilore.runtime.adapter import part_modules, parts_of
from hilore.runtime.alias import non_leaf_alias
from hilore.runtime.derive import derivation_of, same_bits
from hilore.runtime.glue.probing import apart

if TYPE_CHECKING:
    from hilore.runtime.unitbinding import UnitBinding

_PROBED_TOKENS = 8


class _AddScaled(torch.autograd.Function):
    """``base + scaling * (a B')``, in the memory of ``base``. base [..., out], a [..., rank], B (``last``) [out, rank].

    The operators are those that autograd runs for lora_B, a product and a sum, on tensors of the same layout. Casts to
    autocast's dtype (``compute``) are made again in backward instead of kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        base: torch.Tensor,
        a: torch.Tensor,
        last: torch.Tensor,
        scaling: float,
        compute: torch.dtype | None,
    ) -> torch.Tensor:
        with _as_cast(base):
            term = F.linear(_cast(a, compute), _cast(last, compute))
        ctx.folds = _folds(scaling, term.dtype)
        total = base.detach()
        if ctx.folds:
            total.add_(term, alpha=scaling)
        else:
            total.add_(term.mul_(scaling))
        _, wants_a, wants_last = ctx.needs_input_grad[:3]
        ctx.save_for_backward(a if wants_last else None, last if wants_a else None)
        ctx.a_dtype, ctx.last_dtype = a.dtype, last.dtype
        ctx.scaling, ctx.compute, ctx.term_dtype = scaling, compute, term.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        a, last = ctx.saved_tensors
        _, wants_a, wants_last = ctx.needs_input_grad[:3]
        for_a = for_last = None
        with _as_cast(grad):
            term = grad.to(ctx.term_dtype)
            if not ctx.folds:
                term = term * ctx.scaling
            factor = ctx.scaling if ctx.folds else 1.0
            if wants_a:
                for_a = _scaled(_times(term, _cast(last, ctx.compute)), factor).to(ctx.a_dtype)
            if wants_last:
                for_last = _scaled(_rows(term).t().mm(_rows(_cast(a, ctx.compute))), factor).to(ctx.last_dtype)
        return grad, for_a, for_last, None, None


def _as_cast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Products of what they get, whatever autocast says."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _cast(tensor: torch.Tensor, compute: torch.dtype | None) -> torch.Tensor:
    """As autocast does it; float64 stays."""
    return tensor if compute is None or tensor.dtype == torch.float64 else tensor.to(compute)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _times(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _rows(left).mm(right).view(*left.shape[:-1], right.shape[-1])


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor * factor


def _folds(scaling: float, dtype: torch.dtype) -> bool:
    """Whether a product with ``scaling`` is exact."""
    return scaling >= 1 and math.frexp(scaling)[0] == 0.5 and dtype != torch.float16


@dataclass(frozen=True, slots=True)
class Sum:
    """base(x) + scaling * parts(x) of one adapter (adapter.parts_of). ``dtype``: what x is cast to for the first of
    them; ``compute``: autocast's dtype, None without it."""

    adapter: str
    dtype: torch.dtype
    scaling: float
    compute: torch.dtype | None

    def run(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        base: torch.Tensor = layer.base_layer(x)
        *before, last = parts_of(layer, self.adapter)
        a = x.to(self.dtype)
        for part in before:
            a = part(a)
        total: torch.Tensor = _AddScaled.apply(base, a, last.weight, self.scaling, self.compute)  # type: ignore[no-untyped-call]
        return total


def adapted(unit: UnitBinding, call: Callable[..., Any]) -> Callable[..., Any]:
    """``run_adapted`` as a call of its own; ``call`` itself for a unit without an adapter."""
    return partial(run_adapted, unit, call) if unit.front else call


def run_adapted(unit: UnitBinding, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A unit's call: in fewer passes where that has the same bits, else ``call``, the module's own forward."""
    known = _known_sum(unit, call, args, kwargs) if unit.front else None
    return call(*args, **kwargs) if known is None else known.run(unit.module, *args)


def run_adapted_again(unit: UnitBinding, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same in a replay. Its outputs have no backward, so nothing of their graph stays."""
    result = run_adapted(unit, call, *args, **kwargs)
    return non_leaf_alias(result.detach(), result.requires_grad) if unit.front else result


def _known_sum(
    unit: UnitBinding, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sum | None:
    layer: Any = unit.module
    adapters = tuple(layer.active_adapters)
    if kwargs or len(args) != 1 or args[0].dim() < 2 or len(adapters) != 1:
        return None
    parts = parts_of(layer, adapters[0])
    if not parts or getattr(layer, "lora_variant", None) or not _products_alone(layer.base_layer, parts[-1]):
        return None
    (x,) = args
    kind = x.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    casts = getattr(layer, "cast_input_dtype_enabled", True)
    scaling = layer.scaling[adapters[0]]
    dtypes = (x.dtype, compute, *(part.weight.dtype for part in parts[-2:]))
    key = (*dtypes, casts, layer.disable_adapters, layer.merged, adapters[0], scaling)
    if key not in unit.sums:
        unit.sums[key] = _Probe(layer, call, x, adapters[0], compute).sum_of(scaling)
    return unit.sums[key]


def _products_alone(base: nn.Module, last: Any) -> bool:
    """Whether the frozen linear and lora_B are nothing but their matrix products now.

    Nobody else then holds the frozen one's output, which takes the sum.
    """
    for linear in (base, last):
        hooked = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks
        if type(linear) is not nn.Linear or hooked or linear._backward_pre_hooks or "forward" in vars(linear):
            return False
    return last.bias is None


class _Probe:
    """A run of a layer's own forward and backward on a few tokens, with made-up values for lora_B's weight.

    lora_B starts at zero, where any scaling would fit.
    """

    def __init__(
        self, layer: nn.Module, call: Callable[..., Any], x: torch.Tensor, adapter: str, compute: torch.dtype | None
    ) -> None:
        self._layer = layer
        self._adapter = adapter
        self._call = call
        self._x = x.detach()[..., :_PROBED_TOKENS, :].clone().requires_grad_()
        self._compute = compute
        self._chained = True
        self._parts: list[nn.Module] = []
        self._dtype = x.dtype
        self._given: torch.Tensor | None = None
        self._base_calls = 0

    def sum_of(self, scaling: float) -> Sum | None:
        """The layer's sum; None where its result or its gradients are something else."""
        on = self._compute is not None
        # Autocast would keep the casts of the probe's weights until it ends.
        autocast = torch.autocast(self._x.device.type, self._compute, enabled=on, cache_enabled=False)
        with apart(), autocast, self._made_up():
            with self._watching():
                own = self._bits_of(lambda: self._call(self._x))
            if not self._chained or self._base_calls != 1 or self._parts != parts_of(self._layer, self._adapter):
                return None
            found = Sum(self._adapter, self._dtype, scaling, self._compute)
            if isinstance(self._x, FakeTensor):
                return found
            ours = self._bits_of(lambda: found.run(self._layer, self._x))
        alike = len(own) == len(ours) and all(same_bits(*pair) for pair in zip(own, ours, strict=True))
        return found if alike else None

    def _bits_of(self, forward: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """A run's output and its gradients; the generators are where they were."""
        kind = self._x.device.type
        on_accelerator = kind != "cpu"
        with torch.random.fork_rng(
            [self._x.device] if on_accelerator else [], device_type=kind if on_accelerator else "cuda"
        ):
            result = forward()
        if isinstance(self._x, FakeTensor) or not result.requires_grad:
            return [result]
        weights = (getattr(part, "weight", None) for part in self._parts)
        inputs = [self._x, *(weight for weight in weights if weight is not None and weight.requires_grad)]
        grads = torch.autograd.grad(result, inputs, _values_like(result), materialize_grads=True)
        return [result.detach(), *grads]

    @contextmanager
    def _made_up(self) -> Iterator[None]:
        """Copies of the parts' weights where they look them up, lora_B's with other values: no optimizer, reducer or
        hook of a parameter sees the probe."""
        before: list[tuple[dict[str, Any], torch.Tensor]] = []
        parts = [] if isinstance(self._x, FakeTensor) else parts_of(self._layer, self._adapter)
        for part in parts:
            held_in: dict[str, Any] = part._parameters if "weight" in part._parameters else vars(part)
            weight = held_in.get("weight")
            if weight is None:
                continue
            before.append((held_in, weight))
            values = _values_like(weight) if part is parts[-1] else weight.detach().clone()
            held_in["weight"] = values.requires_grad_(weight.requires_grad)
        try:
            yield
        finally:
            for held_in, weight in before:
                held_in["weight"] = weight

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """See every call of the layer's parts and of its frozen linear."""
        base: nn.Module = self._layer.base_layer  # type: ignore[assignment]
        handles = [base.register_forward_hook(self._base_ran)]
        handles += [part.register_forward_hook(self._part_ran) for part in part_modules(self._layer)]
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

    def _base_ran(self, _module: nn.Module, args: tuple[Any, ...], result: torch.Tensor) -> None:
        self._chained &= len(args) == 1 and args[0] is self._x and not self._parts
        self._base_calls += 1

    def _is_argument(self, x: torch.Tensor) -> bool:
        if x is self._x:
            return True
        cast, _ = derivation_of(x, [self._x], [])
        return cast is not None and cast.rule == "cast" and x.shape == self._x.shape


def _values_like(tensor: torch.Tensor) -> torch.Tensor:
    """Of the same layout too."""
    values = torch.arange(tensor.numel(), device=tensor.device).mul(1.7).sin()
    return torch.empty_like(tensor, requires_grad=False).copy_(values.reshape(tensor.shape))
