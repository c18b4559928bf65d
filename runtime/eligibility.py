"""Which saved tensors may be encoded at all: floating activations of the compute dtype above a size floor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hilore.runtime.codecs.base import FLOAT_DTYPES

FLOOR_BYTES = 1 << 14
ROLES = ("activation", "parameter", "index", "mask", "scalar", "other dtype", "repeated", "small", "not strided")


def role_of(
    tensor: Tensor, *, compute_dtype: torch.dtype, floor_bytes: int = FLOOR_BYTES, parameters: Iterable[Tensor] = ()
) -> str:
    """One of ROLES. Only an "activation" may be encoded.

    "parameter": shares the storage of a parameter (a linear's weight reaches a pack hook as a transposed view, so its
    type says nothing): of one of ``parameters``, or of the one that it is a view of. "index": any integer (indices,
    RNG states). "mask": bool. "repeated": an expanded tensor, more elements than its storage holds. "small": less
    than ``floor_bytes``.
    """
    if tensor.layout is not torch.strided:
        return "not strided"
    if _is_parameter(tensor, parameters):
        return "parameter"
    if tensor.dtype == torch.bool:
        return "mask"
    if not tensor.dtype.is_floating_point:
        return "other dtype" if tensor.dtype.is_complex else "index"
    if tensor.dim() == 0:
        return "scalar"
    if tensor.dtype != compute_dtype or tensor.dtype not in FLOAT_DTYPES:
        return "other dtype"
    logical_bytes = tensor.numel() * tensor.element_size()
    if logical_bytes > tensor.untyped_storage().nbytes():
        return "repeated"
    return "small" if logical_bytes < floor_bytes else "activation"


def may_encode(
    tensor: Tensor, *, compute_dtype: torch.dtype, floor_bytes: int = FLOOR_BYTES, parameters: Iterable[Tensor] = ()
) -> bool:
    """Whether ``tensor`` may be kept encoded: its role is "activation". Never for parameters, indices, masks."""
    role = role_of(tensor, compute_dtype=compute_dtype, floor_bytes=floor_bytes, parameters=parameters)
    return role == "activation"


def _is_parameter(tensor: Tensor, parameters: Iterable[Tensor]) -> bool:
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    # The parameters are alive here, so that no other storage can have their address.
    storage = tensor.untyped_storage()._cdata
    return any(parameter.untyped_storage()._cdata == storage for parameter in parameters)
