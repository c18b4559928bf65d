"""AdamW as model.yaml asks for it: dtype of its state, and a master copy of the trainable parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hilore.planner.sources import torch_dtype
from hilore.planner.spec_types import ModelSpec


class StateDtypeAdamW(Optimizer):
    """AdamW whose moments have a dtype of their own, with an optional master copy of each parameter.

    The step is computed in float32 per parameter and rounded to the dtypes of state, master and parameter.
    State per parameter: ``exp_avg``, ``exp_avg_sq`` (``state_dtype``), ``master`` (``master_dtype``, where given).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        state_dtype: torch.dtype,
        master_dtype: torch.dtype | None = None,
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.state_dtype = state_dtype
        self.master_dtype = master_dtype
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad.to(torch.float32), group)
        return loss

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.state_dtype)
            if self.master_dtype is not None:
                state["master"] = parameter.detach().to(self.master_dtype, copy=True)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].to(torch.float32).lerp(gradient, 1 - beta1)
        square = state["exp_avg_sq"].to(torch.float32).mul(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        denominator = square.div_(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
        target = state.get("master", parameter)
        value = target.to(torch.float32).mul(1 - group["lr"] * group["weight_decay"])
        value.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))
        target.copy_(value)
        if target is not parameter:
            parameter.copy_(target)


def make_optimizer(model: nn.Module, spec: ModelSpec, *, lr: float = 1e-5, weight_decay: float = 0.0) -> Optimizer:
    """AdamW over the trainable parameters of ``model``, with state and master dtypes of ``spec``.

    Where the state has each parameter's own dtype and there is no master copy this is torch's AdamW: fused on CUDA,
    one parameter at a time elsewhere, so that a step needs no temporaries of the model's size.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state_dtype = torch_dtype(spec.optimizer.state)
    master = None if spec.precision.master is None else torch_dtype(spec.precision.master)
    if master is not None or any(parameter.dtype != state_dtype for parameter in parameters):
        return StateDtypeAdamW(
            parameters, state_dtype=state_dtype, master_dtype=master, lr=lr, weight_decay=weight_decay
        )
    fused = all(parameter.device.type == "cuda" for parameter in parameters)
    return AdamW(parameters, lr=lr, weight_decay=weight_decay, foreach=False, fused=fused)
