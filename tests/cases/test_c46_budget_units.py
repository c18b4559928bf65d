"""C-46: MB, MiB, GB, GiB. One reading only, and a question where another was probably meant."""

from __future__ import annotations

import pytest

from hilore.cli import main
from hilore.planner.budget import AUTO_MARGIN_BYTES, GIB, MIB, BudgetError, parse_budget, parse_delta, parse_memory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30318", 30318 * MIB),
        ("30318MiB", 30318 * MIB),
        ("30318 mib", 30318 * MIB),
        ("29.6GiB", 31_782_757_990),
        ("30", 30 * MIB),
        ("1", MIB),
        ("0.5GiB", 512 * MIB),
        (str(1 << 24), (1 << 24) * MIB),
    ],
)
def test_exact_readings(text: str, expected: int) -> None:
    assert parse_budget(text) == expected


@pytest.mark.parametrize(
    ("text", "binary", "decimal"),
    [("30318MB", "30318 MiB", "28913 MiB"), ("31.8GB", "32563 MiB", "30326 MiB"), ("32G", "32768 MiB", "30517 MiB")],
)
def test_ambiguous_units_are_refused_with_both_readings(text: str, binary: str, decimal: str) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(text)
    assert caught.value.exit_code == 2
    assert binary in caught.value.message
    assert decimal in caught.value.message


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("0", "was GiB meant?"),
        ("0.9", "was GiB meant?"),
        ("16777217", "were bytes meant?"),
        ("31790727168", "31790727168 bytes are 30,318.0 MiB"),
    ],
)
def test_an_unlikely_size_asks(text: str, question: str) -> None:
    with pytest.raises(BudgetError, match=f"--budget {text} is (under 1|over 2.24) MiB") as caught:
        parse_budget(text)
    assert question in caught.value.message


@pytest.mark.parametrize("text", ["-1", "1e5", "", "MiB", "nan", "inf", "1,000", "30 318", "4TiB", "30318KiB", "0x10"])
def test_anything_else_is_a_usage_error(text: str) -> None:
    with pytest.raises(BudgetError):
        parse_budget(text)


def test_auto_is_the_card_less_the_margin() -> None:
    assert parse_budget("auto", card_bytes=48 * GIB, margin_bytes=GIB) == 47 * GIB
    assert parse_memory("auto", None, card_bytes=48 * GIB) == (48 * GIB, AUTO_MARGIN_BYTES)
    assert parse_memory("auto", "0", card_bytes=48 * GIB) == (48 * GIB, 0)
    assert parse_memory("30318", None, card_bytes=48 * GIB) == (30318 * MIB, 0)
    with pytest.raises(BudgetError, match="needs a GPU"):
        parse_budget("auto")
    with pytest.raises(BudgetError, match="leaves nothing"):
        parse_budget("auto", card_bytes=GIB, margin_bytes=GIB)
    with pytest.raises(BudgetError, match="leaves nothing"):
        parse_memory("auto", "48GiB", card_bytes=48 * GIB)
    with pytest.raises(BudgetError, match=r"--margin 1GiB: 1,024.0 MiB leave nothing of the budget of 1,024.0 MiB"):
        parse_memory("1024", "1GiB", card_bytes=48 * GIB)
    assert parse_memory("30318", "500", card_bytes=0) == (30318 * MIB, 500 * MIB)
    with pytest.raises(BudgetError, match="--margin 1GB"):
        parse_memory("auto", "1GB", card_bytes=48 * GIB)


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1%", "one", ""])
def test_delta_is_a_finite_multiple(text: str) -> None:
    with pytest.raises(BudgetError, match="--delta"):
        parse_delta(text)


def test_help_says_what_a_bare_number_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", "--help"]) == 0
    assert "A bare number is MiB" in " ".join(capsys.readouterr().out.split())
