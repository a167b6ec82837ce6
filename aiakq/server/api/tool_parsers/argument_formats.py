"""Grammars of arguments that are not JSON objects: text between tags, and keyword arguments of Python.

They support only objects with known properties, and only values that the parsers of these formats read back as a value
of the JSON schema; ``properties_of`` and ``text_value`` return None for others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiakq.runtime.structured.formats import Format, any_text, const, either, regex, schema, sequence, some_tags, tag
from aiakq.server.api.tool_parsers.base import PLAIN_NAME

#: Keywords of objects that are fully described by ``properties``, and keywords without effect on values.
_NOTES = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "$comment", "$schema", "strict")
)
_DEFINITIONS = ("$defs", "definitions")
_OF_OBJECTS = _NOTES.union(_DEFINITIONS, ("type", "properties", "required", "additionalProperties"))
_LOCAL = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
#: Maximum length of a chain of references.
_MAX_HOPS = 8
_NOTHING = const("")


@dataclass(frozen=True)
class Property:
    """One property of an object.

    schema  JSON schema without a top-level reference, and self-contained.
    """

    name: str
    schema: Mapping[str, object]
    is_required: bool


def properties_of(schema: Mapping[str, Any]) -> list[Property] | None:
    """Return the properties of objects with the JSON schema ``schema``, or None if others are possible."""
    if not _OF_OBJECTS.issuperset(schema) or not _is_well_formed(schema) or schema.get("additionalProperties"):
        return None
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not properties.keys() >= set(required) or not all(PLAIN_NAME.fullmatch(name) for name in properties):
        return None
    result = []
    for name, value in properties.items():
        property_schema = resolved(value, schema)
        if property_schema is None:
            return None
        result.append(Property(name, property_schema, name in required))
    return result


def takes_anything(schema: Mapping[str, object]) -> bool:
    """Whether objects with the JSON schema ``schema`` may have any properties, and it declares none."""
    return (
        _OF_OBJECTS.issuperset(schema)
        and not schema.get("properties")
        and schema.get("additionalProperties", True) is not False
    )


def _is_well_formed(schema: object) -> bool:
    """Whether the keywords used here have values of the types that JSON Schema allows."""
    if not isinstance(schema, Mapping):
        return False
    return all(is_right(schema[keyword]) for keyword, is_right in _KEYWORDS.items() if keyword in schema)


def _is_list_of(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(each, kind) for each in value)


_are_texts, _are_schemas = _is_list_of(str), _is_list_of(dict)


def _is_length(value: object) -> bool:
    return type(value) is int and value >= 0


_KEYWORDS: Mapping[str, Callable[[object], bool]] = {
    "type": lambda value: isinstance(value, str) or _are_texts(value),
    "properties": lambda value: isinstance(value, dict),
    "required": _are_texts,
    "enum": lambda value: isinstance(value, list),
    "anyOf": _are_schemas,
    "oneOf": _are_schemas,
    "allOf": lambda value: isinstance(value, list),
    "minLength": _is_length,
    "maxLength": _is_length,
    "$defs": lambda value: isinstance(value, dict),
    "definitions": lambda value: isinstance(value, dict),
}


def resolved(value: Any, root: Mapping[str, Any]) -> Mapping[str, object] | None:
    """Return a part of the JSON schema ``root`` with its references resolved, or None if one is not found."""
    for _ in range(_MAX_HOPS):
        if value is True:
            value = {}
        if not _is_well_formed(value):
            return None
        target = value.get("$ref")
        alternatives = value.get("allOf", ())
        if target is None and len(alternatives) == 1:
            if not _NOTES.union(("allOf",)).issuperset(value):
                return None
            value = alternatives[0]
            continue
        if target is None:
            return _with_definitions(value, root)
        match = _LOCAL.fullmatch(target) if isinstance(target, str) else None
        if match is None or not _NOTES.union(("$ref",)).issuperset(value):
            return None
        definitions = root.get(match[1])
        value = definitions.get(match[2]) if isinstance(definitions, Mapping) else None
    return None


def _with_definitions(value: Mapping[str, object], root: Mapping[str, object]) -> Mapping[str, object] | None:
    references = set(re.findall(r'"\$ref": "([^"]*)"', json.dumps(value)))
    if not references:
        return value
    if not all(_LOCAL.match(one) for one in references) or not value.keys().isdisjoint(_DEFINITIONS):
        return None
    return {**{name: root[name] for name in ("$schema", *_DEFINITIONS) if name in root}, **value}


def text_value(value_schema: Mapping[str, object], marks: Collection[str]) -> Format | None:
    """Return the format of a value between tags, where models write strings as they are and all else as JSON.

    value_schema  JSON schema of the value.
    marks         strings that end the value.

    Returns None if a value read back might not match the schema.
    """
    keys = value_schema.keys() - _NOTES
    if "enum" in keys or "const" in keys:
        return _one_of(value_schema, marks) if keys <= {"enum", "const", "type"} else None
    types = _types(value_schema)
    if types is None:
        return None
    if "string" not in types:
        return schema(value_schema)
    if types - {"string", "null"} or not _is_plain(value_schema):
        return None
    if types == {"string"} and keys & {"minLength", "maxLength"}:
        min_length, max_length = value_schema.get("minLength", 0), value_schema.get("maxLength", "")
        return regex(f"(.|\\n){{{min_length},{max_length}}}", excludes=marks)
    return any_text(excludes=marks)


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """Return all types that a value may have, or None if the schema does not restrict them."""
    kinds = schema.get("type")
    if kinds is not None:
        return {kinds} if isinstance(kinds, str) else set(kinds)
    types: set[str] = set()
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key, ()):
            if not isinstance(each.get("type"), str):
                return None
            types.add(each["type"])
    return types or None


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """Whether any string matches ``schema``, apart from its length."""
    keys = schema.keys() - _NOTES
    if "type" in keys:
        return keys <= ({"type", "minLength", "maxLength"} if schema["type"] == "string" else {"type"})
    parts = [part for key in ("anyOf", "oneOf") for part in schema.get(key, ())]
    return len(keys) == 1 and all(part.keys() - _NOTES == {"type"} for part in parts)


def _one_of(schema: Mapping[str, Any], marks: Collection[str]) -> Format | None:
    """Return the values of ``enum`` or ``const``. Strings among values of other types are written as JSON."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    are_strings = schema.get("type", "string" if "enum" in schema else None) == "string"
    if are_strings and not all(isinstance(value, str) for value in values):
        return None
    texts = [value if are_strings else json.dumps(value, ensure_ascii=False) for value in values]
    if any(mark in text for mark in marks for text in texts) or any(text != text.strip("\n") for text in texts):
        return None
    return either(*map(const, texts)) if texts else None


def tagged_arguments(
    schema: Mapping[str, object], marks: Collection[str], parameter: Callable[[Format, Format], Format]
) -> Format | None:
    """Return the format of arguments between tags for the JSON schema ``schema``, in the order of its properties.

    marks      strings that end a value.
    parameter  returns the format of an argument for its name and the format of its value.
    """
    if takes_anything(schema):
        one = parameter(regex(PLAIN_NAME.pattern), any_text(excludes=marks))
        return either(_NOTHING, some_tags([tag("", one)], "", only_one=False))
    properties = properties_of(schema)
    if properties is None:
        return None
    written = []
    for each in properties:
        value = text_value(each.schema, marks)
        if value is None:
            return None
        one = parameter(const(each.name), value)
        written.append(one if each.is_required else either(one, _NOTHING))
    return sequence(*written) if written else _NOTHING


def keyword_arguments(object_schema: Mapping[str, object]) -> Format | None:
    """Return the format of Python keyword arguments for the JSON schema ``payload``, required ones first."""
    if takes_anything(object_schema):
        name = regex(PLAIN_NAME.pattern)
        return either(_NOTHING, sequence(name, const("="), schema({})))
    properties = properties_of(object_schema)
    if properties is None:
        return None
    written = {one.name: sequence(const(f"{one.name}="), _python_value(one.schema)) for one in properties}
    required = [written[one.name] for one in properties if one.is_required]
    others = [written[one.name] for one in properties if not one.is_required]
    if required:
        return sequence(required[0], *(sequence(const(", "), one) for one in required[1:]), *_more(others))
    alternatives = [sequence(one, *_more(others[at + 1 :])) for at, one in enumerate(others)]
    return either(_NOTHING, *alternatives)


def _more(parts: Sequence[Format]) -> list[Format]:
    return [either(sequence(const(", "), one), _NOTHING) for one in parts]


def _python_value(value_schema: Mapping[str, object]) -> Format:
    """Return the format of a Python literal: JSON, with Python's True, False and None."""
    if value_schema.keys() - _NOTES == {"type"} and value_schema["type"] == "boolean":
        return either(const("True"), const("False"))
    return schema(value_schema)
