"""Whether a value matches a JSON schema, in bounded time and without loading anything.

The schemas are those that ``clean_schema`` returns, whose patterns are in the language of llguidance.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import TypeGuard

from aiakq.runtime.structured.ecma_patterns import to_python
from aiakq.runtime.structured.string_formats import ANCHORED, ANCHORED_HOSTNAME_UP_TO_6

#: Maximum length of a pattern that is not one of a format, maximum nesting depth of schemas, and maximum number of
#: digits of a number.
MAX_PATTERN, MAX_DEPTH, MAX_DIGITS = 8000, 64, 1000
_OF_FORMATS = frozenset(each for patterns in (*ANCHORED.values(), ANCHORED_HOSTNAME_UP_TO_6) for each in patterns)
_NOT_CHECKED = frozenset(("unevaluatedProperties", "unevaluatedItems", "dependencies", "$dynamicRef", "$recursiveRef"))

Number = int | float | Decimal

_TYPES: Mapping[str, Callable[[object], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: _is_number(value),
    "integer": lambda value: _is_number(value) and _digits_of(value)[1] >= 0,
}


@dataclass
class Budget:
    """What checks may cost together.

    steps    number of schemas that are applied to values.
    seconds  time for patterns.
    """

    steps: int = 100_000
    seconds: float = 0.2


class _Unknown(Exception):
    """Whether the value matches is not found out."""


def matches(value: object, schema: object, budget: Budget) -> bool:
    """Whether ``value``, decoded from JSON, matches ``schema``, which is clean. Malformed keywords are ignored.

    Numbers are compared as they are written: floats by the shortest text of each.

    Returns False if that is not found out: ``budget``, which it uses up, is too small, the schema refers to another
    document, or has a keyword that is not checked.
    """
    try:
        return _Check(schema, budget).matches(value, schema, MAX_DEPTH)
    except (_Unknown, RecursionError, OverflowError):
        return False


class _Check:
    def __init__(self, root: object, budget: Budget) -> None:
        self._root, self._budget = root, budget

    def matches(self, value: object, schema: object, depth: int) -> bool:
        self._budget.steps -= 1
        if self._budget.steps < 0 or not depth:
            raise _Unknown
        if not isinstance(schema, Mapping):
            return schema is not False
        if not _NOT_CHECKED.isdisjoint(schema):
            raise _Unknown
        return (
            self._is_of_type(value, schema)
            and self._combines(value, schema, depth - 1)
            and (not isinstance(value, dict) or self._matches_object(value, schema, depth - 1))
            and (not isinstance(value, list) or self._matches_array(value, schema, depth - 1))
            and (not isinstance(value, str) or self._matches_string(value, schema))
            and (not _is_number(value) or _matches_number(value, schema))
        )

    def _is_of_type(self, value: object, schema: Mapping[str, object]) -> bool:
        types = schema.get("type")
        names = [types] if isinstance(types, str) else types if isinstance(types, list) else []
        checks = [_TYPES[name] for name in names if isinstance(name, str) and name in _TYPES]
        if checks and not any(check(value) for check in checks):
            return False
        options = schema.get("enum")
        if isinstance(options, list) and not any(_equal(value, option) for option in options):
            return False
        return "const" not in schema or _equal(value, schema["const"])

    def _combines(self, value: object, schema: Mapping[str, object], depth: int) -> bool:
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self.matches(value, self._resolved(reference), depth):
            return False
        if not all(self.matches(value, one, depth) for one in _list(schema, "allOf")):
            return False
        if (any_of := _list(schema, "anyOf")) and not any(self.matches(value, one, depth) for one in any_of):
            return False
        if (one_of := _list(schema, "oneOf")) and sum(self.matches(value, one, depth) for one in one_of) != 1:
            return False
        if "not" in schema and self.matches(value, schema["not"], depth):
            return False
        if "if" in schema:
            branch = "then" if self.matches(value, schema["if"], depth) else "else"
            return self.matches(value, schema.get(branch, True), depth)
        return True

    def _resolved(self, reference: str) -> object:
        if not reference.startswith("#"):
            raise _Unknown
        target = self._root
        for name in filter(None, reference[1:].split("/")):
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdigit() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, Mapping) and name in target:
                target = target[name]
            else:
                raise _Unknown
        return target

    def _matches_object(self, value: dict[str, object], schema: Mapping[str, object], depth: int) -> bool:
        properties, patterns = _mapping(schema, "properties"), _mapping(schema, "patternProperties")
        required = _list(schema, "required")
        if any(isinstance(name, str) and name not in value for name in required):
            return False
        if not _fits(len(value), schema, "minProperties", "maxProperties"):
            return False
        for name, one in value.items():
            parts = [part for pattern, part in patterns.items() if self._search(pattern, name)]
            if name in properties:
                parts.append(properties[name])
            if not parts and "additionalProperties" in schema:
                parts.append(schema["additionalProperties"])
            if "propertyNames" in schema and not self.matches(name, schema["propertyNames"], depth):
                return False
            if not all(self.matches(one, part, depth) for part in parts):
                return False
        dependent = _mapping(schema, "dependentSchemas").items()
        needed = _mapping(schema, "dependentRequired")
        return all(self.matches(value, part, depth) for name, part in dependent if name in value) and all(
            other in value for name in needed if name in value for other in _list(needed, name)
        )

    def _matches_array(self, value: list[object], schema: Mapping[str, object], depth: int) -> bool:
        if not _fits(len(value), schema, "minItems", "maxItems"):
            return False
        if schema.get("uniqueItems") is True and len({_key(one) for one in value}) < len(value):
            return False
        items, first = schema.get("items", True), _list(schema, "prefixItems")
        if isinstance(items, list):  # up to draft 2019-09
            first, items = items, schema.get("additionalItems", True)
        if not all(self.matches(one, part, depth) for one, part in zip(value, first, strict=False)):
            return False
        if items is not True and not all(self.matches(one, items, depth) for one in value[len(first) :]):
            return False
        if "contains" not in schema:
            return True
        count = sum(self.matches(one, schema["contains"], depth) for one in value)
        return _fits(count, {"minContains": 1} | dict(schema), "minContains", "maxContains")

    def _matches_string(self, value: str, schema: Mapping[str, object]) -> bool:
        pattern = schema.get("pattern")
        return _fits(len(value), schema, "minLength", "maxLength") and (
            not isinstance(pattern, str) or self._search(pattern, value)
        )

    def _search(self, pattern: str, text: str) -> bool:
        """Whether ``pattern`` matches in ``text``. A pattern that cannot be compiled matches nothing."""
        if self._budget.seconds <= 0 or (len(pattern) > MAX_PATTERN and pattern not in _OF_FORMATS):
            raise _Unknown
        import regex  # imported late: few schemas have patterns

        start = time.monotonic()
        try:
            return regex.search(_python(pattern), text, timeout=self._budget.seconds) is not None
        except regex.error:
            return False
        except TimeoutError:
            raise _Unknown from None
        finally:
            self._budget.seconds -= time.monotonic() - start


_python = lru_cache(256)(to_python)


def _matches_number(value: Number, schema: Mapping[str, object]) -> bool:
    if not _fits(value, schema, "minimum", "maximum"):
        return False
    number = _exact(value)
    above, below, step = (schema.get(key) for key in ("exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
    if _is_number(above) and number <= _exact(above) or _is_number(below) and number >= _exact(below):
        return False
    if above is True and _equal(value, schema.get("minimum")) or below is True and _equal(value, schema.get("maximum")):
        return False  # draft 4
    return not _is_number(step) or step <= 0 or _is_multiple(value, step)


def _is_multiple(value: Number, step: Number) -> bool:
    (digits, power), (unit, unit_power) = _digits_of(value), _digits_of(step)
    if power >= unit_power:
        return digits * pow(10, power - unit_power, unit) % unit == 0
    return digits == 0 or (unit_power - power <= MAX_DIGITS and digits % (unit * 10 ** (unit_power - power)) == 0)


def _exact(value: Number) -> int | Decimal:
    return Decimal(repr(value)) if isinstance(value, float) else value


def _digits_of(value: Number) -> tuple[int, int]:
    """``value`` as an integer without zeros at its end, and the power of ten by which it is multiplied.

    Raises ``_Unknown`` if it has too many digits.
    """
    sign, digits, power = Decimal(repr(value) if isinstance(value, float) else value).as_tuple()
    if len(digits) > MAX_DIGITS or not isinstance(power, int):
        raise _Unknown
    text = "".join(map(str, digits)).lstrip("0")
    kept = text.rstrip("0")
    return (0, 0) if not kept else (int(kept) * (-1 if sign else 1), power + len(text) - len(kept))


def _fits(size: Number, schema: Mapping[str, object], least: str, most: str) -> bool:
    low, high, number = schema.get(least), schema.get(most), _exact(size)
    return not (_is_number(low) and number < _exact(low) or _is_number(high) and number > _exact(high))


def _is_number(value: object) -> TypeGuard[Number]:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _equal(one: object, other: object) -> bool:
    return one == other if isinstance(one, str) else _key(one) == _key(other)


def _key(value: object) -> str:
    """Return a text that is equal for equal JSON values: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: object) -> object:
    if isinstance(value, list):
        return [_normal(one) for one in value]
    if isinstance(value, dict):
        return {name: _normal(one) for name, one in value.items()}
    return {"": list(_digits_of(value))} if _is_number(value) else [value]


def _list(schema: Mapping[str, object], name: str) -> list[object]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _mapping(schema: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = schema.get(name)
    return value if isinstance(value, Mapping) else {}
