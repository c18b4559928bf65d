"""What the tests of the TRL integration share: a character tokenizer, a tiny trainer, plans written by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hilore.runtime.errors import UnsupportedModelError
from hilore.runtime.fingerprint import model_fingerprint
from hilore.runtime.integrations.trl import attach_trainer
from hilore.runtime.naming import canonical_modules
from hilore.runtime.plan import Plan, Predicted, Regime, RegionPlan, SolverReport, UnitPlan
from tests.models import lora, qwen2_tiny

UNITS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn:attention",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
TOKENS = 64
MICROBATCHES = 4  # two updates of two
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,?"
Modes = Callable[[int, str], str]


def tokenizer() -> Any:
    """One token per character, ids 3 and up; 0 pads, 1 begins, 2 ends."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: place + 3 for place, c in enumerate(CHARACTERS)}
    vocabulary |= {f"<{place}>": place for place in range(len(vocabulary), 128)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def policy(adapter: bool, dropout: float = 0.1) -> nn.Module:
    """The tiny actor, full or with LoRA; the same weights each time."""
    model = qwen2_tiny()
    return lora(model, dropout=dropout) if adapter else model


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs between completions, so that advantages are not all zero."""
    return [float(len(set(ids)) + sum(ids) % 7) for ids in completion_ids]


def trainer_of(
    folder: Path, model: nn.Module, trainer_class: Any = None, *, given: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A GRPOTrainer of two prompts, four completions each, two accumulated microbatches of four rows per update."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "beta": 0.0,
    }
    questions = Dataset.from_list([{"prompt": text} for text in ("what is 3 and 4?", "why", "count to ten.", "a b c")])
    with quiet():
        return (trainer_class or GRPOTrainer)(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(**(settings | options)),
            train_dataset=questions,
            eval_dataset=questions,
            processing_class=tokenizer(),
            **(given or {}),
        )


class quiet(warnings.catch_warnings):
    """Without the warnings of the libraries that are trained with."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")


def mixed(region: int, unit: str) -> str:
    """Some of everything: region 0 keeps attention and gate, the rest recomputed."""
    kept = {0: ("self_attn:attention", "mlp.gate_proj"), 1: ("self_attn.v_proj", "mlp.up_proj", "self_attn.o_proj")}
    return "H" if unit in kept.get(region, ()) else "R"


def plan_for(
    model: nn.Module,
    modes: Modes | str = mixed,
    *,
    hold: Iterable[int] = (),
    label: Any = "high",
    low: float = 0.0,
    high: float = 1e9,
    rows: int = 4,
    **fingerprint: Any,
) -> Plan:
    """A plan for ``model`` written by hand. ``modes``: region, unit -> mode ("L" is int8-g128), or one for all.

    ``down_proj`` is the one call that is dead under any modes: nothing in its region saves what it returns.
    """
    layers = [name for name in canonical_modules(model) if name.count(".") == 2 and name.startswith("model.layers.")]
    regions = []
    for place, layer in enumerate(layers):
        held = place in tuple(hold)
        units = []
        for unit in UNITS:
            mode: Any = "H" if held else modes if isinstance(modes, str) else modes(place, unit)
            codec = "int8-g128" if mode == "L" else None
            dead = unit == "mlp.down_proj"
            units.append(UnitPlan(f"{layer}.{unit}", mode, codec, dead and mode == "R", dead and mode != "H"))
        regions.append(RegionPlan(layer, held, tuple(units)))
    predicted = Predicted(1 << 20, "loss", 80, 100, 1 << 20, 75, 1 << 21, 0.0)
    solver = SolverReport("hand", "optimal", 0, 0, 0.0, 0.0, 0)
    fields = model_fingerprint(model) | {"rows": rows, "first_input_requires_grad": True} | fingerprint
    return Plan(
        1,
        "set",
        "tiny",
        {"kind": "grpo"},
        Regime(label, low, high, 1.0),
        1 << 20,
        0,
        1.0,
        0.01,
        False,
        predicted,
        TOKENS,
        tuple(regions),
        solver,
        fields,
        {},
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bitwise, by name."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def refused_untouched(trainer: Any, named: str) -> None:
    before = dict(trainer.__dict__)
    with pytest.raises(UnsupportedModelError) as caught:
        attach_trainer(trainer, [plan_for(trainer.model)])
    assert named in caught.value.message
    assert trainer.__dict__ == before
    assert not any("_set_gradient_checkpointing" in vars(module) for module in trainer.model.modules())


def trained(folder: Path, adapter: bool, plans: Any = None, trainer_class: Any = None, **options: Any) -> Any:
    """A trainer after its training; ``plans``: model -> plans."""
    trainer = trainer_of(folder, policy(adapter), trainer_class, **options)
    if plans is not None:
        attach_trainer(trainer, plans(trainer.model))
    with quiet():
        trainer.train()
    return trainer


def exact(model: Any) -> list[Plan]:
    """Kept, recomputed and dead in region 0, region 1 held."""
    return [plan_for(model, hold=(1,))]
