"""One microbatch: its exposure before the forward, the choice it runs under, late demotion after it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from hilore.runtime.agreement import Wanted
from hilore.runtime.audit import audited_loss
from hilore.runtime.errors import ExposureError
from hilore.runtime.exposure import exposure_before_forward, normalised_exposure, token_magnitudes
from hilore.runtime.loss_kinds import resolve
from hilore.runtime.notice import notice
from hilore.runtime.nullskip import agree_on_null, null_loss, refuse_skipping
from hilore.runtime.region import Choice
from hilore.runtime.stats import StepStats
from hilore.runtime.tokenweights import token_weights

if TYPE_CHECKING:
    from hilore.runtime.runtime import Runtime


class Microbatch:
    """Context manager made by ``Runtime.microbatch``. The plan is fixed when the first region runs."""

    def __init__(
        self,
        runtime: Runtime,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        logps: torch.Tensor | None,
        old_logps: torch.Tensor | None,
        ref_logps: torch.Tensor | None,
        loss: Any,
        skip_null: bool = False,
        group: Any = None,
        prompt_mask: torch.Tensor | None = None,
    ) -> None:
        self._runtime = runtime
        self._loss = resolve(loss if loss is not None else runtime.plans.plans[0].loss)
        self._advantages = advantages
        self._mask = mask
        self._old_logps = old_logps
        self._ref_logps = ref_logps
        self._logps = logps
        self._prompt_mask = prompt_mask
        self.exposure = exposure_before_forward(
            self._loss, advantages, mask, logps=logps, old_logps=old_logps, ref_logps=ref_logps
        )
        self.null = False
        if skip_null:
            refuse_skipping(runtime.model)
            self.null = agree_on_null(self.exposure == 0.0, group)
        self.exact_exposure: float | None = None
        self.choice: Choice | None = None
        self.fallback = ""
        self._tokens = self._rows = 0
        self.regions_run = 0

    def __enter__(self) -> Microbatch:
        self._runtime.open(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        runtime = self._runtime
        runtime.close(self)
        if exc_type is not None:
            return
        if self.null:
            runtime.stats.null_skipped += self.regions_run == 0
        elif self.regions_run == 0 and runtime.enabled and runtime.model.training:
            notice(
                "no region ran under a plan in this microbatch: the model was not called, was called without "
                "gradients, or its checkpointing functions were replaced after attach"
            )
        elif self.regions_run == 0 and runtime.enabled and torch.is_grad_enabled():
            notice(
                "no region ran under a plan in this microbatch: the model is in eval mode, where plans rest like "
                "gradient checkpointing. Call model.train() before a training forward; evaluations need no microbatch"
            )
        runtime.stats.steps.append(self._step())

    def null_loss(self) -> torch.Tensor:
        """The loss of a microbatch that is skipped (``null`` is True): exactly 0, zeros as gradients.

        Raises ExposureError where the microbatch is not null (or ``skip_null`` was not asked for).
        """
        if not self.null:
            raise ExposureError(
                f"this microbatch has exposure {self.exposure} and is not to be skipped; null_loss() is for those "
                "that runtime.microbatch(..., skip_null=True) calls null",
                exposure=self.exposure,
            )
        return null_loss(self._runtime.model)

    def audited(self, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The loss of ``step()``; of every ``audit_every``-th microbatch with a comparison of its gradients.

        ``step``: forward and loss of this microbatch, which may run three times; whatever scales the loss belongs
        inside. Then call ``backward()`` on what is returned as always. See runtime/audit.py.
        """
        runtime = self._runtime
        if not runtime.audit_due():
            return step()

        def once() -> torch.Tensor:
            self.regions_run = 0
            return step()

        return audited_loss(runtime.model, lambda: self.choice, runtime.stats.audit, once)

    def resolve(self, tokens: int, rows: int, *, masked: bool | None = None) -> Choice:
        """The choice of this microbatch: made when its first region runs, and again for a larger forward after it.

        Under an agreement (runtime/agreement.py) every forward takes the largest figures of all ranks.
        """
        exposure = max(self.exposure, self.exact_exposure or 0.0)
        columns = self._mask.numel() if self._mask.dim() > 1 else None
        wanted = self._runtime.agreed(Wanted(exposure, tokens, rows, columns, masked))
        if self.choice is None or wanted.tokens > self._tokens or wanted.rows > self._rows:
            self.choice, self.fallback = self._runtime.choose(
                wanted.exposure, wanted.tokens, wanted.rows, completions=wanted.completions, masked=wanted.masked
            )
            self._tokens, self._rows = wanted.tokens, wanted.rows
            if self.choice.weighs_tokens:
                self._weigh(self.choice, tokens, rows)
        return self.choice

    def _weigh(self, choice: Choice, tokens: int, rows: int) -> None:
        """Tell the choice what its tokens weigh; where that cannot be said, its planned error does not hold either."""
        magnitudes = token_magnitudes(
            self._loss, self._advantages, self._mask, self._logps, self._old_logps, self._ref_logps
        )
        choice.tokens = token_weights(magnitudes, self._mask, tokens, self._prompt_mask)
        if choice.tokens is None or choice.tokens.rows != rows:
            choice.tokens = None
            choice.demoted = True
            self.fallback = "rows are not prompt and completion side by side, so tokens have no weights"

    def confirm(self, logps: torch.Tensor) -> float:
        """Exact exposure from the log-probs of the forward [B, T]; demotes the L units if it is above the plan's.

        Returns the exact exposure. The gradients of a demoted microbatch are exact. Under an agreement this is
        collective, and the largest exposure of all ranks decides.
        """
        self.exact_exposure = normalised_exposure(
            self._loss,
            self._advantages,
            self._mask,
            logps.detach(),
            old_logps=self._old_logps,
            ref_logps=self._ref_logps,
        )
        choice, largest = self.choice, self.exact_exposure
        if self._runtime.agreement is not None:
            largest = self._runtime.agreement.largest_exposure(largest)
        if choice is None or choice.plan is None or choice.demoted:
            return self.exact_exposure
        if largest > choice.plan.regime.exposure_high and choice.plan.lossy:
            choice.demoted = True
            self._runtime.stats.demotions += 1
        return self.exact_exposure

    def _step(self) -> StepStats:
        choice = self.choice
        plan = choice.plan if choice is not None else None
        held = sum(region.hold for region in plan.regions) if plan is not None else 0
        demoted = choice.demoted if choice is not None else False
        gain = 0.0 if plan is None or demoted else plan.predicted.gc_step_ns / plan.predicted.step_ns - 1
        return StepStats(
            regime=plan.regime.label if plan is not None else "null" if self.null else "none",
            exposure=self.exposure,
            exact_exposure=self.exact_exposure,
            demoted=demoted,
            regions_replayed=self.regions_run - held if plan is not None else self.regions_run,
            regions_held=held,
            gain=gain,
            fallback=self.fallback,
            skipped=self.null and self.regions_run == 0,
        )
