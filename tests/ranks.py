"""Two ranks of a test (gloo, CPU): one process each, which runs scenarios of its module and writes what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

RANKS = 2
ROOT = Path(__file__).parent.parent
LIMIT_S = 300


def run_ranks(module: str, folder: Path) -> list[dict[str, Any]]:
    """Run ``module`` (which calls ``serve``) once per rank; by rank, what its scenarios found."""
    outs = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(folder / "rendezvous"), str(out)],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error[-3000:]
    return [json.loads(out.read_text()) for out in outs]


def serve(scenarios: dict[str, Callable[[int], Any]]) -> None:
    """The main function of a rank: arguments are rank, rendezvous file, and the file to write."""
    rank, rendezvous, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    found = {name: scenario(rank) for name, scenario in scenarios.items()}
    Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
