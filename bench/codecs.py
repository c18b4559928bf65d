"""``python -m bench.codecs``: what each codec keeps of a tensor and what it costs.

Errors and biases on drawn and on recorded values, times beside the GEMM that made the tensor, and the bar for fused
codecs. ``--times`` prints the bar alone. Writes Markdown and JSON.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console

from bench.codec_rivals import rival_rows
from bench.codec_times import SHAPES, CodecTime, Times, measure_times
from bench.codec_values import Values, drawn_values, recorded_values
from bench.table import write_json
from hilore.planner.files import replace_file
from hilore.planner.sidebyside_report import environment
from hilore.runtime.codecs import get_codec

NAMES = (
    "pack-bf16",
    *(f"int{bits}-g32-s8-cm-h64" for bits in (12, 10, 9, 8, 7, 6, 5, 4)),
    *(f"int{bits}-g32-s8-h64" for bits in (10, 8, 6)),
    *("int8-g64-cm-h64", "int8-g64-h64", "int8-g64-cm", "int8-g32", "int8-g64", "int8-g128", "int8-g256"),
    *("int8-g64-asym", "int8-g128-asym", "int8-g64-sr", "int8-g128-sr", "int8-g128-asym-sr", "int6-g64", "int5-g64"),
    *("int4-g32", "int4-g64", "int4-g128", "int4-g64-asym", "int4-g128-asym-sr", "int4-g64-oc", "int4-g128-h64"),
    *("int3-g64", "int2-g64-asym", "int2-g64-asym-sr", "nf4-g64", "nf4-g32-s8-cm-h64", "fp4-g128"),
    *("fp8-e4m3", "fp8-e4m3-plain", "fp8-e5m2", "fp8-e5m2-plain", "mean4-int2-g128-sr"),
)
# (codec, at most this share of the GEMM) at SHAPES[0], one thread; half of it is what we aim at.
BARS = (("int8-g64", 0.07), ("int8-g128", 0.07), ("int4-g64", 0.09), ("int8-g64-sr", 0.13))
SEEDS = 8
OUT = "docs/measurements/codecs"


@dataclass(frozen=True, slots=True)
class Error:
    """Of one codec on one kind of values: medians over its tensors.

    ``bias``: the mean error over the mean magnitude."""

    codec: str
    values: str
    bits: float
    relative_error: float
    bias: float
    raw: int


def measure_error(name: str, values: Values) -> Error:
    codec = get_codec(name)
    found = []
    for place, tensor in enumerate(values.tensors):
        exact = tensor.double()
        encoded = codec.encode(tensor, seed=place)
        difference = codec.decode(encoded).double() - exact
        found.append(
            (
                8 * encoded.nbytes / tensor.numel(),
                float(difference.norm() / exact.norm()),
                float(difference.mean() / exact.abs().mean()),
                int(encoded.raw),
            )
        )
    bits, error, bias, raw = zip(*found, strict=True)
    return Error(name, values.name, statistics.mean(bits), statistics.median(error), statistics.median(bias), sum(raw))


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    times = [measure_times(shape, tuple(dict.fromkeys(n for n, _ in BARS)), given.rounds) for shape in SHAPES[:1]]
    bar = bar_lines(times[0])
    console.print("\n".join(bar))
    if given.times:
        return 0
    kinds = [*drawn_values(given.seed), *recorded_values(given.seed)]
    errors = [measure_error(name, values) for name in NAMES for values in kinds]
    all_times = [measure_times(shape, NAMES, max(3, given.rounds // 3)) for shape in SHAPES]
    command = shlex.join(["python", "-m", "bench.codecs", *(arguments if arguments is not None else sys.argv[1:])])
    where = environment(1, command)
    rivals = rival_rows(given.rounds)
    text = markdown(errors, all_times, bar, rivals, where)
    console.print(text)
    replace_file(f"{given.out}.md", text)
    data = {"environment": where, "errors": [asdict(e) for e in errors], "times": [asdict(t) for t in all_times]}
    data |= {"bar": [asdict(t) for t in times], "rivals": rivals}
    write_json(data, f"{given.out}.json")
    return 0


def bar_lines(times: Times) -> list[str]:
    """The fused bar, each codec on a line of its own, with the bandwidth beside a plain copy's."""
    lines = [
        f"{times.shape.label}, bfloat16, one thread: GEMM {times.gemm_ns / 1e6:.1f} ms, "
        f"copy {times.copy_bytes_per_ns:.1f} GB/s (read and written)"
    ]
    for name, most in BARS:
        row = _row(times, name)
        share = times.share(name)
        verdict = "met, half of it too" if share <= most / 2 else "met" if share <= most else "NOT MET"
        lines.append(
            f"{name}: encode {row.encode_ns / 1e6:.2f} + decode {row.decode_ns / 1e6:.2f} ms = {share:.1%} of the GEMM "
            f"(at most {most:.0%}: {verdict}); {row.bytes_per_ns:.1f} GB/s, "
            f"{row.bytes_per_ns / times.copy_bytes_per_ns:.0%} of the copy's"
        )
    return lines


def markdown(
    errors: list[Error], times: list[Times], bar: list[str], rivals: list[dict[str, object]], where: dict[str, object]
) -> str:
    """The document."""
    kinds = list(dict.fromkeys(error.values for error in errors))
    found = {(error.codec, error.values): error for error in errors}
    shares = [f"{t.shape.label}: share of GEMM (encode + decode)" for t in times]
    parts = [
        "# Codecs: bits, errors, biases, times",
        "",
        f"Command: `{where['command']}`. {where['device']}, one thread, torch {torch.__version__}.",
        "",
        "Relative error ||decoded - x|| / ||x|| in percent. Drawn values are 1024 x 1024, recorded ones those of one "
        "forward of SmolLM2-135M in bfloat16 on reasoning-gym prompts, median over five layers. Bits per element with "
        "scales and means, at 1024 rows. Scales are those of bfloat16 tensors (16 bits).",
        "",
        *_table(
            ["codec", "bits", *kinds],
            [
                [n, f"{found[n, kinds[0]].bits:.3f}", *(f"{100 * found[n, k].relative_error:.3g}" for k in kinds)]
                for n in NAMES
            ],
        ),
        "",
        "## Bias",
        "",
        "Mean error as a share of the mean magnitude, in percent.",
        "",
        *_table(["codec", *kinds], [[n, *(f"{100 * found[n, k].bias:+.2g}" for k in kinds)] for n in NAMES]),
        "",
        "## Time",
        "",
        "Encode and decode in percent of the GEMM that makes the tensor, medians of rounds in which all took turns.",
        "",
        *_table(["codec", "bits", *shares], [_time_row(name, times) for name in NAMES]),
        "",
        "## The fused bar",
        "",
        *(f"- {line}" for line in bar),
        "",
        "## Beside other implementations",
        "",
        *_table(
            ["codec", "by", "bits", "relative error %", "encode ms", "decode ms"],
            [[str(row[key]) for key in ("codec", "by", "bits", "error", "encode_ms", "decode_ms")] for row in rivals],
        ),
        "",
    ]
    return "\n".join(parts)


def _time_row(name: str, times: list[Times]) -> list[str]:
    def cell(of: Times) -> str:
        row = _row(of, name)
        return f"{of.share(name):.1%} ({row.encode_ns / of.gemm_ns:.1%} + {row.decode_ns / of.gemm_ns:.1%})"

    return [name, f"{_row(times[0], name).bits:.3f}", *(cell(of) for of in times)]


def _row(times: Times, name: str) -> CodecTime:
    return next(row for row in times.codecs if row.codec == name)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.codecs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", action="store_true", help="only the fused bar")
    parser.add_argument("--out", default=OUT, help=f"without .md and .json (default {OUT})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
