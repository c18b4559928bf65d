"""log_softmax(hidden @ weight.T)[target] without ever holding the logits of more than one chunk of tokens.

A log-probability depends on its own token's hidden state alone, so its gradient is (dLoss/dlogp) times a row that the
forward can compute while the chunk's logits are there. With a frozen output layer that row is what is kept: backward
multiplies, and runs no output projection again. A trainable one needs dLoss/dlogp first: backward runs chunks again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class _Scaling:
    """``compute``: dtype of the projections. The logits are soft-capped (or not), then divided by ``temperature``."""

    compute: torch.dtype
    temperature: float
    softcap: float | None
    chunk_tokens: int


def chunked_logps(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int = 128,
) -> Tensor:
    """``hidden`` [N, H], ``weight`` [V, H], ``bias`` [V] or None, ``targets`` int64 [N] -> float32 [N].

    Projections run in the autocast dtype where autocast is on, else in ``hidden``'s; log-sum-exp in float32.
    """
    device = hidden.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    scaling = _Scaling(compute, temperature, softcap, chunk_tokens)
    apply: Any = _ChunkedLogps.apply
    result: Tensor = apply(hidden, weight, bias, targets, scaling, torch.is_grad_enabled())
    return result


class _ChunkedLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scaling: _Scaling, grad: bool
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = (grad and wanted for wanted in ctx.needs_input_grad[:3])
        ctx.replays = wants_weight or wants_bias
        ctx.scaling = scaling
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight, cast_bias = _cast(weight, scaling), _cast(bias, scaling)
            logps = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
            keeps_rows = wants_hidden and not ctx.replays
            rows = torch.empty_like(hidden, dtype=scaling.compute) if keeps_rows else None
            for part in _chunks(len(hidden), scaling):
                probabilities, slope, logps[part] = _forward_chunk(
                    hidden[part].to(scaling.compute), cast_weight, cast_bias, targets[part], scaling
                )
                if rows is not None:
                    residual = _residual(probabilities, slope, targets[part], scaling)
                    torch.mm(residual.to(scaling.compute), cast_weight, out=rows[part])
        if rows is not None:
            ctx.save_for_backward(rows)
        elif ctx.replays:
            ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.hidden_dtype = hidden.dtype
        return logps

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.replays:
            return (*_replayed_gradients(ctx, gradient), None, None, None)
        (rows,) = ctx.saved_tensors
        return (rows.float().mul_(gradient.unsqueeze(1)).to(ctx.hidden_dtype), None, None, None, None, None)


def _forward_chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scaling: _Scaling
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Probabilities float32 [n, V], the slope of the soft cap [n, V] or None, log-probabilities float32 [n]."""
    logits = functional.linear(hidden, weight, bias).float()
    slope = None
    if scaling.softcap is not None:
        tanh = torch.tanh(logits / scaling.softcap)
        slope = 1 - tanh * tanh
        logits = tanh * scaling.softcap
    if scaling.temperature != 1.0:
        logits = logits / scaling.temperature
    log_normaliser = torch.logsumexp(logits, dim=-1)
    logps = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_normaliser
    return logits.sub_(log_normaliser.unsqueeze(-1)).exp_(), slope, logps


def _residual(probabilities: Tensor, slope: Tensor | None, targets: Tensor, scaling: _Scaling) -> Tensor:
    """dlogp/dlogits, float32 [n, V], in the memory of ``probabilities``: one-hot minus probability, scaled."""
    residual = probabilities.neg_()
    residual.scatter_add_(-1, targets.unsqueeze(-1), torch.ones_like(residual[:, :1]))
    if slope is not None:
        residual.mul_(slope)
    if scaling.temperature != 1.0:
        residual.div_(scaling.temperature)
    return residual


def _replayed_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias; the last two are summed over chunks in float32."""
    hidden, weight, bias, targets = ctx.saved_tensors
    scaling: _Scaling = ctx.scaling
    wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    of_hidden = torch.empty_like(hidden) if wants_hidden else None
    of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
    of_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
    with torch.autocast(hidden.device.type, enabled=False):
        cast_weight, cast_bias = _cast(weight, scaling), _cast(bias, scaling)
        for part in _chunks(len(hidden), scaling):
            inputs = hidden[part].to(scaling.compute)
            probabilities, slope, _ = _forward_chunk(inputs, cast_weight, cast_bias, targets[part], scaling)
            residual = _residual(probabilities, slope, targets[part], scaling).mul_(gradient[part].unsqueeze(1))
            if of_bias is not None:
                of_bias += residual.sum(0)
            residual = residual.to(scaling.compute)
            if of_hidden is not None:
                of_hidden[part] = (residual @ cast_weight).to(hidden.dtype)
            if of_weight is not None:
                of_weight += residual.t() @ inputs
    return (
        of_hidden,
        None if of_weight is None else of_weight.to(weight.dtype),
        None if of_bias is None else of_bias.to(bias.dtype),
    )


def _cast(tensor: Any, scaling: _Scaling) -> Any:
    return None if tensor is None else tensor.to(scaling.compute)


def _chunks(count: int, scaling: _Scaling) -> list[slice]:
    return [slice(start, min(start + scaling.chunk_tokens, count)) for start in range(0, count, scaling.chunk_tokens)]
