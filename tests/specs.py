"""ModelSpecs for tests, made from model.yaml text by the product's own reader."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hilore.planner.spec import load_spec
from hilore.planner.spec_types import ModelSpec

TINY_CONFIG = (
    "{model_type: qwen2, vocab_size: 128, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 512}"
)


def spec_of(folder: str | Path | None = None, **sections: str) -> ModelSpec:
    """A tiny random Qwen2 on CPU; keyword arguments replace whole sections by their YAML text.

    ``folder``: where the file lies (paths in it are relative to that); by default one that is gone afterwards.
    """
    if folder is None:
        with TemporaryDirectory() as temporary:
            return spec_of(temporary, **sections)
    texts = {
        "name": "tiny",
        "model": f"{{source: hf-config, config: {TINY_CONFIG}}}",
        "precision": "{params: float32}",
        "batch": "{microbatch: 2, prompt_tokens: 8, response_tokens: 8}",
        "device": "cpu",
    } | sections
    path = Path(folder) / "model.yaml"
    path.write_text("".join(f"{key}: {text}\n" for key, text in texts.items()), encoding="utf-8")
    return load_spec(path)
