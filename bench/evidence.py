"""``python -m bench.evidence``: predicted against measured errors on rollouts and plans that calibration never saw.

Stages, in order (all by default; each goes on from where it was stopped, and later ones read what earlier ones wrote):

- ``rollouts``: the actor answers two tasks; five files: for calibration, three more of the same task, the other task
- ``calibrate``: trace and calibration on the first file
- ``confirm``: the factor of each delta, by measuring its plans on a file of their own (planner/confirm.py)
- ``solve``: plans at each delta, one set with the rule each, one with the rule joint where calibration allows it
- ``training-plans``: for ``python -m bench.training``
- ``same``, ``other``: updates composed of held-out microbatches, after an inner epoch that moved the policy
- ``risk``: errors of single regions on single microbatches, one codec at a time, against the risk scores
- ``sizes``: the same predictions by parts of the one calibration
- ``refresh``: a plan on held-out microbatches as training moves the policy on
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
from bench import evidence_sensitivity as sensitivity
from bench import evidence_stages as stages
from bench.evidence_report import report
from bench.evidence_setting import Setting
from hilore.planner.spec import load_spec
from hilore.runtime.errors import HiloreError

STAGES = (
    "rollouts",
    "calibrate",
    "confirm",
    "solve",
    "training-plans",
    "same",
    "other",
    "risk",
    "sizes",
    "refresh",
    "report",
)


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
    setting = Setting(replace(spec, calibration=calibration), Path(given.folder), given)
    setting.folder.mkdir(parents=True, exist_ok=True)
    calibration_measure.FIT_PASSES = (given.fit_passes, given.fit_passes)
    by_name: dict[str, Callable[[Setting], None]] = {
        "rollouts": stages.rollouts,
        "calibrate": stages.calibrate,
        "confirm": stages.confirm,
        "solve": stages.solve,
        "training-plans": stages.training_plans,
        "same": lambda given_setting: stages.held_out(given_setting, "same"),
        "other": lambda given_setting: stages.held_out(given_setting, "other"),
        "risk": stages.risk,
        "sizes": sensitivity.sizes,
        "refresh": sensitivity.refresh,
        "report": report,
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
    parser.add_argument("--training-model", default="examples/smollm2.yaml", metavar="MODEL.YAML")
    parser.add_argument("--folder", default="build/evidence", help="where everything goes")
    parser.add_argument(
        "--tasks", nargs=2, default=("knights_knaves", "chain_sum"), help="calibrated on, and the other"
    )
    parser.add_argument("--calibration-microbatches", type=int, default=32, help="of exposure above 0")
    parser.add_argument("--confirmation-microbatches", type=int, help="default: as many as calibration's")
    parser.add_argument("--microbatches", type=int, default=64, help="of exposure above 0, held out, per task")
    parser.add_argument("--confidence", type=float, default=0.95)
    parser.add_argument("--fit-passes", type=int, default=5, help="random plans per microbatch in the fit")
    parser.add_argument("--deltas", nargs="+", type=float, default=(0.5, 1.0, 2.0))
    parser.add_argument("--part", type=float, default=0.5, help="budget: share of the way from GC's peak to No-GC's")
    parser.add_argument("--random-plans", type=int, default=2, help="held-out random plans")
    parser.add_argument("--updates", type=int, default=200, help="composed per split")
    parser.add_argument("--further-microbatches", type=int, default=24, help="for joint and random plans")
    parser.add_argument("--lr", type=float, default=1e-3, help="of the inner epoch before measuring; 0: none")
    parser.add_argument("--inner-microbatches", type=int, default=24, help="that this epoch trains on")
    parser.add_argument("--native", type=int, default=8, help="microbatches in the actor's own dtypes")
    parser.add_argument("--risk-microbatches", type=int, default=15)
    parser.add_argument("--risk-references", type=int, default=8, help="microbatches of calibration that scores know")
    parser.add_argument(
        "--risk-split",
        choices=("same", "other", "confirmation", "pairs"),
        default="same",
        help="whose pairs are ranked",
    )
    parser.add_argument("--risk-every", type=int, default=2, help="regions: every so many-th, the last among them")
    parser.add_argument("--risk-codecs", nargs="+", default=("int8-g64",))
    parser.add_argument("--sizes", nargs="+", type=int, default=(4, 8, 16, 24), help="microbatches of a calibration")
    parser.add_argument("--refresh-updates", nargs="+", type=int, default=(0, 8, 16, 32))
    parser.add_argument("--refresh-microbatches", type=int, default=8, help="held out, measured at each of them")
    parser.add_argument("--refresh-accumulation", type=int, default=2)
    parser.add_argument("--refresh-lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="FILE", help="JSON (default FOLDER/evidence.json)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
