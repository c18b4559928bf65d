"""Log-probabilities of the completion: from all logits at once (naive) or in chunks of tokens (chunked).

``naive`` is what trainers without a head of their own do: logits of the whole completion, then a row-wise log-softmax
whose result autograd keeps; of a packed row all tokens, as trainers without padding do. ``trl`` is the tiled head of
TRL 1.16's own trainer (planner/trl_head.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hilore.planner.chunked_head import chunked_logps
from hilore.planner.loss import grpo_loss
from hilore.planner.microbatch import Microbatch
from hilore.planner.packing import picked
from hilore.planner.trl_head import trl_logps
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.sharded import model_sharding, unsharded_class, unwrapped

__all__ = ["grpo_loss", "policy_logps", "selected_logps"]

CHUNK_TOKENS = 128
_LOGIT_SCALES = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")


def policy_logps(
    model: nn.Module,
    microbatch: Microbatch,
    head: str = "naive",
    *,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """log pi(token | before) of every completion column: float32 [B, Tr], differentiable.

    ``model``: a causal language model of transformers, under PEFT or not, or a module that takes ``input_ids`` and
    ``attention_mask`` and gives logits [B, T, V] (as a tensor or as ``.logits``). Enters no autocast of its own.
    Raises UnsupportedModelError where ``chunked`` or ``trl`` cannot be exact for this model.
    """
    if head == "chunked":
        return _chunked(model, microbatch, temperature, chunk_tokens)
    if head == "trl":
        return _trl(model, microbatch, temperature)
    if head != "naive":
        raise UnsupportedModelError(f"loss.head: '{head}' is not one of naive, chunked, trl", field="head", found=head)
    keep = microbatch.completion_mask.shape[1]
    inputs = _model_inputs(model, microbatch)
    if "logits_to_keep" in inspect.signature(unwrapped(base_model(model)).forward).parameters and not microbatch.packed:
        inputs["logits_to_keep"] = keep + 1
    output = model(**inputs)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} gives {type(output).__name__} without logits; its forward must return logits "
            "[B, T, V] or an object with .logits",
            found=type(output).__name__,
        )
    if microbatch.places is not None:
        if temperature != 1.0:
            logits = logits / temperature
        return picked(selected_logps(logits, microbatch.input_ids.roll(-1, 1)).float(), microbatch.places)
    logits = logits[:, :-1, :][:, -keep:, :]
    if temperature != 1.0:
        logits = logits / temperature
    return selected_logps(logits, microbatch.input_ids[:, -keep:]).float()


def selected_logps(logits: Tensor, index: Tensor) -> Tensor:
    """log_softmax(logits)[index] row by row: [B, Tr] in the dtype that log-softmax gives, as TRL computes it.

    float32 goes through logsumexp, which keeps the logits; lower dtypes through log_softmax, which keeps its result.
    """
    if logits.dtype in (torch.float32, torch.float64):
        chosen = torch.gather(logits, -1, index.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    rows = [
        functional.log_softmax(row, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        for row, targets in zip(logits, index, strict=True)
    ]
    return torch.stack(rows)


def base_model(model: nn.Module) -> Any:
    """The causal language model inside PEFT's wrapper, or ``model`` itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def _model_inputs(model: nn.Module, microbatch: Microbatch) -> dict[str, Any]:
    """Without padding the mask is left out: transformers drops a mask of ones itself, but only if it can read it.

    Packed rows come with their positions alone. Raises UnsupportedModelError where the model takes none.
    """
    mask = microbatch.attention_mask if microbatch.padded else None
    inputs = {"input_ids": microbatch.input_ids, "attention_mask": mask}
    if not microbatch.packed:
        return inputs
    causal = unwrapped(base_model(model))
    if "position_ids" not in inspect.signature(causal.forward).parameters:
        raise UnsupportedModelError(
            f"batch.layout: packed gives position_ids, which {type(causal).__name__} does not take; set batch.layout: "
            "padded",
            field="layout",
            found="packed",
        )
    return inputs | {"position_ids": microbatch.position_ids}


def _chunked(model: nn.Module, microbatch: Microbatch, temperature: float, chunk_tokens: int) -> Tensor:
    keep = microbatch.completion_mask.shape[1]
    lm_head, softcap = _output_layer(base_model(model), "chunked")
    targets = microbatch.input_ids.roll(-1, 1) if microbatch.packed else microbatch.input_ids[:, -keep:]

    def score(hidden: Tensor) -> Tensor:
        if not microbatch.packed:
            hidden = hidden[:, -keep - 1 : -1, :]
        return chunked_logps(
            hidden.reshape(-1, hidden.shape[-1]),
            lm_head.weight,
            lm_head.bias,
            targets.reshape(-1),
            temperature=temperature,
            softcap=softcap,
            chunk_tokens=chunk_tokens,
        )

    logps = _scored(model, microbatch, score).view(targets.shape)
    return logps if microbatch.places is None else picked(logps, microbatch.places)


def _trl(model: nn.Module, microbatch: Microbatch, temperature: float) -> Tensor:
    lm_head, softcap = _output_layer(base_model(model), "trl")
    return _scored(model, microbatch, lambda hidden: trl_logps(hidden, lm_head, softcap, microbatch, temperature))


def _scored(model: nn.Module, microbatch: Microbatch, score: Callable[[Tensor], Tensor]) -> Tensor:
    """``score`` of the decoder's hidden states [B, T, H].

    FSDP gathers the output layer in the forward of the whole model alone. There ``score`` takes the place of the
    causal model's own forward for this call, as TRL's and verl's fused heads do for all.
    """
    causal: Any = unwrapped(base_model(model))
    inputs = _model_inputs(model, microbatch)

    def forward(**inputs: Any) -> Tensor:
        return score(causal.base_model(**inputs).last_hidden_state)

    if not model_sharding(model):
        return forward(**inputs)
    before = causal.__dict__.get("forward")
    causal.__dict__["forward"] = lambda *_, **given: forward(**{name: given[name] for name in inputs})
    try:
        logps: Tensor = model(**inputs)
    finally:
        del causal.__dict__["forward"]
        if before is not None:
            causal.__dict__["forward"] = before
    return logps


def _output_layer(causal: Any, head: str) -> tuple[nn.Linear, float | None]:
    """The output projection and the soft cap of its logits; refuses what a tiled head would leave out."""
    get_output_embeddings = getattr(causal, "get_output_embeddings", None)
    lm_head = get_output_embeddings() if get_output_embeddings is not None else None
    if lm_head is None or unsharded_class(lm_head) is not nn.Linear:
        raise UnsupportedModelError(
            f"loss.head: {head} needs a plain nn.Linear as output layer, {type(causal).__name__} has "
            f"{type(lm_head).__name__}; set loss.head: naive",
            field="head",
            found=type(lm_head).__name__,
        )
    config = causal.config.get_text_config()
    for name in _LOGIT_SCALES:
        if getattr(config, name, None) not in (None, 1.0):
            raise UnsupportedModelError(
                f"loss.head: {head} does not know the logit scale '{name}' of {type(causal).__name__}; "
                "set loss.head: naive",
                field="head",
                found=name,
            )
    return lm_head, getattr(config, "final_logit_softcapping", None)
