"""AdamW with the state dtypes of the spec."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hilore.planner.actor import build_actor, microbatch_of, policy_loss
from hilore.planner.optimizer import StateDtypeAdamW, make_optimizer
from tests.specs import spec_of

LORA = "{kind: lora, rank: 4, dtype: float32}"


def test_state_of_the_parameters_dtype_is_torch_adamw() -> None:
    actor = build_actor(spec_of(adapter=LORA, precision="{params: bfloat16}"))
    optimizer = make_optimizer(actor.model, actor.spec)
    assert type(optimizer) is torch.optim.AdamW
    assert [p for group in optimizer.param_groups for p in group["params"]] == [
        p for p in actor.model.parameters() if p.requires_grad
    ]


@pytest.mark.parametrize(
    ("precision", "state", "bytes_per_parameter"),
    [
        ("{params: bfloat16}", "bfloat16", 4),
        ("{params: bfloat16}", "float32", 8),
        ("{params: bfloat16, master: float32}", "float32", 12),
        ("{params: float32}", "bfloat16", 4),
        ("{params: float32}", "float32", 8),
    ],
)
def test_state_takes_the_bytes_that_the_spec_says(precision: str, state: str, bytes_per_parameter: int) -> None:
    actor = build_actor(spec_of(precision=precision, optimizer=f"{{state: {state}}}"))
    optimizer = make_optimizer(actor.model, actor.spec)
    policy_loss(actor, microbatch_of(actor, 16)).backward()
    optimizer.step()
    tensors = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
    found = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert found == bytes_per_parameter * sum(parameter.numel() for parameter in actor.model.parameters())


def test_own_step_is_that_of_torch() -> None:
    ours, theirs = (nn.Linear(6, 5, dtype=torch.float32) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 0.01, "weight_decay": 0.1}
    own = StateDtypeAdamW(ours.parameters(), state_dtype=torch.float32, **options)  # type: ignore[arg-type]
    reference = torch.optim.AdamW(theirs.parameters(), foreach=False, **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = torch.randn(3, 6, generator=generator)
        for model, optimizer in ((ours, own), (theirs, reference)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-7)
    assert torch.allclose(ours.bias, theirs.bias, atol=1e-7)


def test_master_copy_keeps_steps_that_bfloat16_would_lose() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = StateDtypeAdamW([parameter], state_dtype=torch.float32, master_dtype=torch.float32, lr=1e-3)
    for _ in range(8):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert optimizer.state[parameter]["master"].tolist() == pytest.approx([1 - 8e-3] * 4, abs=1e-5)
    assert parameter.tolist() == [0.9921875] * 4
