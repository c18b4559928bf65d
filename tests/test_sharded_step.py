"""Real FSDP updates on two ranks (gloo, CPU) against the trace's and the plans' predictions for one rank."""

from __future__ import annotations

import pytest

from bench.sharded import LORA, Case, Row, measure_cases

CASES = [
    Case("none", tied=True, reshard=False, accumulation=1),
    Case(LORA, tied=True, reshard=True, accumulation=2),
    Case("none", tied=False, reshard=True, accumulation=2, sync="last_microbatch"),
    Case("none", tied=True, reshard=True, accumulation=2, kind="fsdp1"),
]
POLICIES = ("gc", "no-gc", "plan, delta 0", "plan with L")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Row]:
    found = measure_cases(CASES, tmp_path_factory.mktemp("ranks"))
    return {(row.case, row.policy): row for row in found}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_prediction_of_a_ranks_peak_holds_and_is_tight(
    rows: dict[tuple[str, str], Row], case: Case, policy: str
) -> None:
    """Of a whole update."""
    row = rows[case.name, policy]
    assert row.measured_bytes <= row.predicted_bytes <= 1.01 * row.measured_bytes
    assert row.exact == (policy != "plan with L"), "gradients are bitwise those of FSDP without a plan"
