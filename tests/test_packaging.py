"""pyproject.toml against the folders: what is forgotten there is missing from an installation."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import get_args

from hilore.planner.spec_types import LossKind
from hilore.runtime.losses import LOSS_KINDS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SOURCES = ("planner", "runtime")


def test_every_package_is_listed() -> None:
    folders = {path.parent for source in SOURCES for path in (ROOT / source).rglob("*.py")}
    found = {".".join(("hilore", *folder.relative_to(ROOT).parts)) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == {"hilore", *found}


def test_every_other_file_is_package_data() -> None:
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for source in SOURCES:
        for path in (ROOT / source).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                package = ".".join(("hilore", *path.parent.relative_to(ROOT).parts))
                assert any(path.match(pattern) for pattern in data.get(package, [])), path


def test_constraints_pin_every_requirement() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *(entry for entries in extras.values() for entry in entries)]
    names = {entry.lower().replace("_", "-").split(">")[0] for entry in wanted}
    assert names <= {name.replace("_", "-") for name in pins}
    assert pins["torch"] == "2.13.0"


def test_loss_kinds_are_those_of_the_runtime() -> None:
    assert set(get_args(LossKind)) == set(LOSS_KINDS)
