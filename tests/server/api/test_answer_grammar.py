"""Grammars of calls: whatever they allow, the parser of the format reads, and it matches the schema of the tool."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from call_grammars import KNOWN, LIKE, MARKED, PARSERS, SCHEMAS, UNMARKED, Vocab, after, calls_in

from aiakq.runtime.structured.formats import some_tags, tag_grammar_of


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("only_one", [True, False], ids=["one", "many"])
@pytest.mark.parametrize("name", KNOWN)
def test_forced_calls_are_calls_that_match_their_schema(name, only_one, special):
    parser = PARSERS[name]
    tags = parser.call_tags(SCHEMAS, only_one)
    grammar = tag_grammar_of(some_tags(tags, parser.separator, only_one=only_one or not parser.separator), LIKE)
    vocab, rng, counts = Vocab(parser, special), random.Random(5), set()
    for _ in range(40):
        text = vocab.sample(grammar, rng)
        calls, content = calls_in(parser, text)
        assert calls and not content, text
        counts.add(len(calls))
        for call in calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert (counts == {1}) == only_one


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("name", MARKED)
def test_calls_in_a_text_match_their_schema(name, special):
    parser = PARSERS[name]
    grammar = tag_grammar_of(parser.answer_format(SCHEMAS, True), LIKE)
    vocab, rng = Vocab(parser, special), random.Random(6)
    for begin in (b"", b"Let me see. " if name in UNMARKED else b"Let me <other>see. "):
        for trigger in parser.triggers:
            calls, content = calls_in(parser, vocab.sample(grammar, rng, begin + trigger.encode()))
            assert len(calls) == 1 and (content or "").strip() == begin.decode().strip()
            jsonschema.validate(json.loads(calls[0].function.arguments), SCHEMAS[calls[0].function.name])


@pytest.mark.parametrize("name", MARKED)
def test_a_text_without_calls_may_be_anything(name):
    parser = PARSERS[name]
    grammar = tag_grammar_of(parser.answer_format(SCHEMAS, False), LIKE)
    vocab = Vocab(parser, True)
    matcher = vocab.compiler.matcher(grammar)
    others = [] if name in UNMARKED else [vocab.other, *b"more", vocab.other, vocab.other]
    for token in [*b'{"name": "x"} <a> [f(a=1)]\n', *others]:
        matcher.advance(token)
        assert matcher.failure is None
    assert vocab.may_end(matcher)


@pytest.mark.parametrize(
    "name, begin",
    [
        (name, begin)
        for name in sorted(UNMARKED)
        for begin in (['{"name": "get_', ' {"type" : "function", "name":'] if "json" in name else ["[get_", " [ get_"])
    ],
)
def test_what_begins_a_message_like_a_call_is_one_or_text(name, begin):
    parser = PARSERS[name]
    vocab, rng = Vocab(parser, True), random.Random(8)
    grammar = tag_grammar_of(parser.answer_format(SCHEMAS, False), LIKE)
    for _ in range(8):
        text = vocab.sample(grammar, rng, begin.encode(), 20_000)
        calls, content = calls_in(parser, text)
        assert calls or content == text.decode(errors="replace")
        for call in calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("name", sorted(UNMARKED))
def test_json_and_lists_may_be_the_answer(name):
    parser = PARSERS[name]
    for text in ('{"name": "Alice", "parameters": {}}', '{"type": "function"}', "[1, 2]", "[get(a=1)]", ""):
        vocab = Vocab(parser, True)
        matcher = vocab.compiler.matcher(tag_grammar_of(parser.answer_format(SCHEMAS, False), LIKE))
        for byte in text.encode():
            matcher.advance(byte)
        assert matcher.failure is None and vocab.may_end(matcher)
        calls, content = calls_in(parser, text.encode())
        assert (not calls and (content or "") == text) or text == "[get(a=1)]"


ODD = {
    "a reference to another document": {"properties": {"a": {"$ref": "other.json#/a"}}},
    "a reference that is not there": {"properties": {"a": {"$ref": "#/$defs/a"}}},
    "a circle": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "alternatives": {"anyOf": [{"required": ["a"]}], "properties": {"a": {}}},
    "properties by pattern": {"patternProperties": {"a": {}}},
    "a name that is no word": {"properties": {"a b": {"type": "integer"}}},
    "other properties": {"properties": {"a": {"type": "integer"}}, "additionalProperties": True},
    "definitions that are none": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": []},
    "requirements that are no names": {"properties": {"a": {}}, "required": [["a"]]},
    "a requirement without a property": {"properties": {}, "required": ["a"], "additionalProperties": False},
}
TEXT_ODD = {
    "no type": {"properties": {"a": {"minLength": 2}}},
    "a pattern": {"properties": {"a": {"type": "string", "pattern": "a+"}}},
    "a format": {"properties": {"a": {"type": "string", "format": "date"}}},
    "strings and numbers": {"properties": {"a": {"type": ["string", "integer"]}}},
    "a value with the end of one": {"properties": {"a": {"enum": ["</tool_call>"]}}},
    "a type that is none": {"properties": {"a": {"type": {"string": 1}}}},
    "types that are none": {"properties": {"a": {"type": ["string", ["null"]]}}},
    "alternatives that are none": {"properties": {"a": {"anyOf": 5}}},
    "values that are none": {"properties": {"a": {"enum": 5}}},
    "a length that is none": {"properties": {"a": {"type": "string", "maxLength": -1}}},
    "alternatives that are strings": {"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 1}]}}},
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
def test_schemas_that_cannot_be_written_in_a_format_have_no_grammar(name):
    parser = PARSERS[name]
    for odd in [*ODD.values(), *([] if name == "pythonic" else TEXT_ODD.values())]:
        assert not parser.has_grammar({"f": {"type": "object", **odd}}), odd
        assert not parser.has_grammar({"f": SCHEMAS["get_time"], "g": {"type": "object", **odd}})


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_the_end_of_a_value_may_be_in_a_string_in_json(name):
    parser, value = PARSERS[name], ['say "</parameter>"', "</tool_call> \\", "</arg_value></function>"]
    schemas = {"f": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}}}
    text = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    }[name].format(json.dumps(value))
    matcher = Vocab(parser, False).compiler.matcher(
        tag_grammar_of(some_tags(parser.call_tags(schemas, True), "", only_one=True), LIKE)
    )
    for byte in text.encode():
        matcher.advance(byte)
    assert matcher.failure is None
    [call], content = calls_in(parser, text.encode(), schemas)
    assert json.loads(call.function.arguments) == {"a": value} and not content


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("odd", [odd for odd in (ODD | TEXT_ODD).values() if "properties" in odd])
def test_arguments_of_odd_schemas_are_read(name, odd):
    text = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    }[name]
    [call], content = calls_in(PARSERS[name], text.encode(), {"f": {"type": "object", **odd}})
    assert json.loads(call.function.arguments)["a"] in (1, "1") and not content


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
def test_any_arguments_are_written_in_every_format(name):
    parser, schemas = PARSERS[name], {"f": {"type": "object"}}
    vocab, rng = Vocab(parser, True), random.Random(2)
    for _ in range(12):
        grammar = tag_grammar_of(some_tags(parser.call_tags(schemas, True), "", only_one=True), LIKE)
        [call], content = calls_in(parser, vocab.sample(grammar, rng, most=20_000), schemas)
        assert isinstance(json.loads(call.function.arguments), dict) and not content


@pytest.mark.parametrize("name", KNOWN)
def test_a_tool_may_have_any_name(name):
    """Quotes, marks and special tokens in a name are text; a format that cannot write it has no grammar for it."""
    parser, schema = PARSERS[name], SCHEMAS["get_time"]
    for odd in ('a "quoted" {name}', "<end>", "[ARGS]", "x:0", "naïve", "n" * 256):
        vocab = Vocab(parser, True)
        if parser.has_grammar({odd: schema}):
            tags = parser.call_tags({odd: schema}, True)
            grammar = tag_grammar_of(some_tags(tags, parser.separator, only_one=True))
            [call], content = calls_in(parser, vocab.sample(grammar, random.Random(3)), {odd: schema})
            assert call.function.name == odd and not content and json.loads(call.function.arguments) == {}
        else:
            assert (
                name in ("kimi_k2", "deepseek_v3", "qwen3_coder", "glm45", "glm47", "qwen3_xml") or "pythonic" in name
            )


@pytest.mark.parametrize(
    "spelled", ['{"name":"get_time","parameters":{}}', '{\n  "name": "get_time",\n  "parameters": {}\n}']
)
def test_the_name_of_a_call_without_a_mark_may_be_spelled_as_the_model_is_used_to(spelled):
    parser = PARSERS["llama3_json"]
    vocab, begin = Vocab(parser, True), spelled.partition("{}")[0]
    assert after(vocab, parser.answer_format(SCHEMAS, False), begin + "{}}") is True
    assert after(vocab, parser.answer_format(SCHEMAS, False), begin + "[") is None
