"""Values in error messages: formatted in a bounded time and length, whatever was given."""

from __future__ import annotations

import reprlib
import shlex
import string
from typing import Any


class _ShortRepr(reprlib.Repr):
    """Five entries per container, four levels of them, and 200 characters of a string or any other value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = self.maxarray = 5
        self.maxdict = 5
        self.maxstring = self.maxother = 200
        self.maxlong = 60

    def repr_int(self, x: int, level: int) -> str:
        """As in ``Repr``; Python refuses to write integers of thousands of digits."""
        try:
            return super().repr_int(x, level)
        except ValueError:
            return f"an integer of {x.bit_length()} bits"


_SHORT = _ShortRepr()
#: Characters of a value with many entries.
_MAX_CHARS = 400


def short_repr(value: object) -> str:
    """Return ``repr(value)``, shortened: a value of a file can be larger than memory once all of it is spelled out."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


def as_text(value: object) -> str:
    """Return ``str(value)``; containers are shortened."""
    is_short = not isinstance(value, (dict, list, tuple, set, frozenset)) and not _is_long(value)
    return str(value) if is_short else short_repr(value)


def _is_long(value: object) -> bool:
    return isinstance(value, int) and value.bit_length() > 1000


class MessageFormatter(string.Formatter):
    """``str.format`` for messages: ``{value!r}``, and values that are neither text nor numbers, are shortened.

    ``{value!q}`` is a word of a command that can be copied to a shell.
    """

    def convert_field(self, value: object, conversion: Any) -> object:
        if conversion == "q":
            return shlex.quote(str(value))
        if conversion == "r":
            return short_repr(value)
        if isinstance(value, (dict, list, tuple, set, frozenset)) or _is_long(value):
            return as_text(value)
        return super().convert_field(value, conversion)
