"""The runtime of one attached model: which plan each microbatch runs under, and what happens in each region."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hilore.runtime.agreement import Agreement, Wanted
from hilore.runtime.ambient import takes_mask, tensors_in
from hilore.runtime.audit import AuditLog
from hilore.runtime.bind import refuse_foreign_hooks, same_units
from hilore.runtime.errors import FingerprintError, PlanSwitchError, UnsupportedModelError
from hilore.runtime.fingerprint import check_fingerprint, model_fingerprint
from hilore.runtime.frame import Frame
from hilore.runtime.heldframe import HeldFrame
from hilore.runtime.huggingface import (
    ENABLED,
    FUNCTION,
    SWITCH,
    CheckpointingSwitch,
    RegionCheckpoint,
    let_caches_through,
)
from hilore.runtime.microbatch import Microbatch
from hilore.runtime.notice import notice
from hilore.runtime.plan import Plan
from hilore.runtime.planfile import PlanSet
from hilore.runtime.region import Choice, RegionActions, RegionBinding, compile_plan
from hilore.runtime.sharded import ShardingWatch
from hilore.runtime.stats import NO_EXPOSURE, Stats


class Runtime:
    """What ``attach`` returns. One object per attached model; ``detach`` restores the model."""

    def __init__(self, model: nn.Module, plans: PlanSet, regions: tuple[RegionBinding, ...]) -> None:
        self.model = model
        self.plans = plans
        self.regions = regions
        self.stats = Stats()
        self.enabled = False
        self.attached = True
        self.audit_every: int | None = None
        self.accept: tuple[str, ...] = ()
        self.agreement: Agreement | None = None
        self._alarm = False
        self._sharding = ShardingWatch(model, regions)
        self._audit_calls = self._next_region = 0
        self._index = {region.name: place for place, region in enumerate(regions)}
        self._compiled: dict[int, tuple[Plan, dict[str, RegionActions]]] = {}
        self._fixed: Plan | None = None
        self._open: list[Microbatch] = []
        self._forward: Choice | None = None
        self._undo: list[Callable[[], None]] = []
        self._switches: list[CheckpointingSwitch] = []

    def microbatch(
        self,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        logps: torch.Tensor | None = None,
        old_logps: torch.Tensor | None = None,
        ref_logps: torch.Tensor | None = None,
        loss: Any = None,
        *,
        skip_null: bool = False,
        group: Any = None,
        prompt_mask: torch.Tensor | None = None,
    ) -> Microbatch:
        """Context of one forward: its exposure chooses the plan.

        advantages [B] or [B, T], mask and the log-probs [B, T] (T response tokens), any float dtype. ``loss`` is a
        kind, a LossSpec or a VerlLoss, None the plan's own. ``skip_null``: where each coefficient is 0 on every rank of
        ``group`` (collective under torch.distributed), ``.null`` is True and ``.null_loss()`` stands for forward and
        backward, which may be left out. ``prompt_mask`` [B, P]: 0 at the prompts' padding, for codecs that give tokens
        bits by their weight. Raises ExposureError for NaN or infinite coefficients, UnsupportedModelError
        for ``skip_null`` under wrappers that reduce gradients later.
        """
        return Microbatch(self, advantages, mask, logps, old_logps, ref_logps, loss, skip_null, group, prompt_mask)

    def audit_due(self) -> bool:
        """Whether this audited microbatch is compared with its exact run: the first, and every ``audit_every``-th."""
        if self.audit_every is None or not self.enabled:
            return False
        self._audit_calls += 1
        return (self._audit_calls - 1) % self.audit_every == 0

    def use(self, plan: Plan | None) -> None:
        """Fix one plan for every following forward, whatever the exposure (None: choose by exposure again).

        Raises PlanSwitchError in the middle of a forward, BindError for a plan with other regions or units.
        """
        self._refuse_switch()
        if plan is not None:
            self._actions(plan)
        self._fixed = plan

    def replace(self, plans: PlanSet) -> None:
        """Take other plans of the same model between updates, as after a calibration on newer rollouts.

        Audits begin anew, and an alarm is over. Raises PlanSwitchError in the middle of a forward, BindError or
        FingerprintError for plans of another model; then the earlier plans stay.
        """
        self._refuse_switch()
        found = model_fingerprint(self.model)
        if "region_grain" in plans.plans[0].fingerprint:
            found["region_grain"] = self.plans.plans[0].fingerprint.get("region_grain", "layer")
        for plan in plans.plans:
            same_units(self.plans.plans[0], plan)
            check_fingerprint(plan.fingerprint, found, self.accept)
        self.plans = plans
        self._compiled.clear()
        self._fixed = None
        self.stats.audit = AuditLog()

    def enable(self) -> None:
        """Turn the plan on, as gradient checkpointing is turned on."""
        for switch in self._switches:
            switch(enable=True)
        self.switched(True)

    def disable(self) -> None:
        """Turn the plan off: the model then keeps all its activations."""
        for switch in self._switches:
            switch(enable=False)
        self.switched(False)

    def switched(self, enabled: bool) -> None:
        """Note that the plan was turned on or off. Off forgets a forward that died half-way."""
        self.enabled = enabled
        if not enabled:
            self.reset()

    def detach(self) -> None:
        """Restore the model. Frames in flight keep working."""
        if not self.attached:
            return
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.attached = False
        self.enabled = False

    def reset(self) -> None:
        """Forget a forward that died half-way, so that a new plan can be chosen."""
        self._forward = None
        self._next_region = 0

    def run_region(self, region: RegionBinding, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """One region's forward under the plan of the running microbatch. Inert without grad or in eval mode."""
        if not torch.is_grad_enabled() or not self.model.training or not self.enabled:
            return call(*args, **kwargs)
        choice = self._enter_region(region, tensors_in(args, kwargs))
        try:
            if choice.holds(region):
                self.stats.held += 1
                result = HeldFrame(region).run(call, args, kwargs)
            else:
                frame = Frame(region, choice, call, args, kwargs)
                self.stats.frame_opened(frame)
                result = frame.run()
        except BaseException:
            self.reset()
            raise
        if self._next_region == len(self.regions):
            self.reset()
        return result

    def choose(
        self,
        exposure: float | None,
        tokens: int,
        rows: int,
        *,
        completions: int | None = None,
        masked: bool | None = None,
    ) -> tuple[Choice, str]:
        """The choice for one forward and, where no plan was made for as much, the reason why it falls back.

        ``completions``: loss columns of all rows; ``masked``: attention gets a mask [B, 1, T, T] (plan.Plan.covers).
        """
        if self._fixed is not None:
            return self._choice(self._fixed, demoted=False), ""
        highest = self.plans.highest(tokens, rows, completions=completions, masked=masked)
        if highest is None:
            self.stats.over_length += 1
            if self.stats.over_length == 1:
                notice(self.plans.why_not_covered(tokens, rows, completions))
            return Choice(None, {}, self.stats, demoted=False), "over_length"
        plan, reason = highest, NO_EXPOSURE
        if exposure is not None:
            plan = self.plans.select(exposure, tokens, rows, completions=completions, masked=masked) or highest
            above = exposure > plan.regime.exposure_high
            self.stats.over_exposure += above
            alarm = self._alarm or self.stats.audit.alarm
            reason = "audit alarm" if alarm else "exposure above every regime" if above else ""
        demoted = bool(reason) and plan.lossy
        return self._choice(plan, demoted), reason if demoted else ""

    def place_checkpoints(self) -> None:
        """Give every region's layer our checkpointing function (each time the switch is turned on)."""
        for region in self.regions:
            vars(region.module)[FUNCTION] = RegionCheckpoint(self, region)
            vars(region.module)[ENABLED] = True
        for switch in self._switches:
            let_caches_through(switch.model, [region.module for region in self.regions])

    def install_switch(self, switchable: nn.Module) -> None:
        """Shadow the checkpointing switch of one Hugging Face model instance."""
        switch = CheckpointingSwitch(self, switchable)
        switchable.__dict__[SWITCH] = switch
        self._switches.append(switch)
        self.on_detach(lambda: switchable.__dict__.pop(SWITCH, None))

    def on_detach(self, undo: Callable[[], Any]) -> None:
        self._undo.append(undo)

    def open(self, microbatch: Microbatch) -> None:
        self._refuse_switch()
        self._open.append(microbatch)

    def close(self, microbatch: Microbatch) -> None:
        self._open.remove(microbatch)
        self.reset()

    def _enter_region(self, region: RegionBinding, inputs: list[torch.Tensor]) -> Choice:
        place = self._index[region.name]
        if place == 0:
            self._begin_forward(inputs)
        elif place != self._next_region or self._forward is None:
            raise UnsupportedModelError(
                f"{region.name}: ran as region {place} where region {self._next_region} was due; a plan needs every "
                "region once per forward, in order (after a forward that died half-way: runtime.reset())",
                unit=region.name,
            )
        self._next_region = place + 1
        assert self._forward is not None
        if self._open:
            self._open[-1].regions_run += 1
        return self._forward

    def _begin_forward(self, inputs: list[torch.Tensor]) -> None:
        refuse_foreign_hooks(self.regions[0].name)
        rows, tokens = inputs[0].shape[:2] if inputs[0].dim() > 2 else (1, inputs[0].shape[0])
        microbatch = self._open[-1] if self._open else None
        if microbatch is not None:
            self._forward = microbatch.resolve(tokens, rows, masked=takes_mask(inputs))
        else:
            wanted = self.agreed(Wanted(None, tokens, rows, None, takes_mask(inputs)))
            self._forward, reason = self.choose(wanted.exposure, wanted.tokens, wanted.rows, masked=wanted.masked)
            self.stats.ran_outside(reason)
        self._forward.whole_replays = self.agreement is not None
        self._sharding.forward_begins(self._forward.plan)
        plan = self._forward.plan
        planned = plan.fingerprint.get("first_input_requires_grad") if plan is not None else None
        if (
            planned is not None
            and bool(planned) != (found := inputs[0].requires_grad)
            and "first_input_requires_grad" not in self.stats.accepted
        ):
            raise FingerprintError(
                f"Plan field first_input_requires_grad={planned}, the model's first region gets an input with "
                f"requires_grad={found}. Call model.enable_input_require_grads() (or leave it out) as "
                "in the traced run",
                field="first_input_requires_grad",
                planned=planned,
                found=found,
            )

    def agreed(self, wanted: Wanted) -> Wanted:
        """The largest of the ranks' figures where they are to choose alike, else this rank's own."""
        if self.agreement is None:
            return wanted
        found = self.agreement.largest(replace(wanted, alarm=self.stats.audit.alarm))
        self._alarm = found.alarm
        return found

    def _actions(self, plan: Plan) -> dict[str, RegionActions]:
        known = self._compiled.get(id(plan))
        if known is None:
            same_units(self.plans.plans[0], plan)
            # The plan beside them: as long as it lives, no other has its id.
            known = self._compiled[id(plan)] = (plan, compile_plan(plan))
        return known[1]

    def _choice(self, plan: Plan, demoted: bool) -> Choice:
        return Choice(plan, self._actions(plan), self.stats, demoted)

    def _refuse_switch(self) -> None:
        if self._forward is not None:
            raise PlanSwitchError(
                f"a plan can change only between forwards, and one is under way: {self._next_region} of "
                f"{len(self.regions)} regions have run. Choose before the model is called (after a forward that died "
                "half-way: runtime.reset())",
                regions_run=self._next_region,
            )
