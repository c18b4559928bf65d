"""``python -m bench.glue`` end to end, at a size that takes no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench.glue as glue


def test_every_part_is_measured_and_has_eagers_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glue, "SIZES", (glue.Sizes("tiny", 32, 64, 2, 1, 16),))
    monkeypatch.setattr(glue, "TOKENS", 16)
    assert glue.main(["--rounds", "2", "--out", str(tmp_path / "glue")]) == 0
    rows = json.loads((tmp_path / "glue.json").read_text())["rows"]
    assert [(row["part"], row["dtype"]) for row in rows] == [
        ("gated product", "bfloat16"),
        ("RMSNorm", "bfloat16"),
        ("rotary embedding", "bfloat16"),
        ("RMSNorm", "float32"),
        ("rotary embedding", "float32"),
    ]
    assert all(row["exact"] and row["both_ns"] > 0 for row in rows)
    assert "| tiny | RMSNorm | bfloat16 |" in (tmp_path / "glue.md").read_text()


def test_a_part_with_other_bits_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glue, "SIZES", (glue.Sizes("tiny", 32, 64, 2, 1, 16),))
    monkeypatch.setattr(glue, "TOKENS", 16)
    honest = glue.rms_norm
    monkeypatch.setattr(glue, "rms_norm", lambda x, weight, eps: honest(x, weight, eps) * 1.5)
    assert glue.main(["--rounds", "1", "--out", str(tmp_path / "glue")]) == 1
    assert "| DIFFERENT |" in (tmp_path / "glue.md").read_text()
