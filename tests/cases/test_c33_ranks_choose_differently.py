"""C-33: ranks see other regimes, have other plans, or do not come. Two processes (tests/cases/c33_rank.py)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("tests.cases.c33_rank", tmp_path_factory.mktemp("ranks"))


def test_under_fsdp2_choices_are_local_to_a_rank_and_nothing_hangs(ranks: list[dict[str, Any]]) -> None:
    """Rank 0 holds its two regions, rank 1 replays them, twice; neither issues a collective of its own."""
    high, low = (found["choices_are_local_under_fsdp2"] for found in ranks)
    assert (high["regimes"], high["held"], high["frames"]) == (["high", "high"], 4, 0)
    assert (low["regimes"], low["held"], low["frames"]) == (["low", "low"], 0, 4)
    for found in (high, low):
        assert found["exact"]
        assert found["same_collectives"]
        assert not found["agreement"]


def test_ranks_with_other_plans_are_refused_by_name_unless_accepted(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["other_plans_are_refused"] for rank in ranks):
        assert "ranks were given different plans: rank 0: set_id set0, hash " in found["message"]
        assert "; rank 1: set_id set1, hash " in found["message"]
        assert 'accept=("plans",)' in found["message"]
        assert found["ranks"] == [[0], [1]]
        assert found["untouched"]
        assert found["accepted"]


def test_how_long_a_solver_took_is_no_difference(ranks: list[dict[str, Any]]) -> None:
    assert [rank["plans_solved_twice_are_the_same"] for rank in ranks] == [True, True]


def test_where_regions_hold_collectives_all_take_the_highest_regime(ranks: list[dict[str, Any]]) -> None:
    """Alone rank 1 would have held its regions and gathered in no backward, with rank 0 waiting for it."""
    for found in (rank["one_choice_where_regions_hold_collectives"] for rank in ranks):
        assert found["regimes"] == ["high"]
        assert found["frames"] == 2
        assert found["exact"]
        assert found["gathers"] == [4, 2], "in each of two forwards and two replays"


def test_a_demotion_is_everybodys(ranks: list[dict[str, Any]]) -> None:
    found = [rank["confirm_is_collective"] for rank in ranks]
    assert found[0]["exposure"] > 9 > found[1]["exposure"]
    assert [entry["demotions"] for entry in found] == [1, 1]
    assert [entry["exact"] for entry in found] == [True, True]


def test_gradients_that_wait_for_a_later_microbatch_are_noticed_once(ranks: list[dict[str, Any]]) -> None:
    for synced, waiting, again in (rank["a_gradient_that_waits_is_noticed"] for rank in ranks):
        assert synced == again == []
        assert len(waiting) == 1
        assert "the plan was made for parallel.gradient_sync: every_microbatch" in waiting[0]
        assert "Set gradient_sync: last_microbatch in model.yaml" in waiting[0]


def test_a_rank_that_skips_its_microbatch_is_named(ranks: list[dict[str, Any]]) -> None:
    message = ranks[0]["a_rank_that_skips_is_named"]
    assert "forward 1 under agreement: rank 1 did not come within 3 s" in message
    assert ranks[1]["a_rank_that_skips_is_named"] == ""


def test_a_rank_that_does_not_attach_is_named(ranks: list[dict[str, Any]]) -> None:
    message = ranks[0]["a_rank_that_does_not_attach_is_named"]
    assert "attach: rank 1 did not come within 3 s" in message
    assert 'timeout_s waits longer, accept=("plans",) compares nothing' in message


def test_an_audit_runs_on_all_ranks_or_on_none(ranks: list[dict[str, Any]]) -> None:
    """Rank 0's plan encodes nothing, rank 1's does: further runs of one alone would wait for gathers of the other."""
    for rank in ranks:
        assert rank["an_audit_runs_on_all_or_none"] == {"apart": 0, "together": 1, "exact": True}


def test_an_alarm_is_everybodys_where_ranks_agree(ranks: list[dict[str, Any]]) -> None:
    assert [rank["an_alarm_is_everybodys"] for rank in ranks] == [["", "audit alarm", ""]] * 2
