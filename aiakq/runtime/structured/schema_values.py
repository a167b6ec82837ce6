"""What can be said about values of JSON schemas in the form that ``schemas.py`` makes, without compiling them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Schema = dict[str, Any] | bool

#: Floats hold all integers up to this one.
MAX_EXACT = 2**53
ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")
#: Keywords that apply to values of one type only.
KEYWORDS_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "array": frozenset(
        ("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems", "maxItems")
        + ("uniqueItems", "unevaluatedItems")
    ),
    "object": frozenset(
        ("properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties")
        + ("maxProperties", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties")
    ),
}


def plain_value(value: Any) -> object:
    """``value`` with numbers that are integers spelled as integers, which are equal in JSON Schema."""
    if isinstance(value, float):
        return plain_number(value)
    if isinstance(value, list):
        return [plain_value(each) for each in value]
    if isinstance(value, dict):
        return {name: plain_value(each) for name, each in value.items()}
    return value


def plain_number(value: float) -> float:
    """``value`` as an integer if it is one that floats hold exactly."""
    return int(value) if isinstance(value, float) and abs(value) <= MAX_EXACT and value.is_integer() else value


def value_key(value: object) -> str:
    """A text that is the same for equal JSON values."""
    return json.dumps(plain_value(value), sort_keys=True)


def value_has_type(value: object, types: Iterable[str]) -> bool:
    """Whether ``value`` is of one of ``types``."""
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, (int, float)):
        return "number" in types or ("integer" in types and float(value).is_integer())
    names = {type(None): "null", str: "string", list: "array", dict: "object"}
    return names[type(value)] in types


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """The types that ``schema`` names; all if it names none."""
    types = schema.get("type")
    return list(ALL_TYPES) if types is None else [types] if isinstance(types, str) else list(types)


def values_of(schema: Schema) -> list[object] | None:
    """The values that ``schema`` lists; None: it lists none."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return None if values is None else list(values)


def complement(schema: Schema) -> Schema | None:
    """The schema of all other values; None: there is none in keywords that can be enforced."""
    if not isinstance(schema, dict):
        return {} if schema is False else False
    keys = set(schema)
    if not keys:
        return False
    values = values_of(schema)
    if values is not None and keys <= {"const", "enum", "type"} and all(value is None for value in values):
        return {"type": [name for name in ALL_TYPES if name != "null"]}
    if keys == {"type"}:
        types = types_of(schema)
        if "integer" in types:
            return None
        others = [name for name in ALL_TYPES if name not in types]
        return {"type": others} if others else False
    if keys == {"anyOf"}:
        parts = [complement(part) for part in schema["anyOf"]]
        return None if any(part is None for part in parts) else {"allOf": parts}
    if keys <= {"type", "required"} and len(schema.get("required", ())) == 1:
        absent = {"properties": {schema["required"][0]: False}}
        if "type" not in keys:
            return {"type": "object", **absent}
        return absent if types_of(schema) == ["object"] else None
    return None


def are_disjoint(schemas: list[Schema], resolve: Callable[[str], Schema]) -> bool:
    """Whether no value can be valid for two of ``schemas``; False where this is not obvious."""
    found = [_resolved(schema, resolve) for schema in schemas]
    listed = [values_of(schema) for schema in found]
    if all(values is not None for values in listed):
        return _all_differ(listed)
    if len(found) > _MAX_COMPARED:
        return _have_own_values(found, resolve)
    return _have_own_values(found, resolve) or all(
        _two_are_disjoint(one, two, resolve) for at, one in enumerate(found) for two in found[at + 1 :]
    )


#: Maximum number of schemas that are compared with each other.
_MAX_COMPARED = 32


def _all_differ(lists: Iterable[list[object] | None]) -> bool:
    keys = [key for values in lists for key in {value_key(value) for value in values or ()}]
    return len(keys) == len(set(keys))


def _have_own_values(schemas: list[Schema], resolve: Callable[[str], Schema]) -> bool:
    """Whether all are objects with a required property whose values tell them apart."""
    if not all(isinstance(schema, dict) and types_of(schema) == ["object"] for schema in schemas):
        return False
    names = set.intersection(*(set(schema.get("required", ())) for schema in schemas if isinstance(schema, dict)))
    for name in names:
        listed = [
            values_of(_resolved(schema.get("properties", {}).get(name, {}), resolve))
            for schema in schemas
            if isinstance(schema, dict)
        ]
        if all(values is not None for values in listed) and _all_differ(listed):
            return True
    return False


def _two_are_disjoint(one: Schema, two: Schema, resolve: Callable[[str], Schema], depth: int = 0) -> bool:
    one, two = _resolved(one, resolve), _resolved(two, resolve)
    if one is False or two is False:
        return True
    if not isinstance(one, dict) or not isinstance(two, dict) or depth > 4:
        return False
    for schema, other in ((one, two), (two, one)):
        for keyword in ("anyOf", "oneOf"):
            parts = schema.get(keyword)
            if parts and all(_two_are_disjoint(part, other, resolve, depth + 1) for part in parts):
                return True
        if any(_two_are_disjoint(part, other, resolve, depth + 1) for part in schema.get("allOf", ())):
            return True
    listed = values_of(one), values_of(two)
    if listed[0] is not None and listed[1] is not None:
        return _all_differ(listed)
    for values, other in ((listed[0], two), (listed[1], one)):
        if values is not None and not any(value_has_type(value, types_of(other)) for value in values):
            return True
    types = [{"number" if name == "integer" else name for name in types_of(schema)} for schema in (one, two)]
    common = types[0] & types[1]
    if not common:
        return True
    if common == {"number"}:
        return _limit(one, True) < _limit(two, False) or _limit(two, True) < _limit(one, False)
    if common != {"object"}:
        return False
    required = {*one.get("required", ()), *two.get("required", ())}
    return any(_two_are_disjoint(_property(one, name), _property(two, name), resolve, depth + 1) for name in required)


def _limit(schema: Mapping[str, Any], is_upper: bool) -> float:
    """A number that no value of ``schema`` is beyond."""
    names = ("maximum", "exclusiveMaximum") if is_upper else ("minimum", "exclusiveMinimum")
    limits = [schema[name] for name in names if name in schema]
    return (min if is_upper else max)(limits, default=math.inf if is_upper else -math.inf)


def _property(schema: Mapping[str, Any], name: str) -> Schema:
    others: Schema = {} if schema.get("patternProperties") else schema.get("additionalProperties", {})
    properties: Mapping[str, Schema] = schema.get("properties", {})
    return properties.get(name, others)


def _resolved(schema: Schema, resolve: Callable[[str], Schema]) -> Schema:
    """``schema``, or what it refers to if it is only a reference."""
    for _ in range(8):
        if not isinstance(schema, dict) or set(schema) != {"$ref"}:
            return schema
        schema = resolve(schema["$ref"])
    return {}


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and value >= 0 and float(value).is_integer()


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_map(value: object) -> bool:
    return isinstance(value, dict)


def _is_schema(value: object) -> bool:
    return isinstance(value, (dict, bool))


def _are_schemas(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


_TYPE_NAMES = {*ALL_TYPES, "integer"}
_WELL_FORMED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (*("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), "minContains"),
        _is_count,
    ),
    "maxContains": _is_count,
    **dict.fromkeys(("minimum", "maximum"), _is_number),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"), lambda value: _is_number(value) or isinstance(value, bool)
    ),
    "multipleOf": lambda value: _is_number(value) and value > 0,
    "type": lambda value: (
        value in _TYPE_NAMES
        if isinstance(value, str)
        else _are_texts(value) and bool(value) and set(value) <= _TYPE_NAMES
    ),
    "required": _are_texts,
    "enum": lambda value: isinstance(value, list),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependencies", "dependentRequired", "dependentSchemas"), _is_map
    ),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _are_schemas),
    "items": lambda value: _is_schema(value) or _are_schemas(value),
    **dict.fromkeys(
        (*("additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then"),),
        _is_schema,
    ),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), _is_schema),
    **dict.fromkeys(("pattern", "$ref", "$dynamicRef", "$recursiveRef"), lambda value: isinstance(value, str)),
    "uniqueItems": lambda value: isinstance(value, bool),
}


def is_well_formed(keyword: str, value: object) -> bool:
    """Whether JSON Schema allows ``value`` for ``keyword``, in any draft."""
    check = _WELL_FORMED.get(keyword)
    try:
        return check is None or check(value)
    except (OverflowError, TypeError):  # huge numbers, types that cannot be hashed
        return False
