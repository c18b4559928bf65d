"""Bits by the weight of tokens: how they are allotted, what the codec keeps, what the runtime makes of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from hilore.runtime.codecs import get_codec
from hilore.runtime.codecs.tokens import SegmentedEncoded, TokenCodec
from hilore.runtime.errors import HiloreError
from hilore.runtime.exposure import LossSpec, token_coefficients, token_magnitudes
from hilore.runtime.tokenweights import LEAST_BITS, MOST_BITS, PROMPT_WEIGHT, TokenWeights, token_weights
from tests import models
from tests.plans import assert_same_step, attach_plan, gradients, plan_for, units_of
from tests.specs import spec_of
from tests.test_lossy import L_UNITS, relative_error

ADVANTAGES = torch.tensor([1.0, 0.0, -0.5])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]])
PROMPTS = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]])


def weights_of(**changes: object) -> TokenWeights | None:
    given: dict[str, object] = {"prompt_mask": PROMPTS, "tokens": 7} | changes
    magnitudes = token_magnitudes(LossSpec(kind="grpo"), ADVANTAGES, MASK)
    return token_weights(magnitudes, MASK, given["tokens"], given["prompt_mask"])  # type: ignore[arg-type]


def test_rows_are_cut_where_prompt_and_completion_begin_and_end() -> None:
    weights = weights_of()
    assert weights is not None
    magnitudes = token_magnitudes(LossSpec(kind="grpo"), ADVANTAGES, MASK)
    one, three = (float(magnitudes[row][MASK[row] != 0].double().square().mean()) for row in (0, 2))
    expected = [
        # Log-probs come from the position before theirs: the last prompt token already predicts.
        (0, 1, 0.0), (1, 2, one * PROMPT_WEIGHT), (2, 5, one),
        # The rest of the first row and all of the second, whose advantage is 0.
        (5, 7, 0.0), (7, 14, 0.0),
        (14, 16, 0.0), (16, 20, three), (20, 21, 0.0),
    ]  # fmt: skip
    merged = [expected[0], expected[1], expected[2], (5, 16, 0.0), *expected[6:]]
    assert [(first, end) for first, end, _ in weights.segments] == [(first, end) for first, end, _ in merged]
    for (_, _, found), (_, _, wanted) in zip(weights.segments, merged, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_without_a_prompt_mask_prompts_have_no_padding() -> None:
    weights = weights_of(prompt_mask=None)
    assert weights is not None
    assert weights.segments[0][:2] == (0, 2)


@pytest.mark.parametrize("changes", [{"tokens": 4}, {"tokens": 9}, {"tokens": 3, "prompt_mask": None}])
def test_rows_that_are_not_prompt_and_completion_have_no_weights(changes: dict[str, object]) -> None:
    assert weights_of(**changes) is None


def test_magnitudes_are_those_of_the_closed_form() -> None:
    spec = LossSpec(kind="grpo", beta=0.05)
    logps = torch.randn(3, 4)
    old, ref = logps + 0.1 * torch.randn(3, 4), logps + 0.1 * torch.randn(3, 4)
    exact = token_coefficients(spec, ADVANTAGES, MASK, logps, old_logps=old, ref_logps=ref)
    found = token_magnitudes(spec, ADVANTAGES, MASK, logps, old, ref)
    assert found.any()
    assert torch.equal(found, exact.abs())


@pytest.mark.parametrize("mean", [4, 6, 8, 10, 12])
def test_bits_follow_the_weights_within_the_mean(mean: int) -> None:
    generator = torch.Generator().manual_seed(mean)
    for _ in range(200):
        sizes = torch.randint(1, 60, (8,), generator=generator).tolist()
        raw = torch.rand(8, generator=generator)
        values = [0.0 if value < 0.2 else float(4.0 ** (6 * value)) for value in raw]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        pieces = tuple((end - size, end, value) for end, size, value in zip(ends, sizes, values, strict=True))
        bits = TokenWeights(1, ends[-1], pieces).bits(mean)
        assert [piece[:2] for piece in bits] == [piece[:2] for piece in pieces]
        assert sum((end - first) * count for first, end, count in bits) <= mean * ends[-1]
        for (_, _, count), (_, _, value) in zip(bits, pieces, strict=True):
            assert (count == 0) == (value == 0)
            assert value == 0 or LEAST_BITS <= count <= MOST_BITS
        ordered = [count for _, count in sorted(zip(values, (piece[2] for piece in bits), strict=True)) if count]
        # What rounding leaves over may go to a smaller weight that it fits: at most one bit out of order.
        assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(ordered))


def test_each_segment_is_what_its_own_width_makes_of_it() -> None:
    codec = get_codec("tw8-g64-h64")
    assert isinstance(codec, TokenCodec)
    tensor = torch.randn(2, 40, 128).bfloat16()
    weights = TokenWeights(2, 40, ((0, 9, 0.0), (9, 30, 1 / 16), (30, 40, 1.0), (40, 80, 0.25)))
    encoded = codec.encode(tensor, 0, weights)
    assert isinstance(encoded, SegmentedEncoded)
    decoded = codec.decode(encoded).view(80, 128)
    assert encoded.nbytes <= codec.nbytes(tensor.shape, tensor.dtype)
    assert len({bits for _, _, bits in encoded.segments}) == 4
    for first, end, bits in encoded.segments:
        part = tensor.view(80, 128)[first:end]
        if not bits:
            assert not decoded[first:end].any()
            continue
        plain = get_codec(f"int{bits}-g64-h64")
        assert torch.equal(decoded[first:end], plain.decode(plain.encode(part.contiguous())))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("token", [3, 60])
def test_a_tensor_with_a_nan_is_kept_whole_wherever_it_stands(value: float, token: int) -> None:
    codec = get_codec("tw8-g64-cm-h64")
    tensor = torch.randn(2, 40, 128)
    tensor.view(80, 128)[token, 7] = value
    weights = TokenWeights(2, 40, ((0, 9, 0.0), (9, 80, 1.0)))
    encoded = codec.encode(tensor, 0, weights)  # type: ignore[call-arg]
    assert encoded.raw
    assert torch.equal(codec.decode(encoded).view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize("shape", [(2, 39, 128), (2, 40, 96), (80, 128), (0, 40, 64), ()])
def test_other_shapes_and_no_weights_take_the_mean(shape: tuple[int, ...]) -> None:
    codec, plain = get_codec("tw6-g64-h64"), get_codec("int6-g64-h64")
    tensor = torch.randn(shape)
    for weights in (None, TokenWeights(2, 40, ((0, 80, 1.0),))):
        encoded = codec.encode(tensor, 0, weights)  # type: ignore[call-arg]
        assert torch.equal(codec.decode(encoded), plain.decode(plain.encode(tensor)))
        assert encoded.nbytes <= codec.nbytes(shape, tensor.dtype)


@pytest.mark.parametrize("name", ["tw8", "tw1-g64", "tw8-g64-oc", "tw8-g64-asym", "tw08-g64"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(HiloreError, match="Unknown codec"):
        get_codec(name)


def test_packed_rows_refuse_it() -> None:
    with pytest.raises(HiloreError, match=r"needs rows of prompt and completion side by side; .*use 'int8-g64'"):
        spec_of(
            batch="{microbatch: 4, prompt_tokens: 10, response_tokens: 30, length_buckets: [40], layout: packed}",
            loss="{kind: grpo, head: naive}",
            codecs="[tw8-g64]",
        )


def test_an_update_is_closer_to_exact_in_the_same_bytes() -> None:
    """Prompts three times as long as completions, one row whose advantage is 0."""
    model = models.lora(models.qwen2_tiny(hidden_size=128, intermediate_size=256, head_dim=64))
    whole = models.microbatch_for(model, rows=3, tokens=64)
    batch = replace(
        whole, completion_mask=whole.completion_mask[:, -16:].clone(), advantages=torch.tensor([1.0, 0.0, -1.0])
    )
    errors, stored = {}, {}
    expected = gradients(model, batch)
    units_of(model, batch)
    for codec in ("int6-g64-h64", "tw6-g64-h64"):
        runtime = attach_plan(model, plan_for(model, dict.fromkeys(L_UNITS, "L"), codec=codec))
        with runtime.microbatch(batch.advantages, batch.completion_mask, prompt_mask=batch.prompt_mask) as microbatch:
            found = gradients(model, batch)
        assert (microbatch.choice is not None, microbatch.fallback) == (True, "")
        errors[codec] = relative_error(found, expected)
        stored[codec] = sum(unit.encoded_bytes for unit in runtime.stats.units.values())
        runtime.detach()
    assert errors["tw6-g64-h64"] < 0.7 * errors["int6-g64-h64"]
    assert stored["tw6-g64-h64"] <= stored["int6-g64-h64"] * 1.02


def test_rows_without_weights_are_recomputed() -> None:
    """A mask as long as the row says nothing of where the prompt ends."""
    model = models.qwen2_tiny_lora(dropout=0.0)
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    units_of(model, batch)
    runtime = attach_plan(model, plan_for(model, dict.fromkeys(L_UNITS, "L"), codec="tw8-g64"))
    with runtime.microbatch(batch.advantages, batch.attention_mask) as microbatch:
        found = gradients(model, batch)
    assert "tokens have no weights" in microbatch.fallback
    assert_same_step(found, expected)
    runtime.detach()
