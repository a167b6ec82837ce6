"""ForeignField: what a request field of another server means here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, Protocol


class Sent(Protocol):
    """A request."""

    def sent(self, name: str) -> object:
        """Return the value of a field of any server, or of Ollama's options; None if it is not set."""

    def has(self, name: str) -> bool:
        """Whether requests of this kind have the field ``name``."""


#: Fields of this server by name.
Fields = Mapping[str, object]


class NotSupported(Exception):
    """The value would change the answer; the text says what is not supported."""


@dataclass(frozen=True)
class ForeignField:
    """A field of another server.

    translate  returns the fields of this server for a value, or raises ``NotSupported``.
    replaces   whether they replace fields that the request sets.
    hint       whether it is ignored by name if the request has no such field.
    named      whether it is ignored by name if its value is not supported, instead of refused.
    """

    translate: Callable[[object, Sent], Fields]
    replaces: bool = False
    hint: bool = False
    named: bool = False


def equal(value: object, other: object) -> bool:
    """Whether two values are equal; numbers of both types are, booleans and numbers are not."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other


def refuse(reason: str) -> NoReturn:
    """Raise ``NotSupported``."""
    raise NotSupported(reason)


def renamed(name: str, *unset: object) -> ForeignField:
    """Another name of the field ``name``, which is not set if the value is one of ``unset``."""

    def translate(value: object, sent: Sent) -> Fields:
        return {} if any(equal(value, each) for each in unset) else {name: value}

    return ForeignField(translate)


def refused(reason: str, *neutral: object) -> ForeignField:
    """A field that only has an effect if its value is none of ``neutral``."""

    def translate(value: object, sent: Sent) -> Fields:
        return {} if any(equal(value, each) for each in neutral) else refuse(reason)

    return ForeignField(translate)


IGNORED = ForeignField(lambda value, sent: {})


def ignored(names: str) -> dict[str, ForeignField]:
    """Return fields without an effect; their names are separated by spaces."""
    return dict.fromkeys(names.split(), IGNORED)


def all_refused(reason: str, names: str, *neutral: object) -> dict[str, ForeignField]:
    """Return ``refused`` for names that are separated by spaces."""
    return dict.fromkeys(names.split(), refused(reason, *neutral))
