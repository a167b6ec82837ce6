"""Refusals of grammars: one line that names the place and the cause, without dumps of llguidance."""

from __future__ import annotations

import json

import pytest

from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.ecma_patterns import refused_part
from aiakq.runtime.structured.formats import regex, schema, tag, tag_grammar_of
from aiakq.runtime.structured.refusals import MAX_REASON
from aiakq.runtime.structured.schemas import clean_schema


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    texts = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    return GrammarCompiler(Vocabulary(texts, [256]).resized(257, [256]))


def inside(pattern: str) -> dict[str, object]:
    rows = {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": pattern}]}}
    return {"type": "object", "properties": {"note": {"default": {"pattern": "("}}, "rows": rows}}


@pytest.mark.parametrize("in_tag", [False, True], ids=["schema", "tool"])
@pytest.mark.parametrize(
    "pattern, cause",
    [
        (r"^(?=.*\d)\w+$", "has a lookahead or lookbehind; write it without one"),
        (r"^(?!x)", "has a lookahead or lookbehind; write it without one"),
        (r"(?<=a)b", "has a lookahead or lookbehind; write it without one"),
        (r"(?<!a)b", "has a lookahead or lookbehind; write it without one"),
        (r"(a)\1", "has a backreference; write it without one"),
        (r"(?<n>a)\k<n>", "has a backreference; write it without one"),
        (r"\bword\b", "has a word boundary; write it without one"),
        ("(a", "is not supported: unclosed group"),
        ("[a", "is not supported: unclosed character class"),
        (r"\p{Foo}", "is not supported: Unicode property not found"),
    ],
)
def test_a_pattern_that_cannot_be_enforced_is_named_with_its_place(compiler, pattern, cause, in_tag):
    tags = tag_grammar_of(tag("<call>", schema(inside(pattern)), "</call>"))
    grammar = tags if in_tag else Grammar("json", json.dumps(inside(pattern)))
    failure, _ = compiler.try_compile(grammar)
    assert failure == f"the pattern '{pattern}' at properties.rows.items.anyOf[1].pattern {cause}"


def test_patterns_of_names_are_named(compiler):
    names = {"type": "object", "patternProperties": {"^(?!_)": {"type": "string"}}}
    failure, _ = compiler.try_compile(Grammar("json", json.dumps({"properties": {"a": names}})))
    assert failure.startswith("the pattern '^(?!_)' at properties.a.patternProperties has a lookahead")
    unused = {"type": "object", "patternProperties": {"^(?!_)": {}}}
    assert compiler.try_compile(Grammar("json", json.dumps(unused)))[0] == ""


@pytest.mark.parametrize("pattern", [r"[\b(?=]", r"\(?=", r"\\b", r"[(?=\]]", "(?:a)", "(?<name>a)", "(?i)a", r"\\1"])
def test_patterns_that_only_look_like_refused_ones_are_not_refused(pattern):
    assert refused_part(pattern) == ""


@pytest.mark.parametrize(
    "grammar, reason",
    [
        (Grammar("regex", "(?=a)b"), "the regular expression '(?=a)b' is not supported: look-around"),
        (tag_grammar_of(regex("(" * 300)), "the regular expression '(((("),
        (Grammar("grammar", "start: foo\n"), 'unknown name: "foo"'),
        (Grammar("json", '{"type": "integer", "minimum": 5, "maximum": 3}'), "Unsatisfiable schema: minimum (5)"),
        (
            Grammar("json", '{"type": "string", "pattern": "a", "format": "date"}'),
            "no string matches all of its pattern, format and length",
        ),
    ],
)
def test_reasons_of_the_library_are_one_line(compiler, grammar, reason):
    failure, _ = compiler.try_compile(grammar)
    assert failure.startswith(reason) and "\n" not in failure and len(failure) <= MAX_REASON
    assert "%llguidance" not in failure and not failure.startswith("at ")


def test_of_tools_that_are_not_strict_a_refused_pattern_is_dropped():
    part = {"type": "string", "pattern": "(?=a)", "maxLength": 5}
    cleaned, dropped = clean_schema({"type": "object", "properties": {"a": part}}, lenient=True)
    assert cleaned["properties"]["a"] == {"type": "string", "maxLength": 5}
    assert dropped == [
        "the pattern '(?=a)' at properties.a.pattern has a lookahead or lookbehind; write it without one"
    ]
    names = {"type": "object", "patternProperties": {"(?=a)": {"type": "string"}}, "additionalProperties": False}
    cleaned, dropped = clean_schema(names, lenient=True)
    assert cleaned == {"type": "object"} and len(dropped) == 1


def test_limits_beyond_any_text_have_no_effect(compiler):
    most = {"type": "array", "maxItems": 1 << 40, "items": {"type": "string", "maxLength": 1 << 40}}
    assert compiler.try_compile(Grammar("json", json.dumps(most)))[0] == ""
