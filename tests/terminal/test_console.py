"""Numbers, sizes and durations in words; progress with and without a terminal."""

from __future__ import annotations

import pytest

from aiakq.terminal import console


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (3, "3"),
        (1234567, "1,234,567"),
        (12.0, "12"),
        (17.1, "17.10"),
        (123.456, "123.5"),
        (1234.56, "1,235"),
        (0.5, "0.5000"),
        (0.000123, "1.23e-04"),
        (-2.5, "-2.500"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_numbers(value, text):
    assert console.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (11_540_992, "11.5 MB"),
        (2e15, "2e+03 TB"),
    ],
)
def test_sizes(value, text):
    assert console.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0123, "12.3 ms"), (3.21, "3.21 s"), (99.9, "99.9 s"), (125, "2 min 05 s"), (4320, "1 h 12 min")],
)
def test_durations(value, text):
    assert console.seconds(value) == text


def test_control_characters_are_shown_not_sent():
    assert console.plain("a\x1b[2Jb\n c\u202e") == r"a\x1b[2Jb c\u202e"


def test_progress_without_a_terminal_is_a_few_plain_lines(capsys):
    with console.ProgressBars("quantize") as bars:
        bars.update("load", 0, 1, "model")
        bars.update("load", 1, 1)
        for done in range(101):
            bars.update("blocks", done, 100, f"layer {done}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["quantize: load  model", "quantize: blocks 0/100  layer 0", "quantize: blocks 100/100  layer 100"]


def test_progress_on_a_terminal_is_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with console.ProgressBars("quantize") as bars:
        bars.update("load", 0, 1, "model")
        bars.update("blocks", 3, 10, "[bold]layer")
    shown = capsys.readouterr().err
    assert "━" in shown and "3/10" in shown and "[bold]layer" in shown
