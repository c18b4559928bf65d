"""The report: one page, nothing to load, and what it shows is what plans, traces and benchmarks say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hilore.cli import main
from hilore.planner.budget import MIB
from hilore.planner.emit import solve_trace, write_plans
from hilore.planner.report_inputs import report_plans
from hilore.planner.report_map import KINDS, mode_map
from hilore.planner.spec import spec_as_dict
from hilore.planner.trace import Trace
from hilore.planner.tracefile import save_trace
from hilore.planner.verify import reference_peaks
from hilore.planner.view import suggested_budget_mib
from tests.solver_fixtures import qwen_trace
from tests.specs import spec_of

VOID = {"meta", "br"}
NAMESPACE = "http://www.w3.org/2000/svg"


def small_trace() -> Trace:
    return replace(qwen_trace(layers=3, buckets=(1024, 2048)), name="tiny", spec=spec_as_dict(spec_of()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace with its plans under plans/."""
    monkeypatch.chdir(tmp_path)
    trace = small_trace()
    save_trace(trace, "tiny.trace.json")
    write_plans(solve_trace(trace, budget_bytes=suggested_budget_mib(trace) * MIB, delta=1.0), "plans")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["report", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def bench(**changes: Any) -> dict[str, Any]:
    figure = {"value": 0.2, "low": 0.1, "high": 0.3}
    row = {
        "policy": "plan <delta 0>",
        "ceiling": "+0 d",
        "step_ns": 5_000_000,
        "gain": figure,
        "share": None,
        "peak_bytes": 7 * MIB,
        "predicted_peak_bytes": 8 * MIB,
        "exact": True,
        "error": 0.0,
    }
    result = {"rows": [row | changes], "rounds": 3, "breaches": ["plan: measured peak 9 B is 1 B over"]}
    return {
        "environment": {"command": "hilore-plan bench tiny.yaml", "device": "a CPU", "threads": 1, "cores": 2},
        "models": [{"name": "tiny", "tokens": 1024, "result": result}],
    }


class Page(HTMLParser):
    """Checks that every element is closed; collects the cells of tables and tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_the_page_is_whole_and_loads_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("b.json").write_text(json.dumps(bench()), encoding="utf-8")
    assert run(capsys, "--bench", "b.json", "--points", "2") == (0, "written: tiny.report.html\n", "")
    text = Path("tiny.report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert re.findall(r"https?://[^\"'<> ]+", text) == [NAMESPACE] * page.tags.count("svg")
    assert not re.search(r"\b(src|href|@import|url\()", text)
    assert "@media(prefers-color-scheme:dark){body" in text
    for heading in ("Trace", "Plans", "Memory", "Frontier", "Measured"):
        assert f"<h2>{heading}</h2>" in text
    assert f"GC peak {reference_peaks(small_trace())[0] / MIB:,.1f} MiB" in text
    measured = page.rows[-1]
    assert measured[:4] == ["plan <delta 0>", "+0 d", "7.00", "8.00"]
    assert measured[-1] == "0 (bitwise)"
    assert "BROKEN: plan: measured peak 9 B is 1 B over" in text


def test_its_figures_are_those_of_the_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--no-frontier", "--json", "--out", "deep/page.html")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data == {
        "trace": "tiny.trace.json",
        "plans": [
            f"plans/tiny{length}.{regime}.json"
            for length in ("", ".t1024")
            for regime in ("null", "low", "mid", "high")
        ],
        "bench": None,
        "written": "deep/page.html",
    }
    text = Path("deep/page.html").read_text(encoding="utf-8")
    assert "<h2>Frontier</h2>" not in text
    assert "<h2>Measured</h2>" not in text
    page = Page(text)
    plans = report_plans(small_trace(), "tiny.trace.json", None)
    shown = [row for row in page.rows if row[0] in ("null", "low", "mid", "high")]
    assert [row[:5] for row in shown] == [
        [plan.regime.label, str(plan.length_bucket), *(str(plan.count(mode)) for mode in "HLR")] for plan in plans
    ]
    parts = page.rows[next(i for i, row in enumerate(page.rows) if row[0] == "what the peak is made of") + 1 :]
    sizes = [float(row[1].replace(",", "")) for row in parts if row[1] != "-"]
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.1)
    highest = max(plan.predicted.peak_bytes for plan in plans if plan.length_bucket == 2048)
    assert parts[-1][1] == f"{highest / MIB:,.2f}"
    assert "blocks of 512 B and segments of 2 MiB is apart from them" in text


def test_a_map_has_one_cell_per_unit_in_its_mode(folder: Path) -> None:
    for plan in report_plans(small_trace(), "tiny.trace.json", None):
        drawing = mode_map(plan, "title")
        cells = {kind: drawing.count(f'fill="{colour}"') for kind, (colour, _) in KINDS.items()}
        held = sum(len(region.units) for region in plan.regions if region.hold)
        dead = sum(unit.dead for region in plan.regions for unit in region.units)
        assert cells == {
            "H": plan.count("H") - held,
            "L": plan.count("L"),
            "R": plan.count("R") - dead,
            "dead": dead,
            "held": held,
        }
        notes = [unescape(note) for note in re.findall(r"<title>([^<]+)</title>", drawing)]
        codecs = [unit.codec for region in plan.regions for unit in region.units if unit.codec]
        assert sum(note.endswith(f"({codec})") for note in notes for codec in set(codecs)) == len(codecs)


def test_plans_that_are_named_and_none_at_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plans/tiny.high.json", "--no-frontier", "--json")
    assert (code, json.loads(out)["plans"]) == (0, ["plans/tiny.high.json"])
    for path in Path("plans").iterdir():
        path.unlink()
    code, out, err = run(capsys, "--out", "none.html")
    assert (code, out) == (2, "")
    assert err == (
        "plans/tiny.*.json: no such plan files; name plans, or make them with: hilore-plan solve --trace "
        "tiny.trace.json --budget N --delta D\n"
    )
    assert not Path("none.html").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "b.json: no such file; make it with: hilore-plan bench model.yaml --out b.json\n"),
        ('{"environment": {', "b.json:1: not valid JSON (cut short?): "),
        ("[]", "b.json: Input should be a valid dictionary or instance of BenchFile: not a benchmark's JSON; "),
        (json.dumps(bench(gain=None)), "b.json: models.0.result.rows.0.gain: Input should be a valid dictionary"),
    ],
)
def test_measured_figures_that_cannot_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str | None, expected: str
) -> None:
    if content is not None:
        Path("b.json").write_text(content, encoding="utf-8")
    code, out, err = run(capsys, "--bench", "b.json", "--no-frontier")
    assert (code, out) == (2, "")
    assert err.startswith(expected)
    assert not Path("tiny.report.html").exists()


@pytest.mark.parametrize("options", [["--out", "folder"], ["--out", "plans/tiny.high.json/page.html"]])
def test_a_page_that_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str], options: Sequence[str]
) -> None:
    Path("folder").mkdir()
    before = Path("plans/tiny.high.json").read_bytes()
    code, out, err = run(capsys, "--no-frontier", *options)
    assert (code, out) == (2, "")
    assert ": cannot be written: " in err
    assert Path("plans/tiny.high.json").read_bytes() == before
    assert list(Path("folder").iterdir()) == []


def test_a_plan_of_another_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_trace(replace(small_trace(), name="other"), "other.trace.json")
    code, _, err = run(capsys, "plans/tiny.high.json", "--trace", "other.trace.json", "--no-frontier")
    assert code == 2
    assert err == (
        "plans/tiny.high.json: plan of tiny, 2048 tokens, is not of the trace of other (other.trace.json: 1024, 2048 "
        "tokens); name its trace with --trace\n"
    )
