"""Plan files: read strictly, saved whole, chosen by exposure and tokens."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hilore.planner.emit import solve_trace, write_plans
from hilore.planner.verify import reference_peaks
from hilore.runtime import PlanSet, load_plans
from hilore.runtime.errors import ExposureError, PlanFileError
from hilore.runtime.plan import Plan
from hilore.runtime.planfile import load_plan, plan_text, save_plan
from tests.solver_fixtures import qwen_trace


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, ...]:
    trace = qwen_trace(layers=2, buckets=(512, 1024), kept_names=("attention", "gate"))
    low, high = reference_peaks(trace)
    return solve_trace(trace, budget_bytes=(low + high) // 2, delta=1.0, command="solve").plans


@pytest.fixture
def folder(plans: tuple[Plan, ...], tmp_path: Path) -> Path:
    for plan in plans:
        save_plan(plan, tmp_path / f"{plan.length_bucket}.{plan.regime.label}.json")
    return tmp_path


def edited(path: Path, change: dict[str, Any], *parents: str | int) -> None:
    data = json.loads(path.read_text())
    at = data
    for parent in parents:
        at = at[parent]
    at.update(change)
    path.write_text(json.dumps(data))


def refusal(source: str | Path) -> str:
    with pytest.raises(PlanFileError) as caught:
        load_plans(source)
    return caught.value.message


def test_a_set_comes_back_as_it_was_saved(plans: tuple[Plan, ...], folder: Path) -> None:
    loaded = load_plans(str(folder / "*.json"))
    assert sorted(map(plan_text, loaded.plans)) == sorted(map(plan_text, plans))
    assert loaded.buckets == (512, 1024)
    assert {Path(plan.path).name for plan in loaded.plans} == {p.name for p in folder.glob("*.json")}
    assert load_plans(sorted(folder.glob("*.json"))) == loaded


@pytest.mark.parametrize(
    ("exposure", "tokens", "label", "bucket"),
    [
        (0.0, 1024, "null", 1024),
        (1e-9, 1024, "low", 1024),
        (0.6, 1024, "low", 1024),
        (0.6000001, 1024, "mid", 1024),
        (1.1, 513, "mid", 1024),
        (2.0, 512, "high", 512),
        (1e9, 1, "high", 512),
    ],
)
def test_select(folder: Path, exposure: float, tokens: int, label: str, bucket: int) -> None:
    chosen = load_plans(str(folder / "*.json")).select(exposure, tokens)
    assert chosen is not None
    assert (chosen.regime.label, chosen.length_bucket) == (label, bucket)


def test_no_plan_holds_rows_longer_than_every_bucket(folder: Path) -> None:
    assert load_plans(str(folder / "*.json")).select(0.5, 1025) is None


@pytest.mark.parametrize("exposure", [math.nan, math.inf, -1e-9])
def test_an_exposure_that_is_no_number_raises(folder: Path, exposure: float) -> None:
    with pytest.raises(ExposureError, match="is no finite number"):
        load_plans(str(folder / "*.json")).select(exposure, 512)


def test_nothing_matches(tmp_path: Path) -> None:
    assert refusal(tmp_path / "*.json") == (
        f"{tmp_path}/*.json: no such plan file; make plans with: hilore-plan solve --budget N --delta D"
    )


def test_a_file_cut_short_is_named_with_its_line(folder: Path) -> None:
    path = folder / "1024.low.json"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    line = text[: len(text) // 2].count("\n") + 1
    assert refusal(folder / "*.json").startswith(f"{path}:{line}: not valid JSON (cut short?)")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"schema_version": 1', '"schema_version": 2', "schema_version is 2, this runtime reads 1"),
        ('"schema_version": 1', '"schema_version": true', "schema_version: Input should be a valid integer"),
        ('"delta": 1.0', '"delta": NaN', "NaN is not a number that a plan can hold"),
        ('"delta": 1.0', '"delta": -Infinity', "-Infinity is not a number that a plan can hold"),
        ('"delta": 1.0', '"delta": 1e999', "1e999 is not a number that a plan can hold"),
        ('"delta": 1.0', '"delta": 1.0, "delta": 2.0', "duplicate key 'delta'"),
        ('"delta": 1.0', '"delta": 1.0, "dleta": 2.0', "dleta: Unexpected keyword argument"),
        ('"delta": 1.0', '"delta": 1.0, "path": "x"', "unknown key 'path'"),
        ('"delta": 1.0', '"delta": "1.0"', "delta: Input should be a valid number"),
        ('"length_bucket": 1024', '"length_bucket": 1024.5', "length_bucket: Input should be a valid integer"),
        ('"exposure_high": 0.6', '"exposure_high": -0.6', "regime low from exposure 0.0 to -0.6"),
    ],
)
def test_wrong_text_is_refused(folder: Path, old: str, new: str, message: str) -> None:
    path = folder / "1024.low.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    found = refusal(folder / "*.json")
    assert found.startswith(f"{path}")
    assert message in found


@pytest.mark.parametrize("fingerprint", [{}, None])
def test_a_plan_without_fingerprint_is_refused(folder: Path, fingerprint: object) -> None:
    edited(folder / "512.mid.json", {"fingerprint": fingerprint})
    assert "the plan has no fingerprint" in refusal(folder / "*.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "L", "codec": None}, "mode L with codec None"),
        ({"mode": "R", "codec": "int8-g128"}, "mode R with codec int8-g128"),
        ({"mode": "H", "codec": None, "dead": True}, "mode H and dead"),
        ({"mode": "H", "codec": None, "dead": False, "dead_if_demoted": True}, "mode H and dead when demoted"),
        ({"name": "model.layers.1.self_attn.q_proj"}, "is not in region model.layers.0"),
        ({"name": "model.layers.0.self_attn.k_proj"}, "appears twice"),
        ({"mode": "Q"}, "mode: Input should be 'H', 'L' or 'R'"),
    ],
)
def test_a_unit_that_contradicts_itself_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    edited(folder / "512.high.json", change, "regions", 0, "units", 0)
    assert message in refusal(folder / "*.json")


def test_a_held_region_has_all_units_at_h(folder: Path) -> None:
    edited(folder / "512.high.json", {"hold": True}, "regions", 0)
    edited(folder / "512.high.json", {"mode": "R", "codec": None}, "regions", 0, "units", 3)
    assert "in a held region" in refusal(folder / "*.json")


def test_two_sets_under_one_name_are_both_named(folder: Path) -> None:
    edited(folder / "512.high.json", {"set_id": "feedfeedfeedfeed"})
    found = refusal(folder / "*.json")
    assert "feedfeedfeedfeed" in found
    assert load_plan(folder / "512.low.json").set_id in found


def test_plans_of_two_models_are_refused(folder: Path) -> None:
    edited(folder / "512.high.json", {"name": "other"})
    assert "plans of two models" in refusal(folder / "*.json")


def test_a_missing_regime_is_named(folder: Path) -> None:
    (folder / "1024.mid.json").unlink()
    assert "for 1024 tokens there is no mid plan among the 3 loaded" in refusal(folder / "*.json")


def test_a_copy_of_a_plan_beside_it_is_refused(folder: Path) -> None:
    (folder / "copy.json").write_bytes((folder / "512.low.json").read_bytes())
    assert "are both the low plan for 512 tokens" in refusal(folder / "*.json")


def test_all_problems_of_a_file_at_once(folder: Path) -> None:
    edited(folder / "512.low.json", {"delta": "x", "name": 3})
    found = refusal(folder / "512.low.json")
    assert "delta: " in found
    assert "name: " in found


def test_saving_replaces_only_with_a_complete_file(plans: tuple[Plan, ...], tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    save_plan(plans[0], target)
    before = target.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_plan(replace(plans[0], delta=math.nan), target)
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(PlanFileError, match=r"missing/a\.json: cannot be written"):
        save_plan(plans[0], tmp_path / "missing" / "a.json")


def test_what_solve_writes_loads(tmp_path: Path) -> None:
    trace = qwen_trace(layers=2, kept_names=("attention",))
    result = solve_trace(trace, budget_bytes=reference_peaks(trace)[1], delta=0.0, command="solve")
    written = write_plans(result, tmp_path)
    loaded = load_plans(str(tmp_path / "*.json"))
    assert isinstance(loaded, PlanSet)
    assert [path.name for path in written] == [f"qwen-like.{name}.json" for name in ("null", "low", "mid", "high")]
    assert all(region.hold for plan in loaded.plans for region in plan.regions)


def test_a_trace_is_named_for_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tiny.trace.json"
    path.write_text('{"trace_version": 2}', encoding="utf-8")
    with pytest.raises(PlanFileError, match=r"a trace, not a plan; `hilore-plan solve --trace .*tiny.trace.json"):
        load_plan(path)
