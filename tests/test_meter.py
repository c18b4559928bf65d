"""The counter of live storages against sums done by hand."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from hilore.runtime.meter import StorageMeter

KIB = 1024


def test_views_add_nothing_and_a_storage_counts_as_long_as_anything_holds_it() -> None:
    with StorageMeter() as meter:
        whole = torch.zeros(4 * KIB, dtype=torch.uint8)
        assert (meter.live_bytes, meter.peak_bytes) == (4 * KIB, 4 * KIB)
        part = whole[:1]
        other = whole.view(2, -1).t()
        assert meter.live_bytes == 4 * KIB
        del whole
        assert meter.live_bytes == 4 * KIB
        del part
        assert meter.live_bytes == 4 * KIB
        del other
        assert (meter.live_bytes, meter.peak_bytes) == (0, 4 * KIB)


def test_the_peak_is_the_highest_sum_and_can_be_reset() -> None:
    with StorageMeter() as meter:
        first = torch.zeros(KIB, dtype=torch.uint8)
        second = torch.zeros(2 * KIB, dtype=torch.uint8)
        del first
        third = torch.zeros(KIB // 2, dtype=torch.uint8)
        assert (meter.live_bytes, meter.peak_bytes) == (2 * KIB + KIB // 2, 3 * KIB)
        meter.reset_peak()
        assert meter.peak_bytes == 2 * KIB + KIB // 2
        del second, third
    assert meter.live_bytes == 0


def test_memory_made_before_counts_once_tracked() -> None:
    linear = nn.Linear(16, 16, bias=False)
    with StorageMeter() as meter:
        meter.track([linear.weight, linear.weight.t(), linear.weight[:2]])
        assert meter.live_bytes == 16 * 16 * 4
        del linear
        assert meter.live_bytes == 0


def test_storages_that_go_after_the_meter_has_left_are_still_counted_off() -> None:
    with StorageMeter() as meter:
        kept = torch.zeros(KIB, dtype=torch.uint8)
    outside = torch.zeros(KIB, dtype=torch.uint8)
    assert meter.live_bytes == KIB
    del kept, outside
    assert meter.live_bytes == 0


def test_saved_tensors_of_a_graph_and_gradients() -> None:
    """tanh saves its result, mul its inputs; backward frees them as it walks and leaves the leaf's gradient."""
    x = torch.ones(KIB, requires_grad=True)
    with StorageMeter() as meter:
        loss = (x.tanh() * 2.0).sum()
        assert meter.live_bytes == 4 * KIB + 4
        loss.backward()
        del loss
        assert meter.live_bytes == 4 * KIB
        x.grad = None
        assert meter.live_bytes == 0


def test_it_counts_the_same_on_fake_tensors() -> None:
    def run() -> tuple[int, int]:
        with StorageMeter() as meter:
            x = torch.ones(64, 64, requires_grad=True)
            loss = (x @ x).relu().sum()
            retained = meter.live_bytes
            loss.backward()
        return retained, meter.peak_bytes

    real = run()
    with FakeTensorMode():
        assert run() == real
    assert real[0] == 2 * 64 * 64 * 4 + 4


def test_on_peak_is_called_when_the_peak_rises_or_is_reset_and_sizes_are_of_that_moment() -> None:
    seen: list[tuple[int, dict[int, int]]] = []
    with StorageMeter() as meter:
        meter.on_peak = lambda: seen.append((meter.peak_bytes, dict(meter.sizes())))
        first = torch.zeros(KIB, dtype=torch.uint8)
        second = torch.zeros(KIB, dtype=torch.uint8)
        del first
        third = torch.zeros(KIB // 2, dtype=torch.uint8)
        assert [peak for peak, _ in seen] == [KIB, 2 * KIB]
        meter.reset_peak()
        assert seen[1:] == [(2 * KIB, {KIB: 2}), (KIB + KIB // 2, {KIB: 1, KIB // 2: 1})]
        del second, third


def test_resizing_is_seen_also_by_nested_meters_and_undone_afterwards() -> None:
    """FSDP2 gives gathered parameters back by resizing their storages to nothing, and takes them again."""
    plain = torch.UntypedStorage.resize_
    with StorageMeter() as outer:
        gathered = torch.zeros(KIB, dtype=torch.uint8)
        storage = gathered.untyped_storage()
        storage.resize_(0)
        assert (outer.live_bytes, outer.peak_bytes) == (0, KIB)
        with StorageMeter() as inner:
            inner.track([gathered])
            storage.resize_(2 * KIB)
            assert (inner.live_bytes, outer.live_bytes) == (2 * KIB, 2 * KIB)
        storage.resize_(4 * KIB)
        assert (inner.live_bytes, outer.live_bytes, outer.peak_bytes) == (2 * KIB, 4 * KIB, 4 * KIB)
        gathered.resize_(8 * KIB)
        assert outer.live_bytes == 8 * KIB
        del gathered, storage
        assert outer.live_bytes == 0
    assert torch.UntypedStorage.resize_ is plain


def test_resizing_is_seen_on_fake_tensors() -> None:
    with FakeTensorMode(), StorageMeter() as meter:
        gathered = torch.zeros(KIB, dtype=torch.uint8)
        gathered.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        gathered.untyped_storage().resize_(KIB)
        assert (meter.live_bytes, meter.peak_bytes) == (KIB, KIB)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_gradients_are_added_up_in_place_as_without_the_meter(fake: bool) -> None:
    """x has three users. exp saves its result; autograd holds one sum and what is added to it, never a third."""
    with FakeTensorMode() if fake else nullcontext():
        x = torch.ones(KIB, requires_grad=True)
        with StorageMeter() as meter:
            middle = x * 1.0
            total = middle.exp().sum() + middle.exp().sum() + middle.exp().sum()
            assert meter.live_bytes == 4 * 4 * KIB + 4
            meter.reset_peak()
            total.backward()
    # The three saved results (middle itself is saved by nothing, but this test holds it), less what backward freed,
    # plus the sum and one summand.
    assert meter.peak_bytes == 4 * 4 * KIB + 4 + 4 + 4 * KIB


def test_a_gradient_that_somebody_holds_is_not_written_to() -> None:
    """The first gradient that reaches ``middle`` is seen by a hook; two nodes share one gradient."""
    x = torch.ones(8, requires_grad=True)
    held: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        x.grad = None
        held.clear()
        middle = x * 1.0
        left, right = middle * 2.0, middle * 3.0
        for node in (left, right):
            node.register_hook(held.append)
        (left + right + middle + left * right).sum().backward()
        assert x.grad is not None
        return torch.stack([*held, x.grad])

    plain = run()
    with StorageMeter():
        assert torch.equal(run(), plain)


def test_zeros_that_a_formula_fills_are_filled_in_place() -> None:
    x = torch.ones(KIB, requires_grad=True)
    picked = torch.arange(0, KIB, 2)
    for pick in (lambda: x.gather(0, picked), lambda: x[picked]):
        x.grad = None
        with StorageMeter() as meter:
            total = pick().sum()
            base = meter.live_bytes
            total.backward()
            assert meter.peak_bytes == base + 4 + 4 * KIB, "the ones and one buffer"
        assert x.grad is not None
        assert torch.equal(x.grad, (torch.arange(KIB) % 2 == 0).float())


def test_a_tensor_made_of_tensors_counts_as_those() -> None:
    """As DTensors, FSDP2's shards: the optimizer's work on them is that on their local tensors."""
    local = torch.ones(KIB)
    wrapped = TwoTensor(local, local.clone())
    with StorageMeter() as meter:
        meter.track([wrapped])
        assert meter.live_bytes == 2 * 4 * KIB
        product = wrapped * 2.0
        assert (meter.live_bytes, meter.peak_bytes) == (4 * 4 * KIB, 4 * 4 * KIB)
        product.add_(wrapped)
        del product
        assert meter.live_bytes == 2 * 4 * KIB


def test_shapes_without_memory_do_not_count() -> None:
    with StorageMeter() as meter:
        shape = torch.empty(1 << 20, device="meta")
        shape = shape.to(torch.bfloat16)
        assert (meter.live_bytes, meter.peak_bytes) == (0, 0)
        real = torch.ones(8)
        assert meter.live_bytes == real.nbytes == 32
