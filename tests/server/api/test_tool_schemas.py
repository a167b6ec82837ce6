"""Schemas of tools: cleaned, relaxed where they cannot be enforced, within a budget for the whole request."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.structured.relaxed_schemas import relaxed_schema
from aiakq.server.api import tool_schemas
from aiakq.server.api.tool_parsers import TOOL_PARSERS
from aiakq.server.api.tool_schemas import MAX_CHECKS, ToolSchemaChecks, arguments_schema, writable_schemas
from aiakq.server.api.tools import Tool
from aiakq.server.process.text_messages import TextReply


def tool(name: str, parameters: Any, strict: bool | None = None) -> Tool:
    return Tool.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}
    )


def test_a_schema_is_enforced_without_unsupported_keywords_and_the_log_names_them(caplog):
    tool_schemas._warn.cache_clear()
    properties = {
        "flag": {"type": "boolean"},
        "tags": {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
    }
    parameters = {
        "properties": properties,
        "required": ["flag"],
        "if": {"required": ["tags"]},
        "then": {"minProperties": 2},
    }
    with caplog.at_level(logging.WARNING, "aiakq.server"):
        schema = arguments_schema(0, tool("set\n", parameters))
        arguments_schema(0, tool("set\n", parameters))
    assert schema["properties"]["flag"] == {"type": "boolean"} and schema["required"] == ["flag"]
    assert schema["properties"]["tags"] == {"type": "array", "items": {"type": "string"}}
    assert schema["type"] == "object" and schema["additionalProperties"] is False
    (record,) = caplog.records
    assert "uniqueItems" in record.getMessage() and "'set\\n'" in record.getMessage()


@pytest.mark.parametrize("keyword", [{"uniqueItems": True, "type": "array"}, {"not": {"type": "integer"}}])
def test_a_strict_tool_is_refused_by_name(keyword):
    with pytest.raises(AiakqError) as caught:
        arguments_schema(3, tool("f", {"type": "object", "properties": {"a": keyword}}, strict=True))
    assert caught.value.id == "grammar_not_enforceable" and caught.value.param == "tools[3].function.parameters"
    assert next(iter(keyword)) in str(caught.value)


def checked(tools: list[Tool], is_bad, seconds: float = 0.0) -> tuple[dict[str, Any], int]:
    """The schemas after the checks, and the number of checks; those of which ``is_bad`` is true do not compile."""
    count = 0

    async def check(schemas: Sequence[Any]) -> TextReply:
        nonlocal count
        count += 1
        return TextReply(0, failure="bad" if any(map(is_bad, schemas)) else "", seconds=seconds)

    async def relax(schema: Any) -> TextReply:
        nonlocal count
        count += 1
        relaxed, dropped = relaxed_schema(schema, lambda each: not is_bad(each))
        return TextReply(0, text=json.dumps(relaxed), dropped=dropped, seconds=seconds)

    schemas = {each.function.name: arguments_schema(at, each) for at, each in enumerate(tools)}
    checks = ToolSchemaChecks(list(enumerate(tools)), check, relax)
    return asyncio.run(checks.enforceable(schemas)), count


def bad(schema: Any) -> bool:
    return "bad" in json.dumps(schema)


def object_with(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def test_only_the_part_of_a_tool_that_cannot_be_enforced_is_relaxed():
    tools = [tool(f"t{at}", object_with(a={"type": "string", "pattern": f"p{at}"})) for at in range(40)]
    tools.append(tool("x", object_with(a={"type": "string", "pattern": "bad"}, b={"type": "string", "pattern": "b+"})))
    schemas, count = checked(tools, bad)
    assert schemas["x"]["properties"] == {"a": {"type": "string"}, "b": {"type": "string", "pattern": "b+"}}
    assert schemas["x"]["required"] == ["a", "b"] and schemas["x"]["additionalProperties"] is False
    assert all(schemas[f"t{at}"]["properties"]["a"]["pattern"] == f"p{at}" for at in range(40))
    assert count < 16


@pytest.mark.parametrize(("seconds", "most"), [(0.0, MAX_CHECKS), (1.0, 2)])
def test_a_request_has_one_budget_for_all_its_tools(seconds, most):
    tools = [tool(f"t{at}", object_with(a={"type": "string", "pattern": "bad"})) for at in range(300)]
    schemas, count = checked(tools, bad, seconds)
    assert count <= most
    names = [schema["properties"] for schema in schemas.values()]
    assert names == [{"a": {"type": "string"}}] * 300  # the types are still enforced


def test_a_strict_tool_that_does_not_compile_is_refused():
    tools = [tool("a", object_with(a={})), tool("b", object_with(a={"type": "string", "pattern": "bad"}), strict=True)]
    with pytest.raises(AiakqError) as caught:
        checked(tools, bad)
    assert caught.value.param == "tools[1].function.parameters"


def test_whatever_does_not_compile_required_names_and_types_remain():
    definitions = {"$defs": {"A": {"type": "object", "properties": {"x": {"pattern": "bad"}}}}}
    schema = object_with(a={"$ref": "#/$defs/A"}, b={"anyOf": [{"type": "string"}, {"type": "null"}]}) | definitions
    relaxed, dropped = relaxed_schema(schema, lambda each: not bad(each) and "$ref" not in json.dumps(each))
    assert relaxed["properties"]["a"] == {"type": "object"} and relaxed["required"] == ["a", "b"] and dropped
    relaxed, _ = relaxed_schema(schema, lambda each: "anyOf" not in json.dumps(each) and not bad(each))
    assert relaxed["properties"]["b"] == {"type": ["string", "null"]}


def test_a_format_that_cannot_write_patterns_still_enforces_names_and_types():
    has_grammar = TOOL_PARSERS.load("qwen3_coder").has_grammar
    parameters = object_with(a={"type": "string", "pattern": "^a+$"}, b={"type": "integer", "minimum": 3})
    tools = [(0, tool("f", parameters)), (1, tool("g", object_with(c={"type": "boolean"})))]
    schemas = {each.function.name: arguments_schema(at, each) for at, each in tools}
    assert not has_grammar(schemas)
    loosened = writable_schemas(tools, schemas, has_grammar)
    assert has_grammar(loosened) and loosened["g"] == schemas["g"]
    assert loosened["f"]["required"] == ["a", "b"] and loosened["f"]["properties"]["b"] == {"type": "integer"}
    strict = [(0, tool("f", parameters, strict=True))]
    assert writable_schemas(strict, {"f": schemas["f"]}, has_grammar)["f"] == schemas["f"]
