"""Relaxed schemas: what can be enforced of the arguments of a tool whose schema is too much for a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aiakq.runtime.structured.schema_values import Schema, types_of

#: Maximum number of properties that are relaxed one by one.
MAX_PROPERTIES = 32
#: Maximum number of listed values that are kept when little else is.
_MAX_VALUES = 256
#: Keywords that are kept, from the strictest form to the loosest.
_KEPT = (
    frozenset(
        ("type", "enum", "const", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems")
        + ("maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "anyOf", "allOf", "$ref")
    ),
    frozenset(("type", "enum", "const", "properties", "required", "items", "anyOf", "$ref")),
    frozenset(("type", "enum", "const")),
)
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties"))


def relaxed_schema(
    schema: Mapping[str, Any], compiles: Callable[[dict[str, Any]], bool]
) -> tuple[dict[str, object], list[str]]:
    """The clean ``schema`` of objects without what keeps it from compiling, and what is not enforced of it.

    compiles  whether a schema can be enforced.
    """
    schema = dict(schema)
    if compiles(schema):
        return schema, []
    own = {name: value for name, value in schema.items() if name in _OF_OBJECTS}
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    properties: Mapping[str, Schema] = schema.get("properties", {})
    if len(properties) <= MAX_PROPERTIES:
        found, dropped = _relaxed_properties(properties, definitions, compiles)
        for rest, note in ((schema, []), (own | definitions, ["keywords beside its properties"])):
            candidate = {**rest, "properties": found} if properties else dict(rest)
            if (candidate != schema or dropped) and compiles(candidate):
                return candidate, dropped + note
    for level in range(len(_KEPT)):
        weaker = {name: _weaker(value, level, definitions) for name, value in properties.items()}
        candidate = {**own, "properties": weaker} | (definitions if level < len(_KEPT) - 1 else {})
        if compiles(candidate):
            return candidate, ["all but the types of its properties, and which are required"]
    return loosest_schema(schema, compiles)


def loosest_schema(
    schema: Mapping[str, Any], compiles: Callable[[dict[str, Any]], bool] = lambda schema: True
) -> tuple[dict[str, object], list[str]]:
    """Only the names and types of the properties of ``schema``; where even that is too much, the required ones."""
    properties: Mapping[str, Schema] = schema.get("properties", {})
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    required = [name for name in schema.get("required", ()) if properties.get(name) is not False]
    shallow = {name: _weaker(value, len(_KEPT) - 1, definitions) for name, value in properties.items()}
    names: dict[str, object] = {"type": "object", "properties": shallow, "required": required}
    if schema.get("additionalProperties") is False:
        names["additionalProperties"] = False
    if compiles(names):
        return names, ["all but the types of its properties, and which are required"]
    few = {name: value for name, value in shallow.items() if name in required}
    return {"type": "object", "properties": few, "required": required}, ["all but its required properties"]


def _relaxed_properties(
    properties: Mapping[str, Schema], definitions: Mapping[str, object], compiles: Callable[[dict[str, object]], bool]
) -> tuple[dict[str, Schema], list[str]]:
    """Each of ``properties`` in the strictest form that compiles."""
    found: dict[str, Schema] = {}
    dropped = []
    for name, value in properties.items():
        forms = [value, *(_weaker(value, level, definitions) for level in range(len(_KEPT))), {}]
        for at, form in enumerate(forms):
            if form == {} or compiles(
                {"type": "object", "properties": {name: form}, "required": [name], **definitions}
            ):
                found[name] = form
                if at:
                    dropped.append(f"parts of the property {name[:64]!r}")
                break
    return found, dropped


def _weaker(schema: Schema, level: int, definitions: Mapping[str, Any]) -> Schema:
    """``schema`` with only the keywords of ``level``."""
    if not isinstance(schema, dict):
        return {}
    kept = _KEPT[level]
    result: dict[str, object] = {}
    for keyword, value in schema.items():
        if keyword not in kept:
            continue
        if keyword in ("properties",):
            result[keyword] = {name: _weaker(each, level, definitions) for name, each in value.items()}
        elif keyword in ("items", "additionalProperties"):
            result[keyword] = _weaker(value, level, definitions) if isinstance(value, dict) else value
        elif keyword in ("anyOf", "allOf", "prefixItems"):
            result[keyword] = [_weaker(each, level, definitions) for each in value]
        elif keyword == "enum" and len(value) > _MAX_VALUES:
            continue
        else:
            result[keyword] = value
    if "type" not in result and level == len(_KEPT) - 1 and "enum" not in result and "const" not in result:
        return _types(schema, definitions.get("$defs", {}))
    return result


def _types(schema: Mapping[str, Any], definitions: Mapping[str, Schema], depth: int = 0) -> dict[str, object]:
    """The types of ``schema``, from its references and alternatives where it names none; {}: any."""
    if "type" in schema:
        return {"type": schema["type"]}
    parts: list[Schema] = []
    if "$ref" in schema:
        parts = [definitions.get(schema["$ref"].rpartition("/")[2], {})]
    elif "anyOf" in schema:
        parts = schema["anyOf"]
    found = [_types(part, definitions, depth + 1) if isinstance(part, dict) and depth < 4 else {} for part in parts]
    if not found or {} in found:
        return {}
    names = list(dict.fromkeys(name for part in found for name in types_of(part)))
    return {"type": names if len(names) > 1 else names[0]}
