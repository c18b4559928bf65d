"""The rules of model.yaml: which keys a section takes, what is the default of each, where a stray key belongs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from hilore.planner import spec_types as types


@dataclass(frozen=True, slots=True)
class Variant:
    """The keys that one value of a section's selector allows. Fields outside both sets take the section's ``empty``.

    A default of ``DERIVED`` depends on other sections and is filled in by planner/spec.py.
    """

    required: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.required, *self.defaults)


@dataclass(frozen=True, slots=True)
class Section:
    """One section. ``selector``: the key whose value names the variant, or empty where there is only one, ``""``.

    ``absent``: what a file without the section means, or None where the section is required. ``word``: a value that
    may stand for the whole section (``parallel: none``).
    """

    type: type[Any]
    variants: Mapping[str, Variant]
    selector: str = ""
    absent: Mapping[str, Any] | None = field(default_factory=dict)
    word: str = ""
    empty: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(item.name for item in fields(self.type))


DERIVED = object()

SECTIONS: dict[str, Section] = {
    "model": Section(
        types.ModelSource,
        selector="source",
        absent=None,
        variants={
            "hf-config": Variant(("source", "config"), {"attention": "sdpa"}),
            "hf": Variant(("source", "path"), {"attention": "sdpa"}),
            "package": Variant(("source", "package"), {"attention": "sdpa"}),
            "python": Variant(("source", "factory"), {"attention": "sdpa"}),
        },
        empty={"config": {}, "path": "", "package": "", "factory": ""},
    ),
    "adapter": Section(
        types.Adapter,
        selector="kind",
        absent={"kind": "none"},
        word="none",
        variants={
            "none": Variant(("kind",)),
            "lora": Variant(
                ("kind",), {"rank": 16, "alpha": 32, "dropout": 0.0, "targets": "all-linear", "dtype": "float32"}
            ),
        },
        empty={"rank": 0, "alpha": 0, "dropout": 0.0, "targets": "", "dtype": ""},
    ),
    "precision": Section(
        types.Precision,
        variants={
            "": Variant(
                (),
                {"params": "bfloat16", "compute": DERIVED, "autocast": False, "master": None, "grads": DERIVED},
            )
        },
    ),
    "batch": Section(
        types.Batch,
        absent=None,
        variants={
            "": Variant(
                ("microbatch", "prompt_tokens", "response_tokens"),
                {"length_buckets": DERIVED, "accumulation": 1, "layout": "padded"},
            )
        },
    ),
    "optimizer": Section(types.Optimizer, variants={"": Variant((), {"kind": "adamw", "state": DERIVED})}),
    "resident": Section(types.Resident, variants={"": Variant((), {"reference": False, "other_mib": 0})}),
    "loss": Section(
        types.Loss,
        variants={
            "": Variant(
                (),
                {
                    "kind": "grpo",
                    "clip_low": 0.2,
                    "clip_high": 0.2,
                    "beta": 0.0,
                    "inner_epochs": 1,
                    "head": "naive",
                },
            )
        },
    ),
    "parallel": Section(
        types.Parallel,
        selector="kind",
        absent={"kind": "none"},
        word="none",
        variants={
            "none": Variant(("kind",)),
            **{
                kind: Variant(
                    ("kind", "world_size"), {"reshard_after_forward": True, "gradient_sync": "every_microbatch"}
                )
                for kind in ("fsdp2", "fsdp1")
            },
        },
        empty={"world_size": 1, "reshard_after_forward": False, "gradient_sync": "every_microbatch"},
    ),
    "device": Section(
        types.Device,
        selector="kind",
        absent=None,
        word="cpu",
        variants={"cpu": Variant(("kind",)), "cuda": Variant(("kind",), {"gpu": ""})},
        empty={"gpu": ""},
    ),
    "calibration": Section(
        types.CalibrationSpec,
        selector="source",
        absent={"source": "prior"},
        variants={
            source: Variant(
                ("source", "path") if source == "rollouts" else ("source",),
                {"microbatches": 24, "reference_error": 0.01, "confidence": 0.95},
            )
            for source in ("prior", "rollouts", "synthetic", "generate")
        },
        empty={"path": ""},
    ),
}

TOP_KEYS = ("name", *SECTIONS, "codecs", "region_grain")
TOP_DEFAULTS: dict[str, Any] = {"codecs": None, "region_grain": "layer"}

# Keys of a transformers config that model.yaml says elsewhere.
SAID_ELSEWHERE = {
    "dtype": "precision.params",
    "torch_dtype": "precision.params",
    "attn_implementation": "model.attention",
    "_attn_implementation": "model.attention",
    "gradient_checkpointing": "no section (a trace is made without it)",
}


def close_match(word: str, known: tuple[str, ...]) -> str:
    """The one of ``known`` that looks like ``word``, swapped letters first, or the empty string."""
    found = difflib.get_close_matches(word, known, n=3, cutoff=0.7)
    swapped = [name for name in found if sorted(name) == sorted(word)]
    return (swapped or found or [""])[0]


def unknown_value(where: str, value: object, known: tuple[str, ...]) -> str:
    """The message for a value that is none of ``known``."""
    guess = close_match(value, known) if isinstance(value, str) else ""
    hint = f"; did you mean '{guess}'?" if guess else ""
    return f"{where} is '{value}', expected one of {', '.join(known)}{hint}"


def unknown_key(key: str, section: str, known: tuple[str, ...], elsewhere: Mapping[str, tuple[str, ...]]) -> str:
    """The message for a key that ``section`` does not have; ``elsewhere`` maps other sections to their keys."""
    text = f"unknown key '{key}' in {section}" if section else f"unknown key '{key}' at the top level"
    homes = [name for name, keys in elsewhere.items() if key in keys and name != section]
    if homes:
        return f"{text}; it belongs in {' or '.join(home or 'the top level' for home in homes)}"
    guess = close_match(key, known)
    if guess:
        return f"{text}; did you mean '{guess}'?"
    for name, keys in elsewhere.items():
        guess = close_match(key, keys)
        if guess:
            return f"{text}; did you mean '{guess}'? It belongs in {name or 'the top level'}"
    return f"{text} (known: {', '.join(known)})"


def homes_of_keys() -> dict[str, tuple[str, ...]]:
    """Every section's keys; the top level stands under the empty name."""
    homes = {name: section.keys for name, section in SECTIONS.items()}
    homes[""] = TOP_KEYS
    return homes


def fill_derived(raw: dict[str, dict[str, Any] | None], taken: dict[str, Any]) -> None:
    """Fill in defaults that follow from other keys: what PyTorch does when nothing else is said."""
    precision, adapter, batch = raw["precision"] or {}, raw["adapter"] or {}, raw["batch"] or {}
    params = _dtype_or(precision.get("params"), "bfloat16")
    trainable = _dtype_or(adapter.get("dtype"), params)
    tokens = (batch.get("prompt_tokens"), batch.get("response_tokens"))
    longest = sum(count for count in tokens if type(count) is int)
    rows = batch.get("microbatch")
    sequences = rows if batch.get("layout") == "packed" and type(rows) is int else 1
    derived: dict[str, Any] = {
        "precision.compute": "bfloat16" if precision.get("autocast") is True else params,
        "precision.grads": trainable,
        "optimizer.state": _dtype_or(precision.get("master"), trainable),
        "batch.length_buckets": [max(longest, 1) * sequences],
    }
    for key, value in derived.items():
        name, _, item = key.partition(".")
        section = raw[name]
        if section is not None and section.get(item) is DERIVED:
            section[item] = value
        if taken.get(key) is DERIVED:
            taken[key] = value


def _dtype_or(value: object, default: str) -> str:
    """``value`` where it is a dtype's name; a wrong one is reported at its own key, not at those that follow it."""
    return value if isinstance(value, str) and value in get_args(types.Dtype) else default
