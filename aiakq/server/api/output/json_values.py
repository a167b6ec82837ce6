"""Decode JSON in generated text: no exceptions, and only what JSON allows."""

from __future__ import annotations

import json
from decimal import Decimal

_INVALID = object()


def decoded(text: str, strict: bool = False, exact: bool = False) -> object:
    """Return the value of a JSON text, or a sentinel (see ``is_valid``) if it is invalid.

    Unless ``strict``, strings may contain line breaks. If ``exact``, numbers that are not written as integers are
    ``Decimal``, without rounding.
    """
    try:
        return json.loads(text, strict=strict, parse_constant=_refuse, parse_float=Decimal if exact else None)
    except (ArithmeticError, ValueError, RecursionError):
        return _INVALID


def is_valid(value: object) -> bool:
    """Whether ``decoded`` returned a value, not the sentinel."""
    return value is not _INVALID


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
