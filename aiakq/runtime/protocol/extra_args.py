"""``extra_args``: values of a request for packages outside the tree."""

from __future__ import annotations

from aiakq.constraints import Constraint
from aiakq.errors import error
from aiakq.runtime.protocol.unicode_text import well_formed

#: Largest number of values, and the constraint of their names.
MAX_EXTRA_ARGS = 64
EXTRA_NAME = Constraint(type=str, least=1, most=64, expected="names of 1 to 64 characters")
#: Bounds of integers, those of msgpack, in which requests travel to the engine.
_LOW, _HIGH = -(2**63), 2**64 - 1


def checked_extra_args(given: dict[str, object]) -> dict[str, object]:
    """Return ``extra_args`` with U+FFFD for lone surrogates. Raises ``value_out_of_range`` and ``invalid_type``."""
    checked = {}
    for name, value in given.items():
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
