"""Values that match a JSON schema, and values that do not."""

from __future__ import annotations

import time

import jsonschema
import pytest

from aiakq.server.api.output.json_values import decoded, is_valid
from aiakq.server.api.output.schema_check import Budget, matches

SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "additionalProperties": False},
    {"properties": {"a": {"enum": [1, "b", [2]]}, "b": {"const": {"c": 1}}}},
    {"properties": {"a": {"minimum": 1, "exclusiveMaximum": 3, "multipleOf": 0.5}}},
    {"properties": {"a": {"pattern": "^b+$", "minLength": 1, "maxLength": 3}}},
    {"properties": {"a": {"items": {"type": "integer"}, "minItems": 1, "maxItems": 2, "uniqueItems": True}}},
    {
        "properties": {
            "a": {"prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "contains": {"const": 2}}
        }
    },
    {"properties": {"a": {"$ref": "#/$defs/x~1y"}}, "$defs": {"x/y": {"anyOf": [{"type": "null"}, {"const": 2}]}}},
    {"properties": {"a": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "b": {"not": {"type": "object"}}}},
    {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 0}},
    {"patternProperties": {"^a": {"type": "integer"}}, "propertyNames": {"maxLength": 1}, "minProperties": 1},
    {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"b": {"required": ["a"]}}, "allOf": [True, {}]},
]
VALUES = [None, True, False, 0, 1, 1.0, 1.5, 2, 3, "", "b", "bbbb", [], [1, 1], [1, 2], ["b", 2], {}, {"c": 1}]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_answer_is_that_of_jsonschema(schema):
    check = jsonschema.Draft202012Validator(schema)
    for a in VALUES:
        for value in ({}, {"a": a}, {"b": a}, {"a": 1, "b": a}, {"aa": a}):
            assert matches(value, schema, Budget()) is check.is_valid(value), value


@pytest.mark.parametrize(
    "schema", [{"type": 5}, {"properties": []}, {"required": "a"}, {"enum": 1}, {"minLength": "a"}]
)
def test_malformed_keywords_are_ignored(schema):
    assert matches({"a": "b"}, schema, Budget())


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.org/other.json"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}] * 8},
        {"unevaluatedProperties": False},
        {"properties": {"a": {"pattern": "^(a|aa)+$"}}},
        {"properties": {"a": {"pattern": "("}}},
    ],
)
def test_what_is_not_found_out_does_not_match_and_takes_no_time(schema):
    start = time.process_time()
    assert not matches({"a": "a" * 200 + "b"}, schema, Budget())
    assert time.process_time() - start < 2


def test_a_budget_is_shared_by_several_checks():
    budget = Budget(steps=10)
    schema = {"properties": {"a": {"items": {}}}}
    results = [matches({"a": [1, 2]}, schema, budget) for _ in range(4)]
    assert results == [True, True, False, False]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"minimum": 9007199254740993}, ["9007199254740993", "1e16"], ["9007199254740992", "9007199254740992.9"]),
        ({"exclusiveMaximum": 2**63}, ["9223372036854775807"], ["9223372036854775808", "9223372036854775808.0"]),
        ({"multipleOf": 0.1}, ["0.3", "1e-1", "0.30", "7", "1e300"], ["0.30000000000000004", "0.31", "1e-2"]),
        ({"multipleOf": 3}, ["9007199254740993", "3e20"], ["9007199254740992", "1e20", "1.5"]),
        ({"maximum": 0.1}, ["0.1", "0.10", "-1e400"], ["0.1000000000000000001", "1e400"]),
        ({"const": 2**60 + 1}, ["1152921504606846977", "1152921504606846977.0"], ["1152921504606846976"]),
        ({"enum": [0.3, 1]}, ["0.3", "3e-1", "1.0", "10E-1"], ["0.30000000000000001", "1.0000000000000000001"]),
        ({"type": "integer"}, ["1.0", "1e3", "1000e-3", "-0.0"], ["1.00000000000000000001", "1e-1"]),
        ({"type": "array", "uniqueItems": True}, ["[1, 1.0000000000000000001]"], ["[1, 1.0]", "[1e1, 10]"]),
    ],
)
def test_numbers_are_compared_as_they_are_written(schema, valid, invalid):
    for texts, expected in ((valid, True), (invalid, False)):
        for text in texts:
            assert matches(decoded(text, strict=True, exact=True), schema, Budget()) is expected, text


@pytest.mark.parametrize("text", ["1e999999999999", "1e-999999999999", "1" * 4000])
def test_huge_numbers_take_no_time(text):
    start = time.process_time()
    value = decoded(text, exact=True)
    assert not any(matches(value, {"const": 3, **schema}, Budget()) for schema in ({}, {"multipleOf": 0.003}))
    assert matches(value, {"type": "integer"}, Budget()) is (text == "1e999999999999")
    assert not is_valid(decoded("1e99999999999999999999", exact=True))
    assert time.process_time() - start < 1
