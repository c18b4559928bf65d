"""Planning for a card that is not here: kernels, roofline, and whole traces without weights."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import hilore.runtime.region as region
from hilore.planner import estimate, tracing
from hilore.planner.actor import build_actor, microbatch_of
from hilore.planner.cudakernels import cuda_attention, efficient_backward_bytes, flash_backward_bytes
from hilore.planner.devices import UnknownGpuError, gpu_named
from hilore.planner.head import policy_logps
from hilore.planner.instrument import RegionBytes, measure_checkpointed, measure_held
from hilore.planner.regionrun import RegionRunner, region_inputs
from hilore.planner.roofline import RooflineClock, collective_ns, estimated_codec_costs, operator_flops
from hilore.planner.spec import load_spec
from hilore.planner.storages import count_saved
from hilore.planner.trace import Trace
from hilore.planner.tracing import trace_spec
from hilore.runtime.codecs import get_codec
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.naming import canonical_modules
from tests.specs import spec_of

A100 = gpu_named("a100-80gb")
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.yaml"))


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=grad)


@pytest.fixture
def fakes() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


def test_flash_saves_grouped_heads_as_they_are(fakes: Any) -> None:
    query, key, value = fake(1, 256, 16, 64), fake(1, 2, 256, 64), fake(1, 2, 256, 64)
    rows = query.transpose(1, 2)
    with cuda_attention(), count_saved([]) as saved:
        out = functional.scaled_dot_product_attention(rows, key, value, is_causal=True, enable_gqa=True)
    tensors = 2 * (16 * 256 * 64) * 2 + 2 * (2 * 256 * 64) * 2
    assert saved.unique_bytes == tensors + 16 * 256 * 4 + 2 * 8 + 8, "q, out, k, v; log-sum-exp; seed; offset"
    assert out.transpose(1, 2).is_contiguous(), "the output is laid out as the query"
    out.sum().backward()
    assert key.grad is not None
    assert key.grad.shape == key.shape


def test_a_mask_takes_the_efficient_kernel_and_is_saved_by_each_call(fakes: Any) -> None:
    query, key, value = (fake(2, 4, 40, 64) for _ in range(3))
    mask = torch.empty(2, 1, 40, 40, dtype=torch.bool)
    with cuda_attention(), count_saved([mask]) as saved:
        functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()
    padded_mask = 2 * 40 * 48 * 2  # bfloat16, rows padded to 48 elements
    assert saved.unique_bytes == 4 * (2 * 4 * 40 * 64 * 2) + 2 * 4 * 64 * 4 + padded_mask + 2 * 8


def test_float32_with_grouped_heads_takes_the_math_kernel(fakes: Any) -> None:
    query, key, value = (fake(1, heads, 64, 64, dtype=torch.float32) for heads in (4, 2, 2))
    with cuda_attention(), count_saved([]) as saved:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert saved.unique_bytes > 4 * 64 * 64 * 4, "scores of T x T are saved"


def test_head_dimensions_are_padded_for_flash(fakes: Any) -> None:
    query = fake(1, 2, 128, 60)
    with cuda_attention():
        out = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert out.shape == (1, 2, 128, 60)
    assert out.untyped_storage().nbytes() == 2 * 128 * 64 * 2


def test_temporaries_of_backward_kernels(fakes: Any) -> None:
    query, key = fake(1, 16, 4096, 128), fake(1, 2, 4096, 128)
    expanded = 2 * 16 * 4096 * 128 * 2
    assert flash_backward_bytes(query, key) == 16 * 4096 * (128 + 1) * 4 + expanded
    assert flash_backward_bytes(query, query) == 16 * 4096 * (128 + 1) * 4
    assert flash_backward_bytes(query[:, :, :4000], key) == flash_backward_bytes(query, key), "rows padded to 128"
    assert efficient_backward_bytes(query) == 16 * 4096 * (128 + 1) * 4


def test_attention_is_put_back() -> None:
    before = functional.scaled_dot_product_attention
    with cuda_attention():
        assert functional.scaled_dot_product_attention is not before
    with pytest.raises(ValueError, match="inside"), cuda_attention():
        raise ValueError("inside")
    assert functional.scaled_dot_product_attention is before


def clocked(run: Any) -> int:
    clock = RooflineClock(A100)
    with clock:
        run()
    return clock()


def test_a_large_gemm_takes_its_arithmetic(fakes: Any) -> None:
    left, right = fake(4096, 4096, grad=False), fake(4096, 4096, grad=False)
    assert clocked(lambda: left @ right) == round(2 * 4096**3 / (312e12 * 0.80) * 1e9 + A100.launch_ns)


def test_a_small_gemm_takes_its_memory(fakes: Any) -> None:
    left, right = fake(4096, 4096, grad=False), fake(4096, 16, grad=False)
    moved = (4096 * 4096 + 4096 * 16 + 4096 * 16) * 2
    assert clocked(lambda: left @ right) == round(moved / (2039e9 * 0.85) * 1e9 + A100.launch_ns)
    flops, kind = operator_flops(torch.ops.aten.mm.default, (left, right), {}, left @ right)
    assert (flops, kind) == (2 * 4096 * 4096 * 16, "gemm_small")


def test_elementwise_work_takes_what_it_moves(fakes: Any) -> None:
    tensor = fake(1000, 1000, grad=False)

    def ns(moved: int) -> int:
        return round(moved / (2039e9 * 0.85) * 1e9 + A100.launch_ns)

    assert clocked(lambda: tensor + tensor.t()) == ns(3 * 2_000_000)
    assert clocked(lambda: tensor.mul_(2)) == ns(2 * 2_000_000)
    assert clocked(lambda: tensor.zero_()) == ns(2_000_000)
    assert clocked(lambda: tensor.t().reshape(-1, 10)[3:].detach()) == ns(2 * 2_000_000), "one copy, four views"
    assert clocked(lambda: torch.empty(10**6)) == 0


def test_a_lookup_does_not_read_its_table(fakes: Any) -> None:
    table = fake(100_000, 1024, grad=False)
    ids = torch.empty(64, dtype=torch.int64)
    moved = 2 * 64 * 1024 * 2 + 64 * 8
    assert clocked(lambda: functional.embedding(ids, table)) == round(moved / (2039e9 * 0.85) * 1e9 + A100.launch_ns)


def test_causal_attention_is_half_a_square_and_backward_two_and_a_half_times_forward(fakes: Any) -> None:
    query = fake(1, 16, 4096, 128)
    square = 4 * 16 * 4096 * 4096 * 128
    with cuda_attention():
        forward = clocked(lambda: functional.scaled_dot_product_attention(query, query, query, is_causal=True))
        whole = clocked(lambda: functional.scaled_dot_product_attention(query, query, query))
        out = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        both = clocked(lambda: torch.autograd.grad(out, query, torch.empty_like(out)))
    assert forward == round(square / 2 / (312e12 * 0.60) * 1e9 + A100.launch_ns)
    assert whole == round(square / (312e12 * 0.60) * 1e9 + A100.launch_ns)
    additions = 2 * round(3 * 16 * 4096 * 128 * 2 / (2039e9 * 0.85) * 1e9 + A100.launch_ns)
    backward = square / 2 * 2.5 / (312e12 * 0.50) * 1e9 + A100.launch_ns
    assert both == pytest.approx(backward + additions, abs=2), "q is query, key and value: its gradients are added"


def test_codecs_take_what_they_read_and_write(fakes: Any) -> None:
    output = fake(4096, 2048, grad=False)
    (cost,) = estimated_codec_costs(A100, output, ["int8-g128"], "cuda")
    payload = get_codec("int8-g128").nbytes((4096, 2048), torch.bfloat16)
    assert cost.payload_bytes == payload
    here, there = (get_codec("int8-g128").workspace_bytes((4096, 2048), torch.bfloat16, d) for d in ("cpu", "cuda"))
    assert cost.workspace_bytes == there > here, "of the card's kernels, not of those here"
    moved = payload + 4096 * 2048 * 2
    assert cost.encode_ns == cost.decode_ns == round(moved / (2039e9 * 0.85 * 0.75) * 1e9) + A100.launch_ns


def test_collectives_take_what_comes_from_the_others() -> None:
    assert collective_ns(A100, 300 * 10**9, 4) == 10**9
    assert collective_ns(A100, 10**9, 1) == 0


def tiny(**sections: str) -> Trace:
    sections = {"device": "{kind: cuda, gpu: a100-80gb}", "precision": "{params: bfloat16}"} | sections
    return trace_spec(spec_of(**sections))


def test_codecs_that_no_unit_offers_are_told() -> None:
    trace = tiny(adapter="{kind: lora, rank: 4}", codecs="[bitmask, int8-g64, pack-bf16, exact-bf16]")
    told = [note for note in trace.notes if note.startswith("codecs: ")]
    assert len(told) == 1
    assert told[0].startswith("codecs: bitmask, exact-bf16 offered to no unit: no unit's output is what they")
    assert {cost.codec for one in trace.buckets[0].classes for unit in one.units for cost in unit.codecs} == {
        "int8-g64",
        "pack-bf16",
    }


def test_an_estimate_reads_no_weights_and_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr("hilore.planner.actor.load_model", refuse)
    trace = tiny(adapter="{kind: lora, rank: 4}")
    assert trace.estimated
    assert trace.device == "a100-80gb"
    assert trace.card_bytes == A100.memory_bytes
    assert trace.fingerprint["gpu"] == "NVIDIA A100-SXM4-80GB"
    assert trace.time_spread == 0.0
    assert trace.fixed.other_bytes == 2 * A100.cublas_workspace_bytes
    assert any(note.startswith("times are estimated from the table of GPUs (a100-80gb: ") for note in trace.notes)
    assert all(unit.run_ns > 0 for found in trace.buckets[0].classes for unit in found.units)
    assert trace.buckets[0].outside.forward_ns > 0 < trace.buckets[0].outside.backward_ns


def test_an_estimate_is_the_same_every_time() -> None:
    first, second = tiny(), tiny()
    assert asdict(replace(first, created_at="")) == asdict(replace(second, created_at=""))


def test_glue_in_fewer_passes_is_not_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors of a card lie on the CPU, which has it; a CPU's trace does count on it."""
    traced = tiny()
    assert traced.buckets[0].classes[0].no_gc is None
    monkeypatch.setattr(region, "glue_forwards", lambda _module: [])
    monkeypatch.setattr(region, "rotary_globals", lambda _module: [])
    without = tiny()
    assert asdict(replace(without, created_at="")) == asdict(replace(traced, created_at=""))


def test_one_capture_serves_all_length_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []
    plain = tracing.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        captures.append(args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(tracing, "capture", counted)
    batch = "{microbatch: 1, prompt_tokens: 32, response_tokens: 32, length_buckets: [16, 64]}"
    both = tiny(batch=batch)
    assert len(captures) == 1
    alone = tiny(batch="{microbatch: 1, prompt_tokens: 1, response_tokens: 15}")
    assert [bucket.tokens for bucket in both.buckets] == [16, 64]
    assert both.buckets[0] == alone.buckets[0], (
        "liveness of the longest serves the shortest, bytes and times are its own"
    )


def test_no_card_named_and_none_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedModelError, match=r"is empty and no CUDA device is here; .*name the card.*l40s-48gb"):
        estimate.target_of(spec_of(device="{kind: cuda}"))
    spec = spec_of(device="{kind: cuda, gpu: l40s-48gb}")
    with pytest.raises(UnknownGpuError, match=r"device.gpu is 'l40', expected one of .*; did you mean 'l40s-48gb'\?"):
        estimate.target_of(replace(spec, device=replace(spec.device, gpu="l40")))


def test_the_card_that_is_here_is_measured_and_another_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"total_memory": 123})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    here = estimate.target_of(spec_of(device="{kind: cuda, gpu: l40s-48gb}"))
    assert (here.estimated, here.device.type, here.card_bytes) == (False, "cuda", 123)
    unnamed = estimate.target_of(spec_of(device="{kind: cuda}"))
    assert (unnamed.estimated, unnamed.gpu) == (False, gpu_named("l40s-48gb"))
    elsewhere = estimate.target_of(spec_of(device="{kind: cuda, gpu: h200-141gb}"))
    assert (elsewhere.estimated, elsewhere.device.type) == (True, "cpu")


def region_bytes(*, fake: bool) -> tuple[RegionBytes, RegionBytes]:
    actor = build_actor(spec_of(batch="{microbatch: 1, prompt_tokens: 32, response_tokens: 32}"), fake=fake)
    microbatch, modules = microbatch_of(actor, 64), canonical_modules(actor.model)
    name = "model.layers.1"
    with actor.faked():
        inputs = region_inputs(lambda: policy_logps(actor.model, microbatch), modules, [name])[name]
        runner = RegionRunner.of(name, modules[name], inputs, {})
        held = measure_held(runner, gradients_exist=False)
        return held, measure_checkpointed(runner, gradients_exist=False)


def test_fake_runs_take_the_branches_of_plain_ones() -> None:
    # Left alone, transformers builds a T x T mask for fake inputs and expands k and v.
    assert region_bytes(fake=True) == region_bytes(fake=False)


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_example_is_valid_and_names_a_known_card(path: Path) -> None:
    spec = load_spec(path)
    if spec.device.kind == "cuda":
        assert gpu_named(spec.device.gpu).memory_bytes > 0
        assert spec.parallel.world_size in (4, 8)


def test_kernels_are_cuda_s_on_a_card_whether_it_is_here_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    card = estimate.estimated_target(A100)
    here = replace(card, estimated=False)
    cpu = estimate.target_of(spec_of())
    plain = functional.scaled_dot_product_attention

    def substituted(context: Any) -> bool:
        with context:
            return functional.scaled_dot_product_attention is not plain

    assert [substituted(estimate.kernels(one)) for one in (card, here, cpu)] == [True, True, False]
    assert [substituted(estimate.timed_kernels(one)) for one in (card, here, cpu)] == [True, False, False]
    assert here.notes[-1].startswith("other memory has 16.2 MiB of cuBLAS workspace")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert estimate._workspace_bytes(None) == 2 * 32 * 2**20
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert estimate._workspace_bytes(None) == estimate._workspace_bytes(A100)
