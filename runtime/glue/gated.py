"""The gated product of an MLP, ``silu(gate) * up``, in one pass each way and with a backward that holds less.

Autograd saves gate, silu(gate) and up, and makes three new tensors of that size from one incoming gradient. Here gate
and up are saved, and silu(gate) never is a tensor: five tensors are alive at the peak where six were. In a replay this
is where a region's memory has its peak.

Only SiLU in bfloat16 on CPU: elsewhere nobody has shown that one pass has the bits of the operators it replaces, and
running silu again by these operators costs more time than its bytes buy. Everything else runs the module's own forward;
fake tensors decide as the real ones do, so that predicted bytes are those of the run.

Nothing is assumed of a module's code: before the first run its forward and backward are looked at on a few tokens, with
made-up results of its linears, and the product must be autograd's own silu and multiplication of just these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.functional import silu
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _disable_current_modes

from hilore.runtime.ambient import running
from hilore.runtime.derive import same_bits
from hilore.runtime.errors import HiloreWarning
from hilore.runtime.glue.decisions import KNOWN_AT_MOST, state_of, transformed, with_parts
from hilore.runtime.glue.gatedops import gated_product, gated_product_backward
from hilore.runtime.glue.probing import PLAIN, apart, hooked, made_up_like

_LINEARS = ("gate_proj", "up_proj", "down_proj")
_PROBED_TOKENS = 4
_SIZES_AT_MOST = 256


class _GatedProduct(torch.autograd.Function):
    """gate and up [..., ffn]. How they lie decides nothing of what is saved: placeholders of a replay lie otherwise."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return gated_product(gate, up) if _in_order(gate, up) else silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        again = torch.is_grad_enabled()
        if not again and _in_order(grad, gate, up):
            return gated_product_backward(grad, gate, up)
        # Gradients of gradients, and tensors that lie otherwise: autograd hands on how gradients lie.
        with torch.enable_grad():
            product = silu(gate) * up
        return torch.autograd.grad(product, (gate, up), grad, create_graph=again)


def _in_order(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def gated_forwards(region: nn.Module) -> list[GatedForward]:
    """Stand-ins for the modules inside a region that have the three linears of a gated MLP."""
    parts = (part for part in region.modules() if part is not region)
    return [GatedForward(part) for part in parts if all(part._modules.get(name) is not None for name in _LINEARS)]


class GatedForward:
    """Stands in for a gated MLP's ``forward`` while its region runs under a frame.

    ``known``: whether that forward is ``down(silu(gate(x)) * up(x))``, by what it may depend on.
    """

    __slots__ = ("_sizes", "_width", "call", "known", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.call: Callable[..., Any] = module.forward
        self.known: dict[tuple[object, ...], bool] = {}
        self._sizes: dict[tuple[object, ...], bool] = {}
        self._width = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = running.frame
        if frame is None or not running.fused or kwargs or len(args) != 1 or not _takes(args[0]):
            return self.call(*args, **kwargs)
        (x,) = args
        if not frame.decisions.take(self, lambda: self._stands_in(x)):
            return self.call(x)
        module: Any = self.module
        gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(product_of(gate, up))

    def _stands_in(self, x: torch.Tensor) -> bool:
        children = (child for name, child in self.module._modules.items() if child is not None and name not in _LINEARS)
        others = [part for child in children for part in child.modules()]
        everywhere = _has_any_global_hook()  # type: ignore[no-untyped-call]
        if everywhere or any(map(_watched, others)) or transformed():
            return False
        compute = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        states = (*state_of(self.module), *((part, *state_of(part)) for part in others))
        key = (*states, x.dtype, compute, isinstance(x, FakeTensor))
        if key not in self.known and len(self.known) < KNOWN_AT_MOST:
            probe = _Probe(self.module, self.call, x, compute)
            self.known[key] = probe.agrees()
            if self.known[key]:
                self._width = probe.width
        if not self.known.get(key, False):
            return False
        if len(self._sizes) >= _SIZES_AT_MOST:
            self._sizes.clear()
        if (key, x.shape) not in self._sizes:
            self._sizes[key, x.shape] = _Probe(self.module, self.call, x, compute).agrees_at(x, self._width)
        return self._sizes[key, x.shape]


def _takes(x: Any) -> bool:
    return type(x) in PLAIN and x.device.type == "cpu" and x.dim() >= 2


def _watched(module: nn.Module) -> bool:
    """Whether someone sees or changes what goes through a module, which would no longer be called."""
    return hooked(module) or "forward" in vars(module)


def product_of(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` [..., width], in one pass each way where both are contiguous and want gradients."""
    alike = gate.shape == up.shape and gate.dtype == up.dtype
    if alike and gate.requires_grad and up.requires_grad and torch.is_grad_enabled():
        product: torch.Tensor = _GatedProduct.apply(gate, up)  # type: ignore[no-untyped-call]
        return product
    return silu(gate) * up


class _Probe:
    """One forward of a gated MLP on a few tokens; its linears' results are made up."""

    def __init__(
        self, module: nn.Module, call: Callable[..., Any], x: torch.Tensor, compute: torch.dtype | None
    ) -> None:
        self._module = module
        self._call = call
        self._x = x.detach()[..., :_PROBED_TOKENS, :]
        self._compute = compute
        self._order: list[str] = []
        self._given: dict[str, Any] = {}
        self._results: dict[str, torch.Tensor] = {}

    def agrees(self) -> bool:
        """Whether the forward is ``down(silu(gate(x)) * up(x))`` in bfloat16 and nothing else; a HiloreWarning where it
        is, but not with our bits."""
        # Autocast would keep the casts of weights that it makes here.
        autocast = torch.autocast("cpu", self._compute, enabled=self._compute is not None, cache_enabled=False)
        with apart(), autocast:
            result = None
            with suppress(Exception), self._watching():  # of a forward that takes no few tokens, say
                result = self._call(self._x)
            if not self._in_order(result):
                return False
            product, gate, up = self._given["down_proj"], self._results["gate_proj"], self._results["up_proj"]
            if not _is_product(product, gate, up) or any(t.dtype != torch.bfloat16 for t in (product, gate, up)):
                return False
            if isinstance(product, FakeTensor):
                return True
            grad = made_up_like(product, 2.9)
            own, ours = (
                (found.detach(), *torch.autograd.grad(found, (gate, up), grad))
                for found in (product, product_of(gate, up))
            )
        if all(same_bits(*pair) for pair in zip(own, ours, strict=True)):
            return True
        _tell(self._module)
        return False

    @property
    def width(self) -> int:
        """Of gate and up, once the forward agreed."""
        return self._results["gate_proj"].shape[-1]

    def agrees_at(self, x: torch.Tensor, width: int) -> bool:
        """Whether a forward that agrees for a few tokens does for x too, which it may cut up, say, or look at: its
        linears are left out, and no tensor has values."""
        # Nobody's meter is to count these.
        with _disable_current_modes(), apart():
            self._x = x.new_empty(x.shape, device=None if isinstance(x, FakeTensor) else "meta")
            sizes = dict.fromkeys(_LINEARS, width) | {"down_proj": x.shape[-1]}
            parts = {name: self._left_out(name, size) for name, size in sizes.items()}
            result = None
            with suppress(Exception):  # of a forward that asks its linears for more than their results, say
                result = type(self._module).forward(with_parts(self._module, parts), self._x)
            return self._in_order(result) and _is_product(
                self._given["down_proj"], self._results["gate_proj"], self._results["up_proj"]
            )

    def _left_out(self, name: str, width: int) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            self._order.append(name)
            self._given[name] = x
            self._results[name] = x.new_empty((*x.shape[:-1], width)).requires_grad_()
            return self._results[name]

        return run

    def _in_order(self, result: Any) -> bool:
        if self._order != list(_LINEARS) or result is not self._results["down_proj"]:
            return False
        return self._given["gate_proj"] is self._x and self._given["up_proj"] is self._x

    @contextmanager
    def _watching(self) -> Iterator[None]:
        linears = [(name, self._module.get_submodule(name)) for name in _LINEARS]
        handles = [linear.register_forward_hook(self._hook(name), with_kwargs=True) for name, linear in linears]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., Any]:
        def ran(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
            self._order.append(name)
            if len(args) != 1 or kwargs or type(result) not in PLAIN:
                self._order.append("something else")
                return result
            self._given[name] = args[0]
            self._results[name] = made_up_like(result, 1.7 + len(self._order)).requires_grad_()
            return self._results[name]

        return ran


def _is_product(product: Any, gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether autograd's graph is a multiplication of ``up`` and of silu of ``gate`` alone."""
    multiplied = product.grad_fn
    if multiplied is None or multiplied.name() != "MulBackward0":
        return False
    sides = [node for node, _ in multiplied.next_functions if node is not None]
    acts = [node for node in sides if node.name() == "SiluBackward0"]
    if len(sides) != 2 or len(acts) != 1 or not any(getattr(node, "variable", None) is up for node in sides):
        return False
    return [getattr(node, "variable", None) is gate for node, _ in acts[0].next_functions] == [True]


def _tell(module: nn.Module) -> None:
    warnings.warn(
        f"{type(module).__name__}: its gated product has other bits than silu(gate) * up, so it runs its own forward, "
        "which holds more than a trace predicts.",
        HiloreWarning,
        stacklevel=2,
    )
