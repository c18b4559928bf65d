"""RMSNorm in fewer passes over memory: forward and backward with the bits of the module's own code.

The form of Llama and those after it, ``weight * (h * rsqrt(mean(h^2) + eps)).to(x.dtype)`` with h = x in float32, takes
seven passes and autograd keeps h, twice the bytes of a bfloat16 x. Here forward and backward are two passes of
normops.py each, around the sums that torch itself makes, and x, the weight and [..., 1] numbers are kept. So x may not
be changed in place before backward, which then raises; autograd's own code raises too where x is float32.

Nothing is assumed of a module's code: before the first run its own forward and backward run on a few tokens, and show
that they issue the operators of that form, and no others, and that output and gradient have the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses import FakeTensor

from hilore.runtime.ambient import running
from hilore.runtime.codecs.base import is_dense
from hilore.runtime.derive import same_bits
from hilore.runtime.errors import HiloreWarning
from hilore.runtime.glue.decisions import KNOWN_AT_MOST, state_of, transformed, with_parts
from hilore.runtime.glue.normops import rms_gradient, rms_product, rms_scale, rms_square
from hilore.runtime.glue.probing import PLAIN, Recorder, apart, hooked, made_up_like

# Others have no kernels, or (float16) sums that the form does not make in float32 alone.
_DTYPES = (torch.bfloat16, torch.float32)
_PROBED_ROWS = 2
_EPSILONS = ("variance_epsilon", "eps")


class _RMSNorm(torch.autograd.Function):
    """x [..., width]; the same again as ``squared`` where x is float32, its own h; weight [width], without a gradient.

    ``squared``: autograd adds a gradient to x for h and another for h^2, each on its own after those that x has from
    elsewhere; a sum of three floats depends on its order.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, squared: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if _in_rows(x):
            inverse = torch.rsqrt(rms_square(x).mean(-1, keepdim=True) + eps)
            result = rms_scale(x, inverse, weight)
        else:
            inverse, result = _plainly(x, squared, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.eps, ctx.twice = eps, squared is not None
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        x, weight, inverse = ctx.saved_tensors
        again = torch.is_grad_enabled()
        if again or not _in_rows(x) or not _in_rows(grad) or (ctx.twice and not grad.is_contiguous()):
            return (*_by_autograd(x, weight, ctx.eps, grad, ctx.twice, again), None, None)
        # In autograd's order: rsqrt's formula, then mean's.
        of_sum = rms_product(grad, x, weight).sum(-1, keepdim=True)
        of_square = (of_sum * -0.5 * inverse.pow(3)) / x.shape[-1]
        if ctx.twice:
            return (grad * weight).mul_(inverse), (x * 2.0).mul_(of_square), None, None
        return rms_gradient(grad, x, weight, inverse, of_square), None, None, None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * (h * rsqrt(mean(h^2) + eps)).to(x.dtype)``, h = x in float32; x [..., width] and ``weight`` [width]
    both bfloat16 or both float32, the weight without a gradient."""
    squared = x if x.dtype == torch.float32 else None
    result: torch.Tensor = _RMSNorm.apply(x, squared, weight, eps)  # type: ignore[no-untyped-call]
    return result


def _in_rows(tensor: torch.Tensor) -> bool:
    """Whether the passes take it, and lie as torch's own operators would: dense, a row's elements side by side."""
    return tensor.is_contiguous() or (tensor.dim() <= 4 and tensor.stride(-1) == 1 and is_dense(tensor))


def _plainly(
    x: torch.Tensor, squared: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The form itself; 1 / sqrt(mean(h^2) + eps) and the result."""
    h = x.to(torch.float32)
    mean = (h if squared is None else squared).pow(2).mean(-1, keepdim=True)
    inverse = torch.rsqrt(mean + eps)
    return inverse, weight * (h * inverse).to(x.dtype)


def _by_autograd(
    x: torch.Tensor, weight: torch.Tensor, eps: float, grad: torch.Tensor, twice: bool, create_graph: bool
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by the form's own graph: for gradients of gradients, and tensors that the passes do not take."""
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        inputs = [x.view_as(x) if create_graph else x.detach().requires_grad_() for _ in range(1 + twice)]
        _, result = _plainly(inputs[0], inputs[1] if twice else None, weight, eps)
    found = torch.autograd.grad(result, inputs, grad, create_graph=create_graph)
    return found if twice else (*found, None)


def norm_forwards(region: nn.Module) -> list[NormForward]:
    """Stand-ins for the modules of a region that may be such norms."""
    return [NormForward(module) for module in region.modules() if _may_be_norm(module)]


def _may_be_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    leaf = not module._modules and set(module._parameters) <= {"weight"}
    return leaf and isinstance(weight, torch.Tensor) and weight.dim() == 1 and _epsilon(module) is not None


def _epsilon(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in _EPSILONS)
    return next((eps for eps in found if isinstance(eps, float)), None)


# What probes found, for as long as a module lives: it may be attached again and again.
_known: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], bool]] = WeakKeyDictionary()


class NormForward:
    """Stands in for a norm's ``forward`` while its region runs."""

    __slots__ = ("call", "known", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.call: Callable[..., Any] = module.forward
        self.known: dict[tuple[object, ...], bool] = _known.setdefault(module, {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = running.frame
        if frame is None or not running.fused or kwargs or len(args) != 1:
            return self.call(*args, **kwargs)
        module: Any = self.module
        (x,), weight, eps = args, module.weight, _epsilon(module)
        if eps is None or not frame.decisions.take(self, lambda: self._stands_in(x, weight, eps)):
            return self.call(x)
        return rms_norm(x, weight, eps)

    def _stands_in(self, x: Any, weight: torch.Tensor, eps: float) -> bool:
        module = self.module
        if not _takes(x, weight) or hooked(module) or torch.is_autocast_enabled("cpu") or transformed():
            return False
        key = (*state_of(module), eps, x.dtype, isinstance(x, FakeTensor))
        if key not in self.known and len(self.known) < KNOWN_AT_MOST:
            self.known[key] = _Probe(module, x, weight, eps).agrees()
        return self.known.get(key, False)


def _takes(x: Any, weight: torch.Tensor) -> bool:
    """What no replay sees otherwise than its forward: how x lies is none of it."""
    if type(x) not in PLAIN or type(weight) not in PLAIN or weight.requires_grad:
        return False
    alike = x.dtype == weight.dtype and x.dtype in _DTYPES and x.device.type == weight.device.type == "cpu"
    return alike and x.dim() >= 2 and x.shape[-1:] == weight.shape and weight.is_contiguous()


@dataclass(frozen=True, slots=True)
class _Run:
    """Every operator of a forward and its backward; the output, x's gradient."""

    operators: list[object]
    results: list[torch.Tensor]


class _Probe:
    """Runs of a module's own forward and backward on a few rows, with made-up values for the weight too.

    A weight of ones would hide where it is multiplied.
    """

    def __init__(self, module: nn.Module, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        self._module = module
        with torch.no_grad():
            rows = [min(size, _PROBED_ROWS) for size in x.shape[:-1]]
            few = torch.empty([*rows, x.shape[-1]], dtype=x.dtype, device=x.device)
            self._x, self._weight = made_up_like(few, 1.7), made_up_like(weight, 2.3)
        self._eps = eps

    def agrees(self) -> bool:
        """Whether the module's forward is the form; a HiloreWarning where it is, but not with our bits."""
        with apart():
            own = None
            with suppress(Exception):  # of a forward that takes no such rows, say
                own = self._run(lambda x: self._own(x))
            form = self._run(lambda x: self._form(x))
            if own is None or form is None or own.operators != form.operators:
                return False
            ours = self._run(lambda x: rms_norm(x, self._weight, self._eps))
        if isinstance(self._x, FakeTensor) or (ours is not None and all(map(same_bits, own.results, ours.results))):
            return True
        _tell(self._module)
        return False

    def _own(self, x: torch.Tensor) -> Any:
        module = with_parts(self._module, {"weight": self._weight})
        return type(module).forward(module, x)

    def _form(self, x: torch.Tensor) -> torch.Tensor:
        return _plainly(x, None, self._weight, self._eps)[1]

    def _run(self, forward: Callable[[torch.Tensor], Any]) -> _Run | None:
        """None: not even of the kind. x has another use, whose gradient comes first."""
        leaf = self._x.clone().requires_grad_()
        with Recorder() as recorder:
            x = leaf * 1
            result = forward(x)
            if not isinstance(result, torch.Tensor) or result.shape != x.shape or result.dtype != x.dtype:
                return None
            if not result.requires_grad:
                return None
            grads = made_up_like(result.detach(), 2.9), made_up_like(x.detach(), 3.1)
            found = torch.autograd.grad((result, x), leaf, grads)
        return _Run(recorder.operators, [result.detach(), *found])


def _tell(module: nn.Module) -> None:
    warnings.warn(
        f"{type(module).__name__}: this torch gives RMSNorm's operators other bits than those that were expected, so "
        "it runs its own forward, which takes longer and holds more than a trace on another torch has predicted.",
        HiloreWarning,
        stacklevel=2,
    )
