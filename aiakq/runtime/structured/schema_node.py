"""SchemaNode: one JSON schema, whose keywords are converted to those that llguidance enforces."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from aiakq.runtime.structured.ecma_patterns import from_ecma, refused_part
from aiakq.runtime.structured.schema_documents import Base, Cleaner
from aiakq.runtime.structured.schema_multiples import joined_multiples
from aiakq.runtime.structured.schema_numbers import exact_value, number_keywords
from aiakq.runtime.structured.schema_parts import any_order, both, listed_names, names_in, objects_only, pattern_of
from aiakq.runtime.structured.schema_values import (
    ALL_TYPES,
    KEYWORDS_OF_TYPE,
    Schema,
    complement,
    plain_value,
    types_of,
    value_has_type,
    value_key,
    values_of,
)
from aiakq.runtime.structured.string_formats import ANCHORED, ANCHORED_HOSTNAME_UP_TO_6

#: Keywords whose schemas apply to the same value.
_IN_PLACE = frozenset(
    ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas")
)
#: Maximum number of dependencies between properties in a schema: each of them doubles its alternatives.
_MAX_DEPENDENCIES = 4
#: A limit beyond this is none: no text has so many characters.
_MAX_COUNT = 1 << 30
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
#: What the parser of llguidance can hold in one step: optional properties in succession, and alternatives, of which an
#: array counts as several, and a value that is neither array nor object as none.
_MAX_OPTIONAL, _MAX_ALTERNATIVES, _ARRAY = 248, 1000, 6


@lru_cache
def _unused_keywords(types: frozenset[str]) -> frozenset[str]:
    """Keywords that apply to values of other types only."""
    return frozenset().union(*(names for name, names in KEYWORDS_OF_TYPE.items() if name not in types))


class SchemaNode:
    """The keywords ``given`` of one schema.

    closed  its objects have only the properties that it names.
    """

    def __init__(self, cleaner: Cleaner, given: dict[str, Any], base: Base, closed: bool) -> None:
        self._cleaner, self._given, self._base, self._closed = cleaner, given, base, closed
        self._out: dict[str, Any] = {}
        self._parts: list[Schema] = []  # schemas that hold too
        self._is_empty = False
        self._set_types()

    def clean(self) -> Schema:
        """The clean schema: {} allows everything, False nothing."""
        if not self._set_values():
            return False
        for keywords, apply in (
            (_IN_PLACE, self._in_place),
            (KEYWORDS_OF_TYPE["string"], self._strings),
            (KEYWORDS_OF_TYPE["number"], self._numbers),
            (KEYWORDS_OF_TYPE["array"], self._arrays),
            (KEYWORDS_OF_TYPE["object"], self._objects),
        ):
            if not keywords.isdisjoint(self._given):
                apply()
        return self._assembled()

    def _assembled(self) -> Schema:
        """All keywords in their original order, which is the order of properties."""
        parts = [part for part in self._parts if part != {}]
        if self._is_empty or False in parts:
            return False
        out = {name: self._out[name] for name in self._given if name in self._out}
        out |= {name: value for name, value in self._out.items() if name not in out}
        if not out and len(parts) == 1:
            return parts[0]
        if parts:
            at_end = "allOf" not in self._given and "$ref" not in self._given
            own = {"allOf": parts}
            out = out | own if at_end or "properties" not in self._given else self._placed(out, own)
        return out

    def _placed(self, out: dict[str, object], own: dict[str, Any]) -> dict[str, object]:
        """``own`` before the properties if it was there."""
        order = list(self._given)
        first = min(order.index(name) for name in ("allOf", "$ref") if name in self._given)
        return own | out if first < order.index("properties") else out | own

    # --- any type

    def _set_types(self) -> None:
        """Drop keywords of types that values cannot have."""
        given = self._given
        self._types = types_of(given)
        if "number" in self._types:
            self._types = [name for name in self._types if name != "integer"]
        if "type" in given and set(self._types) != set(ALL_TYPES):
            self._out["type"] = self._types[0] if len(self._types) == 1 else list(dict.fromkeys(self._types))
            has = {"number" if name == "integer" else name for name in self._types}
            unused = _unused_keywords(frozenset(has))
            if not unused.isdisjoint(given):
                self._given = {name: value for name, value in given.items() if name not in unused}

    def _set_values(self) -> bool:
        """Set the values that are listed; False: none of them can be valid."""
        given = self._given
        values = values_of(given)
        knows_const = self._base.knows("const")
        if values is None or (not knows_const and "enum" not in given):
            return True
        if "const" in given and "enum" in given:
            keys = {value_key(value) for value in given["enum"]}
            values = [value for value in values if value_key(value) in keys]
        values = [plain_value(value) for value in values if value_has_type(value, self._types)]
        values = list({value_key(value): value for value in values}.values())
        try:
            found = [exact_value(value) for value in values]
        except (ValueError, OverflowError):
            keyword = "const" if "const" in given else "enum"
            self._cleaner.refuse(keyword, reason="has a number beyond 2^53, which would be rounded")
            return True
        if any(is_long for _, is_long in found):
            self._out.pop("type", None)  # llguidance would take integers for ones of 64 bits
            values = [value for value, _ in found]
        if "const" in given and len(values) == 1:
            self._out["const"] = values[0]
        else:
            self._out["enum"] = values
        return bool(values)

    def _schema(self, value: object) -> Schema:
        """The clean form of a schema of other values: of properties, of items."""
        return self._cleaner.schema(value, self._base, self._cleaner.closed)

    def _same(self, value: object, closed: bool) -> Schema:
        """The clean form of a schema of the same value."""
        return self._cleaner.schema(value, self._base, closed)

    def _in_place(self) -> None:
        given, cleaner = self._given, self._cleaner
        alone = self._closed and "properties" not in given
        all_of = given.get("allOf", [])
        others = sum(name in given for name in ("$ref", "anyOf", "oneOf")) + len(all_of)
        if "$ref" in given:
            self._parts.append(cleaner.reference(given["$ref"], self._base, alone and others == 1))
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in given:
                self._parts.append(
                    cleaner.dynamic_reference(keyword, given[keyword], self._base, alone and others == 0)
                )
        self._parts += [self._same(part, alone and others == 1) for part in all_of]
        if "anyOf" in given:
            self._parts.append(self._any_of([self._same(part, alone and others == 1) for part in given["anyOf"]]))
        if "oneOf" in given:
            self._one_of([self._same(part, alone and others == 1) for part in given["oneOf"]])
        if "not" in given:
            self._not("not", self._same(given["not"], False))
        self._condition()

    def _any_of(self, parts: list[Schema]) -> Schema:
        found = joined_multiples([part for part in parts if part is not False])
        if {} in found or not self._can_choose(found):
            return {}
        return {"anyOf": found} if len(found) > 1 else found[0] if found else False

    def _can_choose(self, parts: list[Schema]) -> bool:
        """Refuse more alternatives than a parser can hold."""
        if len(parts) <= _MAX_ALTERNATIVES // _ARRAY:
            return True
        kinds = [types_of(part) for part in parts if isinstance(part, dict) and values_of(part) is None]
        if sum(_ARRAY if "array" in types else "object" in types for types in kinds) <= _MAX_ALTERNATIVES:
            return True
        self._cleaner.refuse("anyOf", reason="has too many alternatives")
        return False

    def _one_of(self, parts: list[Schema]) -> None:
        found: list[Schema] = [part for part in parts if part is not False]
        anything = found.count({})
        if anything > 1 or not found:
            self._is_empty = True
        elif len(found) == 1:
            self._parts.append(found[0])
        elif anything:
            self._not("oneOf", self._any_of([part for part in found if part != {}]))
        else:
            self._parts.append(self._cleaner.one_of(found) if self._can_choose(found) else {})

    def _not(self, keyword: str, schema: Schema) -> None:
        other = complement(schema)
        if other is None:
            self._cleaner.refuse(keyword)
        else:
            self._parts.append(other)

    def _condition(self) -> None:
        given = self._given
        if "if" not in given:
            return
        condition = self._same(given["if"], False)
        then, otherwise = (self._same(given.get(name, True), False) for name in ("then", "else"))
        if condition == {} or condition is False:
            self._parts.append(then if condition == {} else otherwise)
        elif then != {} or otherwise != {}:
            other = complement(condition)
            if other is None:
                self._cleaner.refuse(*(name for name in ("if", "then", "else") if name in given))
                return
            pairs = [(condition, then), (other, otherwise)]
            self._parts.append(self._any_of([both(*pair) for pair in pairs]))

    # --- strings and numbers

    def _strings(self) -> None:
        given = self._given
        patterns = self._patterns([given["pattern"]] if "pattern" in given else ())
        if isinstance(given.get("format"), str):
            patterns += self._format(given["format"])
        if self._base.is_declared and self._base.draft == 7:  # annotations in other drafts
            if given.get("contentEncoding") == "base64":
                patterns.append(_BASE64)
            if str(given.get("contentMediaType")).lower() == "application/json":
                self._cleaner.refuse("contentMediaType")
        if patterns:
            self._out["pattern"] = patterns[0]
            kind = {"type": "string"} if self._types == ["string"] else {}
            self._parts += [{**kind, "pattern": pattern} for pattern in patterns[1:]]
        self._counts("minLength", "maxLength")

    def _patterns(self, patterns: Collection[str]) -> list[str]:
        """``patterns`` in the language of llguidance, without those that cannot be enforced."""
        found = []
        for pattern in patterns:
            if part := refused_part(pattern):
                self._cleaner.refuse_pattern(pattern, part)
            else:
                found.append(from_ecma(pattern))
        return found

    def _format(self, name: str) -> Sequence[str]:
        """The regular expressions of a format; none if it is an annotation."""
        if name == "hostname" and self._base.is_declared and self._base.draft < 7:
            return ANCHORED_HOSTNAME_UP_TO_6
        return ANCHORED.get(name, ())

    def _numbers(self) -> None:
        found, choices, refused = number_keywords(self._given, "number" not in self._types)
        if choices:
            self._choose_numbers(found, choices)
        else:
            self._out.update(found)
        if refused:
            reason = "has a value that cannot be enforced exactly; use one of fewer digits"
            self._cleaner.refuse(*refused, reason=reason)

    def _choose_numbers(self, limits: Mapping[str, object], choices: list[Schema]) -> None:
        """Set ``limits`` of numbers, and ``choices``, of which one holds too."""
        others = [name for name in self._types if name not in ("number", "integer")]
        any_other: list[Schema] = [{"type": others if len(others) > 1 else others[0]}] if others else []
        part = self._any_of([*choices, *any_other])
        if isinstance(part, dict) and not {"anyOf", "enum", "const"} & self._given.keys():
            if part.keys() == {"enum"}:  # all values within the limits
                limits = {}
            elif self._out == {"type": "number"} and not limits:
                del self._out["type"]
            self._out.update({**limits, **part})
            return
        self._out.update(limits)
        if part is False or part != {"anyOf": self._given.get("anyOf")}:
            self._parts.append(part)

    def _counts(self, least: str, most: str) -> None:
        if self._given.get(least):
            self._out[least] = int(self._given[least])
        if most in self._given and self._given[most] <= _MAX_COUNT:
            self._out[most] = int(self._given[most])

    # --- arrays

    def _arrays(self) -> None:
        given = self._given
        items, first = given.get("items"), given.get("prefixItems", [])
        if isinstance(items, list):  # up to draft 2019-09
            items, first = given.get("additionalItems"), items
        self._counts("minItems", "maxItems")
        has_in_place = any(name in given for name in _IN_PLACE) or "contains" in given
        if "unevaluatedItems" in given and items is None:
            rest = self._schema(given["unevaluatedItems"])
            if rest != {} and has_in_place:
                self._cleaner.refuse("unevaluatedItems")
            else:
                items = given["unevaluatedItems"]
        if first:
            self._out["prefixItems"] = [self._schema(each) for each in first]
        if items is not None and (cleaned := self._schema(items)) != {}:
            self._out["items"] = cleaned
        self._contains()
        if given.get("uniqueItems") and self._most_items() > 1:
            self._cleaner.refuse("uniqueItems")

    def _most_items(self) -> float:
        most: float = self._out.get("maxItems", float("inf"))
        return min(most, len(self._out.get("prefixItems", ()))) if self._out.get("items") is False else most

    def _contains(self) -> None:
        given, out = self._given, self._out
        if "contains" not in given:
            return
        least, most = int(given.get("minContains", 1)), given.get("maxContains")
        if least == 0 and most is None:
            return
        contained = self._schema(given["contains"])
        if contained == {}:
            out["minItems"] = max(least, out.get("minItems", 0))
            if most is not None:
                out["maxItems"] = min(int(most), out.get("maxItems", int(most)))
        elif contained is not False:
            self._cleaner.refuse(*(name for name in ("contains", "minContains", "maxContains") if name in given))
        elif least:
            self._parts.append({"type": [name for name in ALL_TYPES if name != "array"]})

    # --- objects

    def _objects(self) -> None:
        given, out = self._given, self._out
        properties = {name: self._schema(value) for name, value in given.get("properties", {}).items()}
        if self._cleaner.is_lenient:
            self._cleaner.keep_types(given, properties, self._base)
        by_pattern = {name: self._schema(value) for name, value in given.get("patternProperties", {}).items()}
        for pattern in [pattern for pattern in by_pattern if listed_names(pattern)]:
            value = by_pattern.pop(pattern)  # a parser cannot end where a pattern matches only names that are taken
            for name in listed_names(pattern):
                properties[name] = both(properties.get(name, {}), value)
        if properties:
            out["properties"] = properties
        if given.get("required"):
            out["required"] = list(dict.fromkeys(given["required"]))
        self._counts("minProperties", "maxProperties")
        rest = self._schema(given["additionalProperties"]) if "additionalProperties" in given else self._unevaluated()
        if rest is None and self._closed and "properties" in given and "object" in types_of(self._out):
            rest = False if "type" in self._out and not self._has_more_names(properties) else None
        if self._has_too_many(properties):
            rest = {}
        if by_pattern and (any(value != {} for value in by_pattern.values()) or rest not in (None, {})):
            names = self._patterns(by_pattern)
            if len(names) < len(by_pattern):
                rest = {}  # it would exclude names that match
            else:
                out["patternProperties"] = dict(zip(names, by_pattern.values(), strict=True))
        if rest not in (None, {}):
            out["additionalProperties"] = rest
        self._dependencies()
        if "propertyNames" in given:
            self._property_names(self._schema(given["propertyNames"]))

    def _has_too_many(self, properties: dict[str, Schema]) -> bool:
        """Refuse more optional ``properties`` than a parser can hold, or drop the last ones."""
        required = self._out.get("required", ())
        longest = current = 0
        for name, value in properties.items():
            current = 0 if name in required else current + (value is not False)
            longest = max(longest, current)
        if longest <= _MAX_OPTIONAL:
            return False
        self._cleaner.refuse("properties", reason=f"has more than {_MAX_OPTIONAL} optional ones in succession")
        optional = [name for name in properties if name not in required]
        for name in optional[_MAX_OPTIONAL // 2 :]:
            del properties[name]
        return True

    def _unevaluated(self) -> Schema | None:
        if "unevaluatedProperties" not in self._given:
            return None
        rest = self._schema(self._given["unevaluatedProperties"])
        if rest != {} and any(name in self._given for name in _IN_PLACE):
            self._cleaner.refuse("unevaluatedProperties")
            return None
        return rest

    def _has_more_names(self, properties: Mapping[str, object]) -> bool:
        """Whether schemas of the same objects name other properties, so that these are not all."""
        parts = [part for part in self._parts if isinstance(part, dict)]
        return any("$ref" in part or not names_in(part) <= set(properties) for part in parts)

    def _dependencies(self) -> None:
        given, out = self._given, self._out
        schemas = {**given.get("dependentRequired", {}), **given.get("dependencies", {})}
        found: dict[str, Schema] = {}
        for name, value in [*schemas.items(), *given.get("dependentSchemas", {}).items()]:
            if isinstance(value, list):
                missing = [each for each in value if isinstance(each, str) and each not in out.get("required", ())]
                part: Schema = {"required": missing} if missing else {}
            else:
                part = self._same(value, False)
            if part != {} and out.get("properties", {}).get(name) is not False:
                found[name] = part if name not in found else both(found[name], part)
        for name in [name for name in found if name in out.get("required", ())]:
            part = found.pop(name)
            self._parts.append(both({"type": "object"}, part) if self._types == ["object"] else objects_only(part))
        if len(found) > _MAX_DEPENDENCIES:
            keywords = ("dependentRequired", "dependentSchemas", "dependencies")
            self._cleaner.refuse(*(keyword for keyword in keywords if given.get(keyword)))
            return
        for name, part in found.items():
            absent = {"type": "object", "properties": {name: False}}
            trigger = {"type": "object", "required": [name]}
            present = any_order(part, trigger, out.get("properties", {}))
            others = {"type": [kind for kind in ALL_TYPES if kind != "object"]}
            self._parts.append(self._any_of([absent, *present, *([] if self._types == ["object"] else [others])]))

    def _property_names(self, names: Schema) -> None:
        """Express what the names of properties have to be by the properties themselves."""
        out = self._out
        if not isinstance(names, dict):
            out["maxProperties"] = 0
            return
        if "type" in names and "string" not in types_of(names):
            out["maxProperties"] = 0
            return
        names = {name: value for name, value in names.items() if name != "type"}
        if not names:
            return
        values = values_of(names)
        rest = out.get("additionalProperties", {})
        if values is not None and set(names) <= {"enum", "const"} and "patternProperties" not in out:
            properties = out.get("properties", {})
            allowed = [value for value in values if isinstance(value, str)]
            out["properties"] = {name: value if name in allowed else False for name, value in properties.items()}
            out["properties"] |= {name: rest for name in allowed if name not in properties}
            out["additionalProperties"] = False
            return
        pattern = pattern_of(names)
        if pattern is None or "properties" in out or "patternProperties" in out or "required" in out:
            self._cleaner.refuse("propertyNames")
            return
        out["patternProperties"] = {pattern: rest}
        out["additionalProperties"] = False
