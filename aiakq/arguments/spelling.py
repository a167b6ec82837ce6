"""Spellings of options on a command line, rewritten to the one that the parser knows. Standard library only.

Accepted besides an option's own flags, for every option of every command: underscores for dashes and one dash for two
(``--max_model_len``, ``-quant-type``), ``=`` after every flag (``-t=fp16``), a number or a listed value directly after
a short flag (``-tp2``), a value after a switch (``--enforce-eager False``), and a key of a JSON option after a dot
(``--hf-overrides.rope_theta 5``; ``--x.y+ a,b`` appends to a list).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiakq.arguments.argument import BOOLEANS, Argument, parse_number
from aiakq.arguments.unsupported_row import Unsupported
from aiakq.errors import AiakqError, error, short_repr


@dataclass(frozen=True)
class Spelled:
    """An option that a word names.

    row      its row.
    flag     the flag that the parser knows.
    off      whether the flag turns a switch off.
    several  whether all words up to the next option are entries of its list.
    """

    row: Argument | Unsupported
    flag: str
    off: bool = False
    several: bool = False

    @property
    def is_switch(self) -> bool:
        return self.row.switch if isinstance(self.row, Unsupported) else self.row.type is bool

    @property
    def is_list(self) -> bool:
        return self.row.many if isinstance(self.row, Unsupported) else self.row.type in (list, tuple)

    @property
    def bare(self) -> str | None:
        """The value of the option without one; None if it needs one."""
        return None if isinstance(self.row, Unsupported) else self.row.bare

    @property
    def name(self) -> str:
        """The row's main flag, the same for all spellings."""
        return self.row.flag


class Options:
    """The options of one command, found by any spelling.

    rows         its options and positional arguments.
    unsupported  options that it accepts or refuses without the parser.
    several      the names of list options that take several words, like ``--served-model-name a b``.
    """

    def __init__(
        self, rows: Iterable[Argument], unsupported: Iterable[Unsupported] = (), several: Container[str] = ()
    ) -> None:
        self._by_flag: dict[str, Spelled] = {}
        for row in rows:
            if row.positional:
                continue
            for flag in row.all_flags:
                self._by_flag.setdefault(flag, Spelled(row, flag, several=row.name in several))
            if row.type is bool:
                self._by_flag.setdefault(row.off_flag, Spelled(row, row.off_flag, off=True))
        for other in unsupported:
            for flag in other.flags:
                self._by_flag.setdefault(flag, Spelled(other, flag, several=other.many))
            if other.switch:
                off = f"--no-{other.flag.removeprefix('--')}"
                self._by_flag.setdefault(off, Spelled(other, off, off=True))
        self._by_plain: dict[str, list[Spelled]] = {}
        for flag, spelled in self._by_flag.items():
            self._by_plain.setdefault(_plain(flag), []).append(spelled)

    @property
    def takes_value(self) -> dict[str, bool]:
        """Every flag, and whether it takes a value."""
        return {flag: not spelled.is_switch for flag, spelled in self._by_flag.items()}

    def find(self, name: str) -> Spelled | None:
        """Return the option called ``name``; None if there is none. Raises ``usage`` if it could be several."""
        if name in self._by_flag:
            return self._by_flag[name]
        if name[:1] != "-":
            return None
        found = self._by_plain.get(_plain(name), [])
        if len({spelled.row.name for spelled in found}) > 1:
            flags = " or ".join(spelled.flag for spelled in found)
            raise error("usage", reason=f"{short_repr(name)} could be {flags}.", hint="Write one of them.")
        return found[0] if found else None

    def glued(self, word: str) -> tuple[Spelled, str] | None:
        """Return the option and the value in a word like ``-tp2``: a number, or one of the option's choices."""
        if word.startswith("--"):
            return None
        for flag in sorted((flag for flag in self._by_flag if word.startswith(flag)), key=len, reverse=True):
            spelled, value = self._by_flag[flag], word.removeprefix(flag)
            if not spelled.is_switch and value and _is_value(spelled.row, value):
                return spelled, value
        return None


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-")


def _is_value(row: Argument | Unsupported, text: str) -> bool:
    """Whether ``text`` directly after a flag is a value of the option, and not the rest of a misspelled name."""
    if isinstance(row, Unsupported):
        return text.isdecimal()
    if row.choices:
        return text in map(str, row.choices)
    if row.type is dict:
        return int in row.also and text.isdecimal()
    if row.type is int or row.automatic:
        return parse_number(text) is not None or (row.automatic and text == "auto") or _is_float(row, text)
    return _is_float(row, text)


def _is_float(row: Argument, text: str) -> bool:
    return row.type is float and text.replace(".", "", 1).isdecimal()


@dataclass
class Rewritten:
    """A rewritten command line.

    words        the words that the parser reads.
    unsupported  values of options of unsupported.py, by name.
    warnings     sentences about options that were given more than once.
    """

    words: list[str] = field(default_factory=list)
    unsupported: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def rewrite(
    words: Sequence[str],
    options: Options,
    *,
    has_model: bool = True,
    check_unknown: Callable[[str], None] = lambda word: None,
) -> Rewritten:
    """Rewrite the words of a command to flags and values in the parser's own spelling.

    has_model      whether something other than a word after a list option names the model; if not, the last of several
                   such words does, as in ``--served-model-name a b MODEL``.
    check_unknown  is called with each word that is neither an option nor its value; it may raise.
    Raises ``usage`` for a missing value, a value of a switch that is none, and keys of an option that has none.
    """
    return _Rewriter(words, options, has_model, check_unknown).result()


class _Rewriter:
    """Reads the words from left to right."""

    def __init__(
        self, words: Sequence[str], options: Options, has_model: bool, check_unknown: Callable[[str], None]
    ) -> None:
        self._rest = deque(words)
        self._options = options
        self._has_model = has_model
        self._check_unknown = check_unknown
        self._done = Rewritten()
        self._objects: dict[str, dict[str, object]] = {}  # by the main flag of options with dotted keys
        self._given: dict[str, list[object]] = {}  # values by main flag, to find repetitions

    def result(self) -> Rewritten:
        while self._rest:
            word = self._rest.popleft()
            if word == "--":
                self._done.words += self._finished_objects()
                self._done.words += [word, *self._rest]
                break
            if len(word) < 2 or not word.startswith("-") or not self._option(word):
                self._check_unknown(word)
                self._done.words.append(word)
        else:
            self._done.words += self._finished_objects()
        self._warn_about_repetitions()
        return self._done

    def _option(self, word: str) -> bool:
        """Read the option that ``word`` names, with its value; False if it names none."""
        name, equals, value = word.partition("=")
        spelled = self._options.find(name)
        if spelled is None and (glued := self._options.glued(word)):
            spelled, value = glued
            equals = "="
        if spelled is None and "." in name:
            option, _, keys = name.partition(".")
            spelled = self._options.find(option)
            if spelled is not None:
                self._key(spelled, name, keys, value if equals else self._value_of(spelled, name))
                return True
        if spelled is None:
            return False
        if spelled.is_switch:
            self._switch(spelled, value if equals else None)
        elif spelled.is_list and not equals:
            self._list(spelled, name)
        else:
            self._set(spelled, value if equals else self._value_of(spelled, name))
        return True

    def _value_of(self, spelled: Spelled, name: str) -> str | None:
        """Return the next word as the value of an option. Raises ``usage`` if it is an option itself."""
        without = spelled.bare
        following = self._options.find(self._rest[0].partition("=")[0]) if self._rest else None
        if self._rest and following is None and not (without is not None and self._rest[0].startswith("-")):
            return self._rest.popleft()
        if without is not None:
            return without
        if not self._rest:
            raise error("usage", reason=f"Option {name} requires an argument.", hint=_EMPTY.format(name=name))
        reason = f"{name} has no value: the next word is the option {self._rest[0].partition('=')[0]}."
        raise error("usage", reason=reason, hint=_EMPTY.format(name=name))

    def _switch(self, spelled: Spelled, value: str | None) -> None:
        if value is None and self._rest and self._rest[0].strip().lower() in BOOLEANS:
            value = self._rest.popleft()
        on = True if value is None else BOOLEANS.get(value.strip().lower())
        if on is None:
            raise error("usage", reason=f"{spelled.flag} is {short_repr(value)}, which is not true or false.", hint="")
        on = on is not spelled.off
        self._given.setdefault(spelled.name, []).append(on)
        if isinstance(spelled.row, Unsupported):
            self._done.unsupported[spelled.row.name] = on
        else:
            self._done.words.append(spelled.row.long_flag if on else spelled.row.off_flag)

    def _list(self, spelled: Spelled, name: str) -> None:
        """Read the entries of a list: one word, or all words up to the next option."""
        if not self._rest or self._starts_option(self._rest[0]):
            self._set(spelled, self._value_of(spelled, name))
            return
        values = [self._rest.popleft()]
        if not spelled.several:
            self._set(spelled, values[0])
            return
        while self._rest and not self._starts_option(self._rest[0]) and self._rest[0] != "--":
            values.append(self._rest.popleft())
        model = [] if self._has_model or len(values) < 2 else [values.pop()]
        for value in values:
            self._set(spelled, value)
        self._done.words += model

    def _starts_option(self, word: str) -> bool:
        return word.startswith("-")

    def _set(self, spelled: Spelled, value: str | None) -> None:
        row = spelled.row
        if isinstance(row, Unsupported):
            before = self._done.unsupported.get(row.name)
            several = row.many and before is not None
            self._done.unsupported[row.name] = f"{before} {value}" if several else value
        else:
            self._done.words += [spelled.flag, str(value)]
        if not spelled.is_list:
            self._given.setdefault(spelled.name, []).append(value)

    # --- keys after a dot ---------------------------------------------------------------------------------------------

    def _key(self, spelled: Spelled, name: str, keys: str, text: str | None) -> None:
        """Read ``--option.keys text``. Raises ``usage`` for an option that is no JSON object."""
        row = spelled.row
        if isinstance(row, Argument) and row.type is not dict:
            hint = f"Write: {spelled.flag} VALUE"
            raise error("usage", reason=f"{short_repr(name)}: {spelled.flag} has no keys, it is {row.kind}.", hint=hint)
        held = self._objects.setdefault(spelled.name, {})
        if repeated := set_key(held, keys, parsed_text(str(text), keys.endswith("+")), name):
            self._done.warnings.append(f"{spelled.flag}.{repeated} is given more than once; the last value is used.")

    def _finished_objects(self) -> list[str]:
        """Return the words of options with dotted keys, merged over an object that was given as a whole."""
        words: list[str] = []
        for name, keys in self._objects.items():
            spelled = self._options.find(name)
            assert spelled is not None
            whole = self._given.pop(name, [])
            if isinstance(spelled.row, Unsupported):
                self._done.unsupported[spelled.row.name] = keys
                continue
            if whole:
                keys = merged(_object(name, str(whole[-1])), keys)
            words += [spelled.flag, json.dumps(keys)]
        return words

    def _warn_about_repetitions(self) -> None:
        for name, values in self._given.items():
            if any(value != values[-1] for value in values):
                self._done.warnings.append(f"{name} is given more than once; the last value is used.")


_EMPTY = "Is a shell variable empty? A value that is spelled like an option is written {name}=VALUE."


def _object(name: str, text: str) -> dict[str, object]:
    """Parse an option's JSON object, to which keys are added. Raises ``usage``."""
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if not isinstance(whole, dict):
        reason = f"{name} is {short_repr(text)}, which is no JSON object that {name}.KEY could add to."
        raise error("usage", reason=reason, hint="Give one of the two.")
    return whole


def parsed_text(text: str, listed: bool = False) -> object:
    """Parse the value of a dotted key: JSON, True or False, a number like 4k, else a string.

    listed  whether it is a list joined with commas.
    """
    if listed and not text.lstrip().startswith("["):
        return [parsed_text(part) for part in text.split(",") if part]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        number = parse_number(text)
    return {"True": True, "False": False, "None": None}.get(text, text if number is None else number)


def set_key(held: dict[str, object], keys: str, value: object, name: str) -> str:
    """Set a key like ``a.b`` in nested objects; ``a.b+`` appends to a list.

    Returns the key if it had another value before, else an empty string. Raises ``usage`` for keys without a name.
    """
    *path, last = keys.removesuffix("+").split(".")
    if not all((*path, last)):
        raise error("usage", reason=f"{short_repr(name)} has a key without a name.", hint="Write: --option.key VALUE")
    for key in path:
        inner = held.setdefault(key, {})
        if not isinstance(inner, dict):
            raise error("usage", reason=f"{short_repr(name)}: {key} has a value already.", hint="Give one of the two.")
        held = inner
    before = held.get(last)
    if keys.endswith("+") and isinstance(before, list):
        held[last] = [*before, *value] if isinstance(value, list) else [*before, value]
        return ""
    held[last] = value
    return keys.removesuffix("+") if before is not None and before != value else ""


def merged(whole: Mapping[str, object], keys: Mapping[str, object]) -> dict[str, Any]:
    """Return ``whole`` with ``keys`` set, objects key by key."""
    result = dict(whole)
    for key, value in keys.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def plain_keys(
    given: Mapping[str, object], is_object: Callable[[str], bool], twice: Callable[[str], AiakqError] | None = None
) -> dict[str, object]:
    """Return a mapping of option names to values with names in the form of keywords: underscores, no leading dashes.

    A name like ``hf-overrides.rope_theta`` sets a key of the option before the dot, over an object that is given too.
    is_object  whether the option of this name takes a JSON object.
    twice      the error for a name that occurs twice; ``usage`` if None.
    """
    twice = twice or _twice
    values: dict[str, object] = {}
    dotted: dict[str, dict[str, object]] = {}
    for spelled, value in given.items():
        name, dot, keys = spelled.lstrip("-").partition(".")
        name = name.replace("-", "_")
        if dot and is_object(name):
            if repeated := set_key(dotted.setdefault(name, {}), keys, value, spelled):
                raise twice(f"{name}.{repeated}")
        elif (name := name + dot + keys) in values:
            raise twice(name)
        else:
            values[name] = value
    for name, added in dotted.items():
        whole = values.get(name)
        if isinstance(whole, str):
            whole = _object(name, whole)
        values[name] = merged(whole if isinstance(whole, dict) else {}, added)
    return values


def _twice(name: str) -> AiakqError:
    return error("usage", reason=f"{short_repr(name)} is given twice.", hint="Give it once.")
