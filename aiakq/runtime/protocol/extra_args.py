"""``extra_args``: values of a request for packages outside the tree."""

from __future__ import annotations

from typing import Any

from aiakq.errors import error
from aiakq.runtime.protocol.unicode_text import well_formed

#: Largest number of values, and of characters of their names.
MAX_EXTRA_ARGS, MAX_EXTRA_NAME = 64, 64
#: Bounds of integers, those of msgpack, in which requests travel to the engine.
_LOW, _HIGH = -(2**63), 2**64 - 1


def checked_extra_args(given: object) -> dict[str, Any]:
    """Return ``extra_args`` with U+FFFD for lone surrogates. Raises ``value_out_of_range`` and ``invalid_type``."""
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise error("invalid_type", param="extra_args", reason="an object is expected")
    if len(given) > MAX_EXTRA_ARGS:
        count, allowed = f"{len(given)} values", f"at most {MAX_EXTRA_ARGS}"
        raise error("value_out_of_range", param="extra_args", value=count, allowed=allowed)
    checked = {}
    for name, value in given.items():
        if not 1 <= len(name) <= MAX_EXTRA_NAME:
            allowed = f"names of 1 to {MAX_EXTRA_NAME} characters"
            raise error("value_out_of_range", param="extra_args", value=name[:64], allowed=allowed)
        entries = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, str | bool | int | float) for entry in entries):
            reason = "a number, a string, a boolean or a list of them is expected"
            raise error("invalid_type", param=f"extra_args.{well_formed(name)}", reason=reason)
        if not all(_LOW <= entry <= _HIGH for entry in entries if isinstance(entry, int)):
            value, allowed = "an integer", "-2**63 to 2**64 - 1"
            raise error("value_out_of_range", param=f"extra_args.{well_formed(name)}", value=value, allowed=allowed)
        checked[well_formed(name)] = [_text(entry) for entry in value] if isinstance(value, list) else _text(value)
    return checked


def _text(value: object) -> object:
    return well_formed(value) if isinstance(value, str) else value
