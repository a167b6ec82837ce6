"""Rule: what one option of another server means here. Tables of rules are in vllm.py, sglang.py and so on.

An option is written as its names, separated by spaces, where dashes may be left out: ``tp-size tensor-parallel-size``.
A mark after the first name says what follows the option: ``?`` nothing, ``*`` several values, ``~`` a value or nothing,
``!`` two values; otherwise it has one. ``=a|b`` after the names lists values that change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: What may happen to an option. Those of INCOMPLETE change answers, or what the service offers.
KEPT, IGNORED, DIFFERS, LOST = "kept", "ignored", "differs", "lost"
INCOMPLETE = (DIFFERS, LOST)
_ARITIES = {"?": "switch", "*": "list", "~": "optional", "!": "two"}


class Unavailable(Exception):
    """Raised by the conversion of a value that is not available here. Its text is the reason."""


class WithoutEffect(Exception):
    """Raised by the conversion of a value that changes no answers, and is left out. Its text is the reason."""


class Changed(Exception):
    """Raised by the conversion of a value for which there is only a similar one."""

    def __init__(self, value: object, reason: str) -> None:
        super().__init__(reason)
        self.value = value


@dataclass(frozen=True)
class Rule:
    """One option.

    flags    its names, the usual one first.
    arity    ``value``, ``switch``, ``list``, ``optional`` or ``two``.
    status   KEPT, IGNORED or LOST.
    to       the option of aiakq serve; empty for other statuses.
    key      the key of ``to``, an object, that the value becomes; dots separate keys of objects inside.
    reason   why it is ignored or lost, or what differs; without a full stop.
    convert  returns the value here; raises Unavailable, WithoutEffect or Changed.
    also     further words of the command here.
    silent   values that change nothing.
    off      name that turns a switch off.
    value    the value of ``to`` that a switch stands for.
    """

    flags: tuple[str, ...]
    arity: str
    status: str
    to: str = ""
    key: str = ""
    reason: str = ""
    convert: Callable[[Any], Any] | None = None
    also: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    value: str | None = None


@dataclass(frozen=True)
class Assumed:
    """Words that make a default of the other program explicit.

    to      the option of aiakq serve; not added if the command has it already.
    value   its value; None for a switch.
    key     the key of ``to``, an object.
    reason  the sentence about it.
    unless  options of the other program whose presence makes this wrong.
    """

    to: str
    value: object
    reason: str
    key: str = ""
    unless: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerProgram:
    """A server program.

    name       as it is called in messages.
    version    the version whose options the table has.
    rules      its options.
    variables  environment variables -> (option or "", reason): the option that they set, or why they have no effect.
    assumed    defaults that differ from those of aiakq serve.
    shortens   whether an option may be shortened to a prefix that no other has.
    model      rule of the positional argument.
    """

    name: str
    version: str
    rules: tuple[Rule, ...]
    variables: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    assumed: tuple[Assumed, ...] = ()
    shortens: bool = False
    model: Rule | None = None

    @property
    def by_flag(self) -> dict[str, Rule]:
        return {flag: rule for rule in self.rules for flag in (*rule.flags, *rule.off)}


def _parsed(spec: str) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the names, the arity and the silent values of an option's text."""
    words: list[str] = []
    silent: tuple[str, ...] = ()
    for word in spec.split():
        if word.startswith("="):
            silent = tuple(word[1:].split("|"))
        else:
            words.append(word)
    arity = _ARITIES.get(words[0][-1], "value")
    words[0] = words[0] if arity == "value" else words[0][:-1]
    return tuple(word if word.startswith("-") else f"--{word}" for word in words), arity, silent


def kept(
    to: str,
    spec: str,
    convert: Callable[[Any], Any] | None = None,
    *,
    key: str = "",
    reason: str = "",
    also: tuple[str, ...] = (),
    value: str | None = None,
) -> Rule:
    """An option that ``to`` replaces; ``to`` starts with ``--no-`` for a switch that turns one of aiakq off."""
    flags, arity, silent = _parsed(spec)
    return Rule(flags, arity, KEPT, to, key, reason, convert, also, silent, (), value)


def ignored(reason: str, *specs: str) -> tuple[Rule, ...]:
    """Options without an effect on answers and on what the service offers."""
    return tuple(Rule(*_rest(spec, IGNORED), reason=reason, silent=_parsed(spec)[2]) for spec in specs)


def lost(reason: str, *specs: str) -> tuple[Rule, ...]:
    """Options that are not available."""
    return tuple(Rule(*_rest(spec, LOST), reason=reason, silent=_parsed(spec)[2]) for spec in specs)


def _rest(spec: str, status: str) -> tuple[tuple[str, ...], str, str]:
    flags, arity, _ = _parsed(spec)
    return flags, arity, status
