"""Attention as CUDA would run it, on tensors without a GPU: what its kernels save and what they need in backward.

Fake tensors live on the CPU here, where attention has another kernel. Inside ``cuda_attention`` a call of
``torch.nn.functional.scaled_dot_product_attention`` goes to the operator that PyTorch picks on CUDA:

- flash (half precision, no mask, head dimension up to 256): saves q, k, v as they are (grouped heads not expanded), the
  output, a log-sum-exp (float32 [B, H, T]) and the generator's seed and offset;
- memory-efficient (a mask, or float32 with equal heads): the same and the mask, which each call makes additive in the
  dtype of q anew;
- otherwise the math kernel, T x T scores and all.

Backward temporaries of the kernels, which no dispatch mode sees, are acted out by an empty tensor of their size
(sources: mha_bwd in PyTorch 2.13's flash_api.cpp, and the workspace of its CUTLASS kernels).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

FLASH_HEAD_LIMIT = 256
FLASH_HEAD_STEP = 8
MASK_STEP = 16
_ROWS_STEP = 128
_HALF = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
_plain_attention = functional.scaled_dot_product_attention

NOTE = (
    "attention is taken as CUDA's flash kernel (without a mask) or memory-efficient kernel (with one) would save it; "
    "temporaries inside its backward are counted from PyTorch's source"
)


@dataclass(frozen=True, slots=True)
class _Call:
    """The scalar arguments of one attention call."""

    dropout: float
    causal: bool
    scale: float | None


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
        out, lse, _, _, longest_q, longest_k, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            query, key, value, call.dropout, call.causal, False, scale=call.scale
        )
        ctx.save_for_backward(query, key, value, out, lse, seed, offset)
        ctx.call, ctx.longest = call, (longest_q, longest_k)
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, seed, offset = ctx.saved_tensors
        call: _Call = ctx.call
        workspace = torch.empty(flash_backward_bytes(query, key), dtype=torch.uint8, device=query.device)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            gradient,
            query,
            key,
            value,
            out,
            lse,
            None,
            None,
            *ctx.longest,
            call.dropout,
            call.causal,
            seed,
            offset,
            scale=call.scale,
        )
        del workspace
        return (*grads, None)


class _Efficient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        out, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, call.dropout, call.causal, scale=call.scale
        )
        ctx.save_for_backward(query, key, value, bias, out, lse, seed, offset)
        ctx.call = call
        result: Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, lse, seed, offset = ctx.saved_tensors
        call: _Call = ctx.call
        workspace = torch.empty(efficient_backward_bytes(query), dtype=torch.uint8, device=query.device)
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            gradient,
            query,
            key,
            value,
            bias,
            out,
            lse,
            seed,
            offset,
            call.dropout,
            [True, True, True, False],
            call.causal,
            scale=call.scale,
        )
        del workspace
        return (*grads[:3], None, None)


def flash_backward_bytes(query: Tensor, key: Tensor) -> int:
    """Temporaries of the flash kernel's backward: dq in float32, row sums, k's and v's gradients per query head."""
    rows, heads, tokens, width = query.shape
    padded_tokens = -(-tokens // _ROWS_STEP) * _ROWS_STEP
    padded_width = -(-width // 32) * 32 if width <= 192 else 256
    accumulated = rows * heads * padded_tokens * (padded_width + 1) * 4
    expanded = 2 * rows * heads * key.shape[2] * width * query.element_size() if key.shape[1] != heads else 0
    return accumulated + expanded


def efficient_backward_bytes(query: Tensor) -> int:
    """Temporaries of the memory-efficient kernel's backward: dq in float32 and row sums."""
    rows, heads, tokens, width = query.shape
    return rows * heads * tokens * (width + 1) * 4


@contextmanager
def cuda_attention() -> Iterator[None]:
    """Attention runs as on CUDA inside the block, also in replays during backward.

    The function is replaced by name: a function mode would be off while ``backward`` runs.
    """
    functional.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = _plain_attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    query, key, value = _autocast(query), _autocast(key), _autocast(value)
    call = _Call(dropout_p, is_causal, scale)
    same_width = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if attn_mask is None and query.dtype in _HALF and same_width and query.shape[-1] <= FLASH_HEAD_LIMIT:
        return _flash(query, key, value, call)
    if query.dim() == 4 and query.shape[1] == key.shape[1] == value.shape[1]:
        bias = None if attn_mask is None else _additive(attn_mask, query, key)
        result: Tensor = _Efficient.apply(query, key, value, bias, call)  # type: ignore[no-untyped-call]
        return result
    with sdpa_kernel(SDPBackend.MATH):
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _flash(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
    width = query.shape[-1]
    missing = -width % FLASH_HEAD_STEP
    if missing:
        scale = call.scale if call.scale is not None else width**-0.5
        call = _Call(call.dropout, call.causal, scale)
        query, key, value = (functional.pad(tensor, (0, missing)) for tensor in (query, key, value))
    out: Tensor = _Flash.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return out[..., :width] if missing else out


def _additive(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the kernel takes it: additive, rows padded to its alignment, expanded to all heads (no memory)."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    width = mask.shape[-1]
    if width % MASK_STEP:
        mask = functional.pad(mask, (0, -width % MASK_STEP))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _autocast(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.dtype == torch.float32:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor
