"""JSON schemas, patterns and grammars that are wrong, odd, deep or expensive, wherever requests take them."""

from __future__ import annotations

import json
from typing import Any

from hostile_cases.requests import (
    CHAT,
    COMPLETIONS,
    GOOD,
    MESSAGES,
    RESPONSES,
    Case,
    Draw,
    Expected,
    cut,
    post_json,
    some_text,
)

#: Values of wrong types for keywords.
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 10**9, 2**70, "", "string", "object", "#", "#/$defs/a", "#/definitions/b", "x:y"),
    *([], {}, [[]], [{}], ["a"], ["string", "null"], ["string", ["x"]], [1, "b", None, [1], {"x": 1}]),
    *({"a": 1}, {"a": {}}, {"a": None}, {"a": []}, {"a": {"$ref": "#/$defs/a"}}, {"a": {"type": "string"}}),
)
_KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"),
    *(
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "if",
        "then",
        "$ref",
        "$defs",
        "definitions",
        "$schema",
        "$id",
    ),
    *("minLength", "maxLength", "pattern", "format", "minimum", "exclusiveMaximum", "multipleOf"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "title", "default", "x-guidance"),
)
_PATTERNS = (
    *(
        "(a+)+$",
        "(a|aa)+b",
        "(.*)*",
        "[",
        "(?=a)b",
        "(?<!a)b",
        r"\1",
        r"(a)\1",
        "a{1000000}",
        "(a{1000}){1000}",
        "(?R)",
    ),
    *("^$", "", "\u0000", ".{0,99999}", "((((((((((a{9}){9}){9}){9}){9}){9}){9}){9}){9}){9})", r"\p{Nope}", "a**", "*"),
)
_GRAMMARS = (
    *("start: start", "start: a\na: b\nb: a", "start: a a\na: a | ", "", "start:", "start: /[/", "start: undefined"),
    *('start: "a"{1000000}', 'start: ("a"?)~9999', "%import nothing\nstart: x", "root ::= root", "root ::= [", "::="),
    *("start: " + "(" * 500 + '"a"' + ")" * 500, 'start: ("a" | "aa" | "aaa")* "b"', 'start: %json {"type": 5}'),
)


def odd_schema(draw: Draw, depth: int = 0) -> dict[str, Any]:
    """A schema with keywords of any value."""
    found: dict[str, Any] = {}
    for _ in range(draw.randint(0, 4)):
        part: Any = draw.choice(_ODD)
        if depth < 4 and draw.random() < 0.4:
            inner = odd_schema(draw, depth + 1)
            part = draw.choice([inner, [inner], {"a": inner}])
        found[draw.choice(_KEYWORDS)] = part
    if depth == 0 and draw.random() < 0.7:
        found |= {"type": "object", "properties": {"a": odd_schema(draw, 1), "b": odd_schema(draw, 1)}}
    return found


def expensive_schema(draw: Draw) -> dict[str, Any]:
    """A schema that is expensive: deep, wide, ambiguous, recursive, or with large bounds."""
    size = draw.choice([10, 100, 1000])
    depth = draw.choice([5, 20, 31, 60, 200])
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    recursive = {"type": "array", "items": {"anyOf": [{"$ref": "#"}] * draw.randint(1, 9)}}
    name, text = f"{draw.randrange(10**6)}", {"type": "string"}
    return draw.choice(
        [
            deep,
            recursive,
            {"$ref": "#"},
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            {"type": "object", "properties": {f"{name}_{i}": text for i in range(size)}},
            {"enum": [f"{name} {i}" for i in range(size)]},
            {"anyOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{i % 12}}}{name}$"} for i in range(size // 10)]},
            {"allOf": [{"type": "string", "pattern": f"[a-{draw.choice('xyz')}]{{{i}}}"} for i in range(size // 10)]},
            {"type": "string", "minLength": 10 ** draw.randint(3, 9)},
            {"type": "array", "minItems": 10 ** draw.randint(3, 9), "items": text},
            {"type": "string", "pattern": draw.choice(_PATTERNS)},
            {"type": "number", "multipleOf": draw.choice([0, 1e-300, 1e300, -3, 0.1])},
            {"type": "integer", "minimum": draw.choice([2**64, -(10**300)]), "maximum": draw.choice([0, 10**300])},
            {"type": "string", "minLength": 5, "maxLength": 3},
            {"$ref": draw.choice(["http://127.0.0.1:1/schema", "file:///etc/passwd", "../a", "#/a~1b/%2e"])},
        ]
    )


def grammars(draw: Draw) -> Case:
    """A grammar that is enforced or refused, without a server error."""
    schema = (odd_schema if draw.random() < 0.6 else expensive_schema)(draw)
    path = draw.choice([COMPLETIONS, CHAT, CHAT, RESPONSES, MESSAGES])
    kind, change = draw.choice([*_FIELDS[path](draw, schema)])
    sent = post_json(path, GOOD[path] | change)
    # A schema without values matches nothing, and larger bodies are refused unread.
    expected = Expected(frozenset({200, 400, 413}))
    return Case(f"{path} {kind} {json.dumps(schema):.40}", cut(draw, sent), (expected,), closed=None)


Fields = list[tuple[str, dict[str, Any]]]


def _tools(draw: Draw, schema: Any) -> Fields:
    """Tools of a chat completion, and tool_choice."""
    name = draw.choice(["f", "get_weather", "a" * 64, "a" * 65, "", some_text(draw)])
    function = {"name": name, "parameters": schema} | draw.choice([{}, {"strict": True}, {"strict": False}])
    tools = {"tools": [{"type": "function", "function": function}] * draw.choice([1, 1, 1, 2])}
    named = {"type": "function", "function": {"name": name}}
    return [(f"tools {how}", tools | {"tool_choice": how}) for how in ("auto", "required", named)]


def _completions(draw: Draw, schema: Any) -> Fields:
    choice = [some_text(draw) for _ in range(draw.choice([0, 1, 9, 9000]))]
    grammar, pattern = draw.choice(_GRAMMARS), draw.choice(_PATTERNS)
    tags = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}]}
    return [
        ("guided_json", {"guided_json": schema}),
        ("json", {"structured_outputs": {"json": schema}}),
        ("json text", {"structured_outputs": {"json": json.dumps(schema)[: draw.choice([None, 5])]}}),
        ("regex", {"structured_outputs": {"regex": pattern}}),
        ("choice", {"guided_choice": choice}),
        ("grammar", {"structured_outputs": {"grammar": grammar}}),
        ("whitespace", {"guided_json": schema, "guided_whitespace_pattern": pattern}),
        ("tags", {"response_format": tags | {"triggers": draw.choice([["<a>"], [""], [], ["b"]])}}),
        ("odd tags", {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": schema}}}),
    ]


def _chats(draw: Draw, schema: Any) -> Fields:
    wanted = {"name": "a", "schema": schema, "strict": draw.choice([True, False, None])}
    formats = {"response_format": {"type": "json_schema", "json_schema": wanted}}
    return [("response_format", formats), *_tools(draw, schema), *_completions(draw, schema)]


def _responses(draw: Draw, schema: Any) -> Fields:
    wanted = {"type": "json_schema", "name": "a", "schema": schema, "strict": draw.choice([True, False, None])}
    tool = {"type": "function", "name": "f", "parameters": schema}
    choice = draw.choice(["auto", "required", {"type": "function", "name": "f"}])
    return [("text", {"text": {"format": wanted}}), ("tools", {"tools": [tool], "tool_choice": choice})]


def _messages(draw: Draw, schema: Any) -> Fields:
    choice = draw.choice([{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}])
    return [
        ("output_config", {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        ("tools", {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": choice}),
    ]


_FIELDS = {COMPLETIONS: _completions, CHAT: _chats, RESPONSES: _responses, MESSAGES: _messages}
