"""show, diff and explain on plan files of a synthetic trace."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from hilore.cli import main
from hilore.planner import explain
from hilore.planner.composition import plan_compositions
from hilore.planner.configure import replayed_units
from hilore.planner.explain import explain_unit
from hilore.planner.plan_view import plan_differences
from hilore.planner.problem import RISK_SCALE
from hilore.planner.trace import Trace
from hilore.planner.tracefile import save_trace
from hilore.planner.verify import reference_peaks, reference_times, verify_modes
from hilore.runtime.errors import HiloreError
from hilore.runtime.plan import Plan, Predicted, Regime, RegionPlan, SolverReport, UnitPlan
from hilore.runtime.planfile import save_plan
from tests.solver_fixtures import qwen_trace

MIB = 2**20
HELD = "held"
ATTENTION, GATE = "self_attn:attention", "mlp.gate_proj"


@pytest.fixture
def trace() -> Trace:
    return qwen_trace(layers=4, codecs=("int8-g128", "int4-g64"))


def region_plan(trace: Trace, name: str, kept: Collection[str] | str, lossy: Collection[str] = ()) -> RegionPlan:
    """One region: HELD, or the names of its units at H and at L (int8-g128)."""
    units = trace.buckets[0].classes[0].units
    stored, exact = {*kept, *lossy}, set(kept)
    running, demoted = replayed_units(units, stored), replayed_units(units, exact)
    made = []
    for unit in units:
        if kept == HELD:
            made.append(UnitPlan(f"{name}.{unit.name}", "H", None, False, False))
            continue
        mode = "L" if unit.name in lossy else "H" if unit.name in exact else "R"
        made.append(
            UnitPlan(
                f"{name}.{unit.name}",
                mode,  # type: ignore[arg-type]
                "int8-g128" if mode == "L" else None,
                dead=unit.name not in stored | running,
                dead_if_demoted=unit.name not in exact | demoted,
            )
        )
    return RegionPlan(name, kept == HELD, tuple(made))


def plan_of(trace: Trace, regions: tuple[RegionPlan, ...], *, budget: int | None = None, label: str = "mid") -> Plan:
    """A plan with these regions; its budget is its own peak unless one is given."""
    bucket = trace.buckets[0]
    found = verify_modes(trace, bucket, regions)
    gc_peak, no_gc_peak = reference_peaks(trace)
    gc_ns, no_gc_ns = reference_times(trace)
    predicted = Predicted(
        found.peak_bytes,
        found.peak_event,
        found.step_ns,
        gc_ns,
        gc_peak,
        no_gc_ns,
        no_gc_peak,
        (found.risk / RISK_SCALE) ** 0.5,
    )
    low, high = {"null": (0.0, 0.0), "mid": (0.6, 1.1)}[label]
    return Plan(
        schema_version=1,
        set_id="0123456789ab",
        name=trace.name,
        loss={"kind": "grpo"},
        regime=Regime(label, low, high, 0.3),  # type: ignore[arg-type]
        budget_bytes=found.peak_bytes if budget is None else budget,
        margin_bytes=0,
        delta=1.0,
        delta_star=0.01,
        calibrated=False,
        predicted=predicted,
        length_bucket=bucket.tokens,
        regions=regions,
        solver=SolverReport("cp-sat", "optimal", 1, 1, 0.0, 0.5, 2),
        fingerprint={"model_type": "qwen2"},
        provenance={},
    )


def mixed(trace: Trace, **options: int | str) -> Plan:
    regions = (
        region_plan(trace, "model.layers.0", [ATTENTION], [GATE]),
        region_plan(trace, "model.layers.1", [ATTENTION], [GATE]),
        region_plan(trace, "model.layers.2", HELD),
        region_plan(trace, "model.layers.3", []),
    )
    return plan_of(trace, regions, **options)  # type: ignore[arg-type]


def test_show_folds_equal_regions(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(mixed(trace), "a.json")
    assert main(["show", "a.json"]) == 0
    lines = [" ".join(line.replace("│", "|").split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "qwen-like, regime mid (exposure 0.6 to 1.1), 2048 tokens per row, set 0123456789ab"
    assert "4 regions, 1 held; units H 10, L 2, R 20" in lines
    rows = [line for line in lines if line.startswith("| model.layers")]
    assert rows[0].startswith(f"| model.layers.0-1 | 2 | whole | {ATTENTION} | {GATE} (int8-g128) | ")
    assert "self_attn.q_proj" in rows[0]
    assert rows[1:2] == ["| model.layers.2 | 1 | none | all | - | - | - |"]
    assert rows[2].startswith("| model.layers.3 | 1 | whole | - | - | ")
    assert rows[2].endswith("| mlp.down_proj |")
    assert len(rows) == 3


def test_show_says_what_the_peak_is_made_of(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = mixed(trace)
    save_plan(plan, "a.json")
    save_trace(trace, "qwen-like.trace.json")
    # Another actor's trace is newer; the plan's own has its name.
    save_trace(replace(trace, name="other"), "other.trace.json")
    assert main(["show", "a.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("what the peak is made of"))) :]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table if "│" in line]
    sizes = {row[0]: int(row[1].replace(",", "")) for row in rows if row[1] not in ("-", "")}
    total = sizes.pop("sum: the peak")
    assert total == sum(sizes.values()) == plan.predicted.peak_bytes
    gc_peak, no_gc_peak = reference_peaks(trace)
    assert rows[-1][2:] == [f"{peak / MIB:,.2f}" for peak in (total, gc_peak, no_gc_peak)]
    assert "blocks of 512 B and segments of 2 MiB is apart from them" in lines[-1]

    assert main(["show", "a.json", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["plans"][0]
    assert shown["peak_parts"]["parts"] == sizes
    assert shown["peak_parts"]["event"] == plan.predicted.peak_event
    assert sum(shown["gc_peak_parts"]["parts"].values()) == shown["gc_peak_parts"]["bytes"] == gc_peak
    assert sum(shown["no_gc_peak_parts"]["parts"].values()) == no_gc_peak


def test_show_without_a_trace_of_the_plan_says_so(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = mixed(trace)
    save_plan(plan, "a.json")
    unknown = "what the peak is made of is in the trace: "
    assert main(["show", "a.json"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{unknown}no *.trace.json in this folder; make one with: hilore-plan trace model.yaml"
    save_trace(replace(trace, fixed=replace(trace.fixed, other_bytes=1)), "qwen-like.trace.json")
    assert main(["show", "a.json", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["plans"][0]
    peak = plan.predicted.peak_bytes
    assert shown["peak_parts"] is None
    assert shown["peak_parts_unknown"] == (
        f"a.json: predicts a peak of {peak:,} bytes, but its modes take {peak + 1:,} bytes in qwen-like.trace.json: it "
        "was solved from another trace; name that with --trace, or solve again"
    )
    assert main(["show", "a.json", "--trace", "qwen-like.trace.json"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", shown["peak_parts_unknown"] + "\n")
    assert main(["show", "a.json", "--trace", "none.json"]) == 2
    assert capsys.readouterr().err == "none.json: no such file; make it with: hilore-plan trace model.yaml\n"


def test_show_json(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = mixed(trace)
    save_plan(plan, "a.json")
    assert main(["show", "a.json", "a.json", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["plans"]
    assert [one["path"] for one in shown] == ["a.json", "a.json"]
    assert shown[0]["counts"] == {"H": 10, "L": 2, "R": 20}
    assert shown[0]["held"] == 1
    assert shown[0]["gain_over_gc"] == plan.predicted.gc_step_ns / plan.predicted.step_ns - 1
    assert [(part["regions"], part["count"]) for part in shown[0]["regions"]] == [
        ("model.layers.0-1", 2),
        ("model.layers.2", 1),
        ("model.layers.3", 1),
    ]
    assert shown[0]["regions"][0]["L"] == {GATE: "int8-g128"}


def test_a_truncated_plan_and_a_missing_one(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(mixed(trace), "a.json")
    text = Path("a.json").read_text()
    Path("b.json").write_text(text[: len(text) // 2])
    assert main(["show", "a.json", "b.json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("b.json:")
    assert len(captured.err.splitlines()) == 1
    assert main(["show", "c.json"]) == 2
    assert capsys.readouterr().err == "c.json: no such plan file\n"


def test_diff_names_what_changed(trace: Trace) -> None:
    first = mixed(trace)
    second = replace(
        first,
        regions=(
            region_plan(trace, "model.layers.0", [ATTENTION, GATE]),
            region_plan(trace, "model.layers.1", [ATTENTION, GATE]),
            *first.regions[2:],
        ),
    )
    assert plan_differences(first, first) == []
    changed = plan_differences(first, second)
    assert changed == [
        "units at H: 10 -> 12",
        "units at L: 2 -> 0",
        f"model.layers.0-1: {GATE} L(int8-g128) -> H",
    ]
    held = replace(first, regions=(*first.regions[:3], region_plan(trace, "model.layers.3", HELD)))
    assert plan_differences(first, held)[-1].startswith(
        "model.layers.3: replay whole -> none; self_attn.q_proj R -> H; "
    )


def test_explain_prices_each_alternative_against_the_verifier(trace: Trace) -> None:
    plan = mixed(trace, budget=1 << 40)
    found = explain_unit(plan, trace, f"model.layers.1.{GATE}")
    assert (found.kind, found.mode, found.dead, found.held) == ("gate", "L (int8-g128)", False, False)
    priced = {other.change: other for other in found.alternatives}
    assert list(priced) == [
        "unit at H",
        "unit at R",
        "unit at L (int4-g64)",
        "region held",
        "region replayed, all units at R",
    ]
    other = replace(
        plan, regions=(*plan.regions[:1], region_plan(trace, "model.layers.1", [ATTENTION, GATE]), *plan.regions[2:])
    )
    now, then = (verify_modes(trace, trace.buckets[0], which.regions) for which in (plan, other))
    assert priced["unit at H"].step_ns == then.step_ns - now.step_ns < 0
    assert priced["unit at H"].peak_bytes == then.peak_bytes - now.peak_bytes > 0
    assert priced["unit at H"].refused == ""
    assert found.binds.startswith("nothing here: region held fits and would be ")
    for change, region in (
        ("unit at H", other.regions[1]),
        ("region held", region_plan(trace, "model.layers.1", HELD)),
    ):
        changed = (plan.regions[0], region, *plan.regions[2:])
        new = verify_modes(trace, trace.buckets[0], changed)
        price = priced[change]
        assert sum(size for _, size in price.times) == price.step_ns == new.step_ns - now.step_ns
        assert (price.event, price.over_bytes) == (new.peak_event, new.peak_bytes - plan.budget_bytes)
        before = {event.event: event for event in plan_compositions(trace, trace.buckets[0], plan.regions)}
        assert (
            sum(size for _, size in price.parts) == price.event_bytes == new.peak_bytes - before[price.event].live_bytes
        )
    gate = next(unit for unit in trace.buckets[0].classes[0].units if unit.name == GATE)
    codec = gate.codecs[0]
    assert dict(priced["unit at H"].times) == {f"{GATE} encoded": -codec.encode_ns, f"{GATE} decoded": -codec.decode_ns}
    assert priced["unit at H"].retained_bytes == gate.output_bytes - codec.payload_bytes
    assert dict(priced["unit at R"].times)[f"{GATE} runs"] == gate.run_ns
    assert priced["unit at R"].step_ns > 0
    assert "risk over its limit" in priced["unit at L (int4-g64)"].refused


def test_explain_says_what_binds(trace: Trace) -> None:
    plan = mixed(trace)
    found = explain_unit(plan, trace, f"model.layers.1.{GATE}")
    assert found.spare_bytes == 0
    refused = next(other.refused for other in found.alternatives if other.change == "unit at H")
    assert refused.endswith(f"MiB over the budget in the {found.peak_event}")
    assert f"memory in the {found.peak_event} keeps out unit at H (" in found.binds
    strict = explain_unit(
        replace(plan, delta=found.risk / plan.delta_star * (1 + 1e-9)), trace, f"model.layers.3.{GATE}"
    )
    assert "; risk keeps out unit at L (int8-g128), unit at L (int4-g64)" in strict.binds


def test_explain_a_held_and_a_dead_unit(trace: Trace) -> None:
    plan = mixed(trace, budget=1 << 40)
    held = explain_unit(plan, trace, f"model.layers.2.{GATE}")
    assert held.held
    assert [other.change for other in held.alternatives] == ["region replayed, all units at R"]
    dead = explain_unit(plan, trace, "model.layers.3.mlp.down_proj")
    assert dead.dead
    assert next(other.refused for other in dead.alternatives if other.change == "unit at H").startswith("not measured")
    never = explain_unit(replace(plan, regime=Regime("null", 0.0, 0.0, 0.1)), trace, f"model.layers.3.{GATE}")
    assert never.risk_limit is None


def test_a_split_replay_is_an_alternative_and_shown() -> None:
    trace = qwen_trace(layers=4, split=True)
    plan = mixed(trace, budget=1 << 40)
    found = explain_unit(plan, trace, f"model.layers.1.{GATE}")
    priced = {other.change: other for other in found.alternatives}
    assert priced["replay split"].refused == ""
    assert priced["replay split"].step_ns > 0
    exact = explain_unit(plan, trace, f"model.layers.3.{GATE}")
    assert next(other.peak_bytes for other in exact.alternatives if other.change == "replay split") <= 0

    split = replace(plan.regions[3], split_at=f"model.layers.3.{GATE}")
    cut = replace(plan, regions=(*plan.regions[:3], split))
    assert verify_modes(trace, trace.buckets[0], cut.regions).peak_bytes <= plan.predicted.peak_bytes
    assert plan_differences(plan, cut) == [f"model.layers.3: replay whole -> split at {GATE}"]
    again = explain_unit(cut, trace, f"model.layers.3.{GATE}")
    assert [other.change for other in again.alternatives][-3:] == [
        "replay whole",
        "region held",
        "region replayed, all units at R",
    ]


def test_a_whole_name_wins_over_one_that_ends_in_it(trace: Trace) -> None:
    plan = mixed(trace)
    first, second = plan.regions[0].units[:2]
    units = (replace(first, name="up"), replace(second, name="block.up"), *plan.regions[0].units[2:])
    named = replace(plan, regions=(replace(plan.regions[0], units=units), *plan.regions[1:]))
    assert explain._find(named, "up") == (0, 0)
    assert explain._find(named, "block.up") == (0, 1)


def test_explain_refuses_what_does_not_fit_together(trace: Trace) -> None:
    plan = replace(mixed(trace), path="a.json")
    with pytest.raises(
        HiloreError,
        match=r"a\.json: no unit 'model\.layers\.1\.mlp\.gate_prj'; did you mean 'model\.layers\.1\.mlp\.gate_proj'\?",
    ):
        explain_unit(plan, trace, "model.layers.1.mlp.gate_prj")
    ending = (
        r"no unit 'gate_proj'; 4 end in it, from 'model\.layers\.0\.mlp\.gate_proj' to 'model\.layers\.3\.mlp\.gate_"
    )
    with pytest.raises(HiloreError, match=ending):
        explain_unit(plan, trace, "gate_proj")
    assert explain_unit(plan, trace, "1.mlp.gate_proj").unit == "model.layers.1.mlp.gate_proj"
    with pytest.raises(HiloreError, match="is not of the trace of other"):
        explain_unit(plan, replace(trace, name="other"), f"model.layers.1.{GATE}")


def test_explain_on_the_command_line(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan(mixed(trace), "a.json")
    save_trace(trace, "qwen-like.trace.json")
    assert main(["explain", "a.json", f"model.layers.1.{GATE}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"model.layers.1.{GATE} (gate): L (int8-g128)\n")
    sums = [line for line in out.splitlines() if line.startswith("unit at ") and ": " in line]
    assert len(sums) == 2 * 3
    for line in sums:
        total, *terms = re.findall(r"[+-][0-9,]+", line)
        assert int(total.replace(",", "")) == sum(int(term.replace(",", "")) for term in terms)
    assert main(["explain", "a.json", f"model.layers.1.{GATE}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mode"] == "L (int8-g128)"
