"""Synthetic traces and problems for the tests of everything between a trace and its plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hilore.planner.liveness import dead_in_late_stage, running_units
from hilore.planner.problem import Configuration, Problem, RegionProblem, UnitChoice
from hilore.planner.trace import (
    TRACE_VERSION,
    Bucket,
    Calibration,
    CodecCost,
    Fixed,
    KeepSet,
    Outside,
    RegionClass,
    RegionTrace,
    Trace,
    UnitRisk,
    UnitTrace,
)
from hilore.runtime.plan import RegionPlan, UnitPlan

MIB = 2**20
# Percent of the peak rate that each GEMM reaches: narrow ones less.
ACHIEVED = {"q": 91, "k": 47, "v": 46, "o": 88, "gate": 100, "up": 99, "down": 97}
KAPPA2 = {"v": 4e-6, "o": 8e-7, "gate": 2.4e-6, "up": 1.8e-6, "attention": 1.2e-6}


def unit(
    name: str,
    kind: str,
    run_ns: int,
    output_bytes: int,
    feeds: Sequence[str] = (),
    *,
    rest_bytes: int = 0,
    feeds_saved: bool = False,
    saves_inputs: bool = False,
    saves_own: bool = False,
    keepable: bool = True,
    codecs: Sequence[CodecCost] = (),
) -> UnitTrace:
    return UnitTrace(
        name,
        kind,
        run_ns,
        output_bytes,
        rest_bytes,
        tuple(feeds),
        feeds_saved,
        saves_inputs,
        saves_own,
        keepable,
        "" if keepable else "output changed in place",
        tuple(codecs),
    )


def powerset(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [kept for size in range(len(names) + 1) for kept in itertools.combinations(names, size)]


def qwen_class(
    *,
    tokens: int = 2048,
    hidden: int = 2048,
    codecs: Sequence[str] = ("int8-g128",),
    flops_per_ns: int = 150_000,
    name: str = "decoder",
    kept_names: Sequence[str] = ("q", "k", "v", "attention", "o", "gate", "up"),
    split: bool = False,
) -> RegionClass:
    """A decoder layer of Qwen2.5-3B's proportions under LoRA: GQA 8:1, ffn 5.375 hidden, ``down`` dead.

    ``split``: keep sets are there with split replays too.
    """
    d = tokens * hidden * 2
    widths = {"q": 8, "k": 1, "v": 1, "attention": 8, "o": 8, "gate": 43, "up": 43, "down": 8}
    inner = {"down": 43}

    def costs(kind: str) -> list[CodecCost]:
        if kind in ("q", "k", "down"):
            return []
        out = d * widths[kind] // 8
        ratio = {"int8-g128": (33, 64), "int4-g64": (9, 32), "fp8-e4m3": (1, 2)}
        return [
            CodecCost(c, out * ratio[c][0] // ratio[c][1], out // 300 + 9_000, out // 400 + 8_000, out // 7)
            for c in codecs
        ]

    def linear(name_: str, kind: str, feeds: Sequence[str], *, saved: bool) -> UnitTrace:
        flops = 2 * tokens * hidden * inner.get(kind, 8) // 8 * hidden * widths[kind] // 8
        run_ns = flops * 100 // (flops_per_ns * ACHIEVED[kind])
        return unit(name_, kind, run_ns, d * widths[kind] // 8, feeds, feeds_saved=saved, codecs=costs(kind))

    attention_ns = 4 * tokens * tokens * hidden // 2 // (flops_per_ns // 3)
    units = (
        linear("self_attn.q_proj", "q", ["self_attn:attention"], saved=False),
        linear("self_attn.k_proj", "k", ["self_attn:attention"], saved=False),
        linear("self_attn.v_proj", "v", ["self_attn:attention"], saved=False),
        unit(
            "self_attn:attention",
            "attention",
            attention_ns,
            d,
            ["self_attn.o_proj"],
            rest_bytes=tokens * 16 * 4,
            feeds_saved=True,
            saves_inputs=True,
            saves_own=True,
            codecs=costs("attention"),
        ),
        linear("self_attn.o_proj", "o", ["mlp.gate_proj", "mlp.up_proj"], saved=True),
        linear("mlp.gate_proj", "gate", ["mlp.down_proj"], saved=True),
        linear("mlp.up_proj", "up", ["mlp.down_proj"], saved=True),
        linear("mlp.down_proj", "down", [], saved=False),
    )
    keepable = [u.name for u in units if u.kind in kept_names]
    saved = d * (8 + 10 + 8 + 8 + 8 + 4 * 43) // 8 + tokens * 16 * 4
    temporaries = d * 43 * 3 // 8
    keep_sets = []
    for kept in powerset(keepable):
        out = sum(u.output_bytes + u.rest_bytes for u in units if u.name in kept)
        keep_sets.append(KeepSet(kept, d + out, d + out + temporaries, saved - out + temporaries))
        if split:
            late = sum(u.output_bytes for u in units if u.name in kept and u.name.startswith("mlp"))
            working = max(d + 4 * d * 43 // 8 - late + temporaries, saved - 4 * d * 43 // 8 - (out - late) + d)
            keep_sets.append(KeepSet(kept, d + out, d + out + temporaries, working, split=True))
    forward = sum(u.run_ns for u in units)
    glue = d * 60 // 3000
    return RegionClass(
        name=name,
        units=units,
        keep_sets=tuple(keep_sets),
        hold=KeepSet(tuple(u.name for u in units), d + saved, d + saved + d, temporaries),
        gc=KeepSet((), d, d + temporaries, saved + temporaries),
        forward_ns=forward + glue,
        backward_ns=forward + 2 * glue,
        replay_fixed_ns=glue,
        gc_replay_ns=forward + glue,
        gradient_bytes=0,
        split_at="mlp.gate_proj" if split else "",
        early_fixed_ns=glue * 2 // 5 if split else 0,
    )


def qwen_trace(
    *,
    layers: int = 36,
    buckets: Sequence[int] = (2048,),
    hidden: int = 2048,
    vocabulary: int = 151_936,
    codecs: Sequence[str] = ("int8-g128",),
    seed: int | None = 0,
    head_scale: float = 1.0,
    kept_names: Sequence[str] = ("q", "k", "v", "attention", "o", "gate", "up"),
    split: bool = False,
) -> Trace:
    """A whole actor. ``seed`` None gives every layer the same risks; ``head_scale`` 0 stands for a chunked head."""
    rng = random.Random(seed)
    regions = tuple(RegionTrace(f"model.layers.{i}", 0) for i in range(layers))
    made = []
    for tokens in buckets:
        region_class = qwen_class(tokens=tokens, hidden=hidden, codecs=codecs, kept_names=kept_names, split=split)
        logits = int(tokens * vocabulary * 2 * head_scale)
        d = tokens * hidden * 2
        flops = 2 * tokens * hidden * vocabulary // 150_000
        outside = Outside(3 * MIB, 3 * logits + d, d, d, 64 * MIB, flops, 2 * flops, 2_000_000)
        made.append(Bucket(tokens, 1, (region_class,), regions, outside))
    risks = []
    for i, region in enumerate(regions):
        last = 6.0 if i == layers - 1 else 1.0
        for u in made[0].classes[0].units:
            for cost in u.codecs:
                spread = 1.0 if seed is None else rng.uniform(0.6, 1.6)
                scale = {"int8-g128": 1.0, "int4-g64": 200.0, "fp8-e4m3": 9.0}[cost.codec]
                risks.append(UnitRisk(region.name, u.name, cost.codec, KAPPA2[u.kind] * scale * spread * last))
    return Trace(
        trace_version=TRACE_VERSION,
        name="qwen-like",
        spec={"loss": {"kind": "grpo", "beta": 0.001}},
        fingerprint={"model_type": "qwen2", "num_layers": layers, "hidden_size": hidden},
        device="cpu",
        estimated=True,
        card_bytes=0,
        fixed=Fixed(2 * 3_000 * MIB, 120 * MIB, 240 * MIB, 0),
        buckets=tuple(made),
        calibration=Calibration(
            False, "prior", 0.01, 0.9, 1.0, (0.6, 1.1, 2.0), (0.1, 0.4, 0.3, 0.2), 1.05, tuple(risks)
        ),
        time_spread=0.02,
        notes=(),
        versions={"torch": "2.13.0", "transformers": "5.24.0"},
        created_at="2026-01-01T00:00:00Z",
    )


def random_class(seed: int, *, split: bool = False) -> RegionClass:
    """A few units with random liveness, some keep sets missing."""
    rng, handed = random.Random(seed), random.Random(seed)
    names = ["a", "b", "c", "d"][: rng.randint(2, 4)]
    units = tuple(
        unit(
            name,
            "linear",
            rng.randint(0, 60),
            rng.randint(1, 30),
            [later for later in names[i + 1 :] if rng.random() < 0.6],
            rest_bytes=rng.choice([0, rng.randint(0, 5)]),
            feeds_saved=rng.random() < 0.4,
            saves_inputs=rng.random() < 0.3,
            saves_own=rng.random() < 0.2,
            codecs=[CodecCost("c", rng.randint(1, 9), rng.randint(0, 5), rng.randint(0, 5), rng.randint(0, 9))]
            * (rng.random() < 0.6),
        )
        for i, name in enumerate(names)
    )
    sets = []
    for is_split in (False, True)[: 1 + split]:
        for kept in powerset(names):
            if not kept or rng.random() < 0.8:
                out = sum(u.output_bytes + u.rest_bytes for u in units if u.name in kept)
                measured = KeepSet(kept, 5 + out, out + rng.randint(20, 90), rng.randint(5, 60), is_split)
                sets.append(replace(measured, handed_bytes=handed.choice([None, handed.randint(0, 60)])))
    hold = KeepSet(tuple(names), 120, 130, 10)
    at, early_ns = (names[1], rng.randint(0, 5)) if split else ("", 0)
    return RegionClass("random", units, tuple(sets), hold, sets[0], 10, 10, rng.randint(0, 9), 99, 0, at, early_ns)


def region_plan(
    region_class: RegionClass, modes: Mapping[str, str], *, split: bool = False, name: str = "r"
) -> RegionPlan:
    """A replayed region with ``modes`` per unit ("H", "R" or a codec) and the dead calls that follow."""
    units = region_class.units
    kept = {unit_: mode for unit_, mode in modes.items() if mode != "R"}
    exact = {unit_ for unit_, mode in modes.items() if mode == "H"}
    dead = [running_units(units, kept_)[1] for kept_ in (kept, exact)]
    late = [dead_in_late_stage(units, kept_, region_class.split_at) if split else () for kept_ in (kept, exact)]
    plans = []
    for u in units:
        mode = modes[u.name]
        codec = None if mode in ("H", "R") else mode
        flags = (u.name in dead[0], u.name in dead[1], u.name in late[0], u.name in late[1])
        plans.append(UnitPlan(f"{name}.{u.name}", "L" if codec else mode, codec, *flags))  # type: ignore[arg-type]
    return RegionPlan(name, False, tuple(plans), f"{name}.{region_class.split_at}" if split else None)


def assignments(region_class: RegionClass) -> list[tuple[dict[str, str], bool]]:
    """Every way to give modes to the units within the trace's keep sets, with whether its replay is split."""
    found = []
    for keep_set in region_class.keep_sets:
        offers = [
            ["H", *(cost.codec for cost in u.codecs)] if u.name in keep_set.kept else ["R"] for u in region_class.units
        ]
        for modes in itertools.product(*offers):
            pairs = zip(region_class.units, modes, strict=True)
            found.append(({u.name: mode for u, mode in pairs}, keep_set.split))
    return found


def configuration(
    *,
    retained: int,
    backward: int,
    extra: int,
    forward: int | None = None,
    demoted: int | None = None,
    hold: bool = False,
    modes: str = "R",
) -> Configuration:
    """A configuration made up from numbers; ``modes`` gives one letter per unit."""
    return Configuration(
        hold=hold,
        units=tuple(
            UnitChoice(f"u{i}", mode, "int8-g128" if mode == "L" else None, False, False)
            for i, mode in enumerate(modes)
        ),
        retained_bytes=retained,
        forward_bytes=retained if forward is None else forward,
        backward_bytes=backward,
        demoted_backward_bytes=backward if demoted is None else demoted,
        extra_ns=extra,
        demoted_extra_ns=extra,
        lossy_units=modes.count("L"),
    )


def problem(
    regions: Sequence[RegionProblem],
    *,
    budget: int,
    risk_limit: int = 0,
    base: int = 0,
    head: int = 0,
    head_left: int = 0,
    tail: int = 0,
    optimizer: int = 0,
    constant_ns: int = 1000,
) -> Problem:
    return Problem(tuple(regions), base, head, head_left, tail, optimizer, constant_ns, budget, risk_limit)


def problem36(budget: int, *, risk_limit: int = 12_000, regions: int = 36) -> Problem:
    """Equal units, each at H, L or R."""
    options = (
        configuration(retained=4, backward=120, extra=1000, modes="R"),
        configuration(retained=104, backward=20, extra=0, modes="H"),
        configuration(retained=57, backward=120, demoted=120, extra=130, modes="L"),
    )
    made = [RegionProblem(f"layers.{i}", options, (0, 0, 1000), 0) for i in range(regions)]
    return problem(made, budget=budget, risk_limit=risk_limit, head=60, constant_ns=100_000)


def random_problem(rng: random.Random, regions: int, options: int) -> Problem:
    """Any event may bind: working sets, gradients and the head are of one size, classes repeat at random."""
    pool: list[RegionProblem] = []
    made = []
    for i in range(regions):
        if pool and rng.random() < 0.4:
            like = rng.choice(pool)
        else:
            choices = []
            for k in range(options):
                retained = rng.randint(1, 60)
                modes = "R" if k == 0 else rng.choice(["H", "L", "R", "LH"])
                backward = rng.randint(0, 80)
                choices.append(
                    configuration(
                        retained=retained,
                        forward=retained + rng.randint(0, 60),
                        backward=backward,
                        demoted=max(0, backward + rng.randint(-20, 20)),
                        extra=0 if k == options - 1 else rng.randint(0, 400),
                        modes="H" if k == options - 1 > 0 else modes,
                        hold=k == options - 1 > 0,
                    )
                )
            risk = tuple(rng.randint(0, 50) if "L" in [u.mode for u in c.units] else 0 for c in choices)
            like = RegionProblem("", tuple(choices), risk, rng.choice([0, 0, rng.randint(0, 30)]))
            pool.append(like)
        made.append(RegionProblem(f"r{i}", like.configurations, like.risk, like.gradient_bytes))
    return problem(
        made,
        budget=rng.randint(40, 60 * regions + 80),
        risk_limit=rng.choice([0, rng.randint(0, 30 * regions), 10**9]),
        base=rng.randint(0, 20),
        head=rng.randint(0, 120),
        head_left=rng.randint(0, 40),
        tail=rng.randint(0, 100),
        optimizer=rng.randint(0, 100),
        constant_ns=rng.randint(100, 3000),
    )
