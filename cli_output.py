"""What the commands share: how they print, and options that more than one of them has."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Without a terminal (a pipe, a log) rich would fold tables to 80 columns.
PIPE_WIDTH = 160

TraceOption = Annotated[str | None, typer.Option("--trace", metavar="FILE", help="Default: the newest trace here.")]
PlanTraceOption = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Default: NAME.trace.json here, else the newest one.")
]
# Seeds of plans and microbatches are multiples of it, and have to fit torch's 64 bits.
MOST_SEED = 2**31 - 1
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file.")]
PlansArgument = Annotated[list[str], typer.Argument(metavar="PLAN...", help="Plan files.")]


def print_parts(*parts: str | Table) -> None:
    """Lines and tables on stdout; lines are never folded."""
    console = _console()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(data, allow_nan=False) + "\n")


def complain(text: str) -> None:
    """One message on stderr."""
    sys.stderr.write(text + "\n")


def _console() -> Console:
    from rich.console import Console

    plain = Console(markup=False, highlight=False)
    return plain if plain.is_terminal else Console(markup=False, highlight=False, width=PIPE_WIDTH)
