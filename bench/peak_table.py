"""``python -m bench.peak_table TRACE PLAN``: where each MiB of the predicted peaks of GC, a plan and No-GC goes.

In the paper's setting (examples/qwen2.5-3b.yaml) the document sets the sum beside what the paper reports for GC, which
is memory used on the device, and says what lies between the two as far as arithmetic reaches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hilore.planner.budget import MIB
from hilore.planner.composition import Composition, highest, plan_compositions, reference_compositions
from hilore.planner.composition_view import part_names
from hilore.planner.files import replace_file
from hilore.planner.trace import Bucket, Trace
from hilore.planner.tracefile import load_trace
from hilore.planner.verify import largest_bucket
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan
from hilore.runtime.planfile import load_plan

# GC's peak in the paper (arXiv 2609.33570): Qwen2.5-3B, four L40S, FSDP, 4,096 tokens per microbatch, LoRA r=16.
PAPER_GC_MIB = 28_874
FLOAT32_BYTES = 4


def document(trace: Trace, plan: Plan, typed: str) -> str:
    """The table and what explains the rest. Raises HiloreError where the plan is of another bucket."""
    bucket = largest_bucket(trace)
    if plan.length_bucket != bucket.tokens:
        raise HiloreError(
            f"{plan.path}: planned for {plan.length_bucket} tokens per row, the trace's longest is {bucket.tokens}; "
            "name the plan without a length in its file name"
        )
    columns = {
        "GC": highest(reference_compositions(trace, bucket, gc=True)),
        f"plan, {plan.ceiling_bytes / MIB:,.0f} MiB": highest(plan_compositions(trace, bucket, plan.regions)),
        "No-GC": highest(reference_compositions(trace, bucket, gc=False)),
    }
    lines = [
        f"# Where each MiB of {trace.name}'s peak goes",
        "",
        f"`{typed}`",
        f"Predicted for {trace.device}, not measured on it: allocated MiB on one rank at the highest event of an "
        f"update, {bucket.rows} x {bucket.tokens} tokens per microbatch. Plan: {plan.regime.label} exposures, "
        f"delta {plan.delta:g}.",
        "",
        *_table(columns),
        "",
        *_events(trace, bucket),
        "",
        *_beside_the_paper(trace, bucket, columns["GC"]),
    ]
    return "\n".join(lines) + "\n"


def _table(columns: dict[str, Composition]) -> list[str]:
    sizes = [dict(found.parts) for found in columns.values()]
    lines = [f"| part | {' | '.join(columns)} |", "|---" + "|--:" * len(columns) + "|"]
    for part in part_names(columns.values()):
        found = [size.get(part, 0) for size in sizes]
        if any(found):
            lines.append(f"| {part} | {' | '.join(f'{size / MIB:,.1f}' for size in found)} |")
    lines.append(f"| **peak** | {' | '.join(f'**{found.live_bytes / MIB:,.1f}**' for found in columns.values())} |")
    lines.append(f"| event | {' | '.join(found.event for found in columns.values())} |")
    return lines


def _events(trace: Trace, bucket: Bucket) -> list[str]:
    """GC's highest event of each kind: how far the others lie below the peak."""
    found: dict[str, Composition] = {}
    for one in reference_compositions(trace, bucket, gc=True):
        kind = one.event.partition(" of ")[0]
        if kind not in found or one.live_bytes > found[kind].live_bytes:
            found[kind] = one
    listed = sorted(found.values(), key=lambda one: -one.live_bytes)
    return ["GC's events: " + ", ".join(f"{one.event} {one.live_bytes / MIB:,.1f}" for one in listed) + " MiB."]


def _beside_the_paper(trace: Trace, bucket: Bucket, gc: Composition) -> list[str]:
    """How much of the paper's figure the prediction leaves, and what one tensor of float32 logits would take of it."""
    config = trace.spec["model"]["config"]
    logits = bucket.rows * bucket.tokens * int(config["vocab_size"]) * FLOAT32_BYTES
    left = PAPER_GC_MIB - gc.live_bytes / MIB
    each = logits / MIB
    return [
        "## Beside the paper",
        f"The paper reports {PAPER_GC_MIB:,} MiB for GC on this shape: memory used on the device, so that the CUDA",
        "context, NCCL's buffers and what the allocator holds without using (cached and fragmented blocks) are in it.",
        f"The prediction is of allocated bytes alone; {left:,.1f} MiB lie between the two.",
        "",
        "| in the paper's figure and not in the prediction | MiB |",
        "|---|---|",
        f"| a head in float32 over all {bucket.tokens:,} positions, where this one has the dtype and the "
        f"{bucket.completions:,} positions of the loss: for each tensor of the logits' size | {each:,.1f} |",
        f"| the same for logits, their gradient and log-probabilities (three at once) | {3 * each:,.1f} |",
        f"| the same with an entropy of the policy beside them (five at once) | {5 * each:,.1f} |",
        "| FSDP1's flat parameters and gradients instead of FSDP2's | see `parallel: fsdp1` |",
        "| CUDA context and NCCL's buffers, cached and fragmented blocks | not predicted: `--margin` |",
        "",
        "The paper does not say how its head scores. The lines are what usual float32 heads hold, in place of the",
        f"head's own tensors in the table; {left / each:.1f} float32 tensors of that size would make up all of it.",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peak_table", description=__doc__)
    parser.add_argument("trace", metavar="TRACE.JSON")
    parser.add_argument("plan", metavar="PLAN.JSON", help="a plan of the trace's longest bucket")
    parser.add_argument("--markdown", metavar="FILE", help="the document; printed without it")
    given = parser.parse_args(arguments)
    trace, plan = load_trace(given.trace), load_plan(given.plan)
    folder = "/".join(Path(given.plan).parts[-3:])
    text = document(trace, plan, f"python -m bench.peak_table {Path(given.trace).name} {folder} --markdown FILE")
    if given.markdown:
        replace_file(given.markdown, text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
