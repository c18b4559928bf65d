"""``silu(gate) * up`` and its gradients as torch operators, so that fake tensors and dispatch modes see one call each.

On CPU bfloat16 runs gated.c, one pass and no memory beside the results. It has the bits of torch's vectors, but what
is left at the end of each thread's share torch runs element by element, with other ones. So gated.c is used where every
share is whole vectors, and only after a comparison with this machine's torch (``verified_kernels``). Everything else is
torch's own operators, one written over another's result: the same bits in the same memory, in about twice the time.

The operators take no part in autograd: gated.py calls them from an autograd function.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import silu

from hilore.runtime.codecs.native import NativeKernels, native_kernels
from hilore.runtime.errors import HiloreWarning

# The most that torch's vectors take at once: two of 32 bfloat16 values with AVX-512. Also what gated.c takes.
VECTOR = 64
# at::internal::GRAIN_SIZE: torch gives no thread less.
_GRAIN = 32768
_SIGNIFICANDS = 128
_RANDOM_ROUNDS = 8

_Library: Any = torch.library.Library  # torch leaves it untyped
_library = _Library("hilore", "FRAGMENT")
_library.define("gated_product(Tensor gate, Tensor up) -> Tensor")
_library.define("gated_product_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)")


def gated_product(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``; both of one shape and dtype, contiguous."""
    return cast(Tensor, torch.ops.hilore.gated_product(gate, up))


def gated_product_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``up``; ``grad`` is that of the product. All of one shape and dtype, contiguous."""
    return cast(tuple[Tensor, Tensor], torch.ops.hilore.gated_product_backward(grad, gate, up))


def _product(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate).mul_(up)


def _gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    of_up = silu(gate)
    torch.mul(grad, of_up, out=of_up)
    of_gate = grad * up
    torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
    return of_gate, of_up


def _native_product(kernels: NativeKernels, gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    _call(kernels.library.gated_product_bf16, gate, up, out)
    return out


def _native_gradients(kernels: NativeKernels, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    _call(kernels.library.gated_gradients_bf16, grad, gate, up, of_gate, of_up)
    return of_gate, of_up


def _call(function: Any, *tensors: Tensor) -> None:
    function.restype = None
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    function(*pointers, ctypes.c_int64(tensors[0].numel()), ctypes.c_int(torch.get_num_threads()))


def whole_vectors(numel: int, threads: int) -> bool:
    """Whether torch's elementwise operators run so many contiguous elements as whole vectors in each thread."""
    shares = 1 if numel <= _GRAIN else min(threads, -(-numel // _GRAIN))
    return numel % VECTOR == 0 and -(-numel // shares) % VECTOR == 0


def _kernels_for(*tensors: Tensor) -> NativeKernels | None:
    first = tensors[0]
    alike = all(t.dtype == torch.bfloat16 and t.shape == first.shape and t.is_contiguous() for t in tensors)
    return verified_kernels() if alike and whole_vectors(first.numel(), torch.get_num_threads()) else None


_lock = threading.Lock()
_verified: list[NativeKernels | None] = []


def verified_kernels() -> NativeKernels | None:
    """The kernels where they have torch's bits; None, with one HiloreWarning per process, where they do not."""
    if not _verified:
        with _lock:
            if not _verified:
                _verified.append(_verify(native_kernels()))
    return _verified[0]


def _verify(kernels: NativeKernels | None) -> NativeKernels | None:
    if kernels is None:  # which native.py has told
        return None
    if not kernels.library.gated_has_fma():
        _tell("the C compiler makes no fused multiply-adds for this machine")
        return None
    different = differences(kernels)
    if different:
        _tell(f"{different:,} results of gated.c differ from torch {torch.__version__} on this machine")
        return None
    return kernels


def differences(kernels: NativeKernels) -> int:
    """How many results differ from torch's, over all 65,536 gates.

    A gate's gradient is that of its activation times two numbers that hang on the gate alone, so each significand once
    stands for all of them, short of the smallest numbers; random ones bring these, infinities and NaN too.
    """
    every = torch.arange(1 << 16, device="cpu").to(torch.int16).view(torch.bfloat16)
    # Only whole vectors give NaN the bits that it has in them.
    found = _different(kernels, *[torch.full((VECTOR,), torch.nan, dtype=torch.bfloat16, device="cpu")] * 3)
    for gate in every.view(-1, _GRAIN).unbind():
        ones = torch.ones_like(gate)
        found += sum(_different(kernels, ones * (1 + i / _SIGNIFICANDS), gate, ones) for i in range(_SIGNIFICANDS))
    generator = torch.Generator().manual_seed(0)
    for _ in range(_RANDOM_ROUNDS):
        grad, gate, up = (every[torch.randint(1 << 16, (_GRAIN,), generator=generator, device="cpu")] for _ in range(3))
        found += _different(kernels, grad, gate, up)
    return found


def _different(kernels: NativeKernels, grad: Tensor, gate: Tensor, up: Tensor) -> int:
    ours = (_native_product(kernels, gate, up), *_native_gradients(kernels, grad, gate, up))
    theirs = (_product(gate, up), *_gradients(grad, gate, up))
    return sum(int((a.view(torch.int16) != b.view(torch.int16)).sum()) for a, b in zip(ours, theirs, strict=True))


def _tell(reason: str) -> None:
    warnings.warn(
        f"Gated products of MLPs run as torch's own operators: {reason}. Results and memory are the same; each takes "
        "about twice the time.",
        HiloreWarning,
        stacklevel=4,
    )


def _product_cpu(gate: Tensor, up: Tensor) -> Tensor:
    kernels = _kernels_for(gate, up)
    return _product(gate, up) if kernels is None else _native_product(kernels, gate, up)


def _gradients_cpu(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    kernels = _kernels_for(grad, gate, up)
    return _gradients(grad, gate, up) if kernels is None else _native_gradients(kernels, grad, gate, up)


def _product_fake(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


def _gradients_fake(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


for _name, _cpu, _fake in (
    ("gated_product", _product_cpu, _product_fake),
    ("gated_product_backward", _gradients_cpu, _gradients_fake),
):
    _library.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"hilore::{_name}", _fake, lib=_library)
