"""bench.device on the CPU with a tiny actor: the code that runs on a lent GPU, and what it says where there is none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import device
from bench.device_bias import biases, call_times
from bench.device_card import DevicePeaks, deterministic
from bench.device_rows import DeviceRow, row_breaches
from bench.device_runs import DeviceReport
from tests.solver_fixtures import MIB, qwen_trace

POLICIES = [
    "GC",
    "No-GC",
    "delta 0, measured times 1.05 x GC",
    "delta 1, measured times 1.05 x GC",
    "delta 0, estimated times 1.05 x GC",
    "delta 1, estimated times 1.05 x GC",
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    out = tmp_path_factory.mktemp("device") / "tiny.json"
    assert device.main(["--device", "cpu", "--tiny", "--rounds", "2", "--seconds", "0", "--out", str(out)]) == 0
    data: dict[str, object] = json.loads(out.read_text(encoding="utf-8"))
    return data


def test_the_whole_script_runs_without_a_gpu(measured: dict[str, object]) -> None:
    assert str(measured["environment"]["command"]).startswith("python -m bench.device --device cpu --tiny")  # type: ignore[index]
    report = measured["device"]
    assert isinstance(report, dict)
    rows = report["rows"]
    assert [row["policy"] for row in rows] == POLICIES
    assert report["breaches"] == []
    assert report["run_to_run"] == 0.0
    assert report["tokens"] == 64
    for row in rows:
        assert row["counted_bytes"] <= row["predicted_bytes"] <= 1.02 * row["counted_bytes"]
        assert row["device"] == {"requested": None, "allocated": None, "reserved": None}
        assert row["budget_bytes"] is None or row["counted_bytes"] <= row["budget_bytes"]
    assert all(row["exact"] for row in rows if "delta 1" not in row["policy"])
    # Whether compression is worth its time here is this machine's to say; where it is, it is within delta.
    assert all(row["exact"] or 0 < row["float32_error"] < 0.01 for row in rows)
    kinds = {bias["kind"] for bias in report["bias"]}
    assert {"q", "attention", "gate", "encode int8-g128", "glue of a replay", "step (GC)"} <= kinds


def test_without_a_cuda_device_it_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "never.json"
    assert device.main(["--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("--device cuda: no CUDA device is here (torch ")
    assert captured.err.endswith("python -m bench.device --device cpu --tiny\n")
    assert not out.exists()


def test_bias_is_measured_over_estimated_per_kind_of_call() -> None:
    estimated = qwen_trace(layers=3, kept_names=("gate",))
    bucket = estimated.buckets[0]
    found = bucket.classes[0]
    slower = tuple(replace(unit, run_ns=unit.run_ns * 2) for unit in found.units)
    measured = replace(estimated, buckets=(replace(bucket, classes=(replace(found, units=slower),)),))
    ratios = {bias.kind: bias.ratio for bias in biases(measured, estimated)}
    assert (ratios["gate"], ratios["attention"], ratios["region forward"]) == (2.0, 2.0, 1.0)
    gate = next(unit.run_ns for unit in found.units if unit.kind == "gate")
    assert call_times(estimated)["gate"] == 3 * gate


def test_a_peak_over_its_promise_and_a_gradient_over_the_noise_are_breaches(measured: dict[str, object]) -> None:
    report = measured["device"]
    assert isinstance(report, dict)
    fields = {name: value for name, value in report["rows"][2].items() if name in DeviceRow.__slots__}
    good = DeviceRow(**fields | {"device": DevicePeaks(None, None, None)})
    assert list(row_breaches([good], 0.01)) == []
    low = replace(good, predicted_bytes=good.counted_bytes - MIB)
    assert [line.split(" is ")[1] for line in row_breaches([low], 0.01)] == ["1.00 MiB over the predicted peak"]
    on_a_card = replace(good, device=DevicePeaks(good.predicted_bytes + 2 * MIB, None, None), budget_bytes=None)
    assert [line.split(" is ")[1] for line in row_breaches([on_a_card], 0.01)] == ["2.00 MiB over the predicted peak"]
    wrong = replace(good, exact=False, error=0.02)
    assert len(list(row_breaches([wrong], 0.01))) == 1
    assert list(row_breaches([wrong], 0.03)) == []


def test_deterministic_kernels_only_inside_the_block() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_a_report_goes_to_a_file_named_after_its_card() -> None:
    report = DeviceReport("m", {"kind": "cuda", "name": "NVIDIA H200"}, 1, 1, (), (), 0.0, None, {}, (), ())
    given = device._parser().parse_args([])
    assert device._default_path(report, given) == "docs/measurements/device-nvidia-h200.json"
    assert device._default_path(report, device._parser().parse_args(["--tiny"])) == "build/device-nvidia-h200-tiny.json"
