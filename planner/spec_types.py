"""What one model.yaml says, as frozen dataclasses; planner/spec.py reads them, docs/design.md explains them.

Field names are the keys of the file. Where a key does not apply (``rank`` without an adapter) its field is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Dtype = Literal["float32", "bfloat16", "float16"]
Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
LossKind = Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo"]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the actor comes from. ``config`` (with ``model_type``) for hf-config, ``path`` for hf, and so on."""

    __pydantic_config__ = _STRICT

    source: Literal["hf-config", "hf", "package", "python"]
    config: dict[str, Any]
    path: str
    package: str
    factory: str
    attention: Attention


@dataclass(frozen=True, slots=True)
class Adapter:
    """``targets``: ``"all-linear"`` or module names. ``dtype``: of the adapter's own parameters."""

    __pydantic_config__ = _STRICT

    kind: Literal["none", "lora"]
    rank: NotNegative
    alpha: NotNegative
    dropout: Share
    targets: str | tuple[str, ...]
    dtype: Dtype | Literal[""]


@dataclass(frozen=True, slots=True)
class Precision:
    """``params``: of the model's own parameters; ``master``: the optimizer's copy of the trainable ones, or None."""

    __pydantic_config__ = _STRICT

    params: Dtype
    compute: Dtype
    autocast: bool
    master: Dtype | None
    grads: Dtype


@dataclass(frozen=True, slots=True)
class Batch:
    """``microbatch``: sequences; ``length_buckets``: tokens per row, ascending.

    A padded row holds one sequence (prompt and response); layout packed has all sequences of a microbatch in one row.
    """

    __pydantic_config__ = _STRICT

    microbatch: Positive
    prompt_tokens: Positive
    response_tokens: Positive
    length_buckets: tuple[Positive, ...]
    accumulation: Positive
    layout: Literal["padded", "packed"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    __pydantic_config__ = _STRICT

    kind: Literal["adamw"]
    state: Dtype


@dataclass(frozen=True, slots=True)
class Resident:
    """What else is on the GPU during the update: a reference copy of the model, and ``other_mib`` MiB of others."""

    __pydantic_config__ = _STRICT

    reference: bool
    other_mib: NotNegative


@dataclass(frozen=True, slots=True)
class Loss:
    """``head``: log-probabilities from all logits at once (naive), in chunks of tokens (chunked), or by TRL's trainer
    (trl)."""

    __pydantic_config__ = _STRICT

    kind: LossKind
    clip_low: Annotated[float, Field(ge=0)]
    clip_high: Annotated[float, Field(ge=0)]
    beta: Annotated[float, Field(ge=0)]
    inner_epochs: Positive
    head: Literal["naive", "chunked", "trl"]


@dataclass(frozen=True, slots=True)
class Parallel:
    """``gradient_sync``: reduce gradients in every microbatch, or in the last of an update alone (accelerate's
    ``no_sync``, FSDP2's ``set_requires_gradient_sync(False)``), which keeps unsharded gradients until then."""

    __pydantic_config__ = _STRICT

    kind: Literal["none", "fsdp2", "fsdp1"]
    world_size: Positive
    reshard_after_forward: bool
    gradient_sync: Literal["every_microbatch", "last_microbatch"] = "every_microbatch"


@dataclass(frozen=True, slots=True)
class Device:
    """``gpu``: a name of planner/devices.py, or empty for the card that is here (and on cpu)."""

    __pydantic_config__ = _STRICT

    kind: Literal["cpu", "cuda"]
    gpu: str


@dataclass(frozen=True, slots=True)
class CalibrationSpec:
    """``path``: recorded rollouts (JSONL), for ``source: rollouts``. ``reference_error``: delta* (0.01 is 1 %)."""

    __pydantic_config__ = _STRICT

    source: Literal["prior", "rollouts", "synthetic", "generate"]
    path: str
    microbatches: Positive
    reference_error: Annotated[float, Field(gt=0, lt=1)]
    confidence: Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model.yaml with every default filled in.

    ``codecs``: None means all that apply, the empty tuple none. ``defaults_taken``: what the file left open, as
    ``{"batch.accumulation": 1}``. ``path``: the file as it was given, empty where the spec comes out of a trace.
    """

    __pydantic_config__ = _STRICT

    name: str
    model: ModelSource
    adapter: Adapter
    precision: Precision
    batch: Batch
    optimizer: Optimizer
    resident: Resident
    loss: Loss
    parallel: Parallel
    device: Device
    calibration: CalibrationSpec
    codecs: tuple[str, ...] | None
    region_grain: Literal["layer", "block"]
    defaults_taken: dict[str, Any]
    path: str = ""

    def beside(self, path: str) -> Path:
        """A path that the file names: relative to the folder of the file, not to the current one."""
        return Path(self.path).parent / Path(path).expanduser()
