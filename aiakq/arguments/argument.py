"""One argument of the engine or the server, and whether a value fits it. Standard library only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from aiakq.errors import AiakqError, error

#: What a person may write behind a number: small letters are decimal, capital ones binary.
_SUFFIXES = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
}
_IN_WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list"}


@dataclass(frozen=True)
class Argument:
    """One row of the table.

    name       keyword of LLM(...); the flag is ``--`` plus the name with dashes.
    type       str, int, float or bool; a list of str for ``list``; a JSON object for ``dict``.
    default    None where the engine decides; ``help`` says how.
    group      model, text, memory, scheduling or server; server rows are not engine arguments.
    short      one-dash alias, like ``-q``.
    choices    allowed values, if they can be listed.
    low, high  inclusive bounds of numbers.
    spelled    whether an integer may be written as people do: 25.6k, 32K, 1M.
    automatic  whether ``auto``, or -1, is a value: the engine finds the best.
    levels     whether a whole number may stand for a JSON object.
    """

    name: str
    type: type
    default: Any
    help: str
    group: str
    short: str | None = None
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    spelled: bool = False
    automatic: bool = False
    levels: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def written_as_text(self) -> bool:
        """Whether a command line's word is read by ``checked_value``, not by its parser."""
        return self.type is dict or self.spelled or self.automatic

    @property
    def expected(self) -> str:
        """What a value has to be, in words."""
        if self.type is dict:
            return "a number or a JSON object" if self.levels else "a JSON object"
        words = _IN_WORDS[self.type]
        if self.spelled:
            words += " (or like 25.6k, 32K, 1M)"
        return words + " or auto" if self.automatic else words


def checked_value(argument: Argument, value: Any) -> Any:
    """``value`` as the engine gets it. Raises ``bad_option``."""
    if value is None:
        return None
    if argument.automatic and value in ("auto", "-1", -1):
        return "auto"
    if isinstance(value, str) and argument.written_as_text:
        value = _read(argument, value)
    if isinstance(value, str) and argument.type is list:
        value = [value]
    also: dict[type, tuple[type, ...]] = {float: (int,), dict: (int,) if argument.levels else ()}
    right_type = isinstance(value, (argument.type, *also.get(argument.type, ())))
    if not right_type or (isinstance(value, bool) and argument.type is not bool):
        raise _bad(argument, value, argument.expected)
    if argument.type is list and not all(isinstance(entry, str) for entry in value):
        raise _bad(argument, value, "a list of strings")
    if argument.choices and value not in argument.choices:
        raise _bad(argument, value, "one of " + ", ".join(argument.choices))
    if argument.low is not None and not value >= argument.low:
        raise _bad(argument, value, f"at least {argument.low}")
    if argument.high is not None and not value <= argument.high:
        raise _bad(argument, value, f"at most {argument.high}")
    return value


def _read(argument: Argument, text: str) -> Any:
    """What the words of a command line mean, for a value that is no plain text."""
    if argument.type is dict:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise _bad(argument, text, argument.expected) from None
    number = spelled_number(text)
    if number is None:
        raise _bad(argument, text, argument.expected)
    return number


def spelled_number(text: str) -> int | None:
    """The integer that ``text`` spells, like 32768, 25.6k or 32K; None if it spells none."""
    found = re.fullmatch(r"([+-]?\d{1,18})(\.\d{1,9})?([a-zA-Z]?)", text.strip())
    if found is None or (found[3] and found[3] not in _SUFFIXES):
        return None
    whole, part, factor = int(found[1]), found[2] or "", _SUFFIXES.get(found[3], 1)
    if not part:
        return whole * factor
    # A fraction of a decimal unit only: 1.5K would be read as 1500 by one person and as 1536 by another.
    scaled = int(part[1:]) * factor
    if found[3] not in ("k", "m", "g") or scaled % 10 ** (len(part) - 1):
        return None
    return whole * factor + scaled // 10 ** (len(part) - 1)


def _bad(argument: Argument, value: Any, expected: str) -> AiakqError:
    return error("bad_option", option=argument.flag, value=value, expected=expected, hint=argument.help)
