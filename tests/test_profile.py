"""Measured times: parts that add up to the whole, and what is said of noisy ones."""

from __future__ import annotations

from hilore.planner.profile import LOUD_SPREAD, _added_up, spread_notes


def test_units_take_together_what_a_replay_with_them_takes_more() -> None:
    alone = {"q": 30, "gate": 50, "down": 40}
    assert _added_up(alone, ["q", "gate"], 60) == {"q": 22, "gate": 38, "down": 30}
    assert sum(_added_up(alone, alone, 1200).values()) == 1200


def test_a_difference_that_only_noise_gives_changes_nothing() -> None:
    alone = {"q": 30, "gate": 50}
    assert _added_up(alone, alone, 0) == alone
    assert _added_up(alone, alone, -5) == alone
    assert _added_up({"q": 0}, ["q"], 10) == {"q": 0}


def test_only_loud_times_are_told() -> None:
    assert spread_notes(LOUD_SPREAD) == ()
    (note,) = spread_notes(0.94)
    assert note.startswith("times spread by 94% of their median")
