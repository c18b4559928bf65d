"""Plans with encoded outputs (L): the loss never changes, errors stay where they belong, steps can be repeated."""

from __future__ import annotations

import pytest
import torch

from hilore.runtime.codecs import CODEC_NAMES, get_codec
from hilore.runtime.errors import HiloreWarning
from tests import models
from tests.plans import Step, assert_same_step, attach_plan, gradients, keepable, loss_of, plan_for, units_of

L_UNITS = ("mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj", "self_attn.v_proj")


def relative_error(found: Step, expected: Step) -> float:
    """Of the complete gradient, L2."""
    assert found.gradients.keys() == expected.gradients.keys()
    difference = sum(float((found.gradients[n] - g).double().square().sum()) for n, g in expected.gradients.items())
    return (difference / sum(float(g.double().square().sum()) for g in expected.gradients.values())) ** 0.5


FAMILIES = {
    "qwen2": models.qwen2_tiny,
    "lora": models.qwen2_tiny_lora,
    "qwen3": models.qwen3_tiny,
    "llama": models.llama_tiny,
    "phi3": models.phi3_tiny,
    "gemma2": models.gemma2_tiny,
    "gemma2-sdpa": lambda: models.gemma2_tiny("sdpa"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["", "autocast"])
def test_the_loss_never_changes(family: str, autocast: torch.dtype | None) -> None:
    model = FAMILIES[family]()
    batch = models.microbatch_for(model)
    expected = gradients(model, batch, autocast=autocast)
    units = units_of(model, batch, autocast=autocast)
    for modes in (keepable(units, "L"), dict.fromkeys(L_UNITS, "L")):
        for codec in ("int8-g128", "int4-g64"):
            runtime = attach_plan(model, plan_for(model, modes, codec=codec))
            found = gradients(model, batch, autocast=autocast)
            again = gradients(model, batch, autocast=autocast)
            runtime.detach()
            assert torch.equal(found.loss, expected.loss)
            assert torch.equal(found.rng_state, expected.rng_state)
            assert_same_step(again, found)
            assert all(bool(grad.isfinite().all()) for grad in found.gradients.values())
            assert runtime.stats.live_saved_bytes == 0


@pytest.mark.parametrize(
    ("codec", "least", "most"),
    [
        ("int8-g128", 1e-4, 0.02),
        ("int8-g64", 1e-4, 0.02),
        ("fp8-e4m3", 1e-3, 0.08),
        ("int4-g64", 3e-3, 0.3),
        ("int8-g64-cm-h64", 1e-4, 0.02),
        ("int10-g32-s8-cm-h64", 3e-5, 0.005),
        ("int6-g32-s8-cm-h64", 1e-3, 0.08),
    ],
)
def test_the_error_is_of_the_codecs_size(codec: str, least: float, most: float) -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, dict.fromkeys(L_UNITS, "L"), codec=codec))
    assert least < relative_error(gradients(model, batch), expected) < most
    runtime.detach()


def test_stochastic_rounding_differs_by_step_and_repeats_in_another_run() -> None:
    model = models.qwen2_tiny_lora(dropout=0.0)
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    runs = []
    for _ in range(2):
        runtime = attach_plan(model, plan_for(model, dict.fromkeys(L_UNITS, "L"), codec="int6-g64-sr"))
        runs.append([gradients(model, batch) for _ in range(3)])
        runtime.detach()
    for first, second in zip(*runs, strict=True):
        assert_same_step(second, first)
        assert torch.equal(first.loss, expected.loss)
        assert torch.equal(first.rng_state, expected.rng_state)
    one, two, three = (relative_error(step, expected) for step in runs[0])
    assert len({one, two, three}) == 3


def test_a_lossless_codec_is_exact() -> None:
    """Where float32 values are no upcasts of bf16 nothing is kept, the region runs again, and that is counted."""
    model = models.qwen2_tiny_lora()
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, dict.fromkeys(L_UNITS, "L"), codec="exact-bf16"))
    with pytest.warns(HiloreWarning, match=r"v_proj: its values do not fit its lossless codec"):
        found = gradients(model, batch)
    assert_same_step(found, expected)
    first, later = (runtime.stats.units[f"model.layers.0.{name}"] for name in ("self_attn.v_proj", "mlp.gate_proj"))
    assert (first.recorded, first.unfit, first.kept_bytes, first.encoded_bytes, first.answered) == (1, 1, 0, 0, 0)
    assert (later.recorded, later.unfit, later.kept_bytes, later.encoded_bytes, later.answered) == (1, 0, 0, 0, 0)
    runtime.detach()


@pytest.mark.parametrize("codec", [*(n for n in CODEC_NAMES if not get_codec(n).lossless), "exact-bf16"])
def test_encoded_bytes_are_the_codecs(codec: str) -> None:
    model = models.qwen2_tiny(dtype=torch.bfloat16)
    batch = models.microbatch_for(model)
    units_of(model, batch)
    runtime = attach_plan(model, plan_for(model, {"mlp.gate_proj": "L"}, codec=codec))
    loss = loss_of(model, batch)
    stats = runtime.stats.units["model.layers.1.mlp.gate_proj"]
    nbytes = get_codec(codec).nbytes((2, 16, models.FFN), torch.bfloat16)
    assert (stats.recorded, stats.encoded_bytes, stats.kept_bytes) == (1, nbytes, 0)
    assert runtime.stats.live_saved_bytes == models.LAYERS * nbytes
    assert runtime.stats.encode_roles == {"activation": models.LAYERS}
    del loss
    assert runtime.stats.live_saved_bytes == 0
    runtime.detach()


def test_an_error_does_not_reach_what_backward_did_before() -> None:
    """Backward walks from the last region to the first: with L in the first alone, all later gradients are exact."""
    model = models.qwen2_tiny_lora(dropout=0.1, num_hidden_layers=3)
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, {"model.layers.0.mlp.gate_proj": "L"}))
    found = gradients(model, batch)
    runtime.detach()
    inexact = {n for n, grad in expected.gradients.items() if not torch.equal(grad, found.gradients[n])}
    assert inexact
    assert {name for name in inexact if ".layers.0." not in name} == set()
    # In the region itself the error starts at the gate: the down projection's lora_A sees act(gate) * up.
    assert any(".down_proj.lora_A" in name for name in inexact)


def test_a_unit_that_makes_no_gradient_of_its_own_input_keeps_its_exact_gradient() -> None:
    """gate's own weight gradient needs its input, which is exact, and the incoming gradient, which needs up."""
    model = models.qwen2_tiny(num_hidden_layers=1)
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, {"mlp.up_proj": "L"}))
    found = gradients(model, batch)
    runtime.detach()
    different = {n for n, grad in expected.gradients.items() if not torch.equal(grad, found.gradients[n])}
    layer = "model.layers.0.mlp"
    assert f"{layer}.up_proj.weight" not in different
    assert {f"{layer}.gate_proj.weight", f"{layer}.down_proj.weight"} <= different


def test_a_nan_in_an_encoded_output_stays_where_it_was() -> None:
    model = models.qwen2_tiny(num_hidden_layers=1)
    batch = models.microbatch_for(model)
    units_of(model, batch)
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[3, 0] = float("nan")
    expected = gradients(model, batch)
    runtime = attach_plan(model, plan_for(model, {"mlp.gate_proj": "L"}))
    found = gradients(model, batch)
    stats = runtime.stats.units["model.layers.0.mlp.gate_proj"]
    runtime.detach()
    assert (stats.stored_raw, stats.recorded) == (1, 1)
    for name, grad in expected.gradients.items():
        assert torch.equal(grad.isnan(), found.gradients[name].isnan())


def test_a_second_backward_over_a_retained_graph_is_exact() -> None:
    """The payload is let go at the first replay; a second one runs every unit."""
    model = models.qwen2_tiny_lora()
    batch = models.microbatch_for(model)
    expected = gradients(model, batch)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    runtime = attach_plan(model, plan_for(model, dict.fromkeys(L_UNITS, "L")))
    with models.seeded(0):
        loss = loss_of(model, batch)
    first = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    second = torch.autograd.grad(loss, list(parameters.values()))
    runtime.detach()
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for name, grad in zip(parameters, second, strict=True):
        assert torch.equal(grad, expected.gradients[name])


@pytest.mark.parametrize("split", [None, "mlp.gate_proj"])
def test_l_and_h_and_dead_calls_together(split: str | None) -> None:
    """The error of a mixed plan is that of its L units alone: H, dead and split replays add nothing."""
    model = models.qwen2_tiny_lora(dropout=0.1)
    batch = models.microbatch_for(model)
    encoded = {"mlp.gate_proj": "L", "mlp.up_proj": "L"}
    runtime = attach_plan(model, plan_for(model, encoded))
    reference = gradients(model, batch)
    runtime.detach()
    runtime = attach_plan(
        model, plan_for(model, encoded | {"self_attn:attention": "H", "self_attn.q_proj": "H"}, split=split)
    )
    assert_same_step(gradients(model, batch), reference)
    runtime.detach()
