"""model.yaml -> ModelSpec: strict, and all problems of a file at once, each with its line."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hilore.planner.spec_checks import combined_problems
from hilore.planner.spec_config import keys_of_config
from hilore.planner.spec_rules import (
    SECTIONS,
    TOP_DEFAULTS,
    TOP_KEYS,
    Section,
    Variant,
    close_match,
    fill_derived,
    homes_of_keys,
    unknown_key,
    unknown_value,
)
from hilore.planner.spec_types import (
    Adapter,
    Batch,
    CalibrationSpec,
    Device,
    Loss,
    ModelSource,
    ModelSpec,
    Optimizer,
    Parallel,
    Precision,
    Resident,
)
from hilore.planner.yaml_lines import Document, Problem, parse_yaml, place
from hilore.runtime.codecs import CODEC_NAMES, codec_problem
from hilore.runtime.errors import HiloreError

__all__ = [
    "Adapter",
    "Batch",
    "CalibrationSpec",
    "Device",
    "Loss",
    "ModelSource",
    "ModelSpec",
    "Optimizer",
    "Parallel",
    "Precision",
    "Resident",
    "SpecError",
    "load_spec",
    "spec_as_dict",
    "spec_from_dict",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_ADAPTERS: dict[str, TypeAdapter[Any]] = {}


class SpecError(HiloreError):
    """A model.yaml cannot be used. ``problems``: one line each, ``file:line: message``."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems), problems=problems)
        self.problems = problems


def load_spec(path: str | Path) -> ModelSpec:
    """Read and check one model.yaml.

    Raises SpecError with every problem of the file: unknown, misplaced, duplicate and missing keys, wrong values,
    keys that the chosen kind does not use.
    """
    label = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError((f"{label}: no such file",)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError((f"{label}: cannot be read: {error}",)) from error
    document = parse_yaml(text)
    problems = list(document.problems)
    values: dict[str, Any] = {}
    if document.data is None and not problems:
        problems.append(Problem(0, "the file is empty; it needs at least name, model, batch and device"))
    elif isinstance(document.data, dict):
        values = _read_top(document, problems)
    elif not problems:
        kind = "a list" if isinstance(document.data, list) else f"'{document.data}'"
        problems.append(Problem(document.line(), f"expected keys such as 'model:' at the top level, found {kind}"))
    if problems:
        ordered = sorted(dict.fromkeys(problems), key=lambda problem: problem.line)
        raise SpecError(tuple(f"{label}:{p.line}: {p.text}" if p.line else f"{label}: {p.text}" for p in ordered))
    return ModelSpec(path=label, **values)


def spec_as_dict(spec: ModelSpec) -> dict[str, Any]:
    """The spec as JSON values, without the path of its file: what trace and fingerprint store."""
    data = asdict(spec)
    del data["path"]
    plain: dict[str, Any] = json.loads(json.dumps(data))
    return plain


def spec_from_dict(data: dict[str, Any]) -> ModelSpec:
    """The inverse of ``spec_as_dict``, for what a trace stores. Raises SpecError."""
    try:
        spec: ModelSpec = _adapter(ModelSpec).validate_json(json.dumps(data))
    except ValidationError as error:
        lines = tuple(f"spec in the trace: {place(item['loc'])}: {item['msg']}" for item in error.errors())
        raise SpecError(lines) from None
    return spec


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return _ADAPTERS.setdefault(kind.__name__, TypeAdapter(kind))


def _read_top(document: Document, problems: list[Problem]) -> dict[str, Any]:
    data = document.data
    homes = homes_of_keys()
    for key in data:
        if key not in TOP_KEYS:
            problems.append(Problem(document.line(key), unknown_key(key, "", TOP_KEYS, homes)))
    taken: dict[str, Any] = {}
    raw = {name: _read_section(name, document, taken, problems) for name in SECTIONS}
    fill_derived(raw, taken)
    values: dict[str, Any] = {name: _typed(name, raw[name], document, problems) for name in SECTIONS}
    values["name"] = _read_name(document, problems)
    values["codecs"] = _read_codecs(document, problems)
    values["region_grain"] = _read_grain(document, problems)
    for key, default in TOP_DEFAULTS.items():
        if key not in data:
            taken[key] = default
    values["defaults_taken"] = taken
    problems.extend(combined_problems(values, document))
    return values


def _read_section(
    name: str, document: Document, taken: dict[str, Any], problems: list[Problem]
) -> dict[str, Any] | None:
    """The section with its defaults (DERIVED ones still to be filled in), or None where it cannot be used."""
    section = SECTIONS[name]
    line = document.line(name)
    if name in document.data:
        given = document.data[name]
        if section.word and given == section.word:
            given = {section.selector: section.word}
        if not isinstance(given, dict):
            example = section.selector or next(iter(section.keys))
            shown = "nothing" if given is None else f"'{given}'"
            problems.append(Problem(line, f"{name} must hold keys such as '{example}:', found {shown}"))
            return None
    elif section.absent is None:
        problems.append(Problem(1, f"missing '{name}' at the top level"))
        return None
    else:
        given = dict(section.absent)
        taken.update({f"{name}.{key}": value for key, value in given.items()})
    guessed = _report_unknown(name, section, given, document, problems)
    variant = _variant(name, section, given, document, problems)
    if variant is None:
        return None
    for key in given:
        if key in section.keys and key not in variant.keys:
            chosen = f"{section.selector}: {given[section.selector]}"
            problems.append(Problem(document.line(name, key), f"key '{key}' in {name} is not used with {chosen}"))
    missing = [key for key in variant.required if key not in given]
    problems.extend(Problem(line, f"missing '{key}' in {name}") for key in missing if key not in guessed)
    for key, default in variant.defaults.items():
        if key not in given:
            taken[f"{name}.{key}"] = default
    return {**section.empty, **variant.defaults, **{key: given[key] for key in variant.keys if key in given}}


def _report_unknown(
    name: str, section: Section, given: dict[str, Any], document: Document, problems: list[Problem]
) -> set[str]:
    """Report keys that the section does not have; returns the known keys that they were probably meant to be."""
    homes = homes_of_keys()
    if name == "model":
        homes["model.config"] = keys_of_config(given)
    guessed = set()
    for key in given:
        if key not in section.keys:
            problems.append(Problem(document.line(name, key), unknown_key(key, name, section.keys, homes)))
            guessed.add(close_match(key, section.keys))
    return guessed


def _variant(
    name: str, section: Section, given: dict[str, Any], document: Document, problems: list[Problem]
) -> Variant | None:
    if not section.selector:
        return section.variants[""]
    chosen = given.get(section.selector)
    if isinstance(chosen, str) and chosen in section.variants:
        return section.variants[chosen]
    known = ", ".join(section.variants)
    if section.selector not in given:
        text = f"missing '{section.selector}' in {name} (one of {known})"
        problems.append(Problem(document.line(name), text))
    else:
        line = document.line(name, section.selector)
        problems.append(Problem(line, unknown_value(f"{name}.{section.selector}", chosen, tuple(section.variants))))
    return None


def _typed(name: str, raw: dict[str, Any] | None, document: Document, problems: list[Problem]) -> Any:
    """The section as its dataclass; None, with problems, where a value is of the wrong kind."""
    if raw is None:
        return None
    try:
        return _adapter(SECTIONS[name].type).validate_json(json.dumps(raw))
    except ValidationError as error:
        seen = set()
        for item in error.errors():
            key = str(item["loc"][0]) if item["loc"] else ""
            if key not in seen and not item["type"].startswith("missing"):
                seen.add(key)
                problems.append(_wrong_value(name, key, raw.get(key), item, document))
        return None


def _wrong_value(name: str, key: str, value: Any, item: Any, document: Document) -> Problem:
    line = document.line(name, key)
    if item["type"] == "literal_error":
        known = tuple(re.findall(r"'([^']*)'", item["ctx"]["expected"]))
        return Problem(line, unknown_value(f"{name}.{key}", value, known))
    if key == "targets":
        return Problem(line, f"adapter.targets must be all-linear or a list of module names, found {value!r}")
    wanted = str(item["msg"]).removeprefix("Input ").removeprefix("should be ")
    return Problem(line, f"{name}.{key} must be {wanted}, found {json.dumps(value)}")


def _read_name(document: Document, problems: list[Problem]) -> str:
    name = document.data.get("name")
    line = document.line("name")
    if "name" not in document.data:
        problems.append(Problem(1, "missing 'name' at the top level"))
    elif not isinstance(name, str) or not _NAME.fullmatch(name):
        problems.append(Problem(line, f"name '{name}' must be letters, digits, '.', '_', '+', '-': plan files bear it"))
    elif re.search(r"\.t\d+$", name):
        problems.append(Problem(line, f"name '{name}' must not end in '.t<number>': plan files of a bucket do"))
    else:
        return name
    return ""


def _read_codecs(document: Document, problems: list[Problem]) -> tuple[str, ...] | None:
    if "codecs" not in document.data:
        return None
    codecs = document.data["codecs"]
    if not isinstance(codecs, list):
        problems.append(Problem(document.line("codecs"), f"codecs must be a list of codec names, found {codecs!r}"))
        return ()
    for index, codec in enumerate(codecs):
        line = document.line("codecs", index)
        if codec_problem(codec):
            problems.append(Problem(line, unknown_value("a codec", codec, CODEC_NAMES)))
        elif codec in codecs[:index]:
            problems.append(Problem(line, f"codec '{codec}' is named twice"))
    return tuple(codecs)


def _read_grain(document: Document, problems: list[Problem]) -> str:
    grain = document.data.get("region_grain", "layer")
    if grain not in ("layer", "block"):
        line = document.line("region_grain")
        problems.append(Problem(line, unknown_value("region_grain", grain, ("layer", "block"))))
    return str(grain)
