"""YAML with line numbers: every key's line, duplicate keys as problems, no surprises from YAML 1.1.

PyYAML's own loader keeps the last of two equal keys in silence, reads ``1e-3`` as text and ``12:30`` as a number, so
only its parser is used, and scalars are read here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE", "yes", "Yes", "on", "On"), True),
    **dict.fromkeys(("false", "False", "FALSE", "no", "No", "off", "Off"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a file; ``line`` counts from 1, and 0 stands for the file as a whole."""

    line: int
    text: str


@dataclass(slots=True)
class Document:
    """A parsed file: ``data`` of dicts, lists and scalars; ``lines`` maps a key's path to its line."""

    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, *path: str | int) -> int:
        """The line of the longest known beginning of ``path`` (1 where there is none)."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 1


def place(path: KeyPath) -> str:
    """``("model", "config")`` as ``model.config``; the empty path as ``the top level``."""
    return ".".join(str(part) for part in path) or "the top level"


def parse_yaml(text: str) -> Document:
    """Read one YAML document. Never raises for what the text holds: what is wrong is in ``problems``."""
    document = Document()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 0
        document.problems.append(Problem(line, f"not valid YAML: {error.problem or error.context}"))
        return document
    except yaml.YAMLError as error:
        document.problems.append(Problem(0, f"not valid YAML: {error}"))
        return document
    except RecursionError:
        document.problems.append(Problem(0, "not valid YAML: lists within lists without end"))
        return document
    if node is not None:
        document.data = _read(node, (), document, ())
    return document


def _read(node: yaml.Node, path: KeyPath, document: Document, above: tuple[yaml.Node, ...]) -> Any:
    line = node.start_mark.line + 1
    document.lines.setdefault(path, line)
    if any(node is outer for outer in above):
        document.problems.append(Problem(line, f"the alias in {place(path)} contains itself"))
        return None
    if isinstance(node, yaml.MappingNode):
        return _read_mapping(node, path, document, (*above, node))
    if isinstance(node, yaml.SequenceNode):
        return [_read(item, (*path, index), document, (*above, node)) for index, item in enumerate(node.value)]
    return _read_scalar(node)


def _read_mapping(
    node: yaml.MappingNode, path: KeyPath, document: Document, above: tuple[yaml.Node, ...]
) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            document.problems.append(Problem(line, f"a key in {place(path)} is not plain text"))
            continue
        key = str(key_node.value)
        if key in data:
            first = document.lines[(*path, key)]
            document.problems.append(Problem(line, f"duplicate key '{key}' in {place(path)} (first on line {first})"))
            continue
        document.lines[(*path, key)] = line
        data[key] = _read(value_node, (*path, key), document, above)
    return data


def _read_scalar(node: yaml.Node) -> Any:
    text = str(node.value)
    if isinstance(node, yaml.ScalarNode) and node.style is not None:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text
