"""``python -m bench.fidelity``: what codecs cost the update's gradient of a real model, with everything at L at once.

SmolLM2-135M in float32 with live adapters and completions that it samples itself; the update is the sum over the
microbatches. Each plan keeps every layer's units of some kinds encoded and runs through the runtime.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console

from bench.table import write_json
from hilore.planner.actor import Actor, build_actor
from hilore.planner.files import replace_file
from hilore.planner.generate import generate_rollouts
from hilore.planner.gradient_error import Backward, Instrument
from hilore.planner.handmade import handmade_plan
from hilore.planner.kind_errors import in_float32
from hilore.planner.microbatch import Microbatch
from hilore.planner.rollouts import from_rollouts, with_advantages
from hilore.planner.sidebyside_report import environment
from hilore.planner.spec import load_spec
from hilore.planner.tasks import build_dataset
from hilore.planner.trace import Trace, UnitTrace
from hilore.planner.tracing import trace_spec
from hilore.runtime.codecs import get_codec
from hilore.runtime.codecs.tokens import TokenCodec
from hilore.runtime.exposure import token_magnitudes
from hilore.runtime.tokenweights import token_weights

MODEL = "examples/smollm2.yaml"
ROWS = 4
FIVE = ("v", "attention", "o", "gate", "up")
OUT = "docs/measurements/fidelity"


@dataclass(frozen=True, slots=True)
class Contender:
    """``codecs`` by unit kind; other units are kept exactly. ``most_bits``: on average over the encoded elements, with
    scales and means. ``bar`` percent is what is asked of it, None for those beside it."""

    name: str
    codecs: Mapping[str, str]
    most_bits: float
    bar: float | None = None


def everywhere(codec: str, kinds: Sequence[str] = FIVE, **others: str) -> dict[str, str]:
    return {kind: others.get(kind, codec) for kind in kinds}


CONTENDERS = (
    Contender("plain int8-g64", everywhere("int8-g64"), 8.5),
    Contender("cm-h64, groups of 64", everywhere("int8-g64-cm-h64", v="int8-g64-h64"), 8.5),
    Contender("cm-h64, fine scales", everywhere("int8-g32-s8-cm-h64", v="int8-g32-s8-h64"), 8.5),
    Contender(
        "cm-h64, fine scales, bits by kind",
        everywhere("int8-g32-s8-cm-h64", v="int10-g32-s8-h64", attention="int10-g32-s8-cm-h64", o="int6-g32-s8-cm-h64"),
        8.5,
        1.25,
    ),
    Contender("the same, bits by token", everywhere("tw8-g32-s8-cm-h64", v="tw8-g32-s8-h64"), 8.5, 1.0),
    Contender(
        "the same, bits by kind and token",
        everywhere("tw8-g32-s8-cm-h64", v="tw10-g32-s8-h64", attention="tw10-g32-s8-cm-h64", o="tw6-g32-s8-cm-h64"),
        8.5,
        1.0,
    ),
    Contender("plain int6-g64 (gate, up)", everywhere("int6-g64", ("gate", "up")), 6.5),
    Contender("cm-h64, groups of 64 (gate, up)", everywhere("int6-g64-cm-h64", ("gate", "up")), 6.5),
    Contender("cm-h64, fine scales (gate, up)", everywhere("int6-g32-s8-cm-h64", ("gate", "up")), 6.5, 3.5),
    Contender("the same, bits by token (gate, up)", everywhere("tw6-g32-s8-cm-h64", ("gate", "up")), 6.5, 3.5),
)


@dataclass(frozen=True, slots=True)
class Row:
    """``percent``: of the complete update's gradient norm. ``bits``: of bfloat16 tensors, and of these float32 ones."""

    name: str
    codecs: dict[str, str]
    bits: float
    bits_float32: float
    percent: float
    of_microbatches: tuple[float, ...]
    bar: float | None


def measure(trace: Trace, actor: Actor, microbatches: Sequence[Microbatch], tell: Callable[[str], None]) -> list[Row]:
    exact: list[Backward] = []
    rows = []
    with Instrument(actor, [region.name for region in trace.buckets[-1].regions]) as instrument:
        for microbatch in microbatches:
            exact.append(instrument.exact(microbatch))
        for contender in CONTENDERS:
            tell(contender.name)
            plan = handmade_plan(trace, _modes(contender.codecs))
            found = [instrument.under(microbatch, plan) for microbatch in microbatches]
            bits = [
                _mean_bits(trace, contender.codecs, microbatches, dtype) for dtype in (torch.bfloat16, torch.float32)
            ]
            rows.append(
                Row(
                    contender.name,
                    dict(contender.codecs),
                    bits[0],
                    bits[1],
                    _percent(found, exact),
                    tuple(_percent([one], [other]) for one, other in zip(found, exact, strict=True)),
                    contender.bar,
                )
            )
            assert max(bits) <= contender.most_bits, (contender.name, bits)
    return rows


def _modes(codecs: Mapping[str, str]) -> Callable[[str, UnitTrace], str]:
    return lambda _region, unit: codecs.get(unit.kind, "H") if unit.keepable else "R"


def _mean_bits(
    trace: Trace, codecs: Mapping[str, str], microbatches: Sequence[Microbatch], dtype: torch.dtype
) -> float:
    """Payload bits over elements, all layers and microbatches."""
    hidden = {unit.kind: unit for unit in trace.buckets[-1].classes[0].units}
    tokens = trace.buckets[-1].tokens * int(trace.spec["batch"]["microbatch"])
    payload = elements = 0
    for microbatch in microbatches:
        rows, length = microbatch.input_ids.shape
        for kind, codec in codecs.items():
            width = hidden[kind].output_bytes // (2 * tokens)
            payload += _payload_bytes(codec, torch.zeros(rows, length, width, dtype=dtype), microbatch)
            elements += rows * length * width
    return 8 * payload / elements


def _payload_bytes(name: str, values: torch.Tensor, microbatch: Microbatch) -> int:
    codec = get_codec(name)
    if not isinstance(codec, TokenCodec):
        return codec.nbytes(values.shape, values.dtype)
    magnitudes = token_magnitudes("grpo", microbatch.advantages, microbatch.completion_mask)
    weights = token_weights(magnitudes, microbatch.completion_mask, values.shape[1], microbatch.prompt_mask)
    return codec.encode(values, weights=weights).nbytes


def _percent(found: Sequence[Backward], exact: Sequence[Backward]) -> float:
    """Relative L2 distance of the sums in percent."""
    distance = norm = 0.0
    for place in range(len(exact[0].gradients)):
        reference = sum(one.gradients[place].double() for one in exact)
        distance += float((sum(one.gradients[place].double() for one in found) - reference).square().sum())
        norm += float(torch.as_tensor(reference).square().sum())
    return float(100 * (distance / norm) ** 0.5)


def sampled_microbatches(actor: Actor, count: int, seed: int) -> list[Microbatch]:
    """One group of sampled completions each; rewards are drawn, since this model rarely earns any."""
    entries = build_dataset(count, seed, actor.tokenizer)
    rollouts = generate_rollouts(actor, entries, completions=ROWS, seed=seed)
    drawn = torch.randint(0, 2, (len(rollouts),), generator=torch.Generator().manual_seed(seed))
    drawn[::ROWS], drawn[1::ROWS] = 1, 0  # no group without variance
    rewarded = [
        replace(rollout, reward=float(reward), advantage=None)
        for rollout, reward in zip(rollouts, drawn.tolist(), strict=True)
    ]
    pad = getattr(actor.tokenizer, "pad_token_id", None) or 0
    return list(from_rollouts(with_advantages(rewarded), actor.spec, pad_token=pad, device=actor.device))


def markdown(rows: list[Row], microbatches: Sequence[Microbatch], where: dict[str, object]) -> str:
    tokens = [int(microbatch.attention_mask.sum()) for microbatch in microbatches]
    lines = [
        "# Gradient error with whole kinds of units encoded",
        "",
        f"Command: `{where['command']}`. {where['device']}, torch {torch.__version__}.",
        "",
        f"SmolLM2-135M-Instruct, LoRA r=16 on all linears with a live lora_B, float32 compute, one update of "
        f"{len(tokens)} microbatches of {ROWS} sampled completions each ({', '.join(map(str, tokens))} tokens); "
        "rewards drawn, loss grpo, ratio 1. "
        "Every layer's units of the named kinds at L, all others exact. Error: relative L2 "
        "distance of all trainable gradients of the update from plain eager's. Bits: mean over the encoded elements "
        "with scales and means, for bfloat16 tensors and for these float32 ones.",
        "",
        "| plan | bits bf16 | bits fp32 | error % | at most % | error % by microbatch |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        verdict = "-" if row.bar is None else f"{row.bar} ({'met' if row.percent <= row.bar else 'NOT MET'})"
        each = ", ".join(f"{percent:.3f}" for percent in row.of_microbatches)
        lines.append(
            f"| {row.name} | {row.bits:.3f} | {row.bits_float32:.3f} | {row.percent:.3f} | {verdict} | {each} |"
        )
    lines += ["", "Codecs by kind:", ""]
    lines += [f"- {row.name}: {', '.join(f'{kind} {codec}' for kind, codec in row.codecs.items())}" for row in rows]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    torch.set_num_threads(1)
    spec = load_spec(MODEL)
    spec = replace(spec, batch=replace(spec.batch, microbatch=ROWS))
    trace = trace_spec(spec)
    actor = build_actor(in_float32(spec), live_adapters=True, seed=given.seed)
    microbatches = sampled_microbatches(actor, given.microbatches, given.seed)
    rows = measure(trace, actor, microbatches, lambda name: Console(stderr=True).print(name))
    command = shlex.join(["python", "-m", "bench.fidelity", *(arguments if arguments is not None else sys.argv[1:])])
    where = environment(1, command)
    text = markdown(rows, microbatches, where)
    console.print(text)
    replace_file(f"{given.out}.md", text)
    write_json({"environment": where, "rows": [asdict(row) for row in rows]}, f"{given.out}.json")
    return 0 if all(row.bar is None or row.percent <= row.bar for row in rows) else 6


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.fidelity", description=__doc__)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=OUT, help=f"without .md and .json (default {OUT})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
