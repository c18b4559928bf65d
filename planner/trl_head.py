"""The head that TRL's trainer runs: its own tiled projection, scored as ``GRPOTrainer`` scores completions.

TRL projects tiles of up to 4,096 tokens x 32,768 columns. With Triton it scores completion tokens alone; elsewhere
every position, the prompt's too, and in plain torch, whose float32 temporaries can be the peak of a whole update. A
plan for TRL's trainer is made with ``loss.head: trl``, so that its budget holds there. Source: trl 1.16,
``add_fused_lm_head`` and ``kernels/chunked_logprob.py``.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor

from hilore.planner.microbatch import Microbatch
from hilore.runtime.errors import UnsupportedModelError

OUTPUTS = ("log_probs", "entropy")  # what GRPOTrainer asks for
_UNSCORED = -100


def trl_logps(
    hidden: Tensor, lm_head: nn.Linear, softcap: float | None, microbatch: Microbatch, temperature: float
) -> Tensor:
    """log pi of every completion column: float32 [B, Tr], 0 where the attention mask is.

    ``hidden`` [B, T, H]: the backbone's output.
    Raises UnsupportedModelError where trl is not installed or has another head, and for fake tensors on a device
    with Triton, which cannot run its kernel.
    """
    apply, tile_columns, on_triton = _kernel()
    compact = on_triton(hidden.device)
    if compact and isinstance(hidden, FakeTensor):
        raise UnsupportedModelError(
            "loss.head: 'trl' runs a Triton kernel on this device, whose memory cannot be traced; set loss.head: "
            "chunked, which is the larger of the two there",
            field="head",
            found="trl",
        )
    keep = microbatch.completion_mask.shape[1]
    labels = microbatch.input_ids.masked_fill(microbatch.attention_mask == 0, _UNSCORED)
    labels[:, :-keep] = _UNSCORED
    hidden, labels = hidden[:, :-1], labels[:, 1:]
    scored = labels != _UNSCORED
    logps: Tensor = apply(
        hidden[scored] if compact else hidden.reshape(-1, hidden.size(-1)),
        lm_head.weight,
        lm_head.bias,
        labels[scored] if compact else labels.clamp(min=0).reshape(-1),
        temperature,
        tile_columns,
        softcap,
        1.0,
        OUTPUTS,
    )[0]
    if compact:
        placed: Tensor = logps.new_zeros(scored.shape).masked_scatter(scored, logps)
        return placed[:, -keep:]
    shaped: Tensor = logps.view(scored.shape).masked_fill(~scored, 0)
    return shaped[:, -keep:]


def _kernel() -> tuple[Any, int, Any]:
    """TRL's function, the columns of its tiles, and whether a device runs it by Triton."""
    try:
        kernels = importlib.import_module("trl.kernels")
        utils = importlib.import_module("trl.trainer.utils")
        return kernels.ChunkedLogProbFunction.apply, utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._use_triton
    except (ImportError, AttributeError) as error:
        raise UnsupportedModelError(
            f"loss.head: 'trl' needs the tiled head of trl 1.16 ({error}); type: pip install 'hilore-plan[trl]', or "
            "set loss.head: chunked",
            field="head",
            found="trl",
        ) from error
