"""Reading of the options of another server: every word of a command line belongs to a rule, or is unknown."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from aiakq.arguments.argument import BOOLEANS
from aiakq.arguments.spelling import parsed_text, set_key
from aiakq.terminal.translation.rules import Rule, ServerProgram

#: Dashes that web pages put in place of two hyphens.
_DASHES = re.compile("^[\u2010-\u2015\u2212]+")
_NEGATIVE = re.compile(r"-\d+(\.\d+)?")
#: Values of options that may have none.
_ON_OFF = {*BOOLEANS, "auto", "enabled", "disabled", "none"}


@dataclass
class Given:
    """An option with its values. ``keys`` are those after a dot, with ``is_off`` for a switch that is turned off."""

    rule: Rule
    written: str
    values: list[str] = field(default_factory=list)
    is_off: bool = False
    keys: dict[str, object] = field(default_factory=dict)


def read(words: list[str], tool: ServerProgram) -> tuple[list[Given], list[str]]:
    """Return the options of a command line, and the words that belong to none."""
    return _Reader(words, tool).result()


class _Reader:
    def __init__(self, words: list[str], tool: ServerProgram) -> None:
        self._rest, self._tool = list(words), tool
        self._rules = tool.by_flag
        self._plain = {_plain(flag): rule for flag, rule in self._rules.items()}
        self._given: list[Given] = []
        self._unknown: list[str] = []
        self._dotted: dict[str, Given] = {}

    def result(self) -> tuple[list[Given], list[str]]:
        has_model = False
        while self._rest:
            word = self._rest.pop(0)
            if not self._is_option(word):
                if self._tool.model is not None and not has_model:
                    self._given.append(Given(self._tool.model, "", [word]))
                    has_model = True
                else:
                    self._unknown.append(word)
            elif not self._option(_DASHES.sub("--", word)):
                self._unknown.append(word + self._value_of_unknown())
        return self._given, self._unknown

    def _is_option(self, word: str) -> bool:
        return len(word) > 1 and (word[0] == "-" or bool(_DASHES.match(word))) and not _NEGATIVE.fullmatch(word)

    def _value_of_unknown(self) -> str:
        """Return the words up to the next option: values of an option that is not known."""
        values = []
        while self._rest and not self._is_option(self._rest[0]):
            values.append(self._rest.pop(0))
        return "".join(f" {value}" for value in values)

    def _find(self, name: str) -> Rule | None:
        if name in self._rules:
            return self._rules[name]
        if name.startswith("--") or self._tool.name == "vLLM":
            if (rule := self._plain.get(_plain(name))) is not None:
                return rule
        if name.startswith("--") and self._tool.shortens:
            found = {id(rule): rule for flag, rule in self._rules.items() if flag.startswith(name.replace("_", "-"))}
            if len(found) == 1:
                return next(iter(found.values()))
        return None

    def _option(self, word: str) -> bool:
        name, equals, value = word.partition("=")
        rule = self._find(name)
        if rule is None and "." in name:
            option, _, keys = name.partition(".")
            rule = self._find(option)
            if rule is not None:
                self._key(rule, option, keys, name, value if equals else self._next())
                return True
        if rule is None and (match := re.fullmatch(r"(-[A-Za-z]+)(\d+)", word)) and match[1] in self._rules:
            rule, name, equals, value = self._rules[match[1]], match[1], "=", match[2]
        if rule is None:
            return False
        off = name in rule.off or _plain(name) in map(_plain, rule.off)
        self._given.append(self._with_values(rule, name, value if equals else None, off))
        return True

    def _with_values(self, rule: Rule, name: str, value: str | None, off: bool) -> Given:
        if rule.arity == "switch":
            if value is None and self._rest and self._rest[0].lower() in ("true", "false"):
                value = self._rest.pop(0)
            off = off or (value is not None and BOOLEANS.get(value.lower()) is False)
            return Given(rule, name, [], off)
        if value is not None:
            return Given(rule, name, [value])
        if rule.arity == "optional":
            known = self._rest and self._rest[0].lower() in _ON_OFF
            return Given(rule, name, [self._rest.pop(0)] if known else [])
        if rule.arity == "two":
            return Given(rule, name, [self._next(), self._next()])
        if rule.arity == "list":
            values = []
            while self._rest and not self._is_option(self._rest[0]):
                values.append(self._rest.pop(0))
            return Given(rule, name, values)
        return Given(rule, name, [self._next()])

    def _next(self) -> str:
        """Return the next word as a value; empty if the next one is another option."""
        if not self._rest or (self._is_option(self._rest[0]) and self._find(self._rest[0].partition("=")[0])):
            return ""
        return self._rest.pop(0)

    def _key(self, rule: Rule, option: str, keys: str, name: str, value: str) -> None:
        """Read ``--option.key value``; all keys of an option are one object."""
        held = self._dotted.get(option)
        if held is None:
            held = self._dotted[option] = Given(rule, name)
            self._given.append(held)
        held.values += [value] if len(held.values) == 0 else [name, value]
        set_key(held.keys, keys, parsed_text(value, keys.endswith("+")), name)


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-")
