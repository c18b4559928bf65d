"""Measured over estimated time, per kind of call: what a roofline from a data sheet gets wrong on this device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hilore.planner.trace import Trace
from hilore.planner.verify import largest_bucket, reference_times


@dataclass(frozen=True, slots=True)
class Bias:
    """All calls of one kind in one step of the largest length bucket."""

    kind: str
    measured_ns: int
    estimated_ns: int

    @property
    def ratio(self) -> float:
        return self.measured_ns / self.estimated_ns


def biases(measured: Trace, estimated: Trace) -> tuple[Bias, ...]:
    """Every kind of call that both traces know, units first; what takes no time in one of them is left out."""
    found, expected = call_times(measured), call_times(estimated)
    return tuple(
        Bias(kind, took_ns, expected[kind]) for kind, took_ns in found.items() if took_ns and expected.get(kind)
    )


def call_times(trace: Trace) -> dict[str, int]:
    """Nanoseconds per kind of call, summed over all regions: units, their codecs, glue, whole regions, head, steps."""
    bucket = largest_bucket(trace)
    times: dict[str, int] = defaultdict(int)
    whole: dict[str, int] = defaultdict(int)
    for region in bucket.regions:
        region_class = bucket.classes[region.class_index]
        for unit in region_class.units:
            times[unit.kind] += unit.run_ns
            for cost in unit.codecs:
                whole[f"encode {cost.codec}"] += cost.encode_ns
                whole[f"decode {cost.codec}"] += cost.decode_ns
        whole["glue of a replay"] += region_class.replay_fixed_ns
        whole["region forward"] += region_class.forward_ns
        whole["region backward"] += region_class.backward_ns
        whole["region replay (GC)"] += region_class.gc_replay_ns
    whole["head and embeddings forward"] = bucket.outside.forward_ns
    whole["head and embeddings backward"] = bucket.outside.backward_ns
    whole["step (GC)"], whole["step (No-GC)"] = reference_times(trace)
    return {**times, **whole}
