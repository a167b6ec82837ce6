"""Plain schemas are cleaned to what all others would be."""

from __future__ import annotations

import json

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.structured import schemas
from aiakq.runtime.structured.plain_schemas import is_plain

TEXT, EMPTY = {"type": "string"}, {"type": "string", "enum": []}


def cleaned(schema, **options) -> str:
    try:
        return json.dumps(schemas.clean_schema(schema, **options))
    except AiakqError as problem:
        return str(problem)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["b", "b"], "properties": {"b": TEXT, "a": {"type": "null", "title": "A"}}},
        {"properties": {"a": {"type": "array", "items": {"type": "object", "properties": {}}}}, "type": "object"},
        {"type": "object", "properties": {"a": {}, "b": False, "c": True}, "additionalProperties": {"type": "null"}},
        {"type": "object", "additionalProperties": False, "properties": {"a": {"type": "array", "items": True}}},
        {"type": "array", "items": {"anyOf": [TEXT, {"type": "null"}, False], "description": "a"}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "object", "properties": {"b": TEXT}}, {}]}}},
        {"type": "object", "properties": {"a": {"anyOf": []}, "b": {"anyOf": [EMPTY]}}, "required": ["b"]},
        {
            "type": "object",
            "properties": {"a": EMPTY, "b": {"type": "string", "enum": ["x", "y", "x"]}},
            "required": ["a"],
        },
        {"type": "object", "required": [], "properties": {"a": 5, "b": {"type": "strnig"}}},
        {"type": "object", "properties": {f"p{at}": TEXT for at in range(300)}},
        {"type": "array", "items": [TEXT]},
        {"type": "object", "required": [5], "properties": {"a": TEXT}},
        {"type": ["string", "null"], "enum": ["a"]},
    ],
)
@pytest.mark.parametrize("options", [{}, {"closed": True}, {"closed": True, "only_objects": True, "lenient": True}])
def test_plain_schemas_become_what_all_others_do(monkeypatch, schema, options):
    found = cleaned(schema, **options)
    monkeypatch.setattr(schemas, "is_plain", lambda given: False)
    assert found == cleaned(schema, **options)


def test_only_keywords_of_plain_schemas_are_plain():
    assert is_plain(TEXT) and is_plain({"type": "object", "properties": {}, "default": {}})
    for keyword in ("pattern", "format", "$ref", "allOf", "not", "minimum", "const", "x-own"):
        assert not is_plain({**TEXT, keyword: {}})
