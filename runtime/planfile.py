"""Plan files: read strictly, written whole or not at all."""

from __future__ import annotations

import glob
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hilore.runtime.errors import PlanFileError
from hilore.runtime.plan import REGIME_LABELS, SCHEMA_VERSION, Plan
from hilore.runtime.planset import PlanSet

__all__ = ["PlanSet", "load_plan", "load_plans", "plan_text", "save_plan"]

_ADAPTER: TypeAdapter[Plan] = TypeAdapter(Plan)
_SHOWN_PROBLEMS = 10


def load_plans(source: str | Path | Iterable[str | Path]) -> PlanSet:
    """All plans of a glob pattern or of given paths, as one set.

    Raises PlanFileError: no file matches, a file is cut short or of another schema_version, unknown, missing or
    wrong fields, no fingerprint, plans of two models, two set_ids under one name, a length bucket without one of the
    four regimes.
    """
    if isinstance(source, (str, Path)):
        paths = sorted(glob.glob(str(source)))
        if not paths:
            raise PlanFileError(
                f"{source}: no such plan file; make plans with: hilore-plan solve --budget N --delta D",
                path=str(source),
            )
    else:
        paths = [str(path) for path in source]
    found = PlanSet(tuple(load_plan(path) for path in paths))
    _refuse_missing(found)
    return found


def load_plan(path: str | Path) -> Plan:
    """One plan. Raises PlanFileError as ``load_plans``."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanFileError(f"{path}: no such plan file", path=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanFileError(f"{path}: cannot be read: {error}", path=str(path)) from error
    data = _parse(text, path)
    if "path" in data:
        raise PlanFileError(f"{path}: unknown key 'path'", path=str(path))
    try:
        plan = _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        found = [f"{path}: {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        if len(found) > _SHOWN_PROBLEMS:
            found = [*found[:_SHOWN_PROBLEMS], f"{path}: and {len(found) - _SHOWN_PROBLEMS} more problems"]
        raise PlanFileError("\n".join(found), path=str(path)) from None
    _check(plan, path)
    return replace(plan, path=str(path))


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write one plan; an earlier file of that name is replaced only once the new one is complete."""
    temporary = Path(f"{path}.tmp{os.getpid()}")
    try:
        temporary.write_text(plan_text(plan), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise PlanFileError(f"{path}: cannot be written: {error.strerror or error}", path=str(path)) from error


def plan_text(plan: Plan) -> str:
    """The file's text: keys in schema order, no NaN."""
    data = asdict(plan)
    del data["path"]
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _parse(text: str, path: str | Path) -> dict[str, Any]:
    try:
        data: Any = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant, parse_float=_finite
        )
    except json.JSONDecodeError as error:
        raise PlanFileError(
            f"{path}:{error.lineno}: not valid JSON (cut short?): {error.msg}; solve again", path=str(path)
        ) from None
    except ValueError as error:
        raise PlanFileError(f"{path}: {error}", path=str(path)) from None
    except RecursionError:
        raise PlanFileError(f"{path}: not a plan: lists within lists without end", path=str(path)) from None
    if not isinstance(data, dict):
        raise PlanFileError(f"{path}: not a plan: expected an object at the top level", path=str(path))
    version = data.get("schema_version")
    if version is None and "trace_version" in data:
        raise PlanFileError(
            f"{path}: a trace, not a plan; `hilore-plan solve --trace {path} --budget N --delta D` makes plans of it",
            path=str(path),
        )
    if version != SCHEMA_VERSION:
        raise PlanFileError(
            f"{path}: schema_version is {version!r}, this runtime reads {SCHEMA_VERSION}; solve again with this "
            "hilore-plan",
            path=str(path),
        )
    if not data.get("fingerprint"):
        raise PlanFileError(
            f"{path}: the plan has no fingerprint, so nothing says which model it is for; solve again", path=str(path)
        )
    return data


def _check(plan: Plan, path: str | Path) -> None:
    """What the schema cannot say: exposures in order, codec exactly at L, a held region all H, each unit inside its
    region, once."""
    low, high = plan.regime.exposure_low, plan.regime.exposure_high
    if not 0 <= low <= high or (plan.regime.label == "null" and high > 0):
        raise PlanFileError(f"{path}: regime {plan.regime.label} from exposure {low} to {high}", path=str(path))
    for region in plan.regions:
        for unit in region.units:
            problem = ""
            if (unit.codec is None) == (unit.mode == "L"):
                problem = f"mode {unit.mode} with codec {unit.codec}"
            elif region.hold and unit.mode != "H":
                problem = f"mode {unit.mode} in a held region"
            elif unit.mode != "R" and unit.dead:
                problem = f"mode {unit.mode} and dead"
            elif unit.mode != "R" and unit.dead_late:
                problem = f"mode {unit.mode} and dead_late"
            elif unit.mode == "H" and (unit.dead_if_demoted or unit.dead_late_if_demoted):
                problem = "mode H and dead when demoted"
            elif not unit.name.startswith(f"{region.name}."):
                problem = f"is not in region {region.name}"
            if problem:
                raise PlanFileError(f"{path}: {unit.name}: {problem}", path=str(path), unit=unit.name)
        if region.split_at is not None and region.split_at not in {unit.name for unit in region.units}:
            raise PlanFileError(
                f"{path}: {region.name}: split_at {region.split_at} is no unit of it", path=str(path), unit=region.name
            )
    names = [*(region.name for region in plan.regions), *plan.unit_names]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanFileError(f"{path}: {twice} appears twice", path=str(path), unit=twice)


def _refuse_missing(plans: PlanSet) -> None:
    for bucket in plans.buckets:
        there = [plan for plan in plans.plans if plan.length_bucket == bucket]
        labels = {plan.regime.label for plan in there}
        missing = [label for label in REGIME_LABELS if label not in labels]
        if missing:
            raise PlanFileError(
                f"{there[0].path}: for {bucket} tokens there is no {missing[0]} plan among the {len(there)} loaded; "
                f"load all {len(REGIME_LABELS)} regimes, or solve again",
                path=there[0].path,
            )


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [key for key, _ in pairs]
        raise ValueError(f"duplicate key '{next(name for name in names if names.count(name) > 1)}'")
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that a plan can hold")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_constant(text)
