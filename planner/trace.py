"""The Trace: all that `trace` measured of one actor, and all that `solve` knows of it. One JSON file.

Bytes are allocated storage bytes on one GPU, times are nanoseconds on the device of the run. Unit names inside a
region class are relative to the region ("mlp.gate_proj", "self_attn:attention"); a plan joins them to the region's
name ("model.layers.17" + "." + "mlp.gate_proj").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hilore.planner.risktrace import Calibration, Confirmed, ExposureSample, UnitRisk

__all__ = [
    "TRACE_VERSION",
    "Bucket",
    "Calibration",
    "CodecCost",
    "Confirmed",
    "ExposureSample",
    "Fixed",
    "KeepSet",
    "LargestTensors",
    "Outside",
    "OutsideParts",
    "RegionClass",
    "RegionTrace",
    "ShardedBytes",
    "Trace",
    "UnitRisk",
    "UnitTrace",
]

TRACE_VERSION = 2


@dataclass(frozen=True, slots=True)
class CodecCost:
    """One codec offered to one unit.

    ``workspace_bytes``: at most what one encode or decode of the unit's output allocates on the target's device beside
    payload and result, as the codec declares it (Codec.workspace_bytes).
    """

    codec: str
    payload_bytes: int
    encode_ns: int
    decode_ns: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class UnitTrace:
    """One unit of a region class, in forward order.

    ``kind`` is its risk family: q, k, v, o, gate, up, down, qkv, gate_up, attention or linear.
    ``output_bytes``: the storage that H keeps; ``rest_bytes``: what its own autograd keeps beside its inputs, its
    output and parameters (log-sum-exp, masks), kept with H and with L.
    The four ``feeds``/``saves`` fields are the liveness graph with the glue contracted away:
    ``feeds`` units whose inputs its output reaches through glue alone; ``feeds_saved`` its output is, or reaches
    through glue alone, a tensor that autograd saves outside of units; ``saves_inputs`` its own autograd saves its
    inputs (trainable weight, attention); ``saves_own`` its own autograd saves its output or other results of
    running it (attention).
    ``keepable`` is False, with ``reason``, where its output is changed in place inside the region.
    """

    name: str
    kind: str
    run_ns: int
    output_bytes: int
    rest_bytes: int
    feeds: tuple[str, ...]
    feeds_saved: bool
    saves_inputs: bool
    saves_own: bool
    keepable: bool
    reason: str
    codecs: tuple[CodecCost, ...]


@dataclass(frozen=True, slots=True)
class KeepSet:
    """What one set of kept (H) units costs in memory, measured by the runtime itself under fake tensors.

    ``retained_bytes``: alive after the region's forward because of this region (its input boundary and kept outputs
    with their rest; not its output, which is the next region's boundary).
    ``forward_bytes``: highest live bytes during the region's forward beyond what was live before it.
    ``backward_bytes``: highest live bytes during the region's replay and backward beyond what was live when its
    backward began (when its retained bytes and the incoming gradient were live already).
    ``handed_bytes``: the same when a kept output was handed out in the replay, at the highest; None: not measured.
    A unit at L keeps its payload and its rest instead of its output; its decoded output takes the place of a kept one
    once the replay has handed it out, when the payload goes (in a split replay that of a unit before the split stays
    for the second stage). ``split``: measured with the replay split at the class's ``split_at``.
    ``cast_bytes``: casts of trainable weights that nothing but autocast holds, until the loss is there: in
    ``forward_bytes``, not in ``retained_bytes``. ``keeps_boundary``: its input is in ``retained_bytes``; of a held
    region that depends on what its first norm saves.
    """

    kept: tuple[str, ...]
    retained_bytes: int
    forward_bytes: int
    backward_bytes: int
    split: bool = False
    cast_bytes: int = 0
    keeps_boundary: bool = False
    handed_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ShardedBytes:
    """What FSDP2 takes of a region class's bytes (planner/sharding.py): what a peak is made of, never a decision.

    ``retained_bytes``: of every ``KeepSet.retained_bytes``, parameters that stay gathered. ``forward_bytes``: gathered
    copies while the region's forward computes; ``gathering_bytes``: its gather, where that is the highest moment.
    ``backward_bytes``: gathered and prefetched parameters while its backward computes; ``opening_bytes``: those before
    it computes; ``held_bytes``: an earlier reduction's input beside either. ``reducing_bytes``: the reduction of its
    gradients, when all it retained is gone and ``prefetched_bytes`` are there.
    """

    retained_bytes: int
    forward_bytes: int
    gathering_bytes: int
    backward_bytes: int
    opening_bytes: int
    held_bytes: int
    reducing_bytes: int
    prefetched_bytes: int


@dataclass(frozen=True, slots=True)
class RegionClass:
    """Regions with the same structure, shapes and dtypes.

    ``keep_sets`` holds the subsets of keepable units that can be worth a decision, always among them the empty one.
    ``hold`` is the region that a plan holds (``kept`` then names all units). ``gc`` is Hugging Face's checkpointing,
    which also runs dead calls, and ``no_gc`` the region without a plan or checkpointing (None: as ``hold``):
    references, never a choice.
    ``replay_fixed_ns``: a replay in which no unit runs (glue, bookkeeping). ``gc_replay_ns``: one of GC.
    ``split_at``: the unit before which a replay can be split into two stages (plan.RegionPlan), '' where it cannot;
    ``early_fixed_ns``: the glue of the second stage, which a split replay runs twice. ``sharded``: None without FSDP2.
    ``plan_extra_ns``: what forward and backward take more under a plan, replays aside: the runtime's bookkeeping less
    the passes over memory that linears with adapters save (runtime/adaptersum.py); below 0 where these are more.
    0 in traces of earlier versions.
    """

    name: str
    units: tuple[UnitTrace, ...]
    keep_sets: tuple[KeepSet, ...]
    hold: KeepSet
    gc: KeepSet
    forward_ns: int
    backward_ns: int
    replay_fixed_ns: int
    gc_replay_ns: int
    gradient_bytes: int
    split_at: str = ""
    early_fixed_ns: int = 0
    sharded: ShardedBytes | None = None
    plan_extra_ns: int = 0
    no_gc: KeepSet | None = None

    @property
    def without_checkpointing(self) -> KeepSet:
        """``no_gc``, or what is the same."""
        return self.no_gc or self.hold


@dataclass(frozen=True, slots=True)
class RegionTrace:
    """One region in forward order: ``name`` without wrapper prefix, ``class_index`` into the bucket's classes.

    ``hold_only``: why it may only be held, since its forward does not repeat itself bitwise; '' where it does.
    """

    name: str
    class_index: int
    hold_only: str = ""


@dataclass(frozen=True, slots=True)
class LargestTensors:
    """``count`` storages of ``each_bytes``."""

    count: int
    each_bytes: int


@dataclass(frozen=True, slots=True)
class OutsideParts:
    """What is in Outside's bytes: what a peak is made of, never a decision.

    ``head_fsdp_bytes``, ``head_left_fsdp_bytes``, ``tail_fsdp_bytes``: gathered parameters and reductions of FSDP2.
    ``head_largest``: the largest tensors beside those at the head's highest moment (logits and their copies).
    """

    head_fsdp_bytes: int
    head_left_fsdp_bytes: int
    tail_fsdp_bytes: int
    head_largest: tuple[LargestTensors, ...]


@dataclass(frozen=True, slots=True)
class Outside:
    """All that is in no region.

    ``before_bytes``: alive from before the first region until the end of backward beside boundaries (inputs of the
    update's microbatches, masks, rotary tables, embedding's saved tensors), and ``leaf_boundary_bytes`` of it the first
    region's boundary, where it is a leaf that the graph itself keeps (frozen embeddings made to require grad): the
    first region then keeps no other copy of it. ``head_bytes``: highest live bytes during final norm, lm_head,
    log-probabilities, loss and their backward, beyond what was live after the last region's forward.
    ``head_left_bytes``: what the head still holds when the last region's backward begins (incoming gradient and
    the head's parameter gradients). ``tail_bytes``: the same as ``head_bytes`` for the backward of what lies before
    the first region. ``optimizer_bytes``: the same for the optimizer step, when only the inputs are left of
    ``before_bytes`` (it can be negative). ``head_forward_bytes``: ``head_bytes`` until the loss is there, beside which
    stand the regions' ``cast_bytes``. ``frame_bytes``: of ``before_bytes``, arguments of regions (masks, positions)
    that nothing holds where every region is held. ``parts``: None in traces of earlier versions.
    """

    before_bytes: int
    head_bytes: int
    head_left_bytes: int
    tail_bytes: int
    optimizer_bytes: int
    forward_ns: int
    backward_ns: int
    optimizer_ns: int
    leaf_boundary_bytes: int = 0
    head_forward_bytes: int = 0
    frame_bytes: int = 0
    parts: OutsideParts | None = None


@dataclass(frozen=True, slots=True)
class Fixed:
    """Live during the whole update.

    Of ``other_bytes``: ``workspace_bytes`` are cuBLAS's, ``reference_bytes`` the reference model's, the rest is
    ``resident.other_mib``.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    other_bytes: int
    workspace_bytes: int = 0
    reference_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_state_bytes + self.other_bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """One length bucket: ``tokens`` per row (prompt and response), ``rows`` per microbatch.

    ``completions``: loss columns of all rows, the most that so many tokens can hold; ``masked``: attention was given a
    mask (plan.PlannedMicrobatch). 0 and True in traces of earlier versions.
    """

    tokens: int
    rows: int
    classes: tuple[RegionClass, ...]
    regions: tuple[RegionTrace, ...]
    outside: Outside
    completions: int = 0
    masked: bool = True


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace file. ``card_bytes`` 0 where the device has no card (cpu). ``notes``: what the user should know."""

    trace_version: int
    name: str
    spec: dict[str, Any]
    fingerprint: dict[str, Any]
    device: str
    estimated: bool
    card_bytes: int
    fixed: Fixed
    buckets: tuple[Bucket, ...]
    calibration: Calibration
    time_spread: float
    notes: tuple[str, ...]
    versions: dict[str, str]
    created_at: str
