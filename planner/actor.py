"""ModelSpec -> Actor: the model under its adapter in train mode, with what one microbatch of it needs."""

from __future__ import annotations

import contextlib
import difflib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hilore.planner.head import base_model, grpo_loss, policy_logps
from hilore.planner.microbatch import Microbatch, synthetic_microbatch
from hilore.planner.plainrun import sequences_in_rows
from hilore.planner.sources import SourceError, load_meta_model, load_model, module_dtype, torch_dtype
from hilore.planner.spec_types import ModelSpec
from hilore.runtime.ambient import without_fused_glue

LIVE_ADAPTER_STD = 0.02


@dataclass(frozen=True, slots=True)
class Actor:
    """``model`` in train mode on ``device``; ``fake_mode`` is set where its tensors are fake (then enter it)."""

    model: nn.Module
    tokenizer: Any | None
    spec: ModelSpec
    device: torch.device
    fake_mode: FakeTensorMode | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        """The context that forward and loss run in: autocast to ``precision.compute`` where the spec says so."""
        if not self.spec.precision.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch_dtype(self.spec.precision.compute))

    @contextlib.contextmanager
    def faked(self) -> Iterator[None]:
        """The actor's FakeTensorMode with the branches of a plain run, or nothing for a real actor."""
        if self.fake_mode is None:
            yield
            return
        # Fake tensors of a card that is not here lie on the CPU, whose glue the card does not have.
        fused = contextlib.nullcontext() if self.spec.device.kind == "cpu" else without_fused_glue()
        with self.fake_mode, sequences_in_rows(packed=self.spec.batch.layout == "packed"), fused:
            yield


def build_actor(
    spec: ModelSpec,
    *,
    device: str | torch.device = "cpu",
    fake: bool = False,
    live_adapters: bool = False,
    seed: int = 0,
) -> Actor:
    """Load the model, put the adapter on it, freeze what is not trained, switch to train mode.

    Trainable: the adapter's parameters alone, or without an adapter all those that the source left trainable.
    Input embeddings are made to require grad (``enable_input_require_grads``), as Hugging Face does when gradient
    checkpointing is switched on: the first region's input then requires grad even when the embeddings are frozen.
    ``fake``: no weights are read and no memory is taken; tensors are fake ones that claim to be on ``device``.
    ``live_adapters``: lora_B ~ N(0, 0.02) instead of 0, since a zero lora_B makes every gradient of lora_A vanish.
    Random weights and adapters come from ``seed``; the global random state is left as it was.
    Raises SourceError and UnsupportedModelError.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if fake:
            model, tokenizer = load_meta_model(spec), None
        else:
            model, tokenizer = load_model(spec, device, seed=seed)
        if spec.adapter.kind == "lora":
            with torch.device("meta") if fake else contextlib.nullcontext():
                model = _add_lora(model, spec)
            if live_adapters and not fake:
                _enliven(model, seed)
    require_input_grads = getattr(model, "enable_input_require_grads", None)
    if require_input_grads is not None:
        require_input_grads()
    model.train()
    mode = _fake(model, torch.device(device)) if fake else None
    return Actor(model, tokenizer, spec, torch.device(device), mode)


def microbatch_of(actor: Actor, tokens: int, *, seed: int = 0) -> Microbatch:
    """A synthetic microbatch of one length bucket for this actor, with the reference log-probabilities it needs."""
    config = getattr(base_model(actor.model), "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    pad_token = getattr(actor.tokenizer, "pad_token_id", None) or 0
    with actor.faked():
        microbatch = synthetic_microbatch(
            actor.spec, tokens, seed=seed, device=actor.device, vocabulary=vocabulary, pad_token=pad_token
        )
        return with_reference(actor, microbatch)


def policy_loss(actor: Actor, microbatch: Microbatch) -> Tensor:
    """Forward, log-probabilities and loss of one microbatch: a scalar to call ``backward`` on."""
    with actor.autocast():
        logps = policy_logps(actor.model, microbatch, actor.spec.loss.head)
        return grpo_loss(logps, microbatch, actor.spec.loss, actor.spec.batch.accumulation)


def with_reference(actor: Actor, microbatch: Microbatch) -> Microbatch:
    """The microbatch with ``ref_logps`` where ``loss.beta`` needs them and it has none.

    The reference is the model without its adapter; without an adapter, the model as it is now.
    """
    if not actor.spec.loss.beta or microbatch.ref_logps is not None:
        return microbatch
    disable_adapter = getattr(actor.model, "disable_adapter", contextlib.nullcontext)
    training = actor.model.training
    actor.model.eval()
    try:
        with torch.no_grad(), actor.autocast(), disable_adapter():
            return replace(microbatch, ref_logps=policy_logps(actor.model, microbatch, actor.spec.loss.head))
    finally:
        actor.model.train(training)


def _add_lora(model: nn.Module, spec: ModelSpec) -> nn.Module:
    """Wrap by PEFT. PEFT takes its own choice of adapter dtype (float32 for half-precision models): undone here."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SourceError(
            f"adapter.kind: 'lora' needs peft ({error}); type: pip install 'hilore-plan[hf]'",
            key="adapter.kind",
            value="lora",
        ) from error
    adapter = spec.adapter
    targets = adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets)
    _check_targets(model, targets)
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM" if hasattr(model, "get_output_embeddings") else None,
    )
    with warnings.catch_warnings():
        # PEFT itself still reads the old name of a transformers property
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
        try:
            wrapped: nn.Module = get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise SourceError(
                f"adapter.targets: {targets!r} is refused by peft for {type(model).__name__}: {error}",
                key="adapter.targets",
                value=str(targets),
            ) from error
    gathered = spec.parallel.kind != "none" and not spec.precision.autocast
    dtype = module_dtype(spec) if gathered else torch_dtype(str(adapter.dtype))
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return wrapped


def _check_targets(model: nn.Module, targets: str | list[str]) -> None:
    """PEFT ignores a name that matches nothing as long as another matches; here each must match."""
    if isinstance(targets, str):
        return
    names = [name for name, _ in model.named_modules() if name]
    for target in targets:
        if any(name == target or name.endswith("." + target) for name in names):
            continue
        known = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is nn.Linear})
        guess = difflib.get_close_matches(target, known, n=1)
        hint = f"did you mean '{guess[0]}'?" if guess else f"its linear layers are {', '.join(known)}"
        raise SourceError(
            f"adapter.targets: '{target}' matches no module of {type(model).__name__}; {hint}",
            key="adapter.targets",
            value=target,
        )


def _enliven(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            values = torch.randn(parameter.shape, generator=generator) * LIVE_ADAPTER_STD
            parameter.data.copy_(values)


def _fake(model: nn.Module, device: torch.device) -> FakeTensorMode:
    """Replace every parameter and buffer by a fake one on ``device``; what was shared stays shared."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Any] = {}

    def twin(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            with mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
        return made[id(tensor)]

    kept_alive = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = twin(tensor)
    del kept_alive
    return mode
