"""Channels of a tensor: what shares a mean, and which ones are outliers; judged by a sample of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hilore.runtime.codecs.base import element_count, flat_view, is_dense, memory_order
from hilore.runtime.codecs.reference import sampled_rows


def channel_count(shape: Sequence[int]) -> int:
    """The last dimension; with four or more (batch, tokens, heads, head width: attention) the last two together."""
    return element_count(shape[-channel_dims(shape) :]) if len(shape) else 1


def channel_dims(shape: Sequence[int]) -> int:
    return 2 if len(shape) >= 4 else 1


def sample_of(tensor: Tensor) -> Tensor | None:
    """Up to 64 evenly spread rows ``[rows, channels]``; None where channels are not innermost in memory.

    The rows that reference.channel_mean takes of the dense tensor. A view where that is possible.
    """
    ordered = tensor.detach().permute(memory_order(tensor))
    dims = min(channel_dims(tensor.shape), tensor.dim())
    channels = channel_count(tensor.shape)
    if element_count(ordered.shape[tensor.dim() - dims :]) != channels:
        return None
    rows = tensor.numel() // channels
    count = sampled_rows(rows)
    spacing = rows // count
    if is_dense(tensor):
        return flat_view(tensor).view(rows, channels)[spacing // 2 :: spacing][:count]
    leading = ordered.shape[: tensor.dim() - dims]
    if not leading:
        return ordered.reshape(1, channels)
    places = torch.arange(count, device=tensor.device) * spacing + spacing // 2
    return ordered[torch.unravel_index(places, leading)].reshape(count, channels)


def spread_values(tensor: Tensor) -> Tensor:
    """Up to 64 evenly spread values, flat, in memory order: for one mean of all where channels are not innermost."""
    ordered = tensor.detach().permute(memory_order(tensor))
    count = sampled_rows(tensor.numel())
    spacing = tensor.numel() // count
    places = torch.arange(count, device=tensor.device) * spacing + spacing // 2
    return ordered[torch.unravel_index(places, ordered.shape)]


def outlier_channels(sample: Tensor, count: int) -> Tensor:
    """The ``count`` channels of the largest magnitudes in ``sample``, ascending, int32."""
    return sample.abs().amax(dim=0).topk(count).indices.sort().values.to(torch.int32)


def pick_channels(tensor: Tensor, channels: Tensor) -> Tensor:
    """The values of some channels, ``[rows, len(channels)]``, of a tensor whose channels are innermost in memory."""
    dims = min(channel_dims(tensor.shape), tensor.dim())
    ordered = tensor.detach().permute(memory_order(tensor))
    inner = ordered.shape[tensor.dim() - dims :]
    places = torch.unravel_index(channels.long(), inner) if dims else ()
    picked = ordered[(..., *places)] if dims else ordered  # type: ignore[index]
    # A copy in any case: a single value would come back as a view.
    return picked.reshape(-1, channels.numel()).clone()
