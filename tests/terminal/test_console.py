"""Numbers, sizes and durations in words; progress with and without a terminal."""

from __future__ import annotations

import pytest

from aiakq.terminal import console
from aiakq.terminal.server_log import ServerLog


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
def test_numbers_are_formatted_for_reading(value, text):
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
    [
        (None, "-"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9997, "1 s"),
        (3.21, "3.21 s"),
        (99.9, "99.9 s"),
        (125, "2 min 05 s"),
        (4320, "1 h 12 min"),
    ],
)
def test_durations_are_formatted_for_reading(value, text):
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
    monkeypatch.setattr(console, "is_animated", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with console.ProgressBars("quantize") as bars:
        bars.update("load", 0, 1, "model")
        bars.update("blocks", 3, 10, "[bold]layer")
    shown = capsys.readouterr().err
    assert "━" in shown and "3/10" in shown and "[bold]layer" in shown


def test_notes_during_an_animation_are_printed_by_its_console(monkeypatch):
    """Another console would print on the line that moves."""
    monkeypatch.setattr(console, "is_animated", lambda: True)
    for animation in (console.waiting("loading"), console.ProgressBars("quantize"), ServerLog("model")):
        with animation:
            assert console.err() is console.err()
        assert console.err() is not console.err()


@pytest.mark.parametrize(
    ("environment", "on_terminal", "in_pipe"),
    [
        ({}, True, False),
        ({"TERM": "xterm"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
        ({"FORCE_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"CLICOLOR_FORCE": "1"}, True, True),
        ({"CLICOLOR_FORCE": "0"}, True, False),
        ({"CLICOLOR_FORCE": "1", "NO_COLOR": "1"}, False, False),
        ({"CLICOLOR": "0"}, False, False),
    ],
    ids=str,
)
def test_when_output_has_colours(environment, on_terminal, in_pipe):
    assert console.wants_colour(True, environment) is on_terminal
    assert console.wants_colour(False, environment) is in_pipe


def test_forced_colours_move_no_cursor(process):
    """In CI colours are wanted and bars are not; without colours there is no style either."""
    words = ("chat", "--url", "http://127.0.0.1:1", "--prompt", "a")
    coloured = process(*words, FORCE_COLOR="1", TERM="dumb")
    assert "\x1b[1;31merror[server_unreachable]" in coloured.err and "\x1b[?25l" not in coloured.err
    assert "\x1b" not in process(*words, FORCE_COLOR="1", NO_COLOR="1").err
    assert "\x1b[1m" in process("--help", CLICOLOR_FORCE="1").out
    assert "\x1b" not in process("--help").out


def test_forced_colours_keep_progress_plain(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.ProgressBars("quantize") as bars:
        bars.update("blocks", 1, 2)
        bars.update("blocks", 2, 2)
    with console.waiting("loading m"):
        pass
    found = capsys.readouterr().err
    assert "\x1b[?25l" not in found and "\r" not in found and "quantize: blocks 2/2" in found and "loading m" in found
