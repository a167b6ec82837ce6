"""Schemas that tests enforce: every keyword that can be, in small combinations."""

from __future__ import annotations

import itertools
from typing import Any

_STRINGS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{2,3}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "enum": ["a", 'b"c', "d\\e", "ü", ""]},
    {"const": "only\nthis"},
]
_NUMBERS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"type": "number", "minimum": 0.5, "maximum": 1.5},
    {"enum": [1, 2.5, -3]},
    {"const": 7},
]
_OTHERS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["boolean", "null"]},
    {"enum": [None, True, "x", [1], {"y": 2}]},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]},
    {"oneOf": [{"const": "l"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
    {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 4}]},
]
SCALARS = _STRINGS + _NUMBERS + _OTHERS


def hundred() -> list[dict[str, Any]]:
    """A hundred schemas and a few more."""
    found: list[dict[str, Any]] = list(SCALARS)
    found += [{"type": "array", "items": one, "maxItems": 3} for one in SCALARS]
    found += [
        {"type": "array", "prefixItems": [one, {"type": "null"}], "items": False, "minItems": 2} for one in SCALARS
    ]
    found += [
        {"type": "object", "properties": {"a": one}, "required": ["a"], "additionalProperties": False}
        for one in SCALARS
    ]
    for one, two in itertools.pairwise(SCALARS):
        properties = {"first key": one, "second": two}
        found.append({"type": "object", "properties": properties, "additionalProperties": False})
    found += [
        {
            "$defs": {"leaf": {"type": "boolean"}},
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}},
            "required": ["right"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"k": {"type": "integer", "minimum": 0, "maximum": 3}},
            "required": ["k"],
            "patternProperties": {"^x[0-9]$": {"type": "null"}},
            "additionalProperties": False,
            "maxProperties": 3,
        },
        {
            "type": "object",
            "additionalProperties": {"type": "boolean"},
            "minProperties": 1,
            "maxProperties": 2,
        },
    ]
    return found
