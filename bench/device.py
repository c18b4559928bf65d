"""``python -m bench.device``: what plans promise, measured on the device that is here.

GC, No-GC and plans (delta 0 and 1; of times measured here and of times estimated without the device) of a
Qwen2.5-3B-shaped actor with random weights, LoRA, one row of 4,096 tokens: allocated and reserved peaks beside
predictions, step times, gains, gradient errors beside their noise, and the bias of the estimate. Made for one GPU and
under 8 minutes; nothing is downloaded. ``--device cpu --tiny`` runs the same code on any machine in under a minute.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from bench.device_runs import DeviceReport, Options, measure_device, one_device
from bench.device_view import report_parts
from bench.table import write_json
from hilore.cli_output import print_parts
from hilore.planner.progress import progress_bar
from hilore.planner.sidebyside_model import tiny
from hilore.planner.sidebyside_report import environment
from hilore.planner.spec import load_spec
from hilore.runtime.errors import HiloreError

BREACH = 6
MODEL = "examples/qwen2.5-3b.yaml"
TINY_ROUNDS = 3
TINY_CODECS = ("int8-g128",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write the JSON; exit code 6 where a promise did not hold, 2 where there is no such device."""
    given = _parser().parse_args(arguments)
    try:
        report = _measured(given)
    except HiloreError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    print_parts(*report_parts(report))
    path = given.out or _default_path(report, given)
    write_json({"environment": environment(torch.get_num_threads(), _command(given)), "device": asdict(report)}, path)
    print_parts(f"written: {path}")
    return BREACH if report.breaches else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.device", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", metavar="MODEL.YAML", default=MODEL, help=f"(default {MODEL}); one device, bfloat16")
    parser.add_argument("--tiny", action="store_true", help="the same proportions at a size that takes seconds")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 15; tiny 3)")
    parser.add_argument("--ceilings", type=float, nargs="+", help="budgets as multiples of GC's peak (default 1.05)")
    parser.add_argument("--seconds", type=float, default=Options().seconds, help="no round begins after so many")
    parser.add_argument("--out", metavar="FILE", help="JSON (default docs/measurements/device-NAME.json; tiny: build/)")
    return parser


def _measured(given: argparse.Namespace) -> DeviceReport:
    options = Options(
        device=given.device,
        rounds=given.rounds or (TINY_ROUNDS if given.tiny else Options().rounds),
        ceilings=tuple(given.ceilings or Options().ceilings),
        seconds=given.seconds,
    )
    spec = one_device(load_spec(given.model), given.device)
    if given.tiny:
        spec = replace(tiny(spec), codecs=TINY_CODECS)
    with progress_bar() as tell:
        return measure_device(spec, options, tell)


def _command(given: argparse.Namespace) -> str:
    tiny_option = " --tiny" if given.tiny else ""
    return f"python -m bench.device --device {given.device}{tiny_option} --model {given.model}"


def _default_path(report: DeviceReport, given: argparse.Namespace) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", str(report.device.get("name", report.device["kind"])).lower()).strip("-")
    return f"build/device-{name}-tiny.json" if given.tiny else f"docs/measurements/device-{name}.json"


if __name__ == "__main__":
    warnings.simplefilter("default")
    sys.exit(main())
