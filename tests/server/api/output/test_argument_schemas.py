"""Calls in text that no grammar enforced are checked against the schemas that grammars enforce."""

from __future__ import annotations

from typing import Any

import pytest

from aiakq.runtime.structured.schemas import clean_schema
from aiakq.server.api.chat_message import message_of
from aiakq.server.api.message_parser import MessageParser
from aiakq.server.api.output.argument_schemas import EnforcedSchemas
from aiakq.server.api.output.schema_check import Budget, matches
from aiakq.server.api.reasoning_parsers import REASONING_PARSERS
from aiakq.server.api.tool_parsers import TOOL_PARSERS


def a(schema: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, **keywords}


def text(**keywords: Any) -> dict[str, Any]:
    return a({"type": "string", **keywords})


NUMBER = {"type": "integer"}
CASES = [
    (a({"$ref": "#x"}, **{"$defs": {"q": {"$anchor": "x", **NUMBER}}}), {"a": 1}, {"a": "b"}),
    (a({"$ref": "#/$defs/a%20b"}, **{"$defs": {"a b": NUMBER}}), {"a": 1}, {"a": "1"}),
    (
        a({"$ref": "https://x.org/s#/$defs/b"}, **{"$id": "https://x.org/s", "$defs": {"b": NUMBER}}),
        {"a": 1},
        {"a": ""},
    ),
    (a({"$ref": "/s#/$defs/b"}, **{"$id": "https://x.org/s", "$defs": {"b": NUMBER}}), {"a": 1}, {"a": "1"}),
    (a({}, dependencies={}), {"a": 1}, {"b": 1}),
    (a({}, dependencies={"a": ["b"]}, additionalProperties=True), {"a": 1, "b": 2}, {"a": 1}),
    (a({}, unevaluatedProperties=False), {"a": 1}, {"b": 1}),
    (a({"minimum": 1, "exclusiveMinimum": True, **NUMBER}), {"a": 2}, {"a": 1}),
    (a({"oneOf": [{"type": "string", "format": "uri"}, {"type": "string"}]}), {"a": "x"}, {"a": 1}),
    (a(NUMBER, required=["a"]), {"a": 1.0}, {}),
    (text(pattern="^[^]$"), {"a": "\n"}, {"a": "xx"}),
    (text(pattern="^\\u{78}$"), {"a": "x"}, {"a": "u" * 78}),
    (text(pattern="^[$]\\$\\cA$"), {"a": "$$\1"}, {"a": "$$"}),
    (text(pattern="^\\p{L}\\s[\\w-]$"), {"a": "\u00e9 -"}, {"a": "1 -"}),
    (text(pattern="^a$"), {"a": "a"}, {"a": "a\n"}),
    (text(format="date"), {"a": "2024-02-29"}, {"a": "2023-02-29"}),
    (text(format="date-time"), {"a": "1990-12-31T15:59:60-08:00"}, {"a": "1990-12-31T15:59:60-07:00"}),
    (text(format="uuid"), {"a": "2eb8aa08-aa98-11ea-b4aa-73b441d16380"}, {"a": "2eb8aa08"}),
    (text(format="iri"), {"a": "http://\u00e9.org/?q=\u00fc#1"}, {"a": "x y"}),
    (text(format="no such format"), {"a": "x"}, {"a": 1}),
    (None, {}, {"a": 1}),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES)
def test_arguments_are_checked_as_a_grammar_enforces_them(schema, valid, invalid):
    enforced = EnforcedSchemas({"f": schema or {}})
    assert "f" in enforced and "g" not in enforced
    assert matches(valid, enforced["f"], Budget())
    assert not matches(invalid, enforced["f"], Budget())
    if schema is not None:
        strict, dropped = clean_schema(schema, closed=True, only_objects=True, lenient=True)
        assert enforced["f"] == strict
        assert dropped == [] or "oneOf" in dropped[0]


def test_a_call_in_an_unclosed_thought_is_found_whatever_the_schema_is_written_with():
    schema = a(
        {"$ref": "#x"}, dependencies={}, unevaluatedProperties=False, **{"$defs": {"q": {"$anchor": "x"} | NUMBER}}
    )
    for arguments, is_call in (('{"a": 1}', True), ('{"a": "b"}', False), ('{"b": 1}', False)):
        tools = TOOL_PARSERS.load("hermes")({"f": schema})
        parser = MessageParser(REASONING_PARSERS.load("qwen3")(True), tools, "seed")
        call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        message = message_of("assistant", parser.feed(f"Hm. {call}", ended=True))
        assert bool(message.tool_calls) is is_call


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45"])
def test_text_between_tags_has_the_type_that_a_reference_of_any_kind_names(parser):
    schema = a({"$ref": "#x"}, **{"$defs": {"q": {"$anchor": "x", "type": "string"}}})
    written = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    }[parser]
    events = MessageParser(None, TOOL_PARSERS.load(parser)({"f": schema}), "seed").feed(written, ended=True)
    [call] = message_of("assistant", events).tool_calls or []
    assert call.function.arguments == '{"a": "5"}'
