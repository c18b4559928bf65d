"""FSDP1: sizes of flat parameters by hand, fingerprints, refusals. A real two-rank run: test_sharded_step.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from hilore.planner.flatparams import flat_group, flat_shards
from hilore.planner.shardgroup import GroupBytes
from hilore.planner.spec import SpecError
from hilore.planner.spec_types import ModelSpec
from hilore.runtime.attach import attach
from hilore.runtime.errors import FingerprintError, UnsupportedModelError
from hilore.runtime.fingerprint import model_fingerprint
from hilore.runtime.sharded import model_sharding, reduces_gradients, shared_groups
from tests import models
from tests.plans import plan_for, plan_set, units_of
from tests.specs import spec_of

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
WEIGHT, BIAS = 32 * 16, 33


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def spec(ranks: int = 4, accumulation: int = 1, sync: str = "every_microbatch", grads: str = "float32") -> ModelSpec:
    return spec_of(
        precision=f"{{params: float32, compute: bfloat16, autocast: false, grads: {grads}}}",
        parallel=f"{{kind: fsdp1, world_size: {ranks}, gradient_sync: {sync}}}",
        batch=f"{{microbatch: 1, prompt_tokens: 8, response_tokens: 8, accumulation: {accumulation}}}",
    )


def parameters(*, trained: bool = True) -> list[torch.Tensor]:
    sizes = (WEIGHT, BIAS)
    return [nn.Parameter(torch.empty(size, dtype=torch.bfloat16), requires_grad=trained) for size in sizes]


def test_a_flat_parameter_is_aligned_and_padded() -> None:
    """float32 is aligned to four elements: 33 become 36. 548 are divisible by 4, and padded to 549 by 3."""
    elements = WEIGHT + 36
    assert flat_group(spec(), parameters()) == GroupBytes(
        gathered=2 * elements,
        cast=2 * elements // 4,
        gradients=2 * (WEIGHT + BIAS),
        reduce_input=4 * elements,
        reduce_output=elements,
        reduced=elements,
        recast=0,
        reduce_copy=4 * elements,
        kept_gradient=2 * elements,
        flat_gradient=2 * elements,
    )
    padded = flat_group(spec(ranks=3), parameters())
    assert (padded.gathered, padded.reduced) == (2 * 549, 4 * 183)
    assert padded.reduce_input == 4 * elements + 4 * 549, "the cast one and the padded one"
    assert padded.flat_gradient == 2 * elements


def test_gradients_join_before_the_parameters_go_and_are_cast_after() -> None:
    elements = WEIGHT + 36
    joined = 2 * elements + 2 * (WEIGHT + BIAS) + 2 * elements
    reducing = 4 * elements + elements + 4 * elements + 2 * elements
    assert flat_group(spec(), parameters()).reducing == max(joined, reducing) == reducing
    plain = flat_group(spec(grads="bfloat16"), parameters())
    assert plain.reduce_input == 0, "the flat gradient itself is reduced"
    assert plain.recast == 4 * elements // 4


def test_a_gradient_that_waits_keeps_the_gathered_dtype() -> None:
    waiting = flat_group(spec(accumulation=4, sync="last_microbatch"), parameters())
    assert waiting.accumulated == 2 * (WEIGHT + 36)
    assert flat_group(spec(accumulation=1, sync="last_microbatch"), parameters()).accumulated == 0


def test_frozen_ones_are_only_gathered() -> None:
    assert flat_group(spec(), parameters(trained=False)) == GroupBytes(2 * 548, 2 * 137, 0, 0, 0, 0, 0, 0, 0)


def test_shards_are_one_for_each_region_and_one_for_the_rest() -> None:
    model = models.qwen2_tiny()
    shards = flat_shards(spec(), model, model.model.layers)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert len(shards) == 3
    assert sum(shard.numel() for shard in shards) == whole // 4
    assert {shard.dtype for shard in shards} == {torch.float32}


@pytest.mark.parametrize(
    ("adapter", "ranks", "expected"),
    [
        ("{kind: lora, rank: 4}", 2, "set parallel.kind: fsdp2 (accelerate: fsdp_version: 2; verl: strategy: fsdp2)"),
        ("none", 1, "parallel.world_size 1 with kind: fsdp1 shards nothing"),
    ],
)
def test_model_yaml_refuses_what_flat_parameters_cannot_carry(adapter: str, ranks: int, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(adapter=adapter, parallel=f"{{kind: fsdp1, world_size: {ranks}}}")
    assert len(caught.value.problems) == 1
    assert expected in caught.value.problems[0]


def flat(model: nn.Module, *, whole: bool = False, orig: bool = True) -> FullyShardedDataParallel:
    layer = type(next(module for name, module in model.named_modules() if name.endswith("layers.0")))
    policy = None if whole else ModuleWrapPolicy({layer})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=orig, device_id=torch.device("cpu"))


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_a_fingerprint_sees_the_parameters_that_were_flattened(orig: bool) -> None:
    before = model_fingerprint(models.qwen2_tiny())
    sharded = flat(models.qwen2_tiny(), orig=orig)
    assert model_sharding(sharded) == "fsdp1"
    assert model_fingerprint(sharded) == before | {"parallel": "fsdp1"}


def test_a_plan_for_another_kind_is_refused() -> None:
    model = models.qwen2_tiny()
    units_of(model)
    plan = plan_for(model, fingerprint=model_fingerprint(model) | {"parallel": "fsdp2"})
    with pytest.raises(FingerprintError, match="Plan field parallel=fsdp2, model has fsdp1"):
        attach(flat(model), plan_set(plan))


def test_flat_parameters_that_mix_frozen_and_trained_are_refused_by_name() -> None:
    model = models.qwen2_tiny_lora()
    units_of(model)
    plan = plan_for(model)
    sharded = flat(model)
    with pytest.raises(UnsupportedModelError, match=r"holds frozen and trained parameters.* parallel\.kind: fsdp2"):
        attach(sharded, plan_set(plan))


def test_units_within_a_region_are_refused_by_name() -> None:
    model = models.qwen2_tiny()
    units_of(model)
    plan = plan_for(model)
    wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))
    model.model.layers[1].mlp = wrap(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModelError) as caught:
        attach(model, plan_set(plan), accept=("parallel",))
    assert "model.layers.1.mlp: an FSDP1 unit inside of a region" in caught.value.message
    assert "fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP" in caught.value.message


def test_layers_that_share_a_unit_and_gradients_that_wait_are_known() -> None:
    model = models.qwen2_tiny()
    units_of(model)
    regions = attach(model, plan_set(plan_for(model))).regions
    assert shared_groups(model, regions) == ""
    sharded = flat(model, whole=True)
    assert shared_groups(sharded, regions) == "model.layers.0"
    assert reduces_gradients(sharded)
    with sharded.no_sync():
        assert not reduces_gradients(sharded)
