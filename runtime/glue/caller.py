"""What the source of apply_rotary_pos_emb's caller shows: whether it lets go of q and k with the call."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from functools import cache
from types import CodeType

# What a tensor is asked for without an operator.
_DESCRIBING = ("shape", "dtype", "device", "ndim")


@cache
def lets_go(code: CodeType, function: str) -> bool:
    """Whether code binds the results of every call of ``function`` to the names that it passed as q and k, has bound
    each of these to something made for it alone, and did nothing else with that before."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == function]
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and node.value in calls]
    if len(calls) != len(assigned) or not all(_rebinds(node) for node in assigned):
        return False
    return all(_are_alone(tree, _names(call.args[:2]), call) for call in calls)


def _rebinds(node: ast.Assign) -> bool:
    (target, *others), call = node.targets, node.value
    if others or not isinstance(target, ast.Tuple) or not isinstance(call, ast.Call) or len(target.elts) != 2:
        return False
    passed = [_name(argument) for argument in call.args[:2]]
    return None not in passed and passed[0] != passed[1] and passed == [_name(element) for element in target.elts]


def _are_alone(tree: ast.AST, names: set[str], call: ast.Call) -> bool:
    def before(node: ast.expr | ast.stmt) -> bool:
        return (node.lineno, node.col_offset) < (call.lineno, call.col_offset)

    allowed: set[ast.AST] = set()
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _DESCRIBING:
            allowed.add(node.value)
        elif isinstance(node, ast.Assign) and before(node) and _makes(node, call):
            targets = _names(node.targets)
            bound |= targets if node.value is not call else set()
            allowed |= {part for part in ast.walk(node) if isinstance(part, ast.Name) and part.id in targets}
    used = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names and before(node))
    return names <= bound and all(node in allowed for node in used)


def _makes(node: ast.Assign, call: ast.Call) -> bool:
    """Whether it binds what nobody else has a name for."""
    if node.value is call:
        return True
    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    return len(node.targets) == 1 and all(isinstance(value, (ast.Call, ast.BinOp, ast.Subscript)) for value in values)


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def _name(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None
