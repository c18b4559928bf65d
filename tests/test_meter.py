"""The counter of live storages against sums done by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

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
