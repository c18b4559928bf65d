"""verify: what it calls a breach, and that a fake update has the peak of a real one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hilore.cli import main
from hilore.planner.actor import build_actor
from hilore.planner.budget import MIB
from hilore.planner.check import PlanCheck, Verification, error_limit, verify_plans
from hilore.planner.checkfake import fake_update
from hilore.planner.estimate import target_of
from hilore.planner.plan_view import check_lines
from hilore.planner.spec_types import ModelSpec
from hilore.planner.wholeupdate import FixedPlan, peak_of_update
from hilore.runtime.errors import FingerprintError, HiloreError
from hilore.runtime.plan import Plan, Regime
from hilore.runtime.planfile import save_plan
from tests.plans import keepable, plan_for, units_of
from tests.solver_fixtures import qwen_trace
from tests.specs import spec_of

AMPLE = 1 << 40


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return spec_of(
        adapter="{kind: lora, rank: 4, alpha: 8}", batch="{microbatch: 2, prompt_tokens: 8, response_tokens: 8}"
    )


@pytest.fixture(scope="module")
def plans(spec: ModelSpec) -> dict[str, Plan]:
    """All-R, and every keepable unit at L; budget and prediction are ample."""
    model = build_actor(spec).model
    ample = {"length_bucket": 16, "budget_bytes": AMPLE}
    made = {"R": plan_for(model, "R", **ample), "L": plan_for(model, keepable(units_of(model), "L"), **ample)}
    return {mode: replace(p, predicted=replace(p.predicted, peak_bytes=AMPLE)) for mode, p in made.items()}


def check(plan: Plan, spec: ModelSpec, *, fake: bool = False) -> tuple[PlanCheck, Verification]:
    found = verify_plans([plan], spec, trace=qwen_trace(layers=2), fake=fake, rounds=1, microbatches=1)
    assert len(found.checks) == 1
    return found.checks[0], found


def test_an_exact_plan_keeps_its_promises(plans: dict[str, Plan], spec: ModelSpec) -> None:
    one, found = check(plans["R"], spec)
    assert (found.breaches, found.exit_code) == ((), 0)
    assert (one.exact, one.error, one.error_limit) == (True, 0.0, None)
    assert one.measured_gain is not None


@pytest.mark.parametrize("fake", [False, True])
def test_a_peak_one_byte_over_is_a_breach(plans: dict[str, Plan], spec: ModelSpec, fake: bool) -> None:
    peak = check(plans["R"], spec, fake=fake)[0].measured_peak_bytes
    kept = replace(plans["R"], budget_bytes=peak, predicted=replace(plans["R"].predicted, peak_bytes=peak))
    assert check(kept, spec, fake=fake)[1].breaches == ()
    broken = replace(kept, budget_bytes=peak - 1)
    found = check(broken, spec, fake=fake)[1]
    assert found.exit_code == 6
    assert len(found.breaches) == 1
    assert f"1 B over the budget of {peak - 1:,} B" in found.breaches[0]


def test_a_fake_update_has_the_peak_of_a_real_one(plans: dict[str, Plan], spec: ModelSpec) -> None:
    fake, real = check(plans["R"], spec, fake=True)[0], check(plans["R"], spec)[0]
    assert fake.measured_peak_bytes == real.measured_peak_bytes
    assert (fake.exact, fake.error, fake.measured_gain) == (None, None, None)


def test_blocks_and_segments_are_counted_apart_from_the_peak(plans: dict[str, Plan], spec: ModelSpec) -> None:
    """Every tensor of this model is small: blocks of 512 B, cut from segments of 2 MiB."""
    one, found = check(plans["R"], spec, fake=True)
    with fake_update(spec, target_of(spec), plans["R"].length_bucket) as (actor, update, optimizer):
        peak = peak_of_update(actor, FixedPlan("plan", plans["R"]), update, optimizer)
    assert sum(size * count for size, count in peak.sizes.items()) == peak.peak_bytes
    assert max(peak.sizes) <= MIB
    in_blocks = sum(-(-size // 512) * 512 * count for size, count in peak.sizes.items())
    assert one.rounding_bytes == in_blocks - peak.peak_bytes > 0
    assert one.segment_bytes == -(-in_blocks // (2 * MIB)) * 2 * MIB - peak.peak_bytes
    expected = f"up to {one.rounding_bytes / MIB:,.1f} MiB more as allocated (blocks of 512 B)"
    assert [expected in line for line in check_lines(found)] == [False, True, False]
    assert check_lines(check(plans["R"], spec)[1])[1:] == ["every plan keeps its promises"]


def test_a_gradient_error_over_delta_is_a_breach(plans: dict[str, Plan], spec: ModelSpec) -> None:
    plan = replace(plans["L"], regime=Regime("mid", 0.0, 1.0, 1.0))
    one, _ = check(plan, spec)
    assert one.exact is False
    assert one.error is not None
    assert 0 < one.error < 0.05
    assert one.error_limit == 0.01
    strict = replace(plan, delta=one.error / plan.delta_star * 0.999)
    loose = replace(plan, delta=one.error / plan.delta_star * 1.001)
    assert check(strict, spec)[1].exit_code == 6
    assert "gradient error" in check(strict, spec)[1].breaches[0]
    assert check(loose, spec)[1].exit_code == 0


def test_the_limit_of_an_error_is_that_of_its_regime(plans: dict[str, Plan]) -> None:
    lossy = replace(plans["L"], delta=0.5, delta_star=0.02)
    at = {x: replace(lossy, regime=Regime("mid", 0.0, 2.0, 1.0, allowance=x)) for x in (1.0, 4.0)}
    assert error_limit(at[1.0]) == 0.01
    assert error_limit(at[4.0]) == 0.02
    assert error_limit(replace(lossy, regime=Regime("null", 0.0, 0.0, 1.0))) is None
    assert error_limit(plans["R"]) is None


def test_what_cannot_be_verified_here_is_refused(plans: dict[str, Plan], spec: ModelSpec) -> None:
    with pytest.raises(HiloreError, match=r"parallel.kind is fsdp2: verify runs one process"):
        verify_plans([plans["R"]], replace(spec, parallel=replace(spec.parallel, kind="fsdp2", world_size=2)))
    other = spec_of(adapter="{kind: lora, rank: 8, alpha: 8}")
    with pytest.raises(FingerprintError):
        verify_plans([plans["R"]], other, fake=True)


def test_on_the_command_line(
    plans: dict[str, Plan],
    spec: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    spec_of(tmp_path, adapter="{kind: lora, rank: 4, alpha: 8}")
    peak = check(plans["R"], spec, fake=True)[0].measured_peak_bytes
    good = replace(plans["R"], predicted=replace(plans["R"].predicted, peak_bytes=peak))
    save_plan(good, "good.json")
    save_plan(replace(good, budget_bytes=1), "bad.json")
    assert main(["verify", "good.json", "--model", "model.yaml", "--fake"]) == 0
    assert "every plan keeps its promises" in capsys.readouterr().out
    assert main(["verify", "good.json", "bad.json", "--model", "model.yaml", "--fake", "--json"]) == 6
    data = json.loads(capsys.readouterr().out)
    assert [one["plan"] for one in data["checks"]] == ["good.json", "bad.json"]
    assert [line.split(":")[0] for line in data["breaches"]] == ["bad.json"]
    assert main(["verify", "good.json", "--fake"]) == 2
    assert capsys.readouterr().err.startswith("no *.trace.json in this folder")
