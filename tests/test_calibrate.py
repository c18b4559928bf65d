"""Risk measured on the actor itself (calibration.source: synthetic), and sources that are refused."""

from __future__ import annotations

import math

import pytest

from hilore.planner.calibrate import offered_pairs
from hilore.planner.prior import INTERACTION, MARGIN, calibration_from_prior
from hilore.planner.tracing import trace_spec
from hilore.runtime.errors import UnsupportedModelError
from tests.specs import spec_of

SYNTHETIC = "{source: synthetic, microbatches: 1, confidence: 0.5}"
LORA = "{kind: lora, rank: 4, alpha: 8, dtype: float32}"


def test_errors_of_this_actor_take_the_place_of_the_priors() -> None:
    spec = spec_of(calibration=SYNTHETIC, adapter=LORA, codecs="[int8-g128, int8-g64]")
    trace = trace_spec(spec)
    calibration = trace.calibration
    assert (calibration.source, calibration.calibrated, calibration.interaction) == ("synthetic", False, INTERACTION)
    pairs = {(risk.unit, risk.codec) for risk in calibration.risks}
    assert {codec for _, codec in pairs} == {"int8-g128", "int8-g64"} == {codec for _, codec in offered_pairs(trace)}
    prior = {(r.region, r.unit, r.codec): r.kappa2 for r in calibration_from_prior(spec, trace.buckets[-1]).risks}
    assert prior.keys() == {(r.region, r.unit, r.codec) for r in calibration.risks}
    for risk in calibration.risks:
        error = math.sqrt(risk.kappa2) / MARGIN
        assert 1e-5 < error < 0.05, (risk, "an 8-bit codec's error")
        assert risk.kappa2 != prior[risk.region, risk.unit, risk.codec]


def test_the_same_actor_gives_the_same_risk() -> None:
    spec = spec_of(calibration=SYNTHETIC, adapter=LORA, codecs="[int8-g64]")
    assert trace_spec(spec).calibration == trace_spec(spec).calibration


@pytest.mark.parametrize("source", ["generate", "rollouts"])
def test_a_source_that_is_not_measured_is_refused(source: str) -> None:
    path = ", path: rollouts.jsonl" if source == "rollouts" else ""
    with pytest.raises(UnsupportedModelError, match=rf"calibration\.source: {source} is not measured by this version"):
        trace_spec(spec_of(calibration=f"{{source: {source}{path}}}"))


def test_a_device_that_is_not_here_cannot_be_calibrated_on() -> None:
    with pytest.raises(UnsupportedModelError, match=r"calibration\.source: synthetic runs the actor"):
        trace_spec(spec_of(calibration=SYNTHETIC, device="{kind: cuda, gpu: l40s-48gb}"))
