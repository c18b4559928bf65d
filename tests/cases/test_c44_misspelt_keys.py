"""C-44: a misspelt key does nothing. Strict keys, with the line, what was meant, and all problems at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hilore.cli import main

GOOD = """\
name: tiny
model:
  source: hf-config
  config:
    model_type: qwen2
    num_hidden_layers: 2
    hidden_size: 64
    num_attention_heads: 4
batch:
  microbatch: 1
  prompt_tokens: 8
  response_tokens: 8
device: cpu
"""


def trace(folder: Path, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines on stderr of a `trace` that must fail with exit code 2, write nothing and show no traceback."""
    monkeypatch.chdir(folder)
    Path("model.yaml").write_text(text, encoding="utf-8")
    assert main(["trace", "model.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert [path.name for path in folder.iterdir()] == ["model.yaml"]
    return captured.err.splitlines()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "    hidden_size: 64",
            "    hiden_size: 64",
            "model.yaml:7: unknown key 'hiden_size' in model.config; did you mean 'hidden_size'?",
        ),
        (
            "  source: hf-config",
            "  source: hf-config\n  hiden_size: 64",
            "model.yaml:4: unknown key 'hiden_size' in model; did you mean 'hidden_size'? It belongs in model.config",
        ),
        (
            "name: tiny",
            "rank: 8\nname: tiny",
            "model.yaml:1: unknown key 'rank' at the top level; it belongs in adapter",
        ),
        (
            "  microbatch: 1",
            "  microbatch: 1\n  device: cpu",
            "model.yaml:11: unknown key 'device' in batch; it belongs in the top level",
        ),
        (
            "    hidden_size: 64",
            "    hidden_size: 64\n    hidden_size: 32",
            "model.yaml:8: duplicate key 'hidden_size' in model.config (first on line 7)",
        ),
        (
            "device: cpu",
            "device: cpu\nname: b",
            "model.yaml:14: duplicate key 'name' in the top level (first on line 1)",
        ),
        (
            "model_type: qwen2",
            "model_type: quen2",
            "model.yaml:5: unknown model_type 'quen2' in model.config; did you mean 'qwen2'?",
        ),
        (
            "  microbatch: 1",
            "  micro_batch: 1",
            "model.yaml:10: unknown key 'micro_batch' in batch; did you mean 'microbatch'?",
        ),
        (
            "device: cpu",
            "device: [",
            "model.yaml:14: not valid YAML: expected the node content, but found '<stream end>'",
        ),
    ],
)
def test_one_problem_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    expected: str,
) -> None:
    assert GOOD.count(old) == 1 or old == "name: tiny"
    assert trace(tmp_path, GOOD.replace(old, new, 1), capsys, monkeypatch) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "model.yaml: the file is empty; it needs at least name, model, batch and device"),
        ("# nothing\n", "model.yaml: the file is empty; it needs at least name, model, batch and device"),
        ("- name: tiny\n", "model.yaml:1: expected keys such as 'model:' at the top level, found a list"),
        ("tiny\n", "model.yaml:1: expected keys such as 'model:' at the top level, found 'tiny'"),
    ],
)
def test_a_file_of_another_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    assert trace(tmp_path, text, capsys, monkeypatch) == [expected]


def test_all_problems_at_once_in_the_order_of_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GOOD.replace("hidden_size", "hiden_size").replace("  microbatch: 1", "  microbatch: one")
    text = text.replace("device: cpu", "divice: cpu\nlos: {kind: grpo}\n")
    assert trace(tmp_path, text, capsys, monkeypatch) == [
        "model.yaml:1: missing 'device' at the top level",
        "model.yaml:7: unknown key 'hiden_size' in model.config; did you mean 'hidden_size'?",
        'model.yaml:10: batch.microbatch must be a valid integer, found "one"',
        "model.yaml:13: unknown key 'divice' at the top level; did you mean 'device'?",
        "model.yaml:14: unknown key 'los' at the top level; did you mean 'loss'?",
    ]
