"""TRL's GRPOTrainer under a plan set: each microbatch's forward runs under the plan that its exposure chooses.

``HiloreMixin`` goes before the trainer class; ``attach_trainer`` takes a trainer that exists already. Both do the
same: ``compute_loss`` runs inside ``runtime.microbatch``, the exposure is computed before the forward, and the
log-probs that TRL computes confirm it, so that a microbatch above its plan's regime runs exact. The loss is TRL's own.
Sources: trl 1.16, ``GRPOTrainer._compute_loss`` and ``_get_per_token_logps_and_entropies``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hilore.runtime.attach import attach
from hilore.runtime.errors import BindError, UnsupportedModelError
from hilore.runtime.integrations.trl_loss import exposure_inputs, loss_of, refuse_settings, refused
from hilore.runtime.losses import LossSpec
from hilore.runtime.microbatch import Microbatch
from hilore.runtime.notice import notice
from hilore.runtime.plan import REGIME_LABELS, Plan
from hilore.runtime.planfile import PlanSet
from hilore.runtime.runtime import Runtime

__all__ = ["HiloreMixin", "attach_trainer", "loss_of"]

COMPUTE_LOSS = "compute_loss"
SCORE = "_get_per_token_logps_and_entropies"
LOSS = "_compute_loss"
_LINK = "_hilore_link"
# Counters since attach, where the other metrics are means over an update.
SO_FAR = ("hilore/demotions", "hilore/over_exposure", "hilore/replays", "hilore/unfit", "hilore/null_skipped")
MIB = 2**20


class HiloreMixin:
    """Put before GRPOTrainer: ``class Trainer(HiloreMixin, GRPOTrainer)``, then ``Trainer(..., plans=plans)``.

    ``plans``: a PlanSet or plans; None leaves the trainer as it is. ``accept``: as in ``attach``. ``loss``: as in
    ``attach_trainer``. The runtime is ``trainer.hilore``. Raises as ``attach_trainer``.
    """

    def __init__(
        self,
        *args: Any,
        plans: PlanSet | Iterable[Plan] | None = None,
        accept: tuple[str, ...] = (),
        loss: LossSpec | None = None,
        skip_null: bool = False,
        audit_every: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if plans is not None:
            attach_trainer(self, plans, accept=accept, loss=loss, skip_null=skip_null, audit_every=audit_every)

    @property
    def hilore(self) -> Runtime | None:
        """The runtime of the attached plans, None without plans."""
        link: Link | None = self.__dict__.get(_LINK)
        return None if link is None else link.runtime

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """TRL's compute_loss inside a microbatch of the runtime."""
        call: Callable[..., Tensor] = super().compute_loss  # type: ignore[misc]
        link: Link | None = self.__dict__.get(_LINK)
        return call(model, inputs, *args, **kwargs) if link is None else link.loss(call, model, inputs, args, kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        link: Link | None = self.__dict__.get(_LINK)
        return call(*args, **kwargs) if link is None else link.scored(call(*args, **kwargs))


def attach_trainer(
    trainer: Any,
    plans: PlanSet | Iterable[Plan],
    *,
    accept: tuple[str, ...] = (),
    loss: LossSpec | None = None,
    skip_null: bool = False,
    audit_every: int | None = None,
) -> Runtime:
    """Install ``plans`` on a GRPOTrainer's model, turn them on, and let every training microbatch choose among them.

    The plan takes the place of gradient checkpointing, whatever ``args.gradient_checkpointing`` says: with False it
    is on all the same (``runtime.disable()`` turns it off), with True TRL's own switching turns it off and on. Either
    way the input embeddings are made to require grad, as transformers does where it checkpoints.
    ``loss``: for a trainer whose ``_compute_loss`` is not TRL's own; by default it is read from the trainer
    (``loss_of``). ``skip_null``: a microbatch whose every loss coefficient is 0 (flat groups, beta 0) runs neither
    forward nor backward; TRL's metrics then have no entry for it. ``audit_every``:
    compare every so many-th microbatch's gradients with exact ones (two more runs of it); in TRL's metrics and
    ``runtime.stats.audit``. ``runtime.detach()`` restores trainer and model.
    Raises UnsupportedModelError for a trainer or a setting that a plan cannot follow (nothing was installed), and as
    ``attach``.
    """
    refuse_trainer(trainer, loss)
    plans = plans if isinstance(plans, PlanSet) else PlanSet(tuple(plans))
    _tell_of_another_head(trainer, plans)
    runtime = attach(trainer.model, plans, accept=accept, audit_every=audit_every)
    _require_input_grads(trainer.model, runtime)
    link = Link(trainer, runtime, loss, skip_null)
    trainer.__dict__[_LINK] = link
    runtime.on_detach(lambda: trainer.__dict__.pop(_LINK, None))
    if not isinstance(trainer, HiloreMixin):
        _wrap_methods(trainer, link)
    return runtime


class Link:
    """One trainer and its runtime: what the mixin's methods and the wrapped ones share."""

    def __init__(self, trainer: Any, runtime: Runtime, loss: LossSpec | None, skip_null: bool = False) -> None:
        self.trainer = trainer
        self.runtime = runtime
        self._given = loss
        self._skip_null = skip_null
        self._open: Microbatch | None = None

    def loss(
        self,
        call: Callable[..., Tensor],
        model: nn.Module,
        inputs: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Tensor:
        """One microbatch of training: exposure, TRL's loss under the chosen plan, its figures into TRL's metrics."""
        if not (self.trainer.model.training and torch.is_grad_enabled() and self.runtime.enabled):
            return call(model, inputs, *args, **kwargs)
        loss = self._given if self._given is not None else loss_of(self.trainer, inputs)
        advantages, mask, old_logps, ref_logps = exposure_inputs(inputs)
        with self.runtime.microbatch(
            advantages,
            mask,
            old_logps=old_logps,
            ref_logps=ref_logps,
            loss=loss,
            skip_null=self._skip_null,
            prompt_mask=inputs.get("prompt_mask"),
        ) as microbatch:
            self._open = microbatch
            try:
                result = self._run(microbatch, lambda: call(model, inputs, *args, **kwargs))
            finally:
                self._open = None
            self._refuse_unconfirmed(microbatch)
        self._log(microbatch)
        return result

    def _run(self, microbatch: Microbatch, step: Callable[[], Tensor]) -> Tensor:
        """The loss of a microbatch: skipped, audited, or plain. An audit leaves no second line in the metrics."""
        if microbatch.null:
            return microbatch.null_loss()
        metrics = self.trainer._metrics["train"]
        lengths = {name: len(values) for name, values in metrics.items()}

        def once() -> Tensor:
            for name, values in metrics.items():
                del values[lengths.get(name, 0) :]
            return step()

        return microbatch.audited(once)

    def scored(self, result: Any) -> Any:
        """Confirm the running microbatch's exposure with the log-probs [B, T] that TRL has just computed."""
        if self._open is not None and torch.is_grad_enabled():
            self._open.confirm(result[0])
        return result

    def _refuse_unconfirmed(self, microbatch: Microbatch) -> None:
        if microbatch.regions_run and microbatch.exact_exposure is None:
            raise UnsupportedModelError(
                f"{type(self.trainer).__name__}: its loss ran the model without {SCORE}, so nothing confirmed the "
                f"exposure of the microbatch. Let the loss call self.{SCORE}, or call the model inside "
                "runtime.microbatch(...) yourself",
                unit=type(self.trainer).__name__,
            )

    def _log(self, microbatch: Microbatch) -> None:
        metrics = self.trainer._metrics["train"]
        for key, value in self.runtime.stats.log().items():
            if key == "hilore/regime":
                for label in (*REGIME_LABELS, "none"):
                    metrics[f"{key}_{label}"].append(float(label == value))
            elif key in SO_FAR:
                metrics[key] = [float(value)]
            elif value is not None:
                metrics[key].append(float(value))
        choice = microbatch.choice
        if choice is not None and choice.plan is not None:
            metrics["hilore/planned_peak_mib"].append(choice.plan.predicted.peak_bytes / MIB)
        device = next(self.trainer.model.parameters()).device
        if device.type == "cuda":
            metrics["hilore/peak_mib"] = [torch.cuda.max_memory_allocated(device) / MIB]


def refuse_trainer(trainer: Any, loss: LossSpec | None = None) -> None:
    """Raise UnsupportedModelError for the first thing about ``trainer`` that a plan cannot follow, by its setting.

    BindError where plans are attached to it already.
    """
    import trl

    grpo: Any = trl.GRPOTrainer  # type: ignore[attr-defined]  # trl loads its names lazily
    if not isinstance(trainer, grpo):
        raise refused(
            trainer,
            "this trainer",
            "attach to a trl.GRPOTrainer, or use hilore.runtime.attach and runtime.microbatch in your own loop",
        )
    if trainer.__dict__.get(_LINK) is not None:
        raise BindError("a plan is attached to this trainer already; call runtime.detach() first")
    if loss is None and getattr(type(trainer), LOSS) is not getattr(grpo, LOSS):
        raise refused(trainer, f"its own {LOSS}", "say what it computes: attach_trainer(..., loss=LossSpec(...))")
    refuse_settings(trainer)
    if loss is None:
        loss_of(trainer)


def _tell_of_another_head(trainer: Any, plans: PlanSet) -> None:
    """The head is no part of the model, so that attaching cannot see it; the peak depends on it all the same.

    ``loss.head: trl`` is the tiled head of trl 1.16 in plain torch; by Triton it scores completion tokens alone, for
    which plans are made with ``chunked``.
    """
    by_triton = getattr(importlib.import_module("trl.trainer.utils"), "_use_triton", None)
    if by_triton is None:
        return
    own = "chunked" if by_triton(trainer.accelerator.device) else "trl"
    for head in sorted({str(plan.loss["head"]) for plan in plans.plans if "head" in plan.loss} - {own}):
        notice(
            f"Plans were made for loss.head {head!r}, but TRL's trainer scores completions here as {own!r} does: the "
            f"predicted peak does not hold. Set loss.head: {own} in model.yaml, then trace and solve again"
        )


def _require_input_grads(model: Any, runtime: Runtime) -> None:
    """What transformers does each time checkpointing is turned on, TRL's first generation among them."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    if getattr(inner, "_require_grads_hooks", None):
        return
    inner.enable_input_require_grads()
    runtime.on_detach(inner.disable_input_require_grads)


def _wrap_methods(trainer: Any, link: Link) -> None:
    compute_loss, score = getattr(trainer, COMPUTE_LOSS), getattr(trainer, SCORE)

    def compute_loss_in_microbatch(model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        return link.loss(compute_loss, model, inputs, args, kwargs)

    def score_and_confirm(*args: Any, **kwargs: Any) -> Any:
        return link.scored(score(*args, **kwargs))

    for name, wrapper in ((COMPUTE_LOSS, compute_loss_in_microbatch), (SCORE, score_and_confirm)):
        before = trainer.__dict__.get(name)
        trainer.__dict__[name] = wrapper
        link.runtime.on_detach(lambda name=name, before=before: _restore(trainer, name, before))  # type: ignore[misc]


def _restore(trainer: Any, name: str, before: Any) -> None:
    if before is None:
        trainer.__dict__.pop(name, None)
    else:
        trainer.__dict__[name] = before
