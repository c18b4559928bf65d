"""Check of ``model.config`` (source hf-config) against the configuration classes of transformers."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from hilore.planner.spec_rules import SAID_ELSEWHERE, close_match, unknown_key
from hilore.planner.yaml_lines import Document, Problem

# Read by transformers' models or rope code though no configuration class declares them as fields.
_UNDECLARED = ("model_type", "head_dim", "rope_theta", "rope_scaling", "partial_rotary_factor")
# Not all configuration classes refuse a size that no tensor can have.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def config_problems(config: dict[str, Any], document: Document) -> list[Problem]:
    """All that is wrong with ``model.config``: unknown family, unknown keys, values that its class refuses."""
    where = document.line("model", "config")
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        return [Problem(where, "missing 'model_type' in model.config")]
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        return [Problem(where, f"source hf-config needs transformers ({error}): pip install 'hilore-plan[hf]'")]
    families = tuple(CONFIG_MAPPING.keys())
    if family not in families:
        guess = close_match(family, families)
        hint = f"did you mean '{guess}'?" if guess else "the model families are those of transformers' CONFIG_MAPPING"
        line = document.line("model", "config", "model_type")
        return [Problem(line, f"unknown model_type '{family}' in model.config; {hint}")]

    kind = CONFIG_MAPPING[family]
    known = _config_keys(kind)
    problems = []
    for key in config:
        line = document.line("model", "config", key)
        if key in SAID_ELSEWHERE:
            problems.append(
                Problem(line, f"key '{key}' in model.config is not used; it belongs in {SAID_ELSEWHERE[key]}")
            )
        elif key not in known:
            problems.append(Problem(line, unknown_key(key, "model.config", known, {})))
        elif key in _SIZES and type(config[key]) is int and config[key] < 1:
            problems.append(Problem(line, f"model.config.{key} must be greater than 0, found {config[key]}"))
    heads, key_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if not problems and type(heads) is int and type(key_heads) is int and heads % key_heads:
        line = document.line("model", "config", "num_key_value_heads")
        text = f"model.config.num_key_value_heads {key_heads} does not divide num_attention_heads {heads}"
        problems.append(Problem(line, text))
    if problems:
        return problems
    try:
        made = kind(**{key: value for key, value in config.items() if key != "model_type"})
    except (StrictDataclassError, TypeError, ValueError) as error:
        return [_refused(error, family, document)]
    return _odd_heads(made, config, document)


def _odd_heads(made: Any, config: dict[str, Any], document: Document) -> list[Problem]:
    """Rotary embeddings turn pairs of a head's channels."""
    hidden, heads = getattr(made, "hidden_size", None), getattr(made, "num_attention_heads", None)
    rotary = hasattr(made, "rope_parameters") and getattr(made, "partial_rotary_factor", None) in (None, 1.0)
    if not rotary or type(hidden) is not int or type(heads) is not int:
        return []
    each = getattr(made, "head_dim", None) or hidden // heads
    if type(each) is not int or each % 2 == 0:
        return []
    key = "head_dim" if "head_dim" in config else "hidden_size"
    text = (
        f"model.config gives each head {each} channels (hidden_size {hidden}, num_attention_heads {heads}); rotary "
        "embeddings need an even number: set head_dim"
    )
    return [Problem(document.line("model", "config", key), text)]


def keys_of_config(model: dict[str, Any]) -> tuple[str, ...]:
    """Keys that model.config could hold, for a key that stands one level too high; empty without transformers."""
    config = model.get("config")
    family = config.get("model_type") if isinstance(config, dict) else model.get("model_type")
    if not isinstance(family, str):
        return ()
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return ()
    return _config_keys(CONFIG_MAPPING[family]) if family in CONFIG_MAPPING else ()


def _config_keys(kind: type[Any]) -> tuple[str, ...]:
    """The keys that a transformers configuration class takes."""
    declared = tuple(item.name for item in dataclasses.fields(kind))
    return (*declared, *getattr(kind, "attribute_map", {}), *_UNDECLARED)


def _refused(error: Exception, family: str, document: Document) -> Problem:
    text = " ".join(str(error).split())
    named = re.search(r"[Ff]ield '(\w+)'", text)
    line = document.line("model", "config", named.group(1)) if named else document.line("model", "config")
    return Problem(line, f"model.config is refused by the '{family}' configuration of transformers: {text}")
