"""Unsupported: an argument of another program that is accepted without an effect, or refused. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiakq.arguments.argument import BOOLEANS
from aiakq.errors import short_repr


@dataclass(frozen=True)
class Unsupported:
    """One argument.

    reason    a sentence without the full stop: what replaces it, or what is missing.
    defaults  values that change nothing, besides None, False, and empty values.
    refused   whether other values are refused; else they are accepted with a notice.
    switch    whether it is a flag without a value, or with "true" or "false" as the next word.
    many      whether its value is a list, of which each entry is a word of a command line.
    """

    name: str
    reason: str
    defaults: tuple[Any, ...] = ()
    refused: bool = False
    switch: bool = False
    many: bool = False
    short: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag,) if self.short is None else (self.flag, self.short)

    @property
    def status(self) -> str:
        return "refused" if self.refused else "no effect"

    def is_default(self, value: object) -> bool:
        """Whether ``value`` is equivalent to not giving the argument."""
        if self.switch and isinstance(value, str):
            value = BOOLEANS.get(value.strip().lower(), value)
        return (
            value is None
            or value is False
            or short_repr(value).strip("'") in ("", "{}", "[]", *map(str, self.defaults))
        )
