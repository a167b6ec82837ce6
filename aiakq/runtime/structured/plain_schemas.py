"""Plain JSON schemas, those of most requests: cleaned without looking at keywords that they do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiakq.runtime.structured.schema_values import Schema

SCALARS = ("string", "integer", "number", "boolean", "null")
#: Keywords that exclude nothing, and the keywords of plain schemas by their types.
NOTES = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment")
)
_KEYWORDS = {
    **{kind: NOTES | {"type"} for kind in SCALARS},
    "string": NOTES | {"type", "enum"},
    "array": NOTES | {"type", "items"},
    "object": NOTES | {"type", "properties", "required", "additionalProperties"},
}
_ALTERNATIVES = NOTES | {"anyOf"}
_MAX_PROPERTIES, _MAX_TEXTS, _MAX_ALTERNATIVES = 200, 1000, 100


def is_plain(given: dict[str, object]) -> bool:
    """Whether ``given`` has only keywords of plain schemas, with values that JSON Schema allows."""
    if "anyOf" in given:
        parts = given["anyOf"]
        if not isinstance(parts, list) or not _ALTERNATIVES >= given.keys():
            return False
        if len(parts) > _MAX_ALTERNATIVES or not all(isinstance(part, (dict, bool)) for part in parts):
            return False
        return not any(isinstance(part, dict) and "multipleOf" in part for part in parts)
    kind = given.get("type")
    keywords = _KEYWORDS.get(kind) if isinstance(kind, str) else None
    if keywords is None or not keywords >= given.keys():
        return False
    if kind == "object":
        properties, others = given.get("properties"), given.get("additionalProperties", True)
        if properties is not None and (not isinstance(properties, dict) or len(properties) > _MAX_PROPERTIES):
            return False
        return isinstance(others, (dict, bool)) and ("required" not in given or _are_texts(given["required"]))
    if kind == "array":
        return isinstance(given.get("items", True), (dict, bool))
    return "enum" not in given or (_are_texts(given["enum"]) and bool(given["enum"]))


def plain_schema(given: dict[str, Any], clean: Callable[[Any], Schema], closed: bool) -> Schema:
    """The clean form of ``given``, which is plain, as ``SchemaNode`` makes it.

    clean   makes the clean form of a schema inside it.
    closed  its objects have only the properties that it names.
    """
    if "anyOf" in given:
        parts: list[Schema] = [part for part in map(clean, given["anyOf"]) if part is not False]
        return {} if {} in parts else {"anyOf": parts} if len(parts) > 1 else parts[0] if parts else False
    out: dict[str, object] = {}
    for keyword, value in given.items():
        if keyword == "type":
            out[keyword] = value
        elif keyword == "properties":
            if value:
                out[keyword] = {name: clean(each) for name, each in value.items()}
        elif keyword in ("required", "enum"):
            if value:
                out[keyword] = list(dict.fromkeys(value))
        elif keyword in ("items", "additionalProperties") and (cleaned := clean(value)) != {}:
            out[keyword] = cleaned
    if closed and "properties" in given and "additionalProperties" not in given:
        out["additionalProperties"] = False
    return out


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_TEXTS and all(isinstance(each, str) for each in value)
