"""What reports say about quality."""

from pathlib import Path

import pytest

from aiakq.evaluation.wording import DECIDES, figure_rows, interval_text, kl_text, percent_text

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["README.md", "docs/evaluate.md", "docs/quantize.md"])
def test_the_documentation_says_in_the_same_words_which_number_decides(page: str) -> None:
    assert DECIDES in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_a_table_of_texts_has_an_interval_below_each_figure_that_has_one() -> None:
    texts = [
        {"kl": 0.0123, "kl_interval": {"low": 0.011, "high": 0.0135}, "kl_max": 2.0, "tokens": 8176},
        {"kl": 0.00004, "kl_interval": None, "kl_max": 1.0, "tokens": 64},
    ]
    assert figure_rows(texts) == [
        ("KL divergence", "0.0123", "4.0e-05"),
        ("  95 % interval", "0.0110 to 0.0135", "-"),
        ("KL, maximum", "2.00", "1.00"),
        ("tokens", "8,176", "64"),
    ]


def test_the_unit_of_an_interval_is_written_once() -> None:
    assert interval_text({"low": 0.9, "high": 0.95}, percent_text) == "90.00 to 95.00 %"


def test_divergences_of_every_size_have_three_digits() -> None:
    assert [kl_text(value) for value in (0.0, 1.23456e-5, 0.00123456, 12.3456, None)] == [
        "0", "1.2e-05", "0.00123", "12.3", "infinite"
    ]  # fmt: skip
