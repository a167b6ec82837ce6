"""Tables of evaluations, from documents made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from aiakq.evaluation.wording import BETTER, SAME, counted
from aiakq.terminal import console, quality_tables

EVIL = "\x1b[31mred\u202e\n"


def comparison(*verdicts: str) -> dict[str, Any]:
    bounds = {"low": 0.9, "high": 1.1}
    texts = [
        {"text": f"text{index}", "kl": 0.01, "kl_versus": None, "kl_ratio": 1.0, "kl_ratio_interval": bounds,
         "verdict": verdict}
        for index, verdict in enumerate(verdicts)
    ]  # fmt: skip
    overall = BETTER if BETTER in verdicts else SAME
    return {"model": "a", "versus": "b", "verdict": overall, "texts": texts}


def printed(capsys: pytest.CaptureFixture[str], show: Any, *values: Any) -> str:
    with console.results_on_stdout():
        show(*values)
    return capsys.readouterr().out


def test_verdicts_name_the_texts(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, quality_tables._comparison, comparison(BETTER, SAME))
    assert "a is better: closer to the original on text0; not distinguishable on text1." in out
    out = printed(capsys, quality_tables._comparison, comparison(SAME, SAME))
    assert "a is not distinguishable on text0, text1." in out


def test_tables_fit_into_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    bounds = {"low": 0.00958, "high": 0.0109}
    ratio = {"low": 0.9, "high": 1.1}
    text = {"kl": 0.0102, "kl_interval": bounds, "perplexity_ratio": 1.0, "perplexity_ratio_interval": ratio}
    out = printed(capsys, quality_tables.text_table, [{**text, "name": f"text{index}"} for index in range(7)])
    assert max(map(len, out.splitlines())) <= 80
    assert all(f"text{index}" in out for index in range(7)), "in several tables"
    assert out.count("0.00958 to 0.0109") == 7


def test_tokens_of_a_text_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    choices = [{"token": EVIL, "id": 1, "p": None}]
    worst = {"kl": None, "context": EVIL, "token": EVIL, "p": 1e-6, "p_original": 0.25}
    worst |= {"choices": choices, "original_choices": choices}
    out = printed(capsys, quality_tables.worst_tokens, [{"name": "code", "worst_tokens": [worst]}])
    assert "\x1b" not in out and "\u202e" not in out
    assert r"'\x1b[31mred\u202e\n'" in out and "next 25.0%" in out and "next 1e-06" in out and "KL infinite" in out


def test_intervals_are_only_described_where_there_are_any() -> None:
    text = {"kl_interval": None, "block_tokens": 16}
    assert quality_tables._about_intervals([text], 2000).startswith("There are no intervals: ")
    long = {"kl_interval": {"low": 0.1, "high": 0.2}, "block_tokens": 128}
    assert "2,000 resamples of blocks of 128 tokens" in quality_tables._about_intervals([text, long], 2000)


@pytest.mark.parametrize(("count", "words"), [(1, "1 thread"), (2, "2 threads"), (1200, "1,200 threads")])
def test_counts_agree_with_their_nouns(count: int, words: str) -> None:
    assert counted(count, "thread") == words
