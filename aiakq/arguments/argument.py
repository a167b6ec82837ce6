"""Argument: one option of a command or of the engine, and the validation of its values. Standard library only.

Options are declared as fields of dataclasses (``argument``); ``rows_of`` converts such a class to rows. A row defines
the command-line flag, the keyword, the configuration key, the environment variable, the validation and the
documentation.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiakq.constraints import Constraint, declarations
from aiakq.constraints import declare as argument
from aiakq.errors import AiakqError, error

__all__ = ["PREFIX", "Argument", "argument", "checked_value", "parse_number", "part_of", "rows_of", "value_of_text"]

#: Factors of suffixes: lower-case letters are decimal, upper-case ones binary.
_SUFFIXES = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
}
#: Words for the values of a switch.
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
#: Prefix of the environment variables of options.
PREFIX = "AIAKQ_"


@dataclass(kw_only=True, eq=False)
class Argument(Constraint):
    """One row of a table. A list or tuple holds strings; the second sentence of an error is the default if None.

    name         keyword of ``LLM(...)``, field of the dataclass that declares it.
    group        heading on the help page and in the docs.
    flags        spellings on the command line; messages use the first. ``--`` plus the name with dashes if empty.
    off          flag that turns a switch off; ``--no-`` plus the name if None.
    positional   whether it is a positional argument.
    suffixes     whether an integer may be written like 25.6k, 32K, 1M.
    automatic    whether ``auto`` (for an integer also -1) is a valid value that lets the program choose.
    bare         value on a command line that gives the option without one; None: it needs one.
    separator    separates the entries of a list on the command line and in the environment.
    environment  whether there is an environment variable; False if the program reads that variable itself.
    convert      converts a given value to the one that the program uses; raises ValueError with the invalid part.
    metavar      placeholder of the value on the help page.
    """

    group: str = ""
    flags: tuple[str, ...] = ()
    off: str | None = None
    positional: bool = False
    suffixes: bool = False
    bare: str | None = None
    separator: str = ","
    environment: bool = True
    convert: Callable[[Any], object] | None = None
    metavar: str | None = None

    #: Supported; rows of unsupported.py have no effect or are refused.
    status = "works"

    @property
    def all_flags(self) -> tuple[str, ...]:
        return self.flags or ("--" + self.name.replace("_", "-"),)

    @property
    def flag(self) -> str:
        """The name used in messages."""
        return self.name.upper() if self.positional else self.all_flags[0]

    @property
    def off_flag(self) -> str:
        return self.off or f"--no-{self.long_flag.removeprefix('--')}"

    @property
    def long_flag(self) -> str:
        return next(flag for flag in self.all_flags if flag.startswith("--"))

    @property
    def key(self) -> str:
        """The name in configuration files: that of the long flag, with underscores."""
        return self.name if self.positional else self.long_flag.removeprefix("--").replace("-", "_")

    @property
    def keys(self) -> tuple[str, ...]:
        """All names in configuration files: ``key``, the keyword, and the other flags."""
        flags = (flag.lstrip("-").replace("-", "_") for flag in (() if self.positional else self.all_flags))
        return tuple(dict.fromkeys((self.key, self.name, *flags)))

    @property
    def variable(self) -> str | None:
        """The environment variable."""
        return PREFIX + self.key.upper() if self.environment else None

    @property
    def variables(self) -> tuple[str, ...]:
        """All names of the environment variable; ``variable`` first, then those of the other flags."""
        return tuple(PREFIX + key.upper() for key in self.keys if len(key) > 1) if self.environment else ()

    @property
    def parsed(self) -> bool:
        """Whether a string given as a keyword or in a configuration file is parsed, like on the command line."""
        return self.type is dict or self.suffixes or self.automatic

    @property
    def kind(self) -> str:
        if self.type is dict:
            return "a number or a JSON object" if int in self.also else "a JSON object"
        words = Constraint(type=self.type).kind
        if self.suffixes:
            words += " (or like 25.6k, 32K, 1M)"
        return words + " or auto" if self.automatic else words


def rows_of(options: type, group: str = "") -> tuple[Argument, ...]:
    """Return the options declared by a dataclass, under the heading ``group`` unless they name another."""
    return tuple(declarations(options, Argument, group=group, optional=False).values())


def checked_value(argument: Argument, value: Any, source: str | None = None) -> Any:
    """Validate and convert ``value``. Messages call it ``source``, or the flag if None. Raises ``bad_option``."""
    if value is None:
        return None
    if argument.automatic and _is_auto(argument, value):
        return "auto"
    if isinstance(value, str) and argument.parsed:
        value = _parse(argument, value, source)
    if isinstance(value, str) and argument.type in (list, tuple):
        value = [value]
    if argument.type in (list, tuple) and int in argument.also:  # in Python; on the command line they are strings
        value = [value] if type(value) is int else value
        value = [str(entry) if type(entry) is int else entry for entry in value] if isinstance(value, list) else value
    if argument.choices and value not in argument.choices and isinstance(value, str):
        value = next((choice for choice in argument.choices if str(choice).lower() == value.lower()), value)
    refused = argument.refusal(value)
    if refused is not None:
        raise _bad(argument, value, source, refused.expected)
    if argument.type in (list, tuple) and not all(isinstance(entry, str) for entry in value):
        raise _bad(argument, value, source, "a list of strings")
    if argument.type is not float and not _is_portable(str(value) if isinstance(value, Path) else value):
        limits = {
            dict: "a JSON object with integers of at most 64 bits and with text that is Unicode",
            int: "an integer of at most 64 bits",
        }
        raise _bad(argument, value, source, limits.get(argument.type, "text that is Unicode"))
    if argument.type in (tuple, Path):
        value = argument.type(value)
    if argument.convert is None:
        return value
    try:
        return argument.convert(value)
    except AiakqError:
        raise
    except ValueError as problem:
        raise _bad(argument, problem.args[0], source, argument.kind) from None


def _is_auto(argument: Argument, value: object) -> bool:
    text = value.strip().lower() if isinstance(value, str) else value
    return text == "auto" or (argument.type is int and text in ("-1", -1) and not isinstance(value, bool))


def _is_portable(value: object) -> bool:
    """Whether other processes can be sent ``value``: no integers of more than 64 bits, no halves of characters."""
    if isinstance(value, dict):
        return all(_is_portable(key) and _is_portable(each) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_portable, value))
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    return not isinstance(value, str) or not any("\ud800" <= letter <= "\udfff" for letter in value)


def value_of_text(argument: Argument, text: str, source: str | None = None) -> object:
    """Parse and validate ``text`` from a command line or an environment variable. Raises ``bad_option``."""
    if argument.type in (list, tuple):
        return checked_value(argument, split_list(argument, text), source)
    if argument.automatic and _is_auto(argument, text):
        return "auto"
    return checked_value(argument, _parse(argument, text, source), source)


def split_list(argument: Argument, text: str) -> list[str]:
    """Split a list that is written as one string."""
    return [part for part in text.split(argument.separator) if part]


def _parse(argument: Argument, text: str, source: str | None) -> object:
    """Parse ``text`` as a value of the argument's type."""
    try:
        if argument.type is dict:
            return json.loads(text)
        if argument.type is bool:
            return BOOLEANS[text.strip().lower()]
        if argument.type is float:
            return float(text)
        if argument.type is int:
            number = parse_number(text) if argument.suffixes else int(text)
            if number is not None:
                return number
            raise ValueError
    except (ValueError, KeyError, RecursionError):
        raise _bad(argument, text, source, argument.kind) from None
    return text


def parse_number(text: str) -> int | None:
    """Parse an integer like 32768, 25.6k or 32K; None if ``text`` is not one."""
    match = re.fullmatch(r"([+-]?\d{1,18})(\.\d{1,9})?([a-zA-Z]?)", text.strip())
    if match is None or (match[3] and match[3] not in _SUFFIXES):
        return None
    whole, part, factor = int(match[1]), match[2] or "", _SUFFIXES.get(match[3], 1)
    if not part:
        return whole * factor
    # Fractions only with decimal units: 1.5K could be read as 1500 or as 1536.
    scaled, unit = int(part[1:]) * factor, int("1".ljust(len(part), "0"))
    if match[3] not in ("k", "m", "g") or scaled % unit:
        return None
    return whole * factor + scaled // unit


def part_of(options: type, arguments: object) -> dict[str, Any]:
    """Return the fields of the dataclass ``options`` that ``arguments``, another one, has too, with its values."""
    names = (field.name for field in dataclasses.fields(options))
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def _bad(argument: Argument, value: object, source: str | None, expected: str) -> AiakqError:
    by_default = "" if argument.default in (None, (), "") else f"The default is {argument.default}."
    hint = by_default if argument.hint is None else argument.hint
    return error(
        "bad_option",
        option=source or argument.flag,
        value=value,
        expected=argument.expected or expected,
        hint=hint,
    )
