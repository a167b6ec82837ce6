"""Numbers of JSON schemas: what a grammar writes is within the limits, and every number in them can be written."""

from __future__ import annotations

from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.grammar import grammar_of
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.schemas import clean_schema

TOKENS = [*(bytes([byte]) for byte in range(256)), b"<end>"]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(TOKENS, [256]).resized(257, [256]))


def accepted(compiler: GrammarCompiler, schema: Any, texts: list[str]) -> list[str]:
    """Those of ``texts`` that a grammar of ``schema`` can write, also if the schema is cleaned twice."""
    twice = clean_schema(schema)[0]
    found = []
    for each in (schema, twice):
        grammar = grammar_of("x", {"json": each})
        assert grammar is not None
        matcher = compiler.matcher(grammar)._matcher
        found.append([text for text in texts if _can_write(matcher.deep_copy(), text)])
    assert found[0] == found[1]
    return found[0]


def _can_write(matcher: Any, text: str) -> bool:
    return all(matcher.validate_tokens([byte]) and matcher.consume_token(byte) for byte in text.encode()) and (
        matcher.is_stopped() or matcher.is_accepting()
    )


@pytest.mark.parametrize(
    ("step", "valid", "invalid"),
    [
        (0.25, ["0", "0.25", "0.5", "0.50", "-0.75", "1", "1.0", "12.5"], ["0.1", "0.3", "0.55"]),
        (0.1, ["0", "0.1", "0.3", "1", "1.0", "-2.7"], ["0.25", "0.01"]),
        (0.05, ["0.05", "0.1", "0.15", "0.5", "1.0"], ["0.01", "0.12"]),
        (0.125, ["0.125", "0.25", "0.5", "0.375", "3.5", "2.0"], ["0.1", "0.12"]),
        (1.5, ["0", "1.5", "3", "3.0", "-4.5"], ["1", "0.5", "2.0"]),
        (2.5, ["2.5", "5", "5.0", "7.5"], ["2", "0.5"]),
        (0.01, ["0.01", "0.1", "0.5", "1", "19.99", "20.0"], ["0.001"]),
        (3, ["0", "3", "-6"], ["1", "4", "0.3"]),
    ],
)
def test_multiples_are_written_with_as_few_digits_as_they_have(compiler, step, valid, invalid):
    for schema in ({"type": "number", "multipleOf": step}, {"multipleOf": step}):
        assert accepted(compiler, schema, valid + invalid) == valid
    either = {"anyOf": [{"type": "number", "multipleOf": step}, {"type": "boolean"}]}
    assert accepted(compiler, either, ["true", *valid, *invalid]) == ["true", *valid]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"multipleOf": 0.1, "minimum": 0.3, "maximum": 0.3}, ["0.3"], ["0.2", "0.4", "0"]),
        ({"multipleOf": 0.01, "minimum": 0.3, "maximum": 0.35}, ["0.3", "0.31", "0.35"], ["0.29", "0.36", "0.4"]),
        ({"multipleOf": 0.2, "exclusiveMaximum": 1.851}, ["1.8", "0.2", "-7.4"], ["2", "2.0", "1.9"]),
        ({"multipleOf": 0.25, "maximum": 1.5}, ["1.5", "1.25", "1", "-0.5"], ["1.75", "2"]),
        ({"multipleOf": 0.25, "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.25", "0.5", "0.75"], ["0", "1"]),
        ({"multipleOf": 0.001, "exclusiveMinimum": 0, "maximum": 0.298}, ["0.001", "0.2", "0.298"], ["0", "0.3"]),
        ({"multipleOf": 2.5, "minimum": 1, "maximum": 8, "type": "integer"}, ["5"], ["2", "3", "7"]),
        ({"multipleOf": 0.25, "type": "integer"}, ["0", "7"], ["0.25", "0.5"]),
        ({"multipleOf": 0.25, "anyOf": [{"maximum": 1}, {"minimum": 3}]}, ["0.5", "3.5"], ["1.5", "0.3"]),
        ({"multipleOf": 0.25, "allOf": [{"multipleOf": 0.1}]}, ["0.5", "1", "1.5"], ["0.25", "0.1"]),
    ],
)
def test_multiples_go_with_limits(compiler, schema, valid, invalid):
    assert accepted(compiler, {"type": "number", **schema}, valid + invalid) == valid


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"maximum": 1.851}, ["1.8", "1.85", "1.851", "1.80", "1", "-9.99"], ["1.852", "1.9", "2"]),
        ({"minimum": -1.85, "maximum": 99.99}, ["-1.8", "-1.85", "99.9", "99.99", "0"], ["-1.9", "-1.851", "99.991"]),
        ({"exclusiveMaximum": 0.255, "minimum": 0.2}, ["0.2", "0.25", "0.254"], ["0.255", "0.1", "0.3"]),
        ({"maximum": 1.05}, ["1", "1.0", "1.04", "1.05"], ["1.1", "1.06"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.05", "0.000001"], ["0", "-0", "0.0", "0.6"]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.4", "1.01"], ["1", "1.0", "1.5"]),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, ["-0.5", "-0.1"], ["0", "-0", "-0.0", "-0.6"]),
        ({"exclusiveMaximum": -2, "exclusiveMinimum": -2.5}, ["-2.4"], ["-2", "-2.0", "-2.5"]),
        ({"exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1", "1.0"], ["0", "0.0", "1.1"]),
    ],
)
def test_limits_of_numbers_exclude_what_they_say_and_nothing_else(compiler, schema, valid, invalid):
    assert accepted(compiler, {"type": "number", **schema}, valid + invalid) == valid
    nullable = {"type": ["number", "null"], **schema}
    assert accepted(compiler, nullable, ["null", *valid, *invalid]) == ["null", *valid]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "allOf": [{"multipleOf": 100_000}, {"multipleOf": 99_999}]},
        {"$ref": "#/$defs/a", "multipleOf": 100_003, "$defs": {"a": {"multipleOf": 100_003}}},
        {"type": "number", "multipleOf": 4.00000001},
        {"type": "number", "multipleOf": 1e-9},
    ],
)
def test_steps_whose_remainders_overflow_are_refused_by_name(compiler, schema):
    grammar = grammar_of("x", {"json": schema})
    assert grammar is not None
    with pytest.raises(AiakqError, match='"multipleOf" in the schema has'):
        compiler.matcher(grammar)
    cleaned, dropped = clean_schema(schema, lenient=True)
    assert "multipleOf" in dropped[0] and "multipleOf" not in str(cleaned)


def test_a_schema_without_multiples_within_its_limits_allows_no_value():
    with pytest.raises(AiakqError, match="allows no value"):
        clean_schema({"type": "number", "multipleOf": 0.3, "minimum": 0.4, "maximum": 0.5})
