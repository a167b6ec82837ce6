"""JSON in generated text is passed on as it is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_text import MAX_DEPTH, arguments_value, json_value
from aiakq.server.api.output.scanner import Emit, Parsing, TextScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)


def emitted(reader: Callable[[TextScanner, Emit], Parsing[bool]], *pieces: str) -> tuple[str, bool | None]:
    """What is emitted, and whether the value was complete; None if more text is awaited."""
    text, found = TextScanner(), []
    parsing = reader(text, found.append)
    for piece in pieces:
        text.feed(piece)
        try:
            next(parsing)
        except StopIteration as stop:
            return "".join(found), stop.value
    text.feed("", ended=True)
    try:
        next(parsing)
    except StopIteration as stop:
        return "".join(found), stop.value
    return "".join(found), None


@given(
    value=st.lists(VALUES) | st.dictionaries(st.text(), VALUES), indent=st.sampled_from([None, 1]), ascii=st.booleans()
)
def test_a_value_is_passed_on_to_its_end(value: Any, indent: int | None, ascii: bool):
    written = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert emitted(json_value, written + ' rest "]}') == (written, True)
    assert emitted(json_value, *written, " ") == (written, True)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": "b\nc\td"}', {"a": "b\nc\td"}),
        (r'{"a": "\d+ \'x\' \\ \" \u00e9"}', {"a": "\\d+ 'x' \\ \" é"}),
    ],
)
def test_what_json_forbids_in_strings_is_escaped(written, meant):
    for pieces in ([written], list(written)):
        text, complete = emitted(json_value, *pieces)
        assert complete and json.loads(text) == meant


@pytest.mark.parametrize(
    "written", ['{"a": 1', '{"a": "b', '{"a": "\\', '{"a": 1]', '{"a": <b>}', "", "nan", "{" * 1000]
)
def test_a_malformed_value_is_not_complete(written):
    text, complete = emitted(json_value, written)
    assert complete is False and text == written[: len(text)] and text.count("{") <= MAX_DEPTH


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ('"text"', '"text"'),
        ("[1, 2]", "[1, 2]"),
        ("null", ""),
        ("{}", "{}"),
    ],
)
def test_arguments_may_be_written_as_text(written, arguments):
    assert emitted(arguments_value, written + "}") == (arguments, True)
    assert emitted(arguments_value, *written, "}") == (arguments, True)


def test_white_space_is_dropped_next_to_calls_only():
    def content(*steps: Callable[[EventSink], None]) -> str:
        sink = EventSink(str)
        for step in steps:
            step(sink)
        sink.finish()
        return "".join(event.text for event in sink.take() if hasattr(event, "text"))

    def call(sink: EventSink) -> None:
        sink.start_call("f")
        sink.end_call()

    def text(written: str) -> Callable[[EventSink], None]:
        return lambda sink: sink.content(written)

    assert content(text(" a \n"), text("\n b\n")) == " a \n\n b\n"
    assert content(text("a \n"), call, text("\n"), call, text("\n ")) == "a{}{}"
    assert content(text("\n"), call, text("\nb\n c ")) == "{}b\n c"
