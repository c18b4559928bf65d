"""What a GRPOTrainer's settings say about its loss: the LossSpec of a batch, and the settings that a plan refuses.

Every option of trl 1.16 that changes dLoss/dlogp is either mapped or refused by name. Source:
``GRPOTrainer._compute_loss`` of trl 1.16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.losses import LOSS_KINDS, LossSpec

_PER_BATCH_KINDS = ("dapo", "cispo", "vespo")


def exposure_inputs(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """advantages [B] or [B, T], mask [B, T], old_logps and ref_logps [B, T] or None, of one batch of GRPOTrainer.

    vLLM's importance sampling ratio ([B, 1] or [B, T], never negative) multiplies the policy term, whose slope is
    proportional to the advantage: it is folded into that.
    """
    mask, advantages = inputs["completion_mask"], inputs["advantages"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    ratio = inputs.get("importance_sampling_ratio")
    if ratio is not None:
        advantages = (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages) * ratio
    return advantages, mask, inputs.get("old_per_token_logps"), inputs.get("ref_per_token_logps")


def loss_of(trainer: Any, inputs: Mapping[str, Any] | None = None) -> LossSpec:
    """The loss that ``trainer`` computes on one batch, as a LossSpec; ``inputs`` carries the batch's token count.

    Raises UnsupportedModelError for a loss_type that has no closed form here.
    """
    args = trainer.args
    if trainer.loss_type not in LOSS_KINDS:
        raise refused(trainer, f"loss_type={trainer.loss_type!r}", f"use one of {', '.join(LOSS_KINDS)}")
    items = None if inputs is None or trainer.loss_type not in _PER_BATCH_KINDS else inputs["num_items_in_batch"]
    return LossSpec(
        kind=trainer.loss_type,
        clip_low=trainer.epsilon_low,
        clip_high=trainer.epsilon_high,
        beta=trainer.beta,
        level=trainer.importance_sampling_level,
        accumulation=getattr(trainer, "current_gradient_accumulation_steps", args.gradient_accumulation_steps),
        num_items=None if items is None else float(items),
        max_tokens=trainer.max_completion_length,
        bias_correction=args.use_bias_correction_kl,
        ratio_cap=args.delta,
        sapo_temperatures=(args.sapo_temperature_pos, args.sapo_temperature_neg),
        vespo_positive=(args.vespo_k_pos, args.vespo_lambda_pos),
        vespo_negative=(args.vespo_k_neg, args.vespo_lambda_neg),
        world_size=trainer.accelerator.num_processes,
        steps_per_generation=args.steps_per_generation,
    )


def refuse_settings(trainer: Any) -> None:
    """Raise UnsupportedModelError for the first setting of a GRPOTrainer that a plan cannot follow, by its name."""
    for problems in (_outside_the_logps(trainer), _after_the_forward(trainer), _inside_the_model(trainer)):
        for setting, remedy in problems:
            raise refused(trainer, setting, remedy)


def refused(trainer: Any, setting: str, remedy: str) -> UnsupportedModelError:
    name = type(trainer).__name__
    return UnsupportedModelError(f"{name}: {setting} cannot run under a plan: {remedy}", unit=name, setting=setting)


def _outside_the_logps(trainer: Any) -> Iterator[tuple[str, str]]:
    """Terms whose gradient does not pass through the log-probs, so that no exposure speaks of it."""
    if trainer.entropy_coef != 0.0:
        yield f"entropy_coef={trainer.entropy_coef}", _no_exposure("the entropy bonus") + "entropy_coef=0.0"
    if trainer.use_adaptive_entropy:
        yield "use_adaptive_entropy=True", _no_exposure("the entropy bonus") + "use_adaptive_entropy=False"
    if trainer.aux_loss_enabled:
        coefficient = trainer.router_aux_loss_coef
        yield f"router_aux_loss_coef={coefficient}", _no_exposure("the router's loss") + "router_aux_loss_coef=0.0"


def _no_exposure(term: str) -> str:
    return f"{term} does not pass through the log-probs, so its gradient has no exposure; set "


def _after_the_forward(trainer: Any) -> Iterator[tuple[str, str]]:
    """Weights that are known only once the forward has run, or that do not multiply the advantage."""
    quantile, threshold = trainer.top_entropy_quantile, trainer.off_policy_mask_threshold
    if quantile < 1.0:
        yield f"top_entropy_quantile={quantile}", "it drops tokens by what the forward gives; set it to 1.0"
    if threshold is not None:
        yield f"off_policy_mask_threshold={threshold}", "it drops rows by what the forward gives; set it to None"
    if trainer.loss_type == "vespo" and trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        yield (
            "loss_type='vespo' with vllm_importance_sampling_correction=True",
            "the rollout's ratio enters its sequence weight; set vllm_importance_sampling_correction=False",
        )


def _inside_the_model(trainer: Any) -> Iterator[tuple[str, str]]:
    """What would hide the model's calls, or decide itself what is kept."""
    args = trainer.args
    checkpointing = args.gradient_checkpointing_kwargs or {}
    if args.use_liger_kernel:
        yield "use_liger_kernel=True", "Liger's kernels hide what they save; set use_liger_kernel=False"
    if args.torch_compile:
        yield "torch_compile=True", "a compiled model hides its calls; set torch_compile=False"
    if checkpointing.get("use_reentrant"):
        yield (
            'gradient_checkpointing_kwargs={"use_reentrant": True}',
            'a plan replaces the non-reentrant kind only; set {"use_reentrant": False}',
        )
    if checkpointing.get("offload"):
        yield 'gradient_checkpointing_kwargs={"offload": True}', "a plan decides what stays; leave offload out"
    every = checkpointing.get("every_n_layers", 1)
    if every != 1:
        setting = f'gradient_checkpointing_kwargs={{"every_n_layers": {every}}}'
        yield setting, "a plan decides which layers are held; leave every_n_layers out"
