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
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import silu

from hilore.runtime.ambient import RunningAs, running
from hilore.runtime.derive import same_bits
from hilore.runtime.errors import HiloreWarning
from hilore.runtime.glue.gatedops import gated_product, gated_product_backward

_LINEARS = ("gate_proj", "up_proj", "down_proj")
_PROBED_TOKENS = 4
_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
# What probes found outlives an attachment.
_known: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], bool]] = WeakKeyDictionary()


class _GatedProduct(torch.autograd.Function):
    """gate and up [..., ffn], contiguous."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return gated_product(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        again = torch.is_grad_enabled()
        if not again and grad.is_contiguous():
            return gated_product_backward(grad, gate, up)
        # Gradients of gradients, and those that lie otherwise, whose layout autograd hands on.
        with torch.enable_grad():
            product = silu(gate) * up
        return torch.autograd.grad(product, (gate, up), grad, create_graph=again)


def gated_forwards(region: nn.Module) -> list[GatedForward]:
    """Stand-ins for the modules inside a region that have the three linears of a gated MLP."""
    parts = (part for part in region.modules() if part is not region)
    return [GatedForward(part) for part in parts if all(part._modules.get(name) is not None for name in _LINEARS)]


class GatedForward:
    """Stands in for a gated MLP's ``forward`` while its region runs under a frame.

    ``known``: whether that forward is ``down(silu(gate(x)) * up(x))``, by what it may depend on.
    """

    __slots__ = ("_others", "call", "known", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.call: Callable[..., Any] = module.forward
        self.known = _known.setdefault(module, {})
        linears = [part for name in _LINEARS for part in module.get_submodule(name).modules()]
        inside = {id(part) for part in (module, *linears)}
        self._others = [part for part in module.modules() if id(part) not in inside]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not running.fuses or kwargs or len(args) != 1 or not _takes(args[0]) or any(map(_watched, self._others)):
            return self.call(*args, **kwargs)
        (x,) = args
        compute = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        key = (type(self.module).forward, self.module.training, x.dtype, compute, isinstance(x, FakeTensor))
        if key not in self.known:
            self.known[key] = _Probe(self.module, self.call, x, compute).agrees()
        if not self.known[key]:
            return self.call(x)
        module: Any = self.module
        gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(product_of(gate, up))


def _takes(x: Any) -> bool:
    return type(x) in _PLAIN and x.device.type == "cpu" and x.dim() >= 2


def _watched(module: nn.Module) -> bool:
    """Whether someone sees or changes what goes through a module, which would no longer be called."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


def product_of(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` [..., width], in one pass each way where both are contiguous and want gradients."""
    alike = gate.shape == up.shape and gate.is_contiguous() and up.is_contiguous()
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
        hooks, generators = saved_tensors_hooks(_as_it_is, _as_it_is), torch.random.fork_rng([])
        # Autocast would keep the casts of weights that it makes here.
        autocast = torch.autocast("cpu", self._compute, enabled=self._compute is not None, cache_enabled=False)
        with RunningAs(None), torch.enable_grad(), autocast, hooks, generators:
            with self._watching():
                result = self._call(self._x)
            if not self._in_order(result):
                return False
            product, gate, up = self._given["down_proj"], self._results["gate_proj"], self._results["up_proj"]
            if not _is_product(product, gate, up) or any(t.dtype != torch.bfloat16 for t in (product, gate, up)):
                return False
            if isinstance(product, FakeTensor):
                return True
            grad = _made_up(product, 2.9)
            own, ours = (
                (found.detach(), *torch.autograd.grad(found, (gate, up), grad))
                for found in (product, product_of(gate, up))
            )
        if all(same_bits(*pair) for pair in zip(own, ours, strict=True)):
            return True
        _tell(self._module)
        return False

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
            if len(args) != 1 or kwargs or type(result) not in _PLAIN:
                self._order.append("something else")
                return result
            self._given[name] = args[0]
            self._results[name] = _made_up(result, 1.7 + len(self._order)).requires_grad_()
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


def _bits(product: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (product.detach(), *torch.autograd.grad(product, (gate, up), _made_up(product.detach(), 2.9)))


def _made_up(tensor: torch.Tensor, step: float) -> torch.Tensor:
    """Other values of the same shape and dtype, contiguous."""
    values = torch.arange(tensor.numel(), device=tensor.device).mul(step).sin().mul(3)
    return values.to(tensor.dtype).reshape(tensor.shape)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _tell(module: nn.Module) -> None:
    warnings.warn(
        f"{type(module).__name__}: its gated product has other bits than silu(gate) * up, so it runs its own forward, "
        "which holds more than a trace predicts.",
        HiloreWarning,
        stacklevel=2,
    )
