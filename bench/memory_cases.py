"""The configurations of bench/memory.py, as model.yaml files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hilore.planner.spec import load_spec
from hilore.planner.spec_types import ModelSpec

# What differs from Qwen2's sizes below.
ARCHITECTURES = {
    "qwen2": "",
    "qwen3": ", head_dim: 64",
    "llama": "",
    "phi3": ", pad_token_id: 0, bos_token_id: 1, eos_token_id: 2",
    "gemma": ", head_dim: 64",
}
LENGTHS = (128, 320)
_LORA = "{{kind: lora, rank: 8, alpha: 16, dtype: {}, dropout: {}}}"
_BF16 = "{params: bfloat16}"
# Adapter and precision of each kind of training.
ADAPTERS = {
    "full": ("{kind: none}", _BF16),
    "LoRA bf16": (_LORA.format("bfloat16", 0.0), _BF16),
    "LoRA fp32": (_LORA.format("float32", 0.0), _BF16),
    "LoRA dropout": (_LORA.format("float32", 0.1), _BF16),
    "full, master fp32": ("{kind: none}", "{params: bfloat16, master: float32}"),
    "full, autocast": ("{kind: none}", "{params: float32, compute: bfloat16, autocast: true}"),
    "LoRA dropout, autocast": (
        _LORA.format("float32", 0.1),
        "{params: float32, compute: bfloat16, autocast: true}",
    ),
    "LoRA fp32, autocast": (_LORA.format("float32", 0.0), "{params: bfloat16, compute: bfloat16, autocast: true}"),
}
_EVERYWHERE = ("full", "LoRA bf16", "LoRA fp32", "LoRA dropout")


@dataclass(frozen=True, slots=True)
class Case:
    """``rows`` per microbatch: two are padded and get a mask."""

    architecture: str
    training: str
    head: str
    rows: int

    @property
    def name(self) -> str:
        return f"{self.architecture}, {self.training}, {self.head}"


def cases() -> Iterator[Case]:
    """Each architecture with each common training, heads and rows in turn; the other precisions once or twice."""
    for number, architecture in enumerate(ARCHITECTURES):
        for place, training in enumerate(_EVERYWHERE):
            head = ("naive", "chunked")[(number + place) % 2]
            yield Case(architecture, training, head, 1 + (number + place // 2) % 2)
    yield Case("qwen2", "full, master fp32", "naive", 2)
    yield Case("llama", "full, autocast", "naive", 1)
    yield Case("qwen3", "full, autocast", "chunked", 2)
    yield Case("gemma", "LoRA fp32, autocast", "naive", 2)
    yield Case("llama", "LoRA dropout, autocast", "chunked", 2)


def spec_of(case: Case, folder: Path, lengths: tuple[int, ...] = LENGTHS, accumulation: int = 4) -> ModelSpec:
    """Three layers of d 256; ``accumulation`` microbatches, AdamW with a float32 state."""
    adapter, precision = ADAPTERS[case.training]
    key_heads = 1 if case.architecture == "gemma" else 2
    tokens = lengths[-1]
    path = folder / "model.yaml"
    path.write_text(
        f"""
name: memory
model:
  source: hf-config
  config:
    {{model_type: {case.architecture}, vocab_size: 1000, hidden_size: 256, intermediate_size: 704,
     num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: {key_heads},
     max_position_embeddings: 512{ARCHITECTURES[case.architecture]}}}
adapter: {adapter}
precision: {precision}
batch:
  microbatch: {case.rows}
  prompt_tokens: {tokens // 4}
  response_tokens: {tokens - tokens // 4}
  length_buckets: [{", ".join(map(str, lengths))}]
  accumulation: {accumulation}
optimizer: {{kind: adamw, state: float32}}
loss: {{kind: grpo, beta: 0.001, head: {case.head}}}
device: cpu
""",
        encoding="utf-8",
    )
    return load_spec(path)
