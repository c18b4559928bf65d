"""pack-bf16: every bit comes back, whichever code runs, in the bytes planned; plans that keep units in it are exact."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from hilore.runtime.attach import attach
from hilore.runtime.codecs import compiled, get_codec, loses, native, ops, pack
from hilore.runtime.errors import HiloreWarning
from hilore.runtime.runtime import Runtime
from tests import models
from tests.plans import (
    Step,
    assert_same_step,
    attach_plan,
    gradients,
    keepable,
    loss_of,
    plan_for,
    units_of,
)
from tests.test_codecs import normal as drawn
from tests.test_codecs_lossless import same_bits
from tests.test_lossy import FAMILIES

CODEC = get_codec(pack.PackBf16.name)
NAME = CODEC.name


def normal(*shape: int) -> Tensor:
    return drawn(*shape, dtype=torch.bfloat16)


def by_definition(values: Tensor) -> int:
    """How many elements lie below their group's window, element by element."""
    bits = [int(b) & 0xFFFF for b in values.reshape(-1).view(torch.int16)]
    exponents = [b >> 7 & 0xFF for b in bits]
    groups = [exponents[at : at + pack.GROUP] for at in range(0, len(exponents), pack.GROUP)]
    return sum(e != 0 and max(group) - e >= pack.WINDOW for group in groups for e in group)


@given(
    st.lists(st.integers(-(1 << 15), (1 << 15) - 1), max_size=300),
    st.sampled_from([0xFFFF, 0x87FF, 0x83FF, 0x807F]),
)
@settings(deadline=None, max_examples=300)
def test_any_bits_come_back_or_do_not_fit(numbers: list[int], kept_bits: int) -> None:
    """Masks leave all, four, three or no bits of the exponent free: the rest is that of 1.0."""
    mask = kept_bits - (1 << 16 if kept_bits >= 1 << 15 else 0)
    fixed = torch.tensor(0x3F80, dtype=torch.int16) & ~torch.tensor(mask, dtype=torch.int16)
    values = (torch.tensor(numbers, dtype=torch.int16) & mask | fixed).view(torch.bfloat16)
    encoded = CODEC.encode(values)
    assert encoded.raw == (by_definition(values) > pack.list_room(values.numel()))
    assert same_bits(CODEC.decode(encoded), values)
    if not encoded.raw:
        assert encoded.nbytes == CODEC.nbytes(values.shape, values.dtype)
        reference = pack._pack(values.view(torch.int16))
        assert all(torch.equal(found, expected) for found, expected in zip(encoded.payload, reference, strict=False))
        assert torch.equal(pack._unpack(*encoded.payload, values.numel()), values.view(torch.int16))


def test_a_large_tensor_takes_12_and_a_third_bits() -> None:
    values = normal(1024, 2752)
    encoded = CODEC.encode(values)
    numel = values.numel()
    assert encoded.nbytes == numel // 32 * 49 + (numel // 512 + 16) * 6 == CODEC.nbytes(values.shape, values.dtype)
    assert 12.34 < 8 * encoded.nbytes / numel < 12.36
    assert 0 < by_definition(values[:64]) < numel // 512
    assert same_bits(CODEC.decode(encoded), values)


def test_threads_make_the_same_payload() -> None:
    assert native.native_kernels() is not None, "no compiler: the kernels are untested"
    values = normal(313, 577)
    values[7] *= 2.0**-9  # more for the list in one place than elsewhere
    values[7, ::5] = 3.0
    one = CODEC.encode(values)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        three = CODEC.encode(values)
        decoded = CODEC.decode(three)
    finally:
        torch.set_num_threads(before)
    assert not one.raw
    assert all(torch.equal(a, b) for a, b in zip(one.payload, three.payload, strict=True))
    assert same_bits(decoded, values)


@pytest.mark.parametrize("threads", [1, 3])
def test_one_element_more_than_the_list_holds_does_not_fit(threads: int) -> None:
    values = torch.ones(1 << 16, dtype=torch.bfloat16)
    room = pack.list_room(values.numel())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count, raw in ((room, False), (room + 1, True)):
            changed = values.clone()
            changed[torch.arange(count) * 41] = 2.0**-15
            encoded = CODEC.encode(changed)
            assert encoded.raw is raw
            assert same_bits(CODEC.decode(encoded), changed)
    finally:
        torch.set_num_threads(before)


def test_compiled_graphs_equal_the_kernels_and_serve_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.find_compiler() is not None, "torch.compile needs a compiler: the compiled path is untested"
    tensors = [normal(*shape) for shape in ((24, 256), (13, 577), (1, 31), (250, 256), (1, 33))]
    tensors[1][3, :5] *= 2.0**-20
    encoded = [CODEC.encode(tensor) for tensor in tensors]
    monkeypatch.setattr(native, "_kernels", [None])
    monkeypatch.setattr(ops, "COMPILED_DEVICES", ("cpu",))
    before = counters["stats"]["unique_graphs"]
    for tensor, expected in zip(tensors, encoded, strict=True):
        found = CODEC.encode(tensor)
        assert all(torch.equal(a, b) for a, b in zip(found.payload, expected.payload, strict=True))
        assert same_bits(CODEC.decode(expected), tensor)
    assert counters["stats"]["unique_graphs"] - before == 2, "one to encode, one to decode"
    assert not compiled._failed


def test_fake_tensors_give_the_same_sizes() -> None:
    real = CODEC.encode(normal(13, 577))
    with FakeTensorMode():
        made = CODEC.encode(torch.empty(13, 577, dtype=torch.bfloat16))
        decoded = CODEC.decode(made)
    shapes = [(part.shape, part.dtype) for part in real.payload]
    assert [(part.shape, part.dtype) for part in made.payload] == shapes
    assert (decoded.shape, decoded.dtype) == ((13, 577), torch.bfloat16)


def in_bf16(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def packed_step(runtime: Runtime, model: nn.Module, batch: object) -> Step:
    found = gradients(model, batch)  # type: ignore[arg-type]
    assert runtime.stats.live_saved_bytes == 0
    return found


@pytest.mark.parametrize("split", [None, "mlp.gate_proj"])
@pytest.mark.parametrize("family", FAMILIES)
def test_plans_that_keep_units_packed_are_exact(family: str, split: str | None) -> None:
    if split and family == "phi3":
        split = "mlp.gate_up_proj"
    model = in_bf16(FAMILIES[family]())
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    plan = plan_for(model, keepable(units_of(model), "L"), codec=NAME, split=split)
    assert plan.count("L") > 0
    assert not plan.lossy
    runtime = attach_plan(model, plan)
    found = packed_step(runtime, model, batch)
    runtime.detach()
    assert_same_step(found, expected)
    units = runtime.stats.units
    kept = [name for region in plan.regions for name in (unit.name for unit in region.units if unit.mode == "L")]
    # Both stages of a split replay answer for what lies before the split.
    assert {units[name].answered for name in kept} == ({1, 2} if split else {1})
    assert all(units[name].unfit == 0 for name in kept)
    assert sum(units[name].encoded_bytes for name in kept) > 0


def spread_rows(model: nn.Module, name: str) -> None:
    """Make one linear's output channels lie 20 binades apart, so that half of every group is below the window."""
    weight = dict(model.named_modules())[name].weight
    with torch.no_grad():
        weight[::2] *= 2.0**-20


@pytest.mark.parametrize("split", [None, "mlp.gate_proj"])
@pytest.mark.parametrize("unit", ["self_attn.q_proj", "mlp.up_proj"])
def test_values_that_do_not_fit_run_their_region_again(unit: str, split: str | None) -> None:
    """Exactly, with one notice, with nothing encoded kept; int8 units of the region run again too, others do not."""
    model = in_bf16(models.qwen2_tiny())
    spread_rows(model, f"model.layers.0.{unit}")
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    modes = {unit: "L", "self_attn:attention": "H", "self_attn.o_proj": "L"}
    plan = plan_for(model, modes, codec=NAME, split=split)
    runtime = attach_plan(model, plan)
    with pytest.warns(HiloreWarning, match=f"layers.0.{unit}: its values do not fit"):
        found = packed_step(runtime, model, batch)
    again = packed_step(runtime, model, batch)  # a second warning would be an error
    runtime.detach()
    assert_same_step(found, expected)
    assert_same_step(again, expected)
    stats = runtime.stats.units
    first, second = (stats[f"model.layers.{layer}.{unit}"] for layer in (0, 1))
    assert (first.unfit, first.answered, first.encoded_bytes) == (2, 0, 0)
    steps_and_stages = 2 * (2 if split and "q_proj" in unit else 1)
    assert (second.unfit, second.answered) == (0, steps_and_stages)
    assert stats["model.layers.0.self_attn.o_proj"].answered == 0
    assert sum(one.unfit for one in stats.values()) == 2
    assert stats["model.layers.1.self_attn.o_proj"].answered == 2 * (2 if split else 1)
    assert stats["model.layers.0.self_attn:attention"].answered == 2 * (2 if split else 1)


def test_lossy_units_of_a_region_whose_values_do_not_fit_lose_nothing() -> None:
    model = in_bf16(models.qwen2_tiny())
    for layer in (0, 1):
        spread_rows(model, f"model.layers.{layer}.self_attn.q_proj")
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    plan = plan_for(model, {"self_attn.q_proj": "L", "mlp.up_proj": "L", "mlp.gate_proj": "L"}, codec=NAME)
    lossy = replace(
        plan,
        regions=tuple(
            replace(
                region,
                units=tuple(
                    replace(u, codec="int8-g64") if u.mode == "L" and ".mlp." in u.name else u for u in region.units
                ),
            )
            for region in plan.regions
        ),
    )
    assert lossy.lossy
    runtime = attach_plan(model, lossy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HiloreWarning)
        found = packed_step(runtime, model, batch)
    runtime.detach()
    assert_same_step(found, expected)


def test_what_loses_values() -> None:
    assert [loses(name) for name in (None, NAME, "exact-bf16", "int8-g64", "of another version")] == [
        False,
        False,
        False,
        True,
        True,
    ]


@pytest.mark.filterwarnings("ignore:a forward ran outside of runtime.microbatch")
def test_without_loss_nothing_is_demoted() -> None:
    """A forward without any exposure, as one above every regime, runs a plan as it is where no unit loses values."""
    model = in_bf16(models.qwen2_tiny())
    batch = models.microbatch_for(model)
    for codec, demoted in ((NAME, False), ("int8-g64", True)):
        plan = plan_for(model, {"mlp.gate_proj": "L"}, codec=codec)
        runtime = attach(model, (plan,))
        loss_of(model, batch).backward()
        runtime.detach()
        assert runtime.stats.units["model.layers.0.mlp.gate_proj"].answered == (0 if demoted else 1)


class Alone:
    """An agreement of one rank."""

    def largest(self, wanted: object) -> object:
        return wanted


def test_where_ranks_replay_together_what_does_not_fit_is_kept_whole() -> None:
    """Another rank's values may fit: its replay would then run other collectives."""
    model = in_bf16(models.qwen2_tiny())
    spread_rows(model, "model.layers.0.mlp.up_proj")
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, {"mlp.up_proj": "L"}, codec=NAME))
    runtime.agreement = Alone()  # type: ignore[assignment]
    with pytest.warns(HiloreWarning, match=r"layers.0.mlp.up_proj: its values do not fit.* its output is kept whole"):
        found = packed_step(runtime, model, batch)
    runtime.detach()
    assert_same_step(found, expected)
    stats = runtime.stats.units["model.layers.0.mlp.up_proj"]
    assert (stats.unfit, stats.answered, stats.encoded_bytes) == (1, 1, 0)
    assert stats.kept_bytes > 0


@pytest.mark.parametrize("chunk", [1 << 14, 1 << 22])
def test_the_pass_ends_where_the_list_is_full(chunk: int) -> None:
    """No list of all that is missed is made: it would take more memory than what fits does."""
    values = normal(1 << 16)
    values[::2] *= 2.0**-30
    calls: list[int] = []

    def counted(rows: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(rows.numel())
        return pack.pack_rows(rows)

    *_, count = pack._pack(values.view(torch.int16), counted, chunk)
    assert int(count) > pack.list_room(values.numel())
    assert calls == [min(chunk, values.numel())]
    assert CODEC.encode(values).raw
