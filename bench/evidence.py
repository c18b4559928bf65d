"""``python -m bench.evidence``: predicted against measured errors on rollouts and plans that calibration never saw.

Stages, in order (all by default; each goes on from where it was stopped, and later ones read what earlier ones wrote):

- ``rollouts``: the actor answers two tasks; three files: for calibration, the same task again, the other task
- ``calibrate``: trace and calibration on the first file
- ``solve``: plans at each delta, one set with the rule each, one with the rule joint where calibration allows it
- ``same``, ``other``: updates composed of held-out microbatches, after an inner epoch that moved the policy
- ``risk``: errors of single regions on single microbatches, one codec at a time, against the risk scores
- ``report``: tables and JSON

Two processes can share the work: run ``same`` and ``other`` beside each other once ``solve`` is done.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hilore.planner.calibration_measure as calibration_measure
from bench import evidence_stages as stages
from hilore.planner.spec import load_spec
from hilore.runtime.errors import HiloreError

STAGES = ("rollouts", "calibrate", "solve", "same", "other", "risk", "report")


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    spec = load_spec(given.model)
    calibration = replace(
        spec.calibration,
        source="rollouts",
        path="",
        microbatches=given.calibration_microbatches,
        confidence=given.confidence,
    )
    setting = stages.Setting(replace(spec, calibration=calibration), Path(given.folder), given)
    setting.folder.mkdir(parents=True, exist_ok=True)
    calibration_measure.FIT_PASSES = (given.fit_passes, given.fit_passes)
    by_name: dict[str, Callable[[stages.Setting], None]] = {
        "rollouts": stages.rollouts,
        "calibrate": stages.calibrate,
        "solve": stages.solve,
        "same": lambda given_setting: stages.held_out(given_setting, "same"),
        "other": lambda given_setting: stages.held_out(given_setting, "other"),
        "risk": stages.risk,
        "report": stages.report,
    }
    try:
        for stage in given.stage or STAGES:
            by_name[stage](setting)
    except HiloreError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.evidence", description=__doc__)
    parser.add_argument("stage", nargs="*", choices=[*STAGES, []], help="default: all, in order")
    parser.add_argument("--model", default="bench/evidence.yaml", metavar="MODEL.YAML")
    parser.add_argument("--folder", default="build/evidence", help="where everything goes")
    parser.add_argument(
        "--tasks", nargs=2, default=("knights_knaves", "chain_sum"), help="calibrated on, and the other"
    )
    parser.add_argument("--calibration-microbatches", type=int, default=32, help="of exposure above 0")
    parser.add_argument("--microbatches", type=int, default=64, help="of exposure above 0, held out, per task")
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--fit-passes", type=int, default=8, help="random plans per microbatch in the fit")
    parser.add_argument("--deltas", nargs="+", type=float, default=(0.5, 1.0, 2.0))
    parser.add_argument("--part", type=float, default=0.5, help="budget: share of the way from GC's peak to No-GC's")
    parser.add_argument("--random-plans", type=int, default=2, help="held-out random plans")
    parser.add_argument("--updates", type=int, default=200, help="composed per split")
    parser.add_argument("--lr", type=float, default=3e-4, help="of the inner epoch before measuring; 0: none")
    parser.add_argument("--native", type=int, default=8, help="microbatches in the actor's own dtypes")
    parser.add_argument("--risk-microbatches", type=int, default=9, help="the first is the reference")
    parser.add_argument("--risk-codecs", nargs="+", default=("int8-g128",))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="FILE", help="JSON (default FOLDER/evidence.json)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
