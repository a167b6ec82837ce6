"""Convert arguments written as text between tags to JSON, using the types in the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_values import decoded, is_valid
from aiakq.server.api.output.scanner import Emit, Marks, Parsing, TextScanner
from aiakq.server.api.tool_parsers.argument_formats import resolved
from aiakq.server.api.tool_parsers.python_values import python_value

#: Matches integers with a fraction of zero.
_WHOLE = re.compile(r"(-?[0-9]+)\.0+")
#: Matches the quotes of JSON strings, and escape sequences.
_STRING_MARKS = re.compile(r'\\.?|["\n]', re.DOTALL)
_TYPES: dict[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
#: Names of types that clients write, and those that JSON Schema has for them.
_NAMES = {name: name for names in _TYPES.values() for name in names} | {
    **{"str": "string", "bool": "boolean", "int": "integer", "float": "number", "double": "number"},
    **{"list": "array", "tuple": "array", "dict": "object", "none": "null"},
}


class TaggedArguments:
    """Writes the arguments of one call as a JSON object, value by value.

    schema    JSON schema of the object, as the client wrote it.
    enforced  the same as grammars enforce it, which is needed where ``schema`` does not name types directly.
    """

    def __init__(
        self, schema: Mapping[str, object], output: EventSink, enforced: Callable[[], Mapping[str, object]] = dict
    ) -> None:
        self._schema, self._enforced = schema, enforced
        self._output = output
        self._keys: set[str] = set()

    def begin(self, key: str, trim_line: bool) -> ArgumentText:
        """Start a value; ``trim_line`` drops a line break at its beginning and at its end."""
        separator = ", " if self._keys else "{"
        name = json.dumps(key, ensure_ascii=False)
        self._keys.add(key)
        self._output.arguments(f"{separator}{name}: ")
        types = _types_of(self._schema, key)
        if not types and key in _properties(self._schema):
            types = _types_of(self._enforced(), key)
        return ArgumentText(types, self._output.arguments, trim_line)

    def end(self, is_complete: bool = True) -> None:
        """End the arguments; ``is_complete``: see ``EventSink.end_call``."""
        if self._keys:
            self._output.arguments("}")
        self._output.end_call(is_complete)


class ArgumentText:
    """The text of one value: call ``read``, then ``end``. Strings are passed on incrementally."""

    def __init__(self, types: frozenset[str], emit: Emit, trim_line: bool) -> None:
        self._types = types
        self._emit = emit
        self._trim_line = trim_line
        self._is_string = types == {"string"}
        self._at_start = True
        self._pieces: list[str] = []
        self._line_break = ""  # held: it may be the last one
        self._is_json = bool(types) and "string" not in types
        # Whether the text ends within a JSON string, which may contain anything but a line break.
        self._in_json_string = False
        self._is_escaped = False
        if self._is_string:
            emit('"')

    def read(self, text: TextScanner, marks: Marks) -> Parsing[str]:
        """Add the text up to one of ``marks``, which is returned but not read; "" if the text is truncated."""
        while True:
            mark = yield from text.until(marks, self.add, read_mark=False, keep_rest=False)
            if not mark or not self._in_json_string:
                return mark
            self.add(text.take())

    def add(self, text: str) -> None:
        """Add a piece of text."""
        if not self._is_string:
            self._pieces.append(text)
            if self._is_json and text:
                self._look_for_strings(text)
            return
        if self._trim_line:
            if self._at_start and text:
                text, self._at_start = text.removeprefix("\n"), False
            text = self._line_break + text
            self._line_break = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])

    def _look_for_strings(self, text: str) -> None:
        if self._is_escaped:
            text = text[1:]
        self._is_escaped = False
        for mark in _STRING_MARKS.findall(text):
            if mark == '"':
                self._in_json_string = not self._in_json_string
            elif mark == "\n":
                self._in_json_string = False
            else:
                self._is_escaped = mark == "\\"  # the last character

    def end(self) -> None:
        """End the value."""
        if self._is_string:
            self._emit('"')
            return
        text = "".join(self._pieces)
        if self._trim_line:
            text = text.removeprefix("\n").removesuffix("\n")
        self._emit(json_of(text, self._types))


def _properties(schema: Mapping[str, object]) -> Mapping[str, object]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _types_of(schema: Mapping[str, object], key: str) -> frozenset[str]:
    """Return the types of the property ``key`` of objects with the JSON schema ``schema``."""
    declared = _properties(schema).get(key)
    return json_types(resolved(declared, schema) or declared)


def json_types(schema: object) -> frozenset[str]:
    """Return the types that a JSON schema allows, including its alternatives; empty if it does not restrict them.

    Types that JSON Schema does not have are those of the same meaning; others restrict nothing.
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    declared = schema.get("type")
    named = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    types = {name for name in named if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key) or () if isinstance(schema.get(key), list) else ():
            if isinstance(each, Mapping) and isinstance(each.get("type"), str):
                types.add(each["type"])
    if not types and isinstance(schema.get("enum"), list):
        types = {name for value in schema["enum"] for name in _TYPES.get(type(value), ())[:1]}
    found = {_NAMES.get(name.lower(), "") for name in types}
    return frozenset() if "" in found else frozenset(found)


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value written as ``text``: of one of ``types`` if it can be parsed so, else a string.

    Without types, it is any JSON value that ``text`` can be parsed as.
    """
    stripped = text.strip()
    value = decoded(stripped, strict=True)
    if is_valid(value) and _fits(value, types):
        return stripped
    if "string" not in types:
        whole = _WHOLE.fullmatch(stripped) if "integer" in types else None
        if whole is not None and is_valid(value):
            return whole[1]
        written = python_value(stripped)
        if written is not None and _fits(decoded(written), types):
            return written
        if "boolean" in types and stripped.lower() in ("true", "false"):
            return stripped.lower()
        if types and stripped in ("", "None", "null"):  # models write omitted arguments like this
            return "null"
    return json.dumps(text, ensure_ascii=False)


def _fits(value: object, types: frozenset[str]) -> bool:
    return not types or bool(types.intersection(_TYPES.get(type(value), ())))
