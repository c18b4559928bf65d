"""cli.py: what is called with what, what is printed where, exit codes, and files left alone on errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hilore.cli import main
from hilore.planner.emit import SolveResult, solve_trace, write_plans
from hilore.planner.frontier import smallest_feasible
from hilore.planner.paired import Interval
from hilore.planner.report_inputs import load_bench
from hilore.planner.sidebyside import Measured, SideBySide
from hilore.planner.sidebyside_model import ModelReport, Options
from hilore.planner.spec import ModelSpec, spec_as_dict
from hilore.planner.trace import Trace
from hilore.planner.tracefile import load_trace, save_trace
from hilore.planner.verify import reference_peaks
from hilore.planner.view import fold, suggested_budget_mib
from hilore.runtime.errors import HiloreError, InternalError
from hilore.runtime.planfile import load_plan
from tests.solver_fixtures import qwen_trace
from tests.specs import spec_of

MIB = 2**20
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command in an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HILORE_DEBUG", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    """A model.yaml in the folder that commands run in."""
    return spec_of(tmp_path)


def tiny_trace() -> Trace:
    return replace(qwen_trace(layers=4), name="tiny", spec=spec_as_dict(spec_of()), notes=("one thing to know",))


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """A module of the planner that holds only these functions."""
    module = ModuleType(name)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def fake_tracing(monkeypatch: pytest.MonkeyPatch, outcome: Trace | Exception) -> list[ModelSpec]:
    seen: list[ModelSpec] = []

    def trace_spec(spec: ModelSpec, progress: Callable[[str, int, int], None]) -> Trace:
        seen.append(spec)
        progress("capture", 1, 2)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    stand_in(monkeypatch, "hilore.planner.tracing", trace_spec=trace_spec)
    return seen


def test_trace_writes_the_file_and_ends_with_a_budget_to_try(
    run: Run, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tiny_trace()
    seen = fake_tracing(monkeypatch, found)
    code, out, err = run("trace", "model.yaml")
    assert (code, err) == (0, "")
    assert [given.name for given in seen] == ["tiny"]
    assert load_trace("tiny.trace.json") == found
    lines = out.splitlines()
    budget = suggested_budget_mib(found)
    gc_bytes, no_gc_bytes = reference_peaks(found)
    assert gc_bytes < budget * MIB < no_gc_bytes
    assert lines[-1] == (
        f"GC peak {gc_bytes / MIB:,.1f} MiB, No-GC peak {no_gc_bytes / MIB:,.1f} MiB, card none (cpu): "
        f"try --budget {budget}"
    )
    assert "written: tiny.trace.json" in lines
    assert "note: one thing to know" in lines
    assert "region_grain: layer" in next(line for line in lines if line.startswith("defaults taken: "))
    down = next(line for line in lines if "mlp.down_proj" in line)
    assert "dead" in down
    assert "dead" not in next(line for line in lines if "mlp.gate_proj" in line)
    assert "int8-g128" in next(line for line in lines if "mlp.gate_proj" in line)
    assert any(line.startswith("model.layers.0-3: 4 regions of class decoder") for line in lines)


def test_trace_json_is_one_object(run: Run, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tracing(monkeypatch, tiny_trace())
    code, out, _ = run("trace", "model.yaml", "--json", "--out", "here.trace.json")
    assert code == 0
    data = json.loads(out)
    assert data["trace"] == "here.trace.json"
    assert (data["regions"], data["units"], data["card_bytes"]) == (4, 32, 0)
    assert (data["gc_peak_bytes"], data["no_gc_peak_bytes"]) == reference_peaks(tiny_trace())
    assert Path("here.trace.json").exists()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (HiloreError("model.layers.0: cannot be traced"), 2, "model.layers.0: cannot be traced\n"),
        (
            InternalError("sums disagree"),
            1,
            "internal error: InternalError: sums disagree (set HILORE_DEBUG=1 for the traceback)\n",
        ),
        (ZeroDivisionError("x"), 1, "internal error: ZeroDivisionError: x (set HILORE_DEBUG=1 for the traceback)\n"),
        (
            ModuleNotFoundError("No module named 'peft'", name="peft"),
            2,
            "this command needs peft: pip install 'hilore-plan[hf]'\n",
        ),
        (
            ModuleNotFoundError("No module named 'hilore.planner.gone'", name="hilore.planner.gone"),
            1,
            "internal error: ModuleNotFoundError: No module named 'hilore.planner.gone' "
            "(set HILORE_DEBUG=1 for the traceback)\n",
        ),
    ],
)
def test_a_failed_trace_says_so_and_leaves_the_earlier_file(
    run: Run, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, message: str
) -> None:
    fake_tracing(monkeypatch, error)
    Path("tiny.trace.json").write_text("earlier")
    assert run("trace", "model.yaml") == (code, "", message)
    assert Path("tiny.trace.json").read_text() == "earlier"
    assert sorted(path.name for path in Path().iterdir()) == ["model.yaml", "tiny.trace.json"]


def test_the_traceback_is_there_for_who_asks(run: Run, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tracing(monkeypatch, ZeroDivisionError("x"))
    monkeypatch.setenv("HILORE_DEBUG", "1")
    code, _, err = run("trace", "model.yaml")
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert "in trace_spec" in err


def test_missing_input_files(run: Run) -> None:
    assert run("trace", "nowhere.yaml") == (2, "", "nowhere.yaml: no such file\n")
    assert run("solve", "--budget", "30", "--delta", "1") == (
        2,
        "",
        "no *.trace.json in this folder; make one with: hilore-plan trace model.yaml\n",
    )
    assert run("solve", "--budget", "30", "--delta", "1", "--trace", "x.trace.json") == (
        2,
        "",
        "x.trace.json: no such file; make it with: hilore-plan trace model.yaml\n",
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--budget", "30"], "Missing option '--delta'"),
        (["--delta", "1"], "Missing option '--budget'"),
        (["--budget", "30", "--delta", "nan"], "--delta nan must be a finite number"),
        (["--budget", "30GB", "--delta", "1"], "--budget 30GB: people disagree on GB"),
        (["--budget", "-1", "--delta", "1"], "--budget -1 is not an amount of memory"),
        (["--budget", "auto", "--delta", "1"], "--budget auto needs a GPU in the trace"),
        (["--budget", "30", "--delta", "1", "--time-limit", "0"], "--time-limit 0 must be a finite number above 0"),
        (["--budget", "30", "--delta", "1", "--gap", "-1"], "--gap -1 must be a finite number of 0 or more"),
        (["--budget", "30", "--delta", "1", "--granularity", "block"], "'block' is not one of"),
        (["--bugdet", "30", "--delta", "1"], "No such option: --bugdet"),
    ],
)
def test_wrong_options_leave_the_plans_alone(run: Run, options: list[str], expected: str) -> None:
    save_trace(tiny_trace(), "tiny.trace.json")
    Path("plans").mkdir()
    Path("plans/tiny.low.json").write_text("earlier")
    code, out, err = run("solve", *options)
    assert (code, out) == (2, "")
    assert expected in err
    assert "Traceback" not in err
    assert [path.name for path in Path("plans").iterdir()] == ["tiny.low.json"]
    assert Path("plans/tiny.low.json").read_text() == "earlier"


def contents(folder: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in Path(folder).iterdir()}


def test_solve_writes_a_set_per_bucket_and_prints_each_regime(run: Run) -> None:
    found = replace(tiny_trace(), buckets=qwen_trace(layers=4, buckets=(1024, 2048)).buckets)
    save_trace(found, "tiny.trace.json")
    budget = str(suggested_budget_mib(found))
    code, out, err = run("solve", "--budget", budget, "--delta", "1.0")
    assert (code, err) == (0, "")
    regimes = ("null", "low", "mid", "high")
    assert sorted(contents("plans")) == sorted(
        f"tiny{length}.{regime}.json" for length in ("", ".t1024") for regime in regimes
    )
    plan = load_plan("plans/tiny.low.json")
    assert plan.budget_bytes == int(budget) * MIB
    assert plan.provenance["command"] == f"hilore-plan solve --budget {budget} --delta 1.0"
    lines = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert [line for line in lines if line.endswith("tokens per row")] == ["2048 tokens per row", "1024 tokens per row"]
    row = next(line for line in lines if line.startswith("low ")).split()
    held = sum(region.hold for region in plan.regions)
    assert row[1:6] == ["optimal", *(str(plan.count(mode)) for mode in "HLR"), str(held)]
    assert any(
        line.startswith(f"tiny out of tiny.trace.json: budget {int(budget):,}.0 MiB, margin 0.0") for line in lines
    )


def test_solve_json_is_one_object(run: Run) -> None:
    save_trace(tiny_trace(), "old.trace.json")
    save_trace(tiny_trace(), "tiny.trace.json")
    os.utime("old.trace.json", ns=(1, 1))
    budget = str(suggested_budget_mib(tiny_trace()))
    code, out, err = run("solve", "--budget", budget, "--delta", "0", "--out", "elsewhere", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["trace"] == "tiny.trace.json"
    assert data["plans"] == [f"elsewhere/tiny.{regime}.json" for regime in ("null", "low", "mid", "high")]
    assert [row["lossy"] for row in data["rows"]] == [0, 0, 0, 0]
    assert (data["gap_percent"], data["time_limit_s"], data["margin_bytes"]) == (0.1, 60.0, 0)
    assert sorted(contents("elsewhere")) == sorted(Path(name).name for name in data["plans"])


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (["--budget", "5"], 4, "infeasible: no plan stays within 5.0 MiB; the smallest feasible budget is "),
        (["--time-limit", "1e-9"], 5, "no solution within the time limit"),
    ],
)
def test_without_a_plan_the_earlier_set_stays(run: Run, options: list[str], code: int, expected: str) -> None:
    save_trace(tiny_trace(), "tiny.trace.json")
    good = ["--budget", str(suggested_budget_mib(tiny_trace())), "--delta", "1"]
    assert run("solve", *good)[0] == 0
    before = contents("plans")
    found, out, err = run("solve", *good, *options)
    assert (found, out) == (code, "")
    assert err.startswith(expected)
    assert contents("plans") == before


def test_a_gap_left_open_is_exit_code_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save_trace(tiny_trace(), "tiny.trace.json")
    solved = solve_trace(tiny_trace(), budget_bytes=suggested_budget_mib(tiny_trace()) * MIB, delta=0.0)
    rows = (replace(solved.rows[0], status="feasible", gap=0.05), *solved.rows[1:])
    seen: list[dict[str, Any]] = []

    def cut_short(_trace: Trace, **options: Any) -> SolveResult:
        seen.append(options)
        return replace(solved, rows=rows)

    stand_in(monkeypatch, "hilore.planner.emit", solve_trace=cut_short, write_plans=write_plans)
    code, out, _ = run(
        "solve", "--budget", "9GiB", "--delta", "0.5", "--margin", "100", "--time-limit", "3", "--gap", "0",
        "--granularity", "layer",
    )  # fmt: skip
    assert code == 3
    assert "feasible" in out
    assert len(contents("plans")) == 4
    del seen[0]["command"]
    assert seen == [
        {
            "budget_bytes": 9 * 2**30,
            "delta": 0.5,
            "margin_bytes": 100 * MIB,
            "time_limit_s": 3.0,
            "gap_percent": 0.0,
            "granularity": "layer",
            "rule": "each",
        }
    ]


def test_solve_refuses_a_trace_whose_spec_was_changed(run: Run) -> None:
    found = tiny_trace()
    found.spec["batch"]["microbatch"] = 0
    save_trace(found, "tiny.trace.json")
    code, out, err = run("solve", "--budget", "9000", "--delta", "1")
    assert (code, out) == (2, "")
    assert err == "spec in the trace: batch.microbatch: Input should be greater than 0\n"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"estimated": true', '"estimatd": true', "estimated: Field required"),
        ('"rows": 1', '"rows": 1.0', "buckets.0.rows: Input should be a valid integer"),
        ('"rows": 1', '"rows": 1,\n   "row": 1', "unknown fields: buckets.0.row"),
        ('"rows": 1', '"rows": 1,\n   "rows": 2', "duplicate key 'rows'"),
        ('"trace_version": 2', '"trace_version": 1', "trace_version is 1, this hilore-plan reads 2"),
        ('"interaction": 1.05', '"interaction": NaN', "NaN is not a number that a trace can hold"),
        ('"created_at"', "", "not valid JSON (cut short?)"),
    ],
)
def test_a_damaged_trace_is_refused(run: Run, old: str, new: str, expected: str) -> None:
    path = Path("tiny.trace.json")
    save_trace(tiny_trace(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    code, out, err = run("solve", "--budget", "9000", "--delta", "1")
    assert (code, out) == (2, "")
    assert err.startswith("tiny.trace.json:")
    assert expected in err


def test_a_trace_that_cannot_be_written_leaves_nothing_behind(run: Run) -> None:
    Path("folder").mkdir()
    with pytest.raises(HiloreError, match=r"^folder: cannot be written"):
        save_trace(tiny_trace(), "folder")
    assert [path.name for path in Path().iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.layers.7"], "model.layers.7"),
        (["model.layers.0", "model.layers.1", "model.layers.2"], "model.layers.0-2"),
        (["layers.0.mlp", "layers.1.mlp"], "layers.0-1.mlp"),
        (["layers.9", "layers.10"], "layers.9-10"),
        (["layers.0", "layers.2"], "layers.0 .. layers.2 (2)"),
        (["a.0", "b.1"], "a.0 .. b.1 (2)"),
        (["a", "b.1"], "a .. b.1 (2)"),
    ],
)
def test_fold(names: list[str], expected: str) -> None:
    assert fold(names) == expected


def test_a_suggested_budget_fits_the_card_and_lies_above_gc() -> None:
    found = tiny_trace()
    gc_bytes, no_gc_bytes = reference_peaks(found)
    assert gc_bytes <= suggested_budget_mib(found) * MIB <= no_gc_bytes
    assert suggested_budget_mib(replace(found, card_bytes=gc_bytes)) == gc_bytes // MIB


@pytest.mark.parametrize("delta", ["0", "1"])
def test_at_a_mib_under_and_over_the_smallest_feasible_budget(run: Run, delta: str) -> None:
    """To the byte it is C-36's; the command line takes MiB."""
    save_trace(tiny_trace(), "tiny.trace.json")
    smallest = smallest_feasible(tiny_trace(), delta=float(delta))
    whole = -(-smallest // MIB)
    code, out, err = run("solve", "--budget", str(whole - 1), "--delta", delta)
    assert (code, out) == (4, "")
    first, made_of = err.splitlines()
    assert f"the smallest feasible budget is {whole} MiB ({smallest} bytes)" in first
    assert first.endswith(f"use --budget {whole} or more")
    assert made_of.startswith(f"{whole} MiB are made of: parameters 6,000.0 MiB + ")
    assert not Path("plans").exists()
    exact = f"{smallest / MIB:.30f}MiB"
    for budget in (exact, str(whole), str(whole + 1)):
        assert run("solve", "--budget", budget, "--delta", delta)[0] == 0
        assert load_plan("plans/tiny.high.json").predicted.peak_bytes <= load_plan("plans/tiny.high.json").budget_bytes
    under = f"{(smallest - 1) / MIB:.30f}MiB"
    assert run("solve", "--budget", under, "--delta", delta)[0] == 4


def test_an_output_that_cannot_be_written_is_said_before_the_work(
    run: Run, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fake_tracing(monkeypatch, tiny_trace())
    save_trace(tiny_trace(), "tiny.trace.json")
    Path("folder").mkdir()
    here = Path().absolute()
    for arguments, expected in (
        (("trace", "model.yaml", "--out", "folder"), "folder: cannot be written: is a folder\n"),
        (
            ("trace", "model.yaml", "--out", "model.yaml/x.json"),
            f"model.yaml/x.json: cannot be written: {here / 'model.yaml'} is not a folder\n",
        ),
        (
            ("solve", "--budget", "9000", "--delta", "1", "--out", "model.yaml"),
            f"model.yaml/plan.json: cannot be written: {here / 'model.yaml'} is not a folder\n",
        ),
        (("bench", "model.yaml", "--out", "folder"), "folder: cannot be written: is a folder\n"),
    ):
        assert run(*arguments) == (2, "", expected)
    assert seen == []
    assert list(Path("folder").iterdir()) == []


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"device": "{kind: cuda, gpu: l40s-48gb}"},
            "model.yaml: device is l40s-48gb, which is not here, and policies",
        ),
        ({"parallel": "{kind: fsdp2, world_size: 2}"}, "model.yaml: parallel.kind is fsdp2, and policies are measured"),
    ],
)
def test_bench_measures_only_what_runs_here(run: Run, tmp_path: Path, section: dict[str, str], expected: str) -> None:
    spec_of(tmp_path, **section)
    code, out, err = run("bench", "model.yaml")
    assert (code, out) == (2, "")
    assert err.startswith(expected)
    assert not list(Path().glob("*.bench.json"))


@pytest.mark.parametrize("breaches", [(), ("plan: measured peak 9 B is 1 B over",)])
def test_bench_prints_and_stores_one_measurement(
    run: Run, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, breaches: tuple[str, ...]
) -> None:
    """What it measures is tested in test_bench.py and test_sidebyside.py."""
    seen: list[Options] = []

    def measure(spec: ModelSpec, options: Options, progress: object) -> ModelReport:
        seen.append(options)
        nothing = Interval(0.0, 0.0, 0.0)
        row = Measured("GC", "", 1000, nothing, nothing, MIB, None, None, "", True, 0.0, 0.0, (), {}, "")
        result = SideBySide((row,), breaches, None, None, 32, 1, 1, 1, 10, 0, False, {})
        return ModelReport(spec.name, "naive", 2, 32, 32, 2**11, 1.0, (), (), result, ())

    monkeypatch.setattr("hilore.planner.sidebyside_model.measure_model", measure)
    code, out, err = run("bench", "model.yaml", "--rounds", "1", "--grain", "unit", "--delta", "0", "--json")
    assert (code, err) == (6 if breaches else 0, "")
    data = json.loads(out)
    assert len(out.splitlines()) == 1
    assert data == json.loads(Path("tiny.bench.json").read_text()) | {"written": "tiny.bench.json"}
    command = "hilore-plan bench model.yaml --rounds 1 --grain unit --delta 0 --json"
    assert data["environment"]["command"] == command
    assert [row["policy"] for row in data["models"][0]["result"]["rows"]] == ["GC"]
    assert seen == [Options(rounds=1, grains=("unit",), deltas=(0.0,), command=command)]
    code, out, _ = run("bench", "model.yaml", "--out", "deep/b.json")
    assert code == (6 if breaches else 0)
    assert out.splitlines()[-1] == "written: deep/b.json"
    assert [f"BROKEN: {breach}" in out for breach in breaches] == [True] * len(breaches)
    assert (seen[1].rounds, seen[1].grains, seen[1].deltas) == (15, None, (0.0, 1.0))
    assert load_bench("deep/b.json").models[0].name == "tiny"


def test_help_needs_neither_torch_nor_rich() -> None:
    code = "import sys; from hilore.cli import main; main(['--help']); print({'torch', 'rich'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    for command in (
        "trace", "solve", "calibrate", "confirm", "show", "explain", "diff", "verify", "frontier", "bench", "report",
    ):  # fmt: skip
        assert f"\n  {command} " in done.stdout
