"""``python -m bench.planning --out FOLDER``: trace, solve and ``verify --fake`` of the examples, and what they cost.

Each command of ``hilore-plan`` runs in a process of its own, which gives its CPU seconds and its highest resident
memory. Traces and plans are left in the folder: ``plans/NAME`` at 30,318 MiB, ``plans/NAME-tight`` at 1.05 times GC's
predicted peak. Exit code 6 where a command failed or a plan did not verify.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from bench.planning_view import Command, markdown, plans_readme
from bench.table import environment, write_json
from hilore.planner.budget import MIB
from hilore.planner.files import replace_file
from hilore.planner.spec import load_spec
from hilore.planner.tracefile import load_trace
from hilore.planner.verify import reference_peaks

BREACH = 6
EXAMPLES = "qwen2.5-3b,phi-3.5-mini,llama-3.1-8b,smollm2"
BUDGET_MIB = 30318
TIGHT = 1.05
DELTA = "1.0"

Runner = Callable[[Sequence[str], Path], "Cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process: its exit code, seconds, highest resident bytes, and the last line that it printed."""

    exit_code: int
    wall_s: float
    cpu_s: float
    ram_bytes: int
    last_line: str


def run_process(arguments: Sequence[str], folder: Path) -> Cost:
    """``hilore-plan ARGUMENTS`` in ``folder``; its output goes to a file there."""
    began = time.perf_counter()
    output = folder / "output.txt"
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "hilore.cli", *arguments], cwd=folder, stdout=file, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    lines = output.read_text(encoding="utf-8").strip().splitlines()
    # Linux counts in KiB, macOS in bytes.
    ram = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    seconds = time.perf_counter() - began, usage.ru_utime + usage.ru_stime
    return Cost(process.returncode, seconds[0], seconds[1], ram, lines[-1] if lines else "")


def planned(example: Path, folder: Path, run: Runner, *, verified: bool, least_only: bool) -> Iterator[Command]:
    """The commands of one example in order; stops where one fails. ``least_only``: the tight budget alone."""
    name = load_spec(example).name
    trace = f"{name}.trace.json"

    def command(what: str, plans: str, *arguments: str) -> Command:
        cost = run(arguments, folder)
        typed = shlex.join(["hilore-plan", *(_short(argument, example) for argument in arguments)])
        return Command(example.stem, what, plans, typed, **asdict(cost))

    traced = command("trace", "", "trace", str(example), "--out", trace)
    yield traced
    if traced.exit_code:
        return
    gc_peak, _ = reference_peaks(load_trace(folder / trace))
    tight = -(-int(TIGHT * gc_peak) // MIB)
    budgets = {f"{example.stem}-tight": tight}
    if not least_only:
        budgets = {example.stem: BUDGET_MIB, **budgets}
    for plans, budget in budgets.items():
        out = f"plans/{plans}"
        solved = command(
            "solve", plans, "solve", "--trace", trace, "--budget", str(budget), "--delta", DELTA, "--out", out
        )
        yield solved
        if solved.exit_code:
            return
        if verified:
            plan = f"{out}/{name}.high.json"
            yield command("verify", plans, "verify", plan, "--model", str(example), "--trace", trace, "--fake")


def _short(argument: str, example: Path) -> str:
    return f"examples/{example.name}" if argument == str(example) else argument


def main(arguments: Sequence[str] | None = None, run: Runner = run_process) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.planning", description=__doc__)
    parser.add_argument("--examples", default=EXAMPLES, metavar="NAME,...", help=f"files of examples/; {EXAMPLES}")
    parser.add_argument("--folder", default="examples", help="where their model.yaml files lie")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="traces, plans, costs.json and plans/README.md")
    parser.add_argument("--markdown", metavar="FILE", help="the document with its tables")
    parser.add_argument("--no-verify", action="store_true", help="without verify --fake")
    parser.add_argument("--tight-only", action="store_true", help="without the budget of 30,318 MiB")
    given = parser.parse_args(arguments)
    out = Path(given.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    found: list[Command] = []
    for name in given.examples.split(","):
        example = (Path(given.folder) / f"{name}.yaml").resolve()
        # A model small enough for a CPU has no use for a card's budget.
        least_only = given.tight_only or load_spec(example).device.kind == "cpu"
        for command in planned(example, out, run, verified=not given.no_verify, least_only=least_only):
            found.append(command)
            sys.stdout.write(
                f"{command.typed}: exit {command.exit_code}, {command.wall_s:.1f} s, CPU {command.cpu_s:.1f} s, "
                f"{command.ram_bytes / MIB:,.0f} MiB\n{'  ' + command.last_line if command.exit_code else ''}\n"
            )
            sys.stdout.flush()
    typed = f"python -m bench.planning --examples {given.examples} --out FOLDER --markdown FILE"
    data = {"environment": environment(1, typed), "commands": [asdict(one) for one in found]}
    write_json(data, str(out / "costs.json"))
    replace_file(out / "plans" / "README.md", plans_readme(found))
    if given.markdown:
        replace_file(given.markdown, markdown(found, out, typed))
    return BREACH if any(command.exit_code for command in found) else 0


if __name__ == "__main__":
    sys.exit(main())
