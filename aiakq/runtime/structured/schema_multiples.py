"""Multiples of a number in JSON schemas, as llguidance writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

from aiakq.runtime.structured.schema_values import Schema

#: What llguidance computes remainders with: integers up to this one.
_MAX_REMAINDER = 2**32 - 1
#: Maximum number of multiples within limits that are listed instead.
_MAX_LISTED = 3
#: Maximum number of combinations of steps of one value that are looked at.
_MAX_COMBINED = 1000


def multiples_of(step: float, limits: Mapping[str, float], is_integer: bool) -> list[Schema] | None:
    """Schemas of the multiples of ``step`` within ``limits``; None if they cannot be enforced exactly.

    llguidance writes multiples with as many decimal places as the step has, or with none: 0.25 allows 0.50, but not
    0.5. Those with fewer places are the multiples of larger steps, which are alternatives: 0.25 and 0.5. Each has its
    own limits, which are multiples. Where few are within the limits they are listed, because llguidance may round them
    out of the limits.
    """
    digits, places = _digits_of(step)
    if Decimal(digits).scaleb(-places) != Decimal(repr(step)):
        return None
    found: list[Schema] = []
    for written in (places,) if is_integer else range(places, min(places, 1) - 1, -1):
        shorter = digits // math.gcd(digits, 10 ** (places - written))
        unit = Fraction(math.lcm(shorter, 10**places) if is_integer else shorter, 10**written)
        first, last = _ends(unit, limits)
        if first is not None and last is not None and last - first < _MAX_LISTED:
            listed = [number * unit for number in range(first, last + 1)]
            if any(_exact(value) is None for value in listed):
                return None
            found += [{"enum": [_exact(value) for value in listed]}] if listed else []
            continue
        if not _can_divide(shorter, written) or _digits_of(shorter / 10**written) != (shorter, written):
            return None
        own: dict[str, Any] = {"type": "number", "multipleOf": shorter if not written else shorter / 10**written}
        for name, end in (("minimum", first), ("maximum", last)):
            limit = None if end is None else _exact(end * unit)
            if limit is not None:
                own[name] = limit
            elif end is not None:
                return None
        found.append(own)
    return found or [False]


def _exact(value: Fraction) -> float | None:
    """``value`` as an integer or the float that is written like it; None if there is none."""
    if value.denominator == 1:
        return value.numerator
    return float(value) if Fraction(repr(float(value))) == value else None


def _ends(step: Fraction, limits: Mapping[str, float]) -> tuple[int | None, int | None]:
    """The first and last multiple of ``step`` within ``limits``, divided by it; None: there is none."""
    ends = {name: Fraction(repr(value)) / step for name, value in limits.items()}
    lowest = [math.ceil(ends["minimum"])] if "minimum" in ends else []
    lowest += [math.floor(ends["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in ends else []
    highest = [math.floor(ends["maximum"])] if "maximum" in ends else []
    highest += [math.ceil(ends["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in ends else []
    return max(lowest, default=None), min(highest, default=None)


def joined_multiples(schemas: list[Schema]) -> list[Schema]:
    """``schemas``, alternatives, with those for one ``multipleOf`` beside the others, each once."""
    found: list[Schema] = []
    for each in schemas:
        parts = each["anyOf"] if isinstance(each, dict) and each.keys() == {"anyOf"} else [each]
        has_multiples = any(isinstance(part, dict) and "multipleOf" in part for part in parts)
        found += [part for part in parts if part not in found] if has_multiples else [each]
    return found


def _digits_of(step: float) -> tuple[int, int]:
    """The digits of ``step`` and how many of them are decimal places, as llguidance finds them: it multiplies by 10
    until the product is an integer.
    """
    value, places = float(step), 0
    while not value.is_integer():
        value, places = value * 10, places + 1
    digits = int(value)
    while places and digits % 10 == 0:
        digits, places = digits // 10, places - 1
    return digits, places


def _can_divide(digits: int, places: int) -> bool:
    """Whether llguidance computes remainders of division by a step without an overflow."""
    return digits > 0 and 10 * (digits - 1) + 9 * 10**places <= _MAX_REMAINDER


class TooManySteps(Exception):
    """Raised where a value has more combinations of steps than are looked at."""


def can_combine(schemas: list[Schema], resolve: Callable[[str], Schema]) -> bool:
    """Whether llguidance finds the common multiples of all steps that apply to the same value: its integers hold them.

    schemas  clean ones, with all inside them.
    resolve  returns what a reference refers to.
    """
    try:
        return all(
            len(steps) < 2 or _have_common_multiple(steps)
            for schema in schemas
            for part in _all_in(schema)
            for steps in _combinations(part, resolve, ())
        )
    except TooManySteps:
        return False


def without_multiples(schemas: list[Schema]) -> None:
    """Drop ``multipleOf`` in ``schemas`` and everything inside them."""
    for schema in schemas:
        for part in _all_in(schema):
            if isinstance(part.get("multipleOf"), (int, float)):  # else it is a property of this name
                del part["multipleOf"]


def _all_in(schema: object) -> Iterator[dict[str, object]]:
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending += [each for name, each in value.items() if name not in ("enum", "const")]
        elif isinstance(value, list):
            pending += value


def _combinations(
    schema: object, resolve: Callable[[str], Schema], followed: tuple[str, ...]
) -> list[tuple[tuple[int, int], ...]]:
    """The steps that apply to a value of ``schema`` together, for each way through its alternatives."""
    if not isinstance(schema, dict):
        return [()]
    step = schema.get("multipleOf")
    found: list[tuple[tuple[int, int], ...]] = [(_digits_of(step),) if isinstance(step, (int, float)) else ()]
    parts = [_combinations(each, resolve, followed) for each in _list(schema, "allOf")]
    if alternatives := [_combinations(each, resolve, followed) for each in _list(schema, "anyOf")]:
        parts.append(list(dict.fromkeys(steps for each in alternatives for steps in each)))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        parts.append(_combinations(resolve(reference), resolve, (*followed, reference)))
    for part in parts:
        if len(found) * len(part) > _MAX_COMBINED:
            raise TooManySteps
        found = list(dict.fromkeys(one + two for one, two in product(found, part)))
    return found


def _list(schema: Mapping[str, object], name: str) -> list[object]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _have_common_multiple(steps: tuple[tuple[int, int], ...]) -> bool:
    places = max(each for _, each in steps)
    numbers = [digits * 10 ** (places - each) for digits, each in steps]
    common = math.lcm(*numbers)
    return common * max(numbers) <= _MAX_REMAINDER and _can_divide(common, places)
