"""``python -m bench``: the policies side by side; ``overhead``: what the runtime costs; ``prior``: codecs' errors."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hilore.planner.paired import RESAMPLES
from hilore.planner.sidebyside_model import QUICK_ROUNDS, Options, all_breaches, measure_model, tiny
from hilore.planner.sidebyside_policies import DELTAS, GRAINS
from hilore.planner.spec import load_spec
from hilore.planner.spec_types import ModelSpec
from hilore.runtime.errors import HiloreError

MODELS = ("examples/qwen2_shape.yaml", "examples/qwen2_shape_chunked.yaml")
PRIOR_MODEL = "examples/smollm2.yaml"
BREACH = 6
PIPE_WIDTH = 200

Report = Callable[[str, int, int], None]
Data = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark and return its exit code: 6 where a measurement broke a promise."""
    given = _parser().parse_args(arguments)
    run = {"policies": _policies, "overhead": _overhead, "prior": _prior}[given.what]
    try:
        return run(given)
    except HiloreError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("policies", "overhead", "prior"), default="policies")
    parser.add_argument("--model", action="append", metavar="MODEL.YAML", help="may be given more than once")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 15)")
    parser.add_argument("--microbatches", type=int, default=2, help="of the one update that is measured (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resamples", type=int, default=RESAMPLES, help=f"of the bootstrap (default {RESAMPLES})")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for each solve (default 20)")
    parser.add_argument("--grains", nargs="+", choices=GRAINS, help="of plans (default both; unit with a chunked head)")
    parser.add_argument("--deltas", type=float, nargs="+", default=DELTAS, help="of plans (default 0 and 1)")
    parser.add_argument("--out", metavar="FILE", help="JSON with all figures (default build/bench-WHAT.json)")
    parser.add_argument("--quick", action="store_true", help="3 rounds of a tiny model: shows that everything works")
    return parser


def _options(given: argparse.Namespace) -> Options:
    return Options(
        rounds=given.rounds or (QUICK_ROUNDS if given.quick else Options().rounds),
        microbatches=given.microbatches,
        resamples=given.resamples,
        seed=given.seed,
        threads=given.threads,
        time_limit_s=given.time_limit,
        grains=tuple(given.grains) if given.grains else None,
        deltas=tuple(given.deltas),
        command="python -m bench",
    )


def _specs(given: argparse.Namespace, default: Sequence[str]) -> list[ModelSpec]:
    specs = [load_spec(path) for path in given.model or default]
    return [tiny(spec) for spec in specs] if given.quick else specs


def _policies(given: argparse.Namespace) -> int:
    from bench.table import bench_parts, command, write_json
    from hilore.planner.sidebyside_report import models_json

    options, reports = _options(given), []
    for spec in _specs(given, MODELS):
        with _progress(spec.name) as progress:
            reports.append(measure_model(spec, options, progress))
        _print(*bench_parts(reports[-1]))
    _written(write_json, models_json(reports, options.threads, command()), given)
    return BREACH if all_breaches(reports) else 0


def _overhead(given: argparse.Namespace) -> int:
    from bench.overhead import measure_overhead
    from bench.table import overhead_json, overhead_parts, write_json

    options = _options(given)
    (spec,) = _specs(given, MODELS[:1])[:1]
    with _progress(spec.name) as progress:
        report = measure_overhead(spec, replace(options, rounds=options.rounds), progress)
    _print(*overhead_parts(report))
    _written(write_json, overhead_json(report, options.threads), given)
    return BREACH if report.result.breaches else 0


def _prior(given: argparse.Namespace) -> int:
    from dataclasses import asdict

    from bench.prior import measure_prior, offering_all
    from bench.table import command, write_json
    from hilore.planner.sidebyside_report import environment
    from hilore.planner.tracing import trace_spec

    options = _options(given)
    spec = offering_all(_specs(given, (PRIOR_MODEL,))[0])
    with _progress(spec.name) as progress:
        rows = list(measure_prior(spec, trace_spec(spec, progress), progress, seed=options.seed))
    table = Table(title=f"{spec.name}: gradient error in percent, every layer's unit of a kind at L")
    for column in ("kind", "codec", "others kept", "others recomputed"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.kind, row.codec, f"{row.kept_percent:.3f}", f"{row.recomputed_percent:.3f}")
    _print(table)
    data: Data = {"environment": environment(options.threads, command()), "prior": [asdict(row) for row in rows]}
    _written(write_json, data, given)
    return 0


def _written(
    write: Callable[[dict[str, object], str], None], data: dict[str, object], given: argparse.Namespace
) -> None:
    path = given.out or f"build/bench-{given.what}.json"
    write(data, path)
    _print(f"written: {path}")


def _print(*parts: Table | str) -> None:
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=PIPE_WIDTH)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


@contextmanager
def _progress(name: str) -> Iterator[Report]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=None)
        yield lambda step, done, total: bar.update(task, description=f"{name}: {step}", completed=done, total=total)


if __name__ == "__main__":
    warnings.simplefilter("default")
    sys.exit(main())
