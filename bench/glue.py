"""``python -m bench.glue``: glue in fewer passes beside eager's own, forward and forward with backward, one thread.

The gated product of an MLP, RMSNorm with a frozen weight, and rotary embedding, at the sizes of
examples/qwen2_shape.yaml and of a 3B model. Writes JSON and a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, apply_rotary_pos_emb

from bench.codec_times import keep_freed_memory, medians_ns
from bench.table import versions, write_json
from hilore.planner.files import replace_file
from hilore.planner.sidebyside_report import environment
from hilore.runtime.ambient import RunningAs
from hilore.runtime.derive import same_bits
from hilore.runtime.glue.decisions import Decisions
from hilore.runtime.glue.gated import product_of
from hilore.runtime.glue.rmsnorm import rms_norm
from hilore.runtime.glue.rotary import RotaryCall

TOKENS = 1024
EPS = 1e-6
OUT = "docs/measurements/glue"


@dataclass(frozen=True, slots=True)
class Sizes:
    """A layer's: ``heads`` of queries, ``key_heads`` of keys, each of ``head`` elements."""

    name: str
    hidden: int
    ffn: int
    heads: int
    key_heads: int
    head: int


SIZES = (Sizes("qwen2-shape", 512, 2752, 8, 1, 64), Sizes("3B", 2048, 11008, 16, 2, 128))


@dataclass(frozen=True, slots=True)
class Part:
    """One part of glue: eager's call and ours, on ``leaves`` that get gradients."""

    name: str
    eager: Callable[[], Sequence[Tensor]]
    ours: Callable[[], Sequence[Tensor]]
    leaves: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over rounds in which all took turns. ``exact``: outputs and gradients bitwise alike."""

    sizes: str
    part: str
    dtype: str
    eager_forward_ns: int
    forward_ns: int
    eager_both_ns: int
    both_ns: int
    exact: bool


class _AnyFrame:
    """Stands in for a region's frame, of which glue asks for this alone."""

    def __init__(self) -> None:
        self.decisions = Decisions()


def parts_of(sizes: Sizes, dtype: torch.dtype, generator: torch.Generator) -> list[Part]:
    """The three parts; the gated product in bfloat16 alone."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x = drawn(1, TOKENS, sizes.hidden).requires_grad_()
    norm = Qwen2RMSNorm(sizes.hidden, EPS).to(dtype).requires_grad_(False)
    norm.weight.copy_(drawn(sizes.hidden))
    q = drawn(1, TOKENS, sizes.heads * sizes.head).requires_grad_()
    k = drawn(1, TOKENS, sizes.key_heads * sizes.head).requires_grad_()
    cos, sin = drawn(1, TOKENS, sizes.head), drawn(1, TOKENS, sizes.head)
    stand_in = RotaryCall(apply_rotary_pos_emb, {})

    def turned(call: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
        heads = (each.view(1, TOKENS, -1, sizes.head).transpose(1, 2) for each in (q, k))
        with RunningAs(_AnyFrame()):  # type: ignore[arg-type]
            return call(*heads, cos, sin)

    parts = [
        Part("RMSNorm", lambda: (norm(x),), lambda: (rms_norm(x, norm.weight, EPS),), (x,)),
        Part("rotary embedding", lambda: turned(apply_rotary_pos_emb), lambda: turned(stand_in), (q, k)),
    ]
    if dtype == torch.bfloat16:
        gate, up = (drawn(1, TOKENS, sizes.ffn).requires_grad_() for _ in range(2))
        gated = Part("gated product", lambda: (silu(gate) * up,), lambda: (product_of(gate, up),), (gate, up))
        parts.insert(0, gated)
    return parts


def measure(sizes: Sizes, dtype: torch.dtype, rounds: int, *, seed: int = 0) -> list[Row]:
    """All parts of one size and dtype in turn."""
    rows = []
    for part in parts_of(sizes, dtype, torch.Generator().manual_seed(seed)):
        grads = [torch.randn_like(each) for each in part.eager()]

        def backward(run: Callable[[], Sequence[Tensor]], part: Part = part, grads: Sequence[Tensor] = grads) -> object:
            return torch.autograd.grad(run(), part.leaves, grads)

        took = medians_ns(
            {
                "eager": part.eager,
                "ours": part.ours,
                "eager both": lambda part=part, run=backward: run(part.eager),  # type: ignore[misc]
                "ours both": lambda part=part, run=backward: run(part.ours),  # type: ignore[misc]
            },
            rounds,
        )
        rows.append(
            Row(
                sizes.name,
                part.name,
                str(dtype).removeprefix("torch."),
                took["eager"],
                took["ours"],
                took["eager both"],
                took["ours both"],
                _alike(part, grads),
            )
        )
    return rows


def _alike(part: Part, grads: Sequence[Tensor]) -> bool:
    def bits(run: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        results = run()
        return [*(each.detach() for each in results), *torch.autograd.grad(results, part.leaves, grads)]

    return all(same_bits(*pair) for pair in zip(bits(part.eager), bits(part.ours), strict=True))


def markdown(rows: Sequence[Row], command: str, where: str) -> str:
    """The table with its command."""
    lines = [
        "# Glue in fewer passes",
        "",
        f"`{command}`; {where}. {TOKENS} tokens, milliseconds, medians; eager's own beside ours in one run.",
        "",
        "| sizes | part | dtype | forward: eager | ours | forward and backward: eager | ours | bits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = (row.eager_forward_ns, row.forward_ns, row.eager_both_ns, row.both_ns)
        cells = [row.sizes, row.part, row.dtype, *(f"{time / 1e6:.3f}" for time in times)]
        lines.append(f"| {' | '.join(cells)} | {'alike' if row.exact else 'DIFFERENT'} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    command = "python -m bench.glue " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kinds = (torch.bfloat16, torch.float32)
        rows = [row for sizes in SIZES for dtype in kinds for row in measure(sizes, dtype, given.rounds)]
    finally:
        torch.set_num_threads(threads)
    found = environment(1, command.strip())
    text = markdown(rows, command.strip(), f"{found['device']}, one thread, {versions()}")
    write_json({"environment": found, "rows": [asdict(row) for row in rows]}, f"{given.out}.json")
    replace_file(f"{given.out}.md", text)
    Console(markup=False, highlight=False, width=200).print(text, soft_wrap=True)
    return 0 if all(row.exact for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.glue", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", default=OUT, metavar="PATH", help=f"without suffix (default {OUT})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
