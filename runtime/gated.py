"""The gated product of an MLP, ``act(gate) * up``, with a backward that holds less.

Autograd saves gate, act(gate) and up, and makes three new tensors of that size from one incoming gradient. Here
act(gate) is worked out again where it is needed and is then overwritten by up's gradient, and gate's gradient
overwrites what it is made of: with the same operators on the same values, so with the same bits, five such tensors
are alive where six were. In a replay this is where a region's memory has its peak.

Nothing is assumed of a module's code: before the first run its forward is looked at on a few tokens, with made-up
results of its linears, and the product must be autograd's own act and multiplication of just these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch._subclasses import FakeTensor

from hilore.runtime.ambient import apart, running
from hilore.runtime.derive import same_bits

_LINEARS = ("gate_proj", "up_proj", "down_proj")
_PROBED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Activation:
    """``approximate`` None: SiLU; else GELU of that kind."""

    approximate: str | None

    def __call__(self, gate: torch.Tensor) -> torch.Tensor:
        if self.approximate is None:
            return functional.silu(gate)
        return functional.gelu(gate, approximate=self.approximate)

    def backward_(self, gradient: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """gate's gradient, written over that of the activation's result."""
        if self.approximate is None:
            torch.ops.aten.silu_backward.grad_input(gradient, gate, grad_input=gradient)
        else:
            torch.ops.aten.gelu_backward.grad_input(gradient, gate, approximate=self.approximate, grad_input=gradient)
        return gradient


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        gate, up = ctx.saved_tensors
        activation: Activation = ctx.activation
        if torch.is_grad_enabled() or not gradient.is_contiguous():
            with torch.enable_grad():
                product = activation(gate) * up
            create_graph = torch.is_grad_enabled()
            return (*torch.autograd.grad(product, (gate, up), gradient, create_graph=create_graph), None)
        value = activation(gate)
        torch.mul(gradient, value, out=value)
        return activation.backward_(gradient * up, gate), value, None


def gated_modules(region: nn.Module) -> tuple[nn.Module, ...]:
    """Modules inside a region that have the three linears of a gated MLP."""
    return tuple(m for m in region.modules() if m is not region and all(name in m._modules for name in _LINEARS))


class GatedForward:
    """Stands in for a gated MLP's ``forward`` while its region runs under a frame."""

    __slots__ = ("call", "known", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.call: Callable[..., Any] = module.forward
        self.known: dict[torch.dtype, Activation | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = running.frame
        if frame is None or not frame.changes_glue or kwargs or len(args) != 1:
            return self.call(*args, **kwargs)
        (x,) = args
        if x.dtype not in self.known:
            self.known[x.dtype] = _Probe(self.module, x).activation_of(self.call)
        activation = self.known[x.dtype]
        return self.call(x) if activation is None else self._run(x, activation)

    def _run(self, x: torch.Tensor, activation: Activation) -> Any:
        module: Any = self.module
        gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(_product(gate, up, activation))


def _product(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    alike = gate.shape == up.shape and gate.dtype == up.dtype and gate.is_contiguous() and up.is_contiguous()
    if alike and gate.requires_grad and up.requires_grad:
        product: torch.Tensor = _Gated.apply(gate, up, activation)  # type: ignore[no-untyped-call]
        return product
    return activation(gate) * up


class _Probe:
    """One forward of a gated MLP on a few tokens; its linears' results are made up."""

    def __init__(self, module: nn.Module, x: torch.Tensor) -> None:
        self._module = module
        self._x = x.detach()[..., :_PROBED_TOKENS, :]
        self._order: list[str] = []
        self._given: dict[str, torch.Tensor] = {}
        self._results: dict[str, torch.Tensor] = {}

    def activation_of(self, call: Callable[..., Any]) -> Activation | None:
        """The activation where the forward is ``down(act(gate(x)) * up(x))`` and nothing else."""
        with apart(self._x.device), torch.enable_grad(), self._watching():
            result = call(self._x)
        if self._order != list(_LINEARS) or result is not self._results["down_proj"]:
            return None
        if self._given["gate_proj"] is not self._x or self._given["up_proj"] is not self._x:
            return None
        product, gate, up = self._given["down_proj"], self._results["gate_proj"], self._results["up_proj"]
        activation = _read(product, gate, up)
        if activation is None or isinstance(product, FakeTensor):
            return activation
        with torch.no_grad():
            return activation if same_bits(activation(gate).mul_(up), product) else None

    @contextmanager
    def _watching(self) -> Iterator[None]:
        linears: list[tuple[str, nn.Module]] = [(name, getattr(self._module, name)) for name in _LINEARS]
        handles = [linear.register_forward_hook(self._hook(name)) for name, linear in linears]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[..., torch.Tensor]:
        def ran(_module: nn.Module, args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
            self._order.append(name)
            self._given[name] = args[0]
            values = torch.arange(result.numel(), device=result.device).mul(1.7 + len(self._order)).sin().mul(3)
            self._results[name] = values.to(result.dtype).reshape(result.shape).requires_grad_()
            return self._results[name]

        return ran


def _read(product: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Activation | None:
    """The activation, read off autograd's graph: Mul of an activation of ``gate`` alone and of ``up``."""
    multiplied = product.grad_fn
    if multiplied is None or multiplied.name() != "MulBackward0":
        return None
    sides = [node for node, _ in multiplied.next_functions]
    other = [node for node in sides if getattr(node, "variable", None) is up]
    acts = [node for node in sides if node is not None and node.name() in ("SiluBackward0", "GeluBackward0")]
    if len(sides) != 2 or len(other) != 1 or len(acts) != 1:
        return None
    act: Any = acts[0]
    if [getattr(node, "variable", None) is gate for node, _ in act.next_functions] != [True]:
        return None
    return Activation(act._saved_approximate if act.name() == "GeluBackward0" else None)
