"""C-08 (codec side): parameters, indices, masks and RNG states reach a pack hook; only activations may be encoded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hilore.runtime.eligibility import may_encode, role_of


class Tiny(nn.Module):
    """Embedding, linear, dropout, attention, cross entropy: all that C-08 names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.linear = nn.Linear(64, 64)
        self.head = nn.Linear(64, 50)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = functional.dropout(self.linear(self.embedding(ids)), 0.1)
        heads = hidden.view(*ids.shape, 4, 16).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        logits = self.head(attended.transpose(1, 2).reshape(*ids.shape, 64).tanh())
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def gradients(model: Tiny, ids: Tensor, pack: Any) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        loss = model(ids)
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture
def model() -> Tiny:
    torch.manual_seed(1)
    return Tiny()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 25, (2, 33), generator=torch.Generator().manual_seed(2))


def test_roles_of_what_reaches_the_hook(model: Tiny, ids: Tensor) -> None:
    seen: Counter[str] = Counter()
    weight = model.linear.weight.untyped_storage()._cdata

    def pack(tensor: Tensor) -> Tensor:
        role = role_of(tensor, compute_dtype=torch.float32, floor_bytes=4096, parameters=model.parameters())
        seen[role] += 1
        if tensor.untyped_storage()._cdata == weight:
            assert not isinstance(tensor, nn.Parameter)
            assert role == "parameter"
        assert may_encode(tensor, compute_dtype=torch.float32, floor_bytes=4096, parameters=model.parameters()) == (
            role == "activation"
        )
        return tensor

    gradients(model, ids, pack)
    assert seen["parameter"] >= 2
    assert seen["index"] >= 2
    assert seen["activation"] >= 3
    assert seen["scalar"] + seen["small"] >= 1


def test_a_codec_of_zeros_changes_no_index_and_no_use_of_a_weight(model: Tiny, ids: Tensor) -> None:
    """With the layers' activations 0 in backward, what needs indices and weights alone stays bitwise the same.

    The log-probabilities (66 x 50 float32) stay under the floor, the layers' activations (66 x 64) do not.
    """

    def zero(tensor: Tensor) -> Tensor:
        eligible = may_encode(tensor, compute_dtype=torch.float32, parameters=model.parameters())
        return torch.zeros_like(tensor) if eligible else tensor

    exact = gradients(model, ids, lambda tensor: tensor)
    zeroed = gradients(model, ids, zero)
    assert torch.equal(exact["head.bias"], zeroed["head.bias"])
    assert not torch.equal(exact["head.weight"], zeroed["head.weight"])
    rows = zeroed["embedding.weight"].abs().sum(1) > 0
    assert set(rows.nonzero().flatten().tolist()) <= set(ids.unique().tolist())

    x = torch.randn(100, 64, requires_grad=True)
    upstream = torch.randn(100, 64)
    with torch.autograd.graph.saved_tensors_hooks(zero, lambda packed: packed):
        y = model.linear(x)
    given, weight = torch.autograd.grad(y, (x, model.linear.weight), upstream)
    assert torch.equal(given, upstream @ model.linear.weight)
    assert not weight.any()


@pytest.mark.parametrize(
    ("tensor", "role"),
    [
        (torch.zeros(64, 64), "activation"),
        (torch.zeros(64, 64).t(), "activation"),
        (torch.zeros(64, 64, dtype=torch.bfloat16), "other dtype"),
        (torch.zeros(64, 64, dtype=torch.complex64), "other dtype"),
        (torch.zeros(64, 64, dtype=torch.int64), "index"),
        (torch.get_rng_state(), "index"),
        (torch.zeros(64, 64, dtype=torch.bool), "mask"),
        (torch.tensor(1.0), "scalar"),
        (torch.zeros(1023), "small"),
        (torch.zeros(1024), "activation"),
        (torch.zeros(1, 64).expand(64, 64), "repeated"),
        (torch.eye(64).to_sparse(), "not strided"),
        (nn.Parameter(torch.zeros(64, 64)), "parameter"),
        (nn.Parameter(torch.zeros(64, 64)).t(), "parameter"),
        (nn.Parameter(torch.zeros(64, 64), requires_grad=False)[1:], "parameter"),
    ],
)
def test_role(tensor: Tensor, role: str) -> None:
    assert role_of(tensor, compute_dtype=torch.float32, floor_bytes=4096) == role
    assert may_encode(tensor, compute_dtype=torch.float32, floor_bytes=4096) == (role == "activation")


def test_a_detached_view_of_a_parameter_is_known_by_its_storage() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    view = weight.detach().t()[3:]
    assert role_of(view, compute_dtype=torch.float32, parameters=[weight], floor_bytes=0) == "parameter"
    fresh = weight.detach().clone()
    assert role_of(fresh, compute_dtype=torch.float32, parameters=[weight], floor_bytes=0) == "activation"
