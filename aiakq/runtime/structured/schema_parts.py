"""Combine parts of JSON schemas that are clean already."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from aiakq.runtime.structured.schema_values import ALL_TYPES, Schema


def both(one: Schema, two: Schema) -> Schema:
    """``one`` and ``two``."""
    parts = [part for part in (one, two) if part != {}]
    if False in parts:
        return False
    return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else {}


def any_order(one: Schema, two: Schema, declared: Collection[str]) -> list[Schema]:
    """Both schemas of objects, whose names may come in any order where none is ``declared``."""
    names = {name for part in (one, two) if isinstance(part, dict) for name in part.get("required", ())}
    return [both(one, two)] if names <= set(declared) else [both(one, two), both(two, one)]


def objects_only(schema: Schema) -> Schema:
    """``schema`` for objects, and any other value."""
    others = {"type": [kind for kind in ALL_TYPES if kind != "object"]}
    found = both({"type": "object"}, schema)
    return others if found is False else {"anyOf": [found, others]}


def pattern_of(names: Mapping[str, object]) -> str | None:
    """The regular expression of strings of the schema ``names``; None: it has other keywords."""
    if set(names) == {"pattern"}:
        return str(names["pattern"])
    if set(names) <= {"minLength", "maxLength"}:
        return f"^[\\x{{0}}-\\x{{10FFFF}}]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def names_in(schema: Schema) -> set[str]:
    """Names of the properties that ``schema`` declares for the same value."""
    if not isinstance(schema, dict):
        return set()
    found = set(schema.get("properties", ()))
    for keyword in ("allOf", "anyOf", "oneOf"):
        for part in schema.get(keyword, ()):
            found |= names_in(part)
    return found


_LITERAL = re.compile(r"\^(?:([\w -]+)|\((?:\?:)?([\w -]+(?:\|[\w -]+)*)\))\$", re.ASCII)


def listed_names(pattern: str) -> list[str]:
    """The names that ``pattern`` lists, if it is nothing but a list of them: they are like other properties."""
    match = _LITERAL.fullmatch(pattern)
    return [] if match is None else (match[1] or match[2]).split("|")
