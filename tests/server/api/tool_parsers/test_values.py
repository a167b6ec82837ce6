"""Arguments that are literals of Python, or text between tags."""

from __future__ import annotations

import json
import warnings

import pytest

from aiakq.server.api.output.events import ArgumentsPiece, CallEnded, EventSink
from aiakq.server.api.tool_parsers.python_values import MAX_LITERAL, MAX_STRING, python_value
from aiakq.server.api.tool_parsers.tagged_values import TaggedArguments, json_of, json_types


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-1.5", -1.5),
        ("'it\\'s'", "it's"),
        ('"a"', "a"),
        ("'a\nb'", "a\nb"),
        ("'\\d+ \\n'", "\\d+ \n"),
        ("True", True),
        ("true", True),
        ("None", None),
        ("null", None),
        ("[1, 'a', (2,), {'b': False}]", [1, "a", [2], {"b": False}]),
        ('{"a": true}', {"a": True}),
        ("'" + 70 * " " + 70 * "(" + "-" * 70 + "'", 70 * " " + 70 * "(" + "-" * 70),
    ],
)
def test_literals_have_their_json(text, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert json.loads(python_value(text)) == value


@pytest.mark.parametrize("text", ["1e999", '{"a": [-5E400]}', "1.50"])
def test_json_is_passed_on_as_it_is_written(text):
    assert python_value(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "x", "f(1)", "1 +", "{1: {2}}", "{1, 2}", "b'a'", "1j", "[1e999, 'a']", "NaN", "9" * 10_000, "\0"]
    + ["__import__('os').system('true')", "[" * 5000, "(" * 5000 + ")" * 5000, "-" * 60_000 + "1", "1+" * 30_000 + "1"]
    + ["[" + "'a'," * MAX_LITERAL + "]", "'" + "a" * MAX_STRING + "'"],
    ids=lambda text: text[:12] or "empty",
)
def test_what_is_no_literal_is_refused(text):
    assert python_value(text) is None


@pytest.mark.parametrize(
    ("schema", "text", "written"),
    [
        ({"type": "integer"}, "3", "3"),
        ({"type": "integer"}, "2026-01-15", '"2026-01-15"'),
        ({"type": "integer"}, "3.5", '"3.5"'),
        ({"type": "integer"}, " -3.0\n", "-3"),
        ({"type": "integer"}, "12345678901234567891.00", "12345678901234567891"),
        ({"type": "integer"}, "03.0", '"03.0"'),
        ({"type": ["integer", "null"]}, "3.0", "3"),
        ({"type": ["integer", "number"]}, "3.0", "3.0"),
        ({"type": ["integer", "string"]}, "3.0", '"3.0"'),
        ({"type": "number"}, "3.0", "3.0"),
        ({"enum": [3, 4]}, "3.0", "3"),
        ({"type": "number"}, " 3.50\n", "3.50"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "FALSE", "false"),
        ({"type": "array"}, "['a', None]", '["a", null]'),
        ({"type": "object"}, '{"a": [1]}', '{"a": [1]}'),
        ({"type": "object"}, '{"a": "b\nc"}', '{"a": "b\\nc"}'),
        ({"type": "object"}, "{a}", '"{a}"'),
        ({"type": "integer"}, "", "null"),
        ({"type": "array"}, "None", "null"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "3", '"3"'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "3", "3"),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["1", "2"]}, "2", '"2"'),
        ({}, "3", "3"),
        ({}, "text", '"text"'),
        ({}, "", '""'),
        (None, "[1]", "[1]"),
        ({"type": 5, "anyOf": 3}, "a", '"a"'),
        ({"type": "float"}, "3.14", "3.14"),
        ({"type": "int"}, "3", "3"),
        ({"type": "str"}, "3", '"3"'),
        ({"type": "Dict"}, "{'a': True}", '{"a": true}'),
        ({"type": ["str", "any"]}, "3", "3"),
        ({"type": "any"}, "text", '"text"'),
    ],
)
def test_values_are_of_the_type_of_their_schema(schema, text, written):
    assert json_of(text, json_types(schema)) == written


@pytest.mark.parametrize("pieces", [["\n a\n\n"], ["\n", " a", "\n", "\n"], list("\n a\n\n")])
def test_a_string_loses_one_line_break_at_each_end(pieces):
    sink = EventSink(str)
    arguments = TaggedArguments({"properties": {"s": {"type": "string"}}}, sink)
    sink.start_call("f")
    for key, trim in (("s", True), ("s", False), ("free", True)):
        value = arguments.begin(key, trim)
        for piece in pieces:
            value.add(piece)
        value.end()
    arguments.end()
    events = sink.take()
    text = "".join(event.text for event in events if isinstance(event, ArgumentsPiece))
    assert text == '{"s": " a\\n", "s": "\\n a\\n\\n", "free": " a\\n"}' and isinstance(events[-1], CallEnded)
