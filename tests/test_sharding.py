"""FSDP2's arithmetic: groups, padding, what a region carries on a rank. A real two-rank run: test_sharded_step.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hilore.planner.actor import build_actor
from hilore.planner.devices import gpu_named
from hilore.planner.roofline import collective_ns
from hilore.planner.sharding import (
    Around,
    GroupBytes,
    Sharding,
    shard_classes,
    shard_keep_set,
    sharding_of,
)
from hilore.planner.shardtrace import fingerprint_model, shard_bucket, shard_module
from hilore.planner.spec_types import ModelSpec
from hilore.planner.trace import Bucket, KeepSet, Outside, RegionClass, RegionTrace
from hilore.planner.tracefile import load_trace, save_trace
from hilore.planner.tracing import trace_spec
from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.naming import canonical_modules
from tests.specs import spec_of

HIDDEN, FFN, VOCABULARY, LAYERS = 32, 64, 128, 2
KV = HIDDEN // 2
LAYER = 2 * HIDDEN * HIDDEN + HIDDEN + 2 * (KV * HIDDEN + KV) + 3 * HIDDEN * FFN + 2 * HIDDEN
SHARDED = "{params: float32, compute: bfloat16, autocast: false, grads: float32}"


def spec(ranks: int = 4, **sections: str) -> ModelSpec:
    sections = {
        "precision": SHARDED,
        "parallel": f"{{kind: fsdp2, world_size: {ranks}, reshard_after_forward: true}}",
        "batch": "{microbatch: 1, prompt_tokens: 32, response_tokens: 32}",
    } | sections
    return spec_of(**sections)


def sharding(wanted: ModelSpec) -> Sharding:
    actor = build_actor(wanted, fake=True)
    modules = canonical_modules(actor.model)
    names = [f"model.layers.{index}" for index in range(LAYERS)]
    found = sharding_of(wanted, actor.model, {name: modules[name] for name in names})
    assert found is not None
    return found


def test_a_region_is_gathered_in_the_dtype_of_the_forward_and_reduced_in_that_of_gradients() -> None:
    group = sharding(spec()).regions["model.layers.1"]
    assert group == GroupBytes(
        gathered=2 * LAYER,
        cast=2 * LAYER // 4,
        gradients=2 * LAYER,
        reduce_input=4 * LAYER,
        reduce_output=LAYER,
        reduced=LAYER,
        recast=0,
        reduce_copy=4 * LAYER,
        kept_gradient=2 * HIDDEN,
    )


def test_nccl_reduces_in_place() -> None:
    group = sharding(spec(device="{kind: cuda, gpu: l40s-48gb}")).regions["model.layers.1"]
    assert group.reduce_copy == 0


def test_a_dimension_that_ranks_do_not_divide_is_padded() -> None:
    found = sharding(spec(ranks=3))
    padded = {32: 33, 16: 18, 64: 66}
    elements = (
        (padded[32] + 2 * padded[16] + padded[32]) * HIDDEN  # q, k, v, o
        + padded[32] + 2 * padded[16]  # biases
        + 2 * padded[64] * HIDDEN + padded[32] * FFN  # gate, up, down
        + 2 * padded[32]  # norms
    )  # fmt: skip
    group = found.regions["model.layers.0"]
    assert group.gathered == 2 * elements
    assert group.reduce_input == 4 * elements
    assert group.reduced == 4 * elements // 3
    assert group.gradients == 2 * LAYER, "autograd's own are not padded"


def test_lora_reduces_adapters_alone_and_gathers_all() -> None:
    adapter = "{kind: lora, rank: 4, dtype: float32}"
    group = sharding(spec(adapter=adapter)).regions["model.layers.0"]
    sides = [
        (HIDDEN, HIDDEN),
        (HIDDEN, KV),
        (HIDDEN, KV),
        (HIDDEN, HIDDEN),
        (HIDDEN, FFN),
        (HIDDEN, FFN),
        (FFN, HIDDEN),
    ]
    adapters = sum(4 * (a + b) for a, b in sides)
    assert group.gathered == 2 * (LAYER + adapters)
    assert group.gradients == 2 * adapters
    assert group.reduce_input == 4 * adapters
    assert group.kept_gradient == 2 * 4 * HIDDEN, "lora_B of down_proj"
    frozen_in_bfloat16 = spec(adapter=adapter, precision=SHARDED.replace("params: float32", "params: bfloat16"))
    assert sharding(frozen_in_bfloat16).regions["model.layers.0"].cast == 2 * adapters // 4


def test_tied_embeddings_are_one_group_with_the_head() -> None:
    tied = sharding(spec(model=f"{{source: hf-config, config: {config(tied=True)}}}"))
    assert tied.tied
    assert tied.first == tied.last
    assert tied.first.gathered == tied.through_bytes == 2 * (VOCABULARY * HIDDEN + HIDDEN)
    assert tied.first.kept_gradient == 2 * VOCABULARY * HIDDEN
    untied = sharding(spec())
    assert not untied.tied
    assert untied.through_bytes == 0
    assert untied.first.gathered == 2 * VOCABULARY * HIDDEN
    assert untied.last.gathered == 2 * (VOCABULARY * HIDDEN + HIDDEN)


def config(*, tied: bool) -> str:
    return (
        f"{{model_type: qwen2, vocab_size: {VOCABULARY}, hidden_size: {HIDDEN}, intermediate_size: {FFN}, "
        f"num_hidden_layers: {LAYERS}, num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512, "
        f"tie_word_embeddings: {str(tied).lower()}}}"
    )


def test_without_fsdp_there_is_no_sharding_and_blocks_cannot_be_sharded() -> None:
    actor = build_actor(spec_of(), fake=True)
    assert sharding_of(actor.spec, actor.model, {}) is None
    wanted = spec(region_grain="block")
    with pytest.raises(UnsupportedModelError, match="FSDP gathers whole decoder layers; set region_grain: layer"):
        sharding_of(wanted, nn.Linear(2, 2), {})


GROUP = GroupBytes(
    gathered=100, cast=25, gradients=90, reduce_input=180, reduce_output=45, reduced=45, recast=0, reduce_copy=0,
    kept_gradient=3,
)  # fmt: skip
FROZEN = GroupBytes(100, 25, 0, 0, 0, 0, 0, 0, 0)
KEPT = KeepSet((), retained_bytes=7, forward_bytes=1000, backward_bytes=2000)


def ranks(*, reshard: bool = True, tied: bool = True, world_size: int = 4, group: GroupBytes = GROUP) -> Sharding:
    ends = GroupBytes(300, 0, 0, 0, 0, 0, 0, 0, 0)
    return Sharding(world_size, reshard, tied, {f"r{index}": group for index in range(4)}, ends, ends)


def test_a_region_carries_two_copies_in_forward_and_its_neighbours_buffers_in_backward() -> None:
    found = shard_keep_set(ranks(), GROUP, Around(100, 100, 180), KEPT, 7)
    assert found.retained_bytes == 7
    assert found.forward_bytes == 100 + 100 + 1000 + 300, "flat, parameters, its own work, tied embeddings"
    assert found.backward_bytes == 100 + 100 + 2000 + 180, "parameters, next flat, its own work, reduction before"


def test_where_a_region_itself_needs_little_gathering_is_the_peak() -> None:
    small = KeepSet((), retained_bytes=7, forward_bytes=10, backward_bytes=10)
    found = shard_keep_set(ranks(), GROUP, Around(500, 100, 180), small, 7)
    assert found.forward_bytes == 7 + 500 + 100 + 100 + 300, "input, the flat before, the region's own, parameters"
    # The reduction: the next flat, gradients and the reduce-scatter's input, less what the region no longer retains.
    reducing = 100 + 90 + 180 - 7
    opening = 180 + 100 + 100 + 25
    assert found.backward_bytes == max(reducing, opening)
    alone = shard_keep_set(ranks(), GROUP, Around(500, 100, 0), small, 7)
    assert alone.backward_bytes == reducing


def test_parameters_that_are_not_resharded_stay() -> None:
    found = shard_keep_set(ranks(reshard=False), GROUP, Around(100, 0, 180), KEPT, 7)
    assert found.retained_bytes == 7 + 100
    assert found.backward_bytes == 2000 + 180


def test_one_rank_needs_no_flat_buffer() -> None:
    assert ranks(world_size=1).flat(GROUP) == 0
    found = shard_keep_set(ranks(world_size=1), GROUP, Around(0, 0, 0), KEPT, 7)
    assert found.forward_bytes == 100 + 1000 + 300


def region_class(gradient_bytes: int = 90) -> RegionClass:
    return RegionClass("r0", (), (KEPT,), KEPT, KEPT, 10, 20, 1, 2, gradient_bytes)


def listed() -> list[tuple[str, int]]:
    return [(f"r{index}", 0) for index in range(4)]


def test_the_last_region_gets_a_class_of_its_own_where_its_smaller_burden_matters() -> None:
    tight = KeepSet((), 7, 10, 300)
    found = RegionClass("r0", (), (tight,), tight, tight, 10, 20, 1, 2, 90)
    classes, indices = shard_classes(ranks(), (found,), listed(), accumulates=True, head_bytes=10_000)
    assert indices == (0, 0, 0, 1)
    assert [shared.name for shared in classes] == ["r0", "r3"]
    assert classes[0].keep_sets[0].backward_bytes - classes[1].keep_sets[0].backward_bytes == 180
    assert classes[0].gradient_bytes == 0, "accumulated gradients are fixed memory"
    classes, indices = shard_classes(ranks(group=FROZEN), (found,), listed(), accumulates=True, head_bytes=10_000)
    assert indices == (0, 0, 0, 0), "without gradients all regions carry the same"


def test_the_first_gather_counts_only_where_it_can_bind() -> None:
    found = region_class()
    _, indices = shard_classes(ranks(group=FROZEN), (found,), listed(), accumulates=True, head_bytes=10_000)
    assert indices == (0, 0, 0, 0)
    classes, indices = shard_classes(ranks(group=FROZEN), (found,), listed(), accumulates=True, head_bytes=0)
    assert indices == (0, 1, 1, 1)
    assert classes[0].keep_sets[0].forward_bytes >= classes[1].keep_sets[0].forward_bytes


def test_gradients_that_stay_are_the_ranks_part() -> None:
    classes, _ = shard_classes(ranks(), (region_class(),), listed(), accumulates=False, head_bytes=10_000)
    assert {found.gradient_bytes for found in classes} == {45}


def test_collectives_count_where_they_outlast_the_compute() -> None:
    gpu = gpu_named("l40s-48gb")
    outside = Outside(0, 10_000, 0, 0, 0, 1000, 2000, 0)
    bucket = Bucket(64, 1, (region_class(),), tuple(RegionTrace(name, 0) for name, _ in listed()), outside)
    big = GroupBytes(10**9, 0, 10**9, 2 * 10**9, 5 * 10**8, 5 * 10**8, 0, 0, 0)
    found = shard_bucket(ranks(group=big), bucket, gpu=gpu, accumulates=True)
    gather, reduce = collective_ns(gpu, 10**9, 4), collective_ns(gpu, 2 * 10**9, 4)
    assert {c.forward_ns for c in found.classes} == {gather}
    assert {c.backward_ns for c in found.classes} == {gather + reduce}
    assert found.outside.forward_ns == 1000 + collective_ns(gpu, 300, 4), "the embeddings' gather overlaps nothing"
    hidden = shard_bucket(ranks(group=FROZEN), bucket, gpu=gpu, accumulates=True)
    assert collective_ns(gpu, 100, 4) == 4
    assert {c.forward_ns for c in hidden.classes} == {10}, "the region's own compute hides its gather"


def test_a_rank_holds_its_part_of_parameters_state_and_gradients() -> None:
    batch = "{microbatch: 1, prompt_tokens: 32, response_tokens: 32, accumulation: 2}"
    trace = trace_spec(spec(batch=batch, device="{kind: cuda, gpu: l40s-48gb}"))
    whole = 4 * (LAYERS * LAYER + 2 * VOCABULARY * HIDDEN + HIDDEN)
    buffers = buffer_bytes()
    assert trace.fixed.parameter_bytes == whole // 4 + buffers
    assert trace.fixed.gradient_bytes == whole // 4
    steps = trace.fixed.optimizer_state_bytes - 2 * whole // 4
    assert 0 <= steps <= 4 * 100, "AdamW counts steps in one number per parameter"
    assert any(note.startswith("FSDP2 on 4 ranks: ") for note in trace.notes)
    assert any("for it set parallel.gradient_sync: last_microbatch" in note for note in trace.notes)


def buffer_bytes() -> int:
    model = build_actor(spec_of(), fake=True).model
    return sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())


def test_the_fingerprint_has_the_dtypes_that_a_trainers_model_shows() -> None:
    actor = build_actor(spec(adapter="{kind: lora, rank: 4, dtype: float32}"), fake=True)
    before = {name: parameter.dtype for name, parameter in actor.model.named_parameters()}
    found: str = fingerprint_model(actor)["parameter_dtypes"]
    assert "bfloat16" not in found
    assert "float32 trainable" in found
    assert {name: parameter.dtype for name, parameter in actor.model.named_parameters()} == before
    assert set(before.values()) == {torch.bfloat16}


def test_shards_are_padded_rows_in_the_persistent_dtype() -> None:
    actor = build_actor(spec(ranks=3), fake=True)
    shards = list(shard_module(actor).parameters())
    embedding = actor.model.get_input_embeddings().weight  # type: ignore[operator]
    assert embedding.shape == (VOCABULARY, HIDDEN)
    assert any(shard.shape == (43, HIDDEN) and shard.dtype == torch.float32 for shard in shards)
    assert len(shards) == len(list(actor.model.parameters()))


def test_a_sharded_trace_survives_its_file(tmp_path: Path) -> None:
    trace = trace_spec(spec(device="{kind: cuda, gpu: l40s-48gb}"))
    save_trace(trace, tmp_path / "tiny.trace.json")
    assert load_trace(tmp_path / "tiny.trace.json") == trace
    assert (trace.fingerprint["parallel"], trace.fingerprint["world_size"]) == ("fsdp2", 4)
    assert {region.class_index for region in trace.buckets[0].regions} == set(range(len(trace.buckets[0].classes)))
