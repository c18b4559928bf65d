"""What a plan was made for, in named fields that can be compared one by one.

``model_fingerprint`` gives the fields that a model itself shows; the planner adds the fields of the run (layout, rows,
tokens, parallel kind, device). A plan is refused where a field of ``REFUSED`` differs, with both values.
"""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from typing import Any

import torch
from torch import nn

from hilore.runtime.errors import FingerprintError, PlanFileError
from hilore.runtime.naming import canonical_names
from hilore.runtime.sharded import model_sharding, whole_parameters

_SIZE_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
REFUSED = (
    "architecture",
    *_SIZE_FIELDS,
    "parameter_shapes",
    "parameter_dtypes",
    "adapter",
    "attention",
    "trainable_set",
    "region_grain",
    "layout",
    "parallel",
    "first_input_requires_grad",
    "torch",
    "transformers",
)
WARNED = ("torch_patch", "transformers_patch", "gpu", "world_size")
RANKS_PLANS = "plans"


def model_fingerprint(model: nn.Module) -> dict[str, Any]:
    """Fields that the model itself shows: architecture, sizes, dtypes, adapter, attention, trainable set, versions."""
    base = base_model(model)
    config = getattr(base, "config", None)
    names = canonical_names(model)
    shapes: list[str] = []
    trainable: list[str] = []
    dtypes: Counter[str] = Counter()
    for parameter in whole_parameters(model):
        owner, _, leaf = parameter.name.rpartition(".")
        name = f"{names[owner]}.{leaf}"
        if not _is_adapter(parameter.name):
            shapes.append(f"{name} {parameter.shape}")
        kind = str(parameter.dtype).removeprefix("torch.")
        dtypes[kind + (" trainable" if parameter.requires_grad else "")] += 1
        if parameter.requires_grad:
            trainable.append(f"{name} {parameter.shape}")
    fields: dict[str, Any] = {"architecture": _class_name(base)}
    for field, attribute in _SIZE_FIELDS.items():
        fields[field] = getattr(config, attribute, None)
    fields |= {
        "parameter_shapes": _digest(shapes),
        "parameter_dtypes": ", ".join(f"{count} {kind}" for kind, count in sorted(dtypes.items())),
        "adapter": _adapter(model),
        "attention": getattr(config, "_attn_implementation", None),
        "trainable_set": f"{len(trainable)} tensors {_digest(trainable)}",
    }
    # A model that is not sharded yet may still be: of it nothing is said.
    parallel = {"parallel": model_sharding(model)} if model_sharding(model) else {}
    return fields | parallel | versions()


def versions() -> dict[str, str]:
    """Library versions: minor releases bind, patch releases warn."""
    found = {"torch": torch.__version__.split("+")[0]}
    try:
        import transformers
    except ImportError:
        found["transformers"] = "absent"
    else:
        found["transformers"] = transformers.__version__
    fields = {name: ".".join(version.split(".")[:2]) for name, version in found.items()}
    return fields | {f"{name}_patch": version for name, version in found.items()}


def refuse_unknown_fields(accept: tuple[str, ...]) -> None:
    """Raise FingerprintError where ``accept`` names what no plan can differ in, or is one string."""
    if isinstance(accept, str):
        raise FingerprintError(f'accept is the string {accept!r}; give a tuple of names: accept=("{accept}",)')
    known = (*REFUSED, *WARNED, RANKS_PLANS)
    for field in accept:
        if field not in known:
            close = difflib.get_close_matches(str(field), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"use any of {', '.join(known)}"
            raise FingerprintError(f"accept names the unknown field {field!r}; {hint}", field=field)


def check_fingerprint(planned: dict[str, Any], found: dict[str, Any], accept: tuple[str, ...]) -> tuple[str, ...]:
    """Compare field by field. Returns a line for each difference that is only warned of or accepted by name.

    Raises FingerprintError for the first refused difference, PlanFileError where the plan has no fingerprint.
    """
    if not planned:
        raise PlanFileError("the plan has no fingerprint, so nothing says which model it is for; solve it again")
    lines = []
    for field in (*REFUSED, *WARNED):
        if field not in planned or field not in found or planned[field] == found[field]:
            continue
        line = f"Plan field {field}={planned[field]}, model has {found[field]}"
        if field in REFUSED and field not in accept:
            raise FingerprintError(
                f"{line}. Make plans for this model (`hilore-plan trace`, `hilore-plan solve`), or pass "
                f'attach(..., accept=("{field}",)) if you know that it does not matter',
                field=field,
                planned=planned[field],
                found=found[field],
            )
        lines.append(line)
    return tuple(lines)


def base_model(model: nn.Module) -> nn.Module:
    """The model inside all wrappers."""
    names = canonical_names(model)
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    return modules[[full for full, name in names.items() if name == ""][-1]]


def _class_name(module: nn.Module) -> str:
    """The class that the model was made as: FSDP2 gives each module a subclass of its own."""
    made_as = (cls for cls in type(module).__mro__ if not any(base.__name__ == "FSDPModule" for base in cls.__mro__))
    return next(made_as).__name__


def _is_adapter(full_name: str) -> bool:
    return any(part.startswith("lora_") for part in full_name.split("."))


def _adapter(model: nn.Module) -> str:
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if configs:
            return "; ".join(_adapter_line(configs[name]) for name in sorted(configs))
    return "none"


def _adapter_line(config: Any) -> str:
    targets = config.target_modules
    listed = targets if isinstance(targets, str) else "+".join(sorted(targets or ()))
    kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    return (
        f"{kind} rank {getattr(config, 'r', None)} alpha {getattr(config, 'lora_alpha', None)} "
        f"dropout {getattr(config, 'lora_dropout', None)} targets {listed}"
    )


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
