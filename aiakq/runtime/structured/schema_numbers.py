"""Limits of numbers in JSON schemas, as far as llguidance, which computes with 64-bit floats, enforces them exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_DOWN, Decimal
from typing import Any

from aiakq.runtime.structured.schema_multiples import multiples_of
from aiakq.runtime.structured.schema_values import MAX_EXACT, Schema, plain_number

#: Limits of numbers that are not integers are 0, or have an absolute value between these.
_SMALLEST, _LARGEST = 1e-60, 10**17
#: Limits of integers: the smallest one, and the end of all.
LEAST_INTEGER, _END_OF_INTEGERS = 1024 - 2**63, 2**63
#: End of limits of integers away from 0, without a limit on the other side.
_END_OF_LONE_LIMITS = 10**18

Keywords = dict[str, float]


def number_keywords(given: Mapping[str, Any], is_integer: bool) -> tuple[Keywords, list[Schema], list[str]]:
    """The keywords for numbers in ``given`` as they are enforced, and the names of those that cannot be exactly.

    In between, the schemas of which one holds too, if there are any.

    The integer -2^63, and the 1023 above it, are never allowed by a limit: the lowest one is ``LEAST_INTEGER``.
    """
    limits: Keywords = {}
    for limit, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        name = exclusive if given.get(exclusive) is True else limit  # in draft 4 it is a boolean
        if limit in given:
            limits[name] = _number(given[limit])
        if exclusive in given and not isinstance(given[exclusive], bool):
            limits[exclusive] = _number(given[exclusive])
    refused: list[str] = []
    is_plain = all(value == 0 or _SMALLEST <= abs(value) < MAX_EXACT for value in limits.values())
    if not is_plain:
        limits, refused = (_integer_limits if is_integer else _limits)(limits)
    if "multipleOf" in given:
        multiples = multiples_of(given["multipleOf"], limits, is_integer) if is_plain or not limits else None
        if multiples is None:
            return limits, [], [*refused, "multipleOf"]
        first = multiples[0]
        if len(multiples) > 1 or isinstance(first, bool) or "multipleOf" not in first:
            return limits, multiples, refused
        return {name: value for name, value in first.items() if name != "type"}, [], refused
    if is_integer or not limits:
        return limits, [], refused
    return _without_whole_end(limits), _with_cut_ends(limits), refused


def _number(value: float) -> float:
    """``value`` as an integer if it is one: the one that it is written as."""
    if isinstance(value, float) and abs(value) > MAX_EXACT:
        return int(Decimal(repr(value)))
    return plain_number(value)


def exact_value(value: object) -> tuple[object, bool]:
    """``value`` of ``enum`` or ``const`` as llguidance writes it exactly, and whether it has numbers beyond 2^53.

    Raises ``ValueError`` for a number that it would round.
    """
    if isinstance(value, (list, dict)):
        found = [exact_value(each) for each in (value.values() if isinstance(value, dict) else value)]
        values = [each for each, _ in found]
        return (dict(zip(value, values, strict=True)) if isinstance(value, dict) else values), any(
            is_long for _, is_long in found
        )
    if not isinstance(value, (int, float)) or abs(value) <= MAX_EXACT:
        return value, False
    if not math.isfinite(value):
        raise ValueError("JSON has no such number")
    if isinstance(value, int) and not _is_exact_integer(value):
        if Decimal(repr(float(value))) != value:
            raise ValueError("it would be rounded")
        value = float(value)
    return value, True


def _limits(limits: Keywords) -> tuple[Keywords, list[str]]:
    """Limits of any numbers, which llguidance writes with as few digits as tell floats apart."""
    found = {name: value for name, value in limits.items() if value == 0 or _is_exact_limit(value)}
    return found, [name for name in limits if name not in found]


def _is_exact_limit(value: float) -> bool:
    return _SMALLEST <= abs(value) <= _LARGEST and (not isinstance(value, int) or Decimal(repr(float(value))) == value)


def _integer_limits(limits: Keywords) -> tuple[Keywords, list[str]]:
    """Limits of integers, which llguidance computes in 64 bits after it has read them as floats."""
    lowest = [math.ceil(limits["minimum"])] if "minimum" in limits else []
    lowest += [math.floor(limits["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in limits else []
    highest = [math.floor(limits["maximum"])] if "maximum" in limits else []
    highest += [math.ceil(limits["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in limits else []
    low, high = max(lowest, default=None), min(highest, default=None)
    low = LEAST_INTEGER if low == -_END_OF_INTEGERS else low
    high_holds = high is not None and (high == _END_OF_INTEGERS - 1 or _is_exact_integer(high))
    low_holds = low is not None and _is_exact_integer(low) and (low < _END_OF_LONE_LIMITS or high_holds)
    if high is not None and high <= -_END_OF_LONE_LIMITS:
        high_holds = high_holds and low_holds
    found: Keywords = {}
    if low is not None and low_holds:
        found["minimum"] = low
    if high is not None and high_holds:
        found |= {"exclusiveMaximum": _END_OF_INTEGERS} if high == _END_OF_INTEGERS - 1 else {"maximum": high}
    holds = {"inimum": low_holds, "aximum": high_holds}
    return found, [name for name in limits if not holds[name[-6:]]]


def _is_exact_integer(value: int) -> bool:
    return LEAST_INTEGER <= value < _END_OF_INTEGERS and int(float(value)) == value


def _without_whole_end(limits: Keywords) -> Keywords:
    """``limits`` as llguidance keeps them: between 0 and 0.5, it also writes a 0 that is excluded.

    The limit becomes the next number, as far as 64-bit floats tell it apart.
    """
    found = dict(limits)
    for sign, names in (
        (1, ("exclusiveMinimum", "minimum", "maximum")),
        (-1, ("exclusiveMaximum", "maximum", "minimum")),
    ):
        end, inner, outer = names
        other = f"exclusive{outer.capitalize()}"
        if end not in found or sign * found[end] < 0 or found[end] != int(found[end]):
            continue
        last = min((sign * found[name] for name in (outer, other) if name in found), default=math.inf)
        if last >= sign * found[end] + 1:
            continue
        start = _SMALLEST if found[end] == 0 else math.nextafter(sign * found.pop(end), math.inf)
        found.pop(end, None)
        found[inner] = sign * max(start, sign * found.get(inner, sign * start))
    return found


def _with_cut_ends(limits: Keywords) -> list[Schema]:
    """Schemas of numbers within ``limits`` and those that llguidance does not write, none if it writes all.

    Those are what is left of the limit away from 0 if its last digits are cut: up to 1.85, it writes 1.80, but not 1.8.
    """
    cut: list[float] = []
    whole: list[Schema] = []
    for sign, names in ((1, ("maximum", "exclusiveMaximum")), (-1, ("minimum", "exclusiveMinimum"))):
        ends = [sign * limits[name] for name in names if name in limits]
        end = Decimal(repr(min(ends))) if ends else Decimal(0)
        places = -int(end.as_tuple().exponent)
        if end <= 0 or places < 2:
            continue
        parts = [end.quantize(Decimal(1).scaleb(-place), ROUND_DOWN) for place in range(1, places)]
        cut += [sign * float(part) for part in parts if part != int(part)]
        if parts[0] == int(parts[0]):
            number = sign * int(parts[0])
            whole = [*whole, {"type": "number", "minimum": number - (sign > 0), "maximum": number + (sign < 0)}]
    found = [value for value in dict.fromkeys(cut) if _is_within(value, limits)]
    if not found and not whole:
        return []
    return [{"type": "number"}, *whole, *([{"enum": found}] if found else [])]


def _is_within(value: float, limits: Keywords) -> bool:
    return not (
        value < limits.get("minimum", value)
        or value > limits.get("maximum", value)
        or value <= limits.get("exclusiveMinimum", -math.inf)
        or value >= limits.get("exclusiveMaximum", math.inf)
    )
