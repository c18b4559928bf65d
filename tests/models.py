"""Tiny models that tests share: seeded random weights, train mode, no key-value cache.

Every function takes ``seed`` and leaves the global random state as it found it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hilore.planner.microbatch import Microbatch

VOCABULARY = 128
HIDDEN = 32
LAYERS = 2
HEADS = 4
KV_HEADS = 2
FFN = 64
_ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Drop(nn.Module):
    """Linear-ReLU-dropout-Linear, width 8: the smallest module that draws random numbers."""

    def __init__(self, width: int = 8, p: float = 0.5) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.dropout = nn.Dropout(p)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.dropout(torch.relu(self.first(x))))
        return hidden


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generator inside, restore it after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of torch inside, as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def mlp(seed: int = 0) -> nn.Sequential:
    """Linear-GELU-Linear, 64-256-64."""
    with seeded(seed):
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).train()


def drop(seed: int = 0, p: float = 0.5) -> Drop:
    with seeded(seed):
        return Drop(p=p).train()


def _sizes(**changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    return sizes | changes


def causal_lm(
    model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **changes: Any
) -> nn.Module:
    """A random causal language model of ``model_type`` with this module's tiny sizes, ``changes`` on top."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**_sizes(**changes))
    with seeded(seed):
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model.train()


def qwen2_tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    return causal_lm("qwen2", seed=seed, dtype=dtype, **changes)


def qwen2_tiny_lora(
    dropout: float = 0.1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    adapter_dtype: torch.dtype | None = None,
    live: bool = True,
    **changes: Any,
) -> nn.Module:
    """qwen2_tiny with LoRA r=4 on all seven linears; ``live``: lora_B is not zero, so that lora_A has gradients."""
    return lora(
        qwen2_tiny(seed=seed, dtype=dtype, **changes),
        dropout=dropout,
        seed=seed,
        adapter_dtype=adapter_dtype,
        live=live,
    )


def lora(
    model: nn.Module,
    *,
    dropout: float = 0.1,
    rank: int = 4,
    seed: int = 0,
    adapter_dtype: torch.dtype | None = None,
    live: bool = True,
    targets: Any = None,
) -> nn.Module:
    """Wrap ``model`` by PEFT. ``adapter_dtype`` None leaves the dtype that PEFT chooses (float32 for bf16 models)."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=dropout, target_modules=targets or _ALL_LINEAR, task_type="CAUSAL_LM"
    )
    with seeded(seed + 1):
        wrapped: nn.Module = get_peft_model(model, config)
        for name, parameter in wrapped.named_parameters():
            if "lora_" not in name:
                continue
            if live and "lora_B" in name:
                with torch.no_grad():
                    parameter.normal_(0.0, 0.02)
            if adapter_dtype is not None:
                parameter.data = parameter.data.to(adapter_dtype)
    return wrapped.train()


def qwen3_tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    return causal_lm("qwen3", seed=seed, dtype=dtype, **({"head_dim": HIDDEN // HEADS} | changes))


def llama_tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    return causal_lm("llama", seed=seed, dtype=dtype, **changes)


def phi3_tiny(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Fused projections: qkv_proj and gate_up_proj are split into views of one storage."""
    return causal_lm("phi3", seed=seed, dtype=dtype, **changes)


def gemma2_tiny(
    attention: str = "eager", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> nn.Module:
    """Attention ``eager`` is Gemma2's own default.

    transformers refuses to build Gemma2 with ``sdpa``, which has no soft capping of scores. It runs without the
    capping when the setting is changed afterwards: that is what ``attention="sdpa"`` gives.
    """
    sizes: dict[str, Any] = {
        "head_dim": HIDDEN // HEADS,
        "query_pre_attn_scalar": HIDDEN // HEADS,
        "sliding_window": 8,
    }
    if attention != "eager":
        sizes["attn_logit_softcapping"] = None
    model = causal_lm("gemma2", seed=seed, dtype=dtype, attention="eager", **(sizes | changes))
    if attention != "eager":
        model.config._attn_implementation = attention
    return model


def microbatch_for(
    model: nn.Module, rows: int = 2, tokens: int = 16, left_padding: bool = True, seed: int = 0
) -> Microbatch:
    """A microbatch of ``rows`` x ``tokens`` whose second half is completion.

    ``left_padding``: row r starts with r pad tokens (none in row 0) and row r's completion ends with r pads.
    Advantages alternate in sign with root mean square 1.
    """
    config = getattr(model, "config", None)
    vocabulary = int(getattr(config, "vocab_size", VOCABULARY))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (rows, tokens), generator=generator)
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    response = tokens // 2
    if left_padding:
        for row in range(1, rows):
            pads = min(row, response - 1)
            mask[row, :pads] = 0
            mask[row, tokens - pads :] = 0
    ids = ids.masked_fill(mask == 0, 0)
    sign = torch.tensor([1.0 if row % 2 == 0 else -1.0 for row in range(rows)])
    return Microbatch(ids, mask, mask[:, tokens - response :].clone(), sign, None, None)
