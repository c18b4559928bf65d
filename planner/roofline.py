"""Time without the device: every operator takes as long as its arithmetic or its memory traffic, whichever is longer.

The clock is a dispatch mode: it sees each operator that really runs (forward, replay and backward alike, under fake
tensors) and moves on by what a card of planner/devices.py would need for it. Whatever reads a device's clock reads
this one in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hilore.planner.gpu import SMALL_GEMM_SIDE, Gpu
from hilore.planner.trace import CodecCost
from hilore.runtime.codecs import get_codec

_aten: Any = torch.ops.aten
_FREE = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.detach,
    _aten.alias, _aten._unsafe_view, _aten.lift_fresh, _aten._local_scalar_dense, _aten.resize_, _aten.set_,
}  # fmt: skip
_FORWARD_ATTENTION = {
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
}
_BACKWARD_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
}
# Operators that write their first argument without reading it, and that read of a table only what they pick.
_OVERWRITES = {_aten.zero_, _aten.fill_, _aten.copy_, _aten.zeros_like, _aten.ones_like, _aten.full_like}
_PICKS = {_aten.embedding, _aten.gather, _aten.index_select, _aten.index}
_SCATTERS = {_aten.scatter_add_, _aten.scatter_, _aten.scatter_add, _aten.scatter}
# Backward of attention is five matrix products where forward is two; a causal mask leaves half of each.
_ATTENTION_BACKWARD_FACTOR = 2.5


class RooflineClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Nanoseconds that the operators run so far would have taken on ``gpu``, kernels one after another.

    Time of the CPU that launches them is not in it: a card that outruns its CPU is slower than this.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu
        self._now_ns = 0.0

    def __call__(self) -> int:
        return round(self._now_ns)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._now_ns += operator_ns(self._gpu, func, args, kwargs or {}, result)
        return result


def operator_ns(gpu: Gpu, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """max(flops / rate, bytes / bandwidth) + launch of one aten operator; 0 for views and allocations."""
    packet = func.overloadpacket
    outputs = _tensors(result)
    if packet in _FREE or not outputs or func.is_view:
        return 0.0
    moved_ns = moved_bytes(packet, args, kwargs, outputs) / gpu.bytes_per_second() * 1e9
    flops, kind = operator_flops(func, args, kwargs, result)
    arithmetic_ns = flops / gpu.rate(_dtype_of(args), kind) * 1e9 if flops else 0.0
    return max(moved_ns, arithmetic_ns) + gpu.launch_ns


def operator_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[float, str]:
    """Multiplications and additions of one operator, causal attention counted as half its square, and its kind."""
    packet = func.overloadpacket
    if packet in _FORWARD_ATTENTION:
        return _attention_flops(*_tensors(args)[:3]) * _causal_share(func, args, kwargs), "attention_forward"
    if packet in _BACKWARD_ATTENTION:
        flops = _attention_flops(*_tensors(args)[1:4]) * _causal_share(func, args, kwargs)
        return flops * _ATTENTION_BACKWARD_FACTOR, "attention_backward"
    if packet not in flop_registry:
        return 0.0, "elementwise"
    flops = flop_registry[packet](*args, **kwargs, out_val=result)
    sides = [size for tensor in _tensors(args) if tensor.dim() >= 2 for size in tensor.shape[-2:]]
    return float(flops), "gemm_small" if min(sides) < SMALL_GEMM_SIDE else "gemm_large"


def moved_bytes(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> int:
    """Bytes that one operator reads and writes, each tensor once; repeats of an expanded tensor come from cache."""
    written = sum(map(_nbytes, outputs))
    inputs = _tensors((args, kwargs))
    if packet in _PICKS:
        return 2 * written + sum(_nbytes(tensor) for tensor in inputs[1:])
    if packet in _SCATTERS:
        return 2 * _nbytes(inputs[-1]) + sum(_nbytes(tensor) for tensor in inputs[1:])
    return written + sum(map(_nbytes, inputs[1:] if packet in _OVERWRITES else inputs))


def estimated_codec_costs(gpu: Gpu, output: Tensor, names: Iterable[str], device_type: str) -> tuple[CodecCost, ...]:
    """Encode and decode times of each codec for a tensor like ``output``: one reads what the other writes.

    Its workspace is that of ``device_type``'s kernels, wherever ``output`` is.
    """
    found = []
    for name in names:
        codec, shape = get_codec(name), tuple(output.shape)
        if codec.lossless and not (codec.holds_activations and codec.shrinks(shape, output.dtype)):
            continue
        payload = codec.nbytes(shape, output.dtype)
        moved = payload + output.numel() * output.element_size()
        took = round(moved / gpu.bytes_per_second("codec") * 1e9) + gpu.launch_ns
        workspace = codec.workspace_bytes(shape, output.dtype, device_type)
        found.append(CodecCost(name, payload, took, took, workspace))
    return tuple(found)


def collective_ns(gpu: Gpu, nbytes: int, world_size: int) -> int:
    """A ring all-gather that ends with ``nbytes`` on each card, or a reduce-scatter that begins with them."""
    if world_size == 1 or not nbytes:
        return 0
    return round(nbytes * (world_size - 1) / world_size / (gpu.link_bandwidth * gpu.link_fraction.value) * 1e9)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> float:
    rows = prod(query.shape[:-2])
    return 2.0 * rows * query.shape[-2] * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _causal_share(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return 0.5 if named.get("is_causal") else 1.0


def _dtype_of(args: tuple[Any, ...]) -> str:
    dtypes = [tensor.dtype for tensor in _tensors(args) if tensor.is_floating_point()]
    return str(dtypes[0]).removeprefix("torch.") if dtypes else "float32"


def _nbytes(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
