"""What a kept call's autograd saved and is derived again at backward: the right source, also where values coincide."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from hilore.runtime.derive import derivation_of
from hilore.runtime.meter import StorageMeter
from hilore.runtime.provenance import Provenance
from tests import models
from tests.plans import assert_same_step, attach_plan, gradients, plan_for, units_of


def test_a_derivation_found_while_k_and_v_are_equal_is_not_trusted_later() -> None:
    """With padding sdpa saves k and v with their heads repeated; with zero weights either would do for both.

    Two tokens: at later positions the rotation gives k a zero of the other sign.
    """
    model = models.qwen2_tiny()
    batch = models.microbatch_for(model, tokens=2)
    batch.attention_mask[1, 0] = 0
    units_of(model, batch)
    runtime = attach_plan(model, plan_for(model, {"self_attn:attention": "H"}))
    weights = [p for name, p in model.named_parameters() if "k_proj" in name or "v_proj" in name]
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
    gradients(model, batch)
    with torch.no_grad():
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)
    found = gradients(model, batch)
    runtime.detach()
    assert_same_step(found, gradients(model, batch))


def test_derivations_are_bitwise() -> None:
    draw = torch.Generator().manual_seed(0)
    source = torch.randn(2, 3, 5, 4, generator=draw)
    other = torch.randn(2, 3, 5, 4, generator=draw)
    repeated = source.repeat_interleave(2, dim=1)
    derivation, certain = derivation_of(repeated, [other, source], [])
    assert derivation is not None
    assert (derivation.rule, derivation.source, derivation.from_parameter, certain) == ("repeat_heads", 1, False, True)
    assert torch.equal(derivation.apply(source, repeated.shape, repeated.stride()), repeated)
    changed = repeated.clone()
    changed[0, 0, 0, 0] = torch.nextafter(changed[0, 0, 0, 0], torch.tensor(9.0))
    assert derivation_of(changed, [other, source], []) == (None, True)


def test_a_cast_weight_keeps_its_stride() -> None:
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    saved = weight.bfloat16().t()
    derivation, certain = derivation_of(saved, [], [weight])
    assert derivation is not None
    assert (derivation.rule, derivation.from_parameter, certain) == ("cast_transposed", True, True)
    again = derivation.apply(weight, saved.shape, saved.stride())
    assert again.stride() == saved.stride()
    assert torch.equal(again, saved)


def test_a_square_weights_cast_lies_as_its_transpose_under_fake_tensors_too() -> None:
    with FakeTensorMode():
        weight = torch.empty(6, 6)
        saved = weight.bfloat16()
        for value, rule in ((saved.t(), "cast_transposed"), (saved, "cast")):
            found, certain = derivation_of(value, [], [weight])
            assert found is not None
            assert (found.rule, certain) == (rule, True)


def test_a_trial_takes_a_small_part_of_what_it_compares() -> None:
    weight = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    keys = torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(1))
    cast, repeated = weight.bfloat16().t(), keys.repeat_interleave(4, dim=1)
    changed = cast.clone()
    changed[-1, -1] += 1
    with StorageMeter() as meter:
        meter.track([weight, keys, cast, repeated, changed])
        there = meter.live_bytes
        for value, source, expected in ((cast, weight, True), (changed, weight, False), (repeated, keys, True)):
            meter.reset_peak()
            found, _ = derivation_of(value, [], [source])
            assert (found is not None) == expected
            assert meter.peak_bytes - there <= value.untyped_storage().nbytes() // 16


def test_two_sources_of_one_value_are_uncertain() -> None:
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    derivation, certain = derivation_of(weight.bfloat16(), [weight, weight.clone()], [])
    assert derivation is not None
    assert not certain


def test_fake_tensors_are_traced_to_the_argument_they_come_from() -> None:
    """Of q, k and v, expanded heads of k and v fit a copy of q, and each other's source, by their shapes alone."""
    with FakeTensorMode():
        query, key, value = torch.empty(2, 4, 6, 8), torch.empty(2, 2, 6, 8), torch.empty(2, 2, 6, 8)
        weight = torch.empty(12, 8)
        with Provenance([weight, query, key, value]) as provenance:
            repeated = [source.repeat_interleave(2, dim=1) for source in (key, value)]
            rows = query.new_empty(12, 8).copy_(query[:, 0].reshape(12, 8)).bfloat16()
        found = [derivation_of(saved, [query, key, value], [weight], provenance)[0] for saved in (*repeated, rows)]
        assert [f and (f.rule, f.source, f.from_parameter) for f in found] == [
            ("repeat_heads", 1, False),
            ("repeat_heads", 2, False),
            None,
        ]


def test_a_tensor_of_two_arguments_is_derived_from_neither() -> None:
    with FakeTensorMode():
        left, right = torch.empty(4, 8), torch.empty(4, 8)
        with Provenance([left, right]) as provenance:
            both = (left + right).bfloat16()
            alone = left.bfloat16()
        assert derivation_of(both, [left, right], [], provenance) == (None, True)
        found, _ = derivation_of(alone, [left, right], [], provenance)
        assert found is not None
        assert (found.rule, found.source) == ("cast", 0)
