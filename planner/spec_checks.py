"""Checks of model.yaml that need several keys at once; planner/spec.py has checked each key alone."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

from hilore.planner.devices import UnknownGpuError, gpu_named
from hilore.planner.packing import SHORTEST
from hilore.planner.spec_config import config_problems
from hilore.planner.spec_types import Adapter, Batch, CalibrationSpec, Device, ModelSource, Parallel, Precision
from hilore.planner.yaml_lines import Document, Problem
from hilore.runtime.codecs.tokens import token_codec

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def combined_problems(values: dict[str, Any], document: Document) -> list[Problem]:
    """What only several keys together can get wrong. Sections that already have problems are None here."""
    problems: list[Problem] = []
    model, batch, calibration = values["model"], values["batch"], values["calibration"]
    precision, parallel, adapter = values["precision"], values["parallel"], values["adapter"]
    device, loss = values["device"], values["loss"]
    if model is not None:
        problems.extend(_model_problems(model, document))
    if batch is not None:
        problems.extend(_bucket_problems(batch, document))
    if batch is not None and loss is not None and batch.layout == "packed" and loss.head == "trl":
        text = "loss.head: trl is the head of TRL's trainer, which pads; with layout: packed use naive or chunked"
        problems.append(Problem(document.line("loss", "head"), text))
    if batch is not None and batch.layout == "packed":
        problems.extend(_packed_codec_problems(values["codecs"], document))
    if device is not None:
        problems.extend(_device_problems(device, document))
    if calibration is not None:
        problems.extend(_confidence_problems(calibration, document))
    if precision is not None and parallel is not None:
        problems.extend(_precision_problems(precision, parallel, document))
    if parallel is not None and parallel.kind == "fsdp1":
        problems.extend(_flat_problems(parallel, adapter, document))
    if adapter is not None and adapter.kind == "lora":
        for key in ("rank", "alpha"):
            if getattr(adapter, key) == 0:
                problems.append(
                    Problem(document.line("adapter", key), f"adapter.{key} must be greater than 0, found 0")
                )
    return problems


def _model_problems(model: ModelSource, document: Document) -> list[Problem]:
    if model.source == "hf-config":
        return config_problems(model.config, document)
    if model.source == "python" and not _FACTORY.fullmatch(model.factory):
        line = document.line("model", "factory")
        return [Problem(line, f"model.factory must be 'package.module:function', found '{model.factory}'")]
    given = {"hf": model.path, "package": model.package, "python": model.factory}[model.source]
    return [] if given else [Problem(document.line("model"), f"model names no {model.source} to load")]


def _bucket_problems(batch: Batch, document: Document) -> list[Problem]:
    line = document.line("batch", "length_buckets")
    buckets = batch.length_buckets
    longest = batch.prompt_tokens + batch.response_tokens
    if not buckets or list(buckets) != sorted(set(buckets)):
        return [Problem(line, f"batch.length_buckets must ascend, found {list(buckets)}")]
    if batch.layout == "packed":
        return _packed_problems(batch, longest, line)
    if buckets[0] < SHORTEST:
        text = f"batch.length_buckets begins with {buckets[0]} tokens; a row of prompt and completion has {SHORTEST}"
        return [Problem(line, f"{text} or more")]
    if buckets[-1] != longest:
        text = f"the last of batch.length_buckets is {buckets[-1]}, but the longest row has {longest} tokens"
        return [Problem(line, f"{text} (prompt_tokens + response_tokens)")]
    return []


def _packed_problems(batch: Batch, longest: int, line: int) -> list[Problem]:
    """Rows of several sequences: the longest sequence fits the last bucket, one token each of all fits the first."""
    sequences, buckets = batch.microbatch, batch.length_buckets
    if not longest <= buckets[-1] <= sequences * longest:
        text = (
            f"the last of batch.length_buckets is {buckets[-1]}; with layout: packed it must hold the longest sequence"
        )
        return [
            Problem(
                line,
                f"{text} ({longest} tokens) and no more than all {sequences} of a microbatch ({sequences * longest})",
            )
        ]
    if buckets[0] < SHORTEST * sequences:
        text = f"batch.length_buckets begins with {buckets[0]} tokens, which do not hold {sequences} sequences"
        return [Problem(line, f"{text} of at least {SHORTEST} tokens")]
    return []


def _device_problems(device: Device, document: Document) -> list[Problem]:
    """A card that planner/devices.py does not have: neither its memory nor its rates are known."""
    if not device.gpu:
        return []
    try:
        gpu_named(device.gpu)
    except UnknownGpuError as error:
        return [Problem(document.line("device", "gpu"), error.message)]
    return []


def _confidence_problems(calibration: CalibrationSpec, document: Document) -> list[Problem]:
    confidence, count = Fraction(str(calibration.confidence)), calibration.microbatches
    if confidence <= Fraction(count, count + 1):
        return []
    needed = math.ceil(confidence / (1 - confidence))
    text = f"{count} microbatches carry a confidence of at most {count}/{count + 1}, not {calibration.confidence}"
    line = document.line("calibration", "confidence")
    return [Problem(line, f"{text}; it needs calibration.microbatches of at least {needed}")]


def _flat_problems(parallel: Parallel, adapter: Adapter | None, document: Document) -> list[Problem]:
    """What FSDP1's flat parameters cannot carry."""
    problems = []
    if parallel.world_size == 1:
        text = "parallel.world_size 1 with kind: fsdp1 shards nothing (PyTorch makes it NO_SHARD); use parallel: none"
        problems.append(Problem(document.line("parallel", "world_size"), text))
    if adapter is not None and adapter.kind == "lora":
        text = (
            "parallel.kind fsdp1 with adapter.kind lora: a flat parameter that holds frozen and trainable ones makes "
            "gradients of all, and adapters wrapped apart are gathered within the replayed layers; shard with "
            "fully_shard and set parallel.kind: fsdp2 (accelerate: fsdp_version: 2; verl: strategy: fsdp2)"
        )
        problems.append(Problem(document.line("parallel", "kind"), text))
    return problems


def _precision_problems(precision: Precision, parallel: Parallel, document: Document) -> list[Problem]:
    line = document.line("precision", "compute")
    if precision.autocast and precision.compute == "float32":
        return [Problem(line, "precision.compute float32 with autocast: true does nothing; name the autocast dtype")]
    if not precision.autocast and parallel.kind == "none" and precision.compute != precision.params:
        text = f"precision.compute {precision.compute} differs from params {precision.params}"
        return [Problem(line, f"{text}; set autocast: true, or make them equal")]
    return []


def _packed_codec_problems(codecs: tuple[str, ...] | None, document: Document) -> list[Problem]:
    return [
        Problem(
            document.line("codecs", index),
            f"codec '{codec}' gives the tokens of a row bits by their weight, which needs rows of prompt and "
            f"completion side by side; with layout: packed use '{codec.replace('tw', 'int', 1)}'",
        )
        for index, codec in enumerate(codecs or ())
        if token_codec(codec) is not None
    ]
