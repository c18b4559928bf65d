"""The frontier: monotone, verified, in agreement with solve; rivals against figures worked out by hand; its files."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hilore.cli import main
from hilore.planner import frontier_curves
from hilore.planner.build import build_problem, risk_limit
from hilore.planner.emit import solve_trace
from hilore.planner.frontier import default_budgets, frontier, smallest_feasible
from hilore.planner.frontier_curves import CHAIN, GREEDY, LAYER, PLAN, UNIFORM
from hilore.planner.frontier_dp import chain_choices
from hilore.planner.frontier_plot import frontier_svg
from hilore.planner.frontier_points import Curve, Frontier, Point, running_best
from hilore.planner.frontier_rivals import BLOCK, EVERY_N, GC, NO_GC, SAC, rival_candidates
from hilore.planner.frontier_view import frontier_csv
from hilore.planner.problem import Verified
from hilore.planner.regimes import regimes
from hilore.planner.solved import InfeasibleError, NoPlanError
from hilore.planner.spec import spec_as_dict
from hilore.planner.trace import Trace
from hilore.planner.tracefile import save_trace
from hilore.planner.verify import reference_peaks, reference_times, verify
from hilore.runtime.errors import InternalError
from tests.solver_fixtures import qwen_trace
from tests.specs import spec_of

MIB = 2**20
LAYERS = 5


def small_trace() -> Trace:
    return replace(qwen_trace(layers=LAYERS), name="tiny", spec=spec_as_dict(spec_of()))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return small_trace()


@pytest.fixture(scope="module")
def found(trace: Trace) -> Frontier:
    budgets = default_budgets(trace, delta=1.0, points=6)
    under = smallest_feasible(trace, delta=1.0) - 1
    return frontier(trace, budgets=(*budgets, under), deltas=(1.0, 0.0), gap_percent=0.0)


def curve(found: Frontier, policy: str, delta: float | None = None) -> Curve:
    return next(curve for curve in found.curves if (curve.policy, curve.delta) == (policy, delta))


def points(curve: Curve) -> list[Point]:
    return [point for point in curve.points if point is not None]


def test_budgets_go_from_the_smallest_feasible_one_to_no_gc(trace: Trace, found: Frontier) -> None:
    smallest, no_gc = smallest_feasible(trace, delta=1.0), reference_peaks(trace)[1]
    assert found.smallest_bytes == smallest
    solved = solve_trace(trace, budget_bytes=smallest, delta=1.0)
    assert max(row.peak_bytes for row in solved.rows) == smallest
    with pytest.raises(InfeasibleError):
        solve_trace(trace, budget_bytes=smallest - 1, delta=1.0)
    budgets = default_budgets(trace, delta=1.0)
    assert len(budgets) == 12
    assert budgets == tuple(sorted(set(budgets)))
    assert (budgets[0], budgets[-1]) == (-(-smallest // MIB) * MIB, -(-no_gc // MIB) * MIB)
    steps = [after - before for before, after in itertools.pairwise(budgets)]
    assert steps[0] < steps[-1]


def test_every_curve_is_monotone_and_within_its_budgets(found: Frontier) -> None:
    policies = [(found.policy, found.delta) for found in found.curves]
    assert policies == [
        *[(policy, delta) for delta in (0.0, 1.0) for policy in (PLAN, GREEDY)],
        *[(LAYER, delta) for delta in (0.0, 1.0)],
        (UNIFORM, 1.0),
        *[(policy, None) for policy in (GC, NO_GC, EVERY_N, BLOCK, SAC, CHAIN)],
    ]
    for one in found.curves:
        assert len(one.points) == len(found.budgets) == 7
        assert one.points[0] is None, "a byte under the smallest feasible budget"
        there = [point is not None for point in one.points]
        assert there == sorted(there), "what fits a budget fits a larger one"
        own = points(one)
        for before, after in itertools.pairwise(own):
            assert after.step_ns <= before.step_ns
        for budget, point in zip(found.budgets, one.points, strict=True):
            assert point is None or point.peak_bytes <= point.budget_bytes == budget
    for policy in (PLAN, GREEDY, LAYER):
        exact, lossy = (curve(found, policy, delta) for delta in (0.0, 1.0))
        assert all(b.step_ns <= a.step_ns for a, b in zip(points(exact), points(lossy), strict=True))


def test_ours_is_nowhere_slower_than_any_exact_policy(found: Frontier) -> None:
    for policy in (GC, NO_GC, EVERY_N, BLOCK, SAC, CHAIN):
        for own, other in zip(curve(found, PLAN, 0.0).points, curve(found, policy).points, strict=True):
            assert other is None or (own is not None and own.step_ns <= other.step_ns)
    best = points(curve(found, PLAN, 0.0))[-1]
    assert best.step_ns == found.no_gc_step_ns
    assert found.share(best) == 1.0
    assert best.error == 0.0


@pytest.mark.parametrize(("policy", "grain"), [(PLAN, "unit"), (LAYER, "layer")])
@pytest.mark.parametrize("delta", [0.0, 1.0])
def test_plans_agree_with_solve_at_the_same_budget(
    trace: Trace, found: Frontier, policy: str, grain: str, delta: float
) -> None:
    for point in points(curve(found, policy, delta))[1::2]:
        assert point.carried == ""
        solved = solve_trace(trace, budget_bytes=point.budget_bytes, delta=delta, gap_percent=0.0, granularity=grain)
        assert point.regime_ns == tuple(row.step_ns for row in solved.rows)
        assert point.peak_bytes == max(row.peak_bytes for row in solved.rows)
        expected = sum(r.frequency * ns for r, ns in zip(regimes(trace.calibration), point.regime_ns, strict=True))
        assert point.step_ns == round(expected)
        assert (point.status, point.gap) == ("optimal", 0.0)


def test_references_are_those_of_the_trace(trace: Trace, found: Frontier) -> None:
    assert (found.gc_peak_bytes, found.no_gc_peak_bytes) == reference_peaks(trace)
    assert (found.gc_step_ns, found.no_gc_step_ns) == reference_times(trace)
    gc, no_gc = points(curve(found, GC)), points(curve(found, NO_GC))
    assert {(point.peak_bytes, point.step_ns) for point in gc} == {(found.gc_peak_bytes, found.gc_step_ns)}
    assert [(point.peak_bytes, point.step_ns) for point in no_gc] == [(found.no_gc_peak_bytes, found.no_gc_step_ns)]


def by_hand(trace: Trace, held: set[int]) -> tuple[int, int]:
    """Peak and time of a trace of equal layers, the ones in ``held`` held and the others under GC."""
    bucket = trace.buckets[0]
    layer, outside = bucket.classes[0], bucket.outside
    live = trace.fixed.total_bytes + outside.before_bytes
    kinds = [layer.hold if place in held else layer.gc for place in range(len(bucket.regions))]
    peaks = []
    for kind in kinds:
        peaks.append(live + kind.forward_bytes)
        live += kind.retained_bytes
    peaks.append(live + outside.head_bytes)
    for kind in reversed(kinds):
        peaks.append(live + outside.head_left_bytes + kind.backward_bytes)
        live -= kind.retained_bytes
    peaks += [live + outside.tail_bytes, live + outside.optimizer_bytes]
    return max(peaks), reference_times(trace)[1] + (len(kinds) - len(held)) * layer.gc_replay_ns


def test_rivals_by_hand(trace: Trace) -> None:
    families = rival_candidates(trace, trace.buckets[0])
    every = {found.detail: (found.peak_bytes, found.step_ns) for found in families[EVERY_N]}
    # Layer i is replayed where n divides i.
    assert every == {f"n = {n}": by_hand(trace, {i for i in range(LAYERS) if i % n}) for n in range(2, LAYERS + 1)}
    blocks = {found.detail: (found.peak_bytes, found.step_ns) for found in families[BLOCK]}
    assert blocks["last 2 held"] == by_hand(trace, {3, 4})
    assert blocks["first 3 held"] == by_hand(trace, {0, 1, 2})
    assert len(blocks) == 2 * (LAYERS - 1)


@pytest.mark.parametrize("lora", [False, True])
def test_selective_checkpointing_by_hand(trace: Trace, lora: bool) -> None:
    if lora:
        trace = replace(trace, spec=trace.spec | {"adapter": {"kind": "lora", "targets": ["q_proj", "down_proj"]}})
    layer = trace.buckets[0].classes[0]
    units = {unit.name: unit for unit in layer.units}
    found = {each.detail: each for each in rival_candidates(trace, trace.buckets[0])[SAC]}
    assert len(found) == 6
    attention = units["self_attn:attention"]
    assert found["attention saved in all layers"].step_ns == reference_times(trace)[0] - LAYERS * attention.run_ns
    even = found["GEMMs saved in even layers"]
    gemms = [unit for unit in layer.units if unit.kind != "attention"]
    assert even.step_ns == reference_times(trace)[0] - 3 * sum(unit.run_ns for unit in gemms)
    # Kept in three of five layers beside what GC keeps, by a head that binds: the adapted ones twice, down although
    # no replay needs it.
    kept = sum(unit.output_bytes + unit.rest_bytes for unit in gemms)
    kept += units["self_attn.q_proj"].output_bytes + units["mlp.down_proj"].output_bytes if lora else 0
    assert even.peak_event == "head"
    assert even.peak_bytes == reference_peaks(trace)[0] + 3 * kept


def test_a_uniform_codec_is_one_configuration_within_the_risk(trace: Trace, found: Frontier) -> None:
    problem = build_problem(trace, trace.buckets[0], budget_bytes=0, delta=1.0, psi_high=1.0)
    limit = risk_limit(trace.calibration, delta=1.0, psi_high=1.0)
    made = frontier_curves._uniform_choices(problem)
    best: dict[int, int] = {}
    for detail, choice in made:
        assert detail == "int8-g128 alone, every region the same"
        chosen = [region.configurations[index] for region, index in zip(problem.regions, choice, strict=True)]
        assert len({tuple((unit.mode, unit.codec) for unit in each.units) for each in chosen}) == 1
        verified = verify(problem, choice)
        for budget in found.budgets:
            if max(verified.peak_bytes, verified.demoted_peak_bytes) <= budget and verified.risk <= limit:
                best[budget] = min(best.get(budget, verified.step_ns), verified.step_ns)
    assert len(made) > 10
    uniform = points(curve(found, UNIFORM, 1.0))
    assert {point.budget_bytes: point.regime_ns[-1] for point in uniform} == best
    assert all(0 < (point.error or 0) <= 0.01 for point in uniform)


def test_the_chain_is_the_best_of_its_slots(trace: Trace) -> None:
    trace = replace(trace, buckets=(replace(trace.buckets[0], regions=trace.buckets[0].regions[:3]),))
    budget = (reference_peaks(trace)[0] + reference_peaks(trace)[1]) // 2
    problem = build_problem(trace, trace.buckets[0], budget_bytes=budget, delta=0.0, psi_high=0.0)
    made = dict(chain_choices(problem))
    assert len(made) == 6
    times = {}
    for name, choice in made.items():
        verified = verify(problem, choice)
        assert verified.peak_bytes <= budget
        assert not any(region.configurations[i].split_at for region, i in zip(problem.regions, choice, strict=True))
        times[name] = verified.step_ns
    assert times["slots of 1 MiB, 100% of the room"] == min(times.values())
    optimum = solve_trace(trace, budget_bytes=budget, delta=0.0, gap_percent=0.0).rows[0].step_ns
    assert optimum <= min(times.values()) < reference_times(trace)[0]
    nothing = replace(problem, budget_bytes=problem.base_bytes)
    assert list(chain_choices(nothing)) == []


def point(budget: int, step_ns: int) -> Point:
    return Point(budget * MIB, budget * MIB, "head", step_ns, (step_ns,) * 4, 0.0)


def test_what_was_found_under_less_stands_where_nothing_faster_was() -> None:
    budgets = [MIB, 2 * MIB, 3 * MIB, 4 * MIB]
    taken = running_best(budgets, [None, point(2, 50), None, point(4, 60)])
    assert taken[0] is None
    assert [(p.step_ns, p.budget_bytes // MIB, p.peak_bytes // MIB, p.carried) for p in taken[1:] if p] == [
        (50, 2, 2, ""),
        (50, 3, 2, "found under 2.0 MiB"),
        (50, 4, 2, "found under 2.0 MiB"),
    ]
    lossy = running_best(budgets, [None, point(2, 55), point(3, 40), None], taken, "found under delta 0")
    assert [(p.step_ns, p.carried) for p in lossy[1:] if p] == [
        (50, "found under delta 0"),
        (40, ""),
        (40, "found under 3.0 MiB"),
    ]


def test_too_little_time_leaves_points_out(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = default_budgets(trace, points=3)
    real = solve_trace

    def slow_at(budget: int) -> None:
        def solve(trace: Trace, *, budget_bytes: int, **options: object) -> object:
            if budget_bytes == budget:
                raise NoPlanError("no solution within the time limit of 20 s")
            return real(trace, budget_bytes=budget_bytes, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(frontier_curves, "solve_trace", solve)

    slow_at(budgets[0])
    first = curve(frontier(trace, budgets=budgets, deltas=(0.0,), rivals=False), PLAN, 0.0)
    assert [each is None for each in first.points] == [True, False, False]
    slow_at(budgets[1])
    second = curve(frontier(trace, budgets=budgets, deltas=(0.0,), rivals=False), PLAN, 0.0)
    assert [each.carried for each in points(second)] == ["", f"found under {budgets[0] // MIB:,}.0 MiB", ""]


def test_a_disagreement_with_the_verifier_is_an_error_of_ours(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    real = frontier_curves.verify_modes

    def wrong(*arguments: object, **options: object) -> Verified:
        found = real(*arguments, **options)  # type: ignore[arg-type]
        return replace(found, peak_bytes=found.peak_bytes + 1)

    monkeypatch.setattr(frontier_curves, "verify_modes", wrong)
    with pytest.raises(InternalError, match=r"null: a plan of \d+ bytes and \d+ ns, verified \d+ bytes"):
        frontier(trace, budgets=default_budgets(trace, points=2), deltas=(0.0,), rivals=False)


def test_a_frontier_of_budgets_that_are_all_too_small(trace: Trace) -> None:
    smallest = smallest_feasible(trace)
    with pytest.raises(InfeasibleError, match="the smallest feasible budget is") as caught:
        frontier(trace, budgets=(smallest // 2, smallest - 1), deltas=(0.0,))
    assert caught.value.smallest_budget_bytes == smallest


def test_the_csv_has_every_point(found: Frontier) -> None:
    rows = list(csv.DictReader(io.StringIO(frontier_csv(found))))
    assert len(rows) == sum(len(points(each)) for each in found.curves)
    last = next(row for row in rows if row["policy"] == NO_GC)
    assert (last["delta"], int(last["peak_bytes"]), int(last["step_ns"])) == (
        "",
        found.no_gc_peak_bytes,
        found.no_gc_step_ns,
    )
    greedy = next(row for row in rows if row["policy"] == GREEDY)
    assert greedy["predicted_error"] == ""


def test_the_plot_is_one_self_contained_svg(found: Frontier) -> None:
    text = frontier_svg(found)
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [label for label in shown if label in {each.label for each in found.curves}] == [
        each.label for each in found.curves
    ]
    assert "prefers-color-scheme:dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "nan" not in text


def folder_files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = small_trace()
    save_trace(trace, "tiny.trace.json")
    low = default_budgets(trace)[0] // MIB
    options = ["--budgets", f"{low + 200},{low + 100}MiB", "--deltas", "0", "--budgets", "9GiB"]
    code, out, err = run(capsys, "frontier", *options, "--out", "deep/f.csv", "--plot", "f.svg")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].strip() == "tiny, 2048 tokens per row: predicted gain over GC"
    assert any(line.startswith(f"tiny.trace.json: smallest feasible budget {low:,} MiB (") for line in lines)
    assert lines[-1] == "written: deep/f.csv, f.svg"
    rows = list(csv.DictReader(io.StringIO(Path("deep/f.csv").read_text(encoding="utf-8"))))
    assert sorted({int(row["budget_bytes"]) // MIB for row in rows}) == sorted([low + 100, low + 200, 9 * 1024])
    ElementTree.parse("f.svg")

    code, out, err = run(capsys, "frontier", *options, "--no-rivals", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert len(out.splitlines()) == 1
    assert data["smallest_bytes"] == smallest_feasible(trace)
    shown = {(row["policy"], row["budget_bytes"]): row for row in data["points"]}
    assert {policy for policy, _ in shown} == {PLAN, GREEDY}
    assert run(capsys, "solve", "--budget", str(low + 100), "--delta", "0", "--json", "--out", "plans")[0] == 0
    plan = json.loads(Path("plans/tiny.high.json").read_text(encoding="utf-8"))
    row = shown[PLAN, (low + 100) * MIB]
    assert (row["peak_bytes"], row["step_ns"]) == (plan["predicted"]["peak_bytes"], plan["predicted"]["step_ns"])


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (["--deltas", ""], 2, "--deltas '': an empty entry; separate them by single commas\n"),
        (["--out", "tiny.trace.json/f.csv"], 2, "tiny.trace.json/f.csv: cannot be written: "),
        (["--plot", "f.png"], 2, "--plot f.png: plots are SVG; write f.svg\n"),
        (["--budgets", "7000,,8000"], 2, "--budgets 7000,,8000: an empty entry; separate them by single commas\n"),
        (["--budgets", "7000MB"], 2, "--budgets 7000MB: people disagree on MB: "),
        (["--deltas", "0,nan"], 2, "--deltas nan must be a finite number, 0 (no lossy units) or more\n"),
        (["--time-limit", "0"], 2, "--time-limit 0 must be a finite number above 0\n"),
        (["--budgets", "10", "--deltas", "0"], 4, "infeasible: no plan stays within 10.0 MiB; the smallest feasible"),
        (["--trace", "none.json"], 2, "none.json: no such file; make it with: hilore-plan trace model.yaml\n"),
    ],
)
def test_wrong_input_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: Sequence[str],
    code: int,
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_trace(small_trace(), "tiny.trace.json")
    found, out, err = run(capsys, "frontier", "--out", "f.csv", *options)
    assert (found, out) == (code, "")
    assert err.startswith(expected)
    assert folder_files() == ["tiny.trace.json"]


def test_an_output_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_trace(small_trace(), "tiny.trace.json")
    Path("f.csv").write_text("earlier", encoding="utf-8")
    Path("f.svg").mkdir()
    options = ["--budgets", "9GiB", "--deltas", "0", "--no-rivals", "--out", "f.csv", "--plot", "f.svg"]
    assert run(capsys, "frontier", *options) == (2, "", "f.svg: cannot be written: is a folder\n")
    assert Path("f.csv").read_text(encoding="utf-8") == "earlier"
    assert folder_files() == ["f.csv", "f.svg", "tiny.trace.json"]
