"""Patterns of layer names in configs: plain names, globs with ``*`` and ``?``, and regular expressions after ``re:``.

Configs come from strangers, and Python's own ``re`` can be made to run for ever by one line of text. So regular
expressions are matched here by following all ways at once: a piece takes all places where it may begin to all places
where it may then end, as bits of a number. The time is bounded by a budget that real patterns are far below.

Understood are literals, ``.``, classes, escapes, groups, ``|``, repeats, ``^``, ``$`` and lookahead. Back references,
lookbehind and flags are refused.

Standard library only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiakq.errors import AiakqError, error

MAX_PATTERN = 8192
MAX_NAME = 1024
_MAX_REPEAT = 1000
_MAX_DEPTH = 20
#: Pieces tried per name before a pattern is given up; real patterns need a few hundred.
_BUDGET = 200_000

_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdigit,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
}


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` means the module ``name``; a regular expression need only fit the beginning, as ``re.match``.

    Raises ``format_unsupported`` for a pattern that is too long, malformed or too costly.
    """
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).match(name)
    if "*" in pattern or "?" in pattern:
        return _compiled(glob_to_regex(pattern)).match(name)
    return pattern == name


def is_plain(pattern: str) -> bool:
    """Whether the pattern is a name and nothing else."""
    return not (pattern.startswith("re:") or "*" in pattern or "?" in pattern)


def glob_to_regex(pattern: str) -> str:
    """The regular expression (without ``re:``) that a glob or a plain name stands for."""
    pieces = {"*": ".*", "?": "."}
    return "^" + "".join(pieces.get(char) or re.escape(char) for char in pattern) + "$"


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> _Regex:
    return _Regex(text)


# A node takes a set of places to a set of places; bit p of a set is the place before character p.
_Node = Callable[["_Match", int], int]


@dataclass
class _Match:
    """One name being matched: the places of each of its characters, and what may still be spent."""

    text: str
    where: Mapping[str, int]
    budget: int = _BUDGET


@functools.lru_cache(maxsize=256)
def _where(text: str) -> Mapping[str, int]:
    """Each character of ``text`` with the set of its places."""
    found: dict[str, int] = {}
    for at, char in enumerate(text):
        found[char] = found.get(char, 0) | 1 << at
    return found


class _Regex:
    """A parsed regular expression. Raises ``format_unsupported`` for what it does not understand."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_PATTERN:
            raise self._refused(f"it has {len(text)} characters, at most {MAX_PATTERN} are read")
        self.at = 0
        self.root = self._alternatives(0)
        if self.at != len(text):
            raise self._refused("a bracket is closed that was never opened")

    def match(self, name: str) -> bool:
        """Whether the expression fits a beginning of ``name``."""
        if len(name) > MAX_NAME:
            raise error("format_unsupported", reason=f"a layer has a name of {len(name)} characters")
        return bool(self.root(_Match(name, _where(name)), 1))

    def _refused(self, reason: str) -> AiakqError:
        shown = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return error("format_unsupported", reason=f"the layer pattern {shown!r} is refused: {reason}")

    # --- parsing: recursive descent ----------------------------------------------------------------------------------

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _alternatives(self, depth: int) -> _Node:
        if depth > _MAX_DEPTH:
            raise self._refused("its brackets are nested too deeply")
        choices = [self._sequence(depth)]
        while self._peek() == "|":
            self.at += 1
            choices.append(self._sequence(depth))
        return choices[0] if len(choices) == 1 else self._node(_either(choices))

    def _sequence(self, depth: int) -> _Node:
        pieces: list[_Node] = []
        while self._peek() not in ("", "|", ")"):
            pieces.append(self._repeated(self._atom(depth)))
        return self._node(_one_after_another(pieces))

    def _atom(self, depth: int) -> _Node:
        char = self._peek()
        self.at += 1
        if char == "(":
            return self._group(depth)
        if char == "[":
            return _One("", self._class())
        if char == ".":
            return _One("", "\n".__ne__)
        if char == "^":
            return _start
        if char == "$":
            return _end
        if char in "*+?{":
            raise self._refused(f"there is nothing for its {char!r} to repeat")
        if char == "\\":
            return self._escape()
        return _One(char)

    def _escape(self) -> _Node:
        char = self._peek()
        self.at += 1
        if char in ("A", "Z"):
            return _start if char == "A" else _end
        if char == "b":
            return _boundary
        return _One("", self._escaped(char))

    def _escaped(self, char: str) -> Callable[[str], bool]:
        if char.lower() in _CLASSES:
            inside = _CLASSES[char.lower()]
            return inside if char.islower() else lambda found: not inside(found)
        if not char or char.isalnum():
            raise self._refused(f"it uses \\{char}")
        return char.__eq__

    def _group(self, depth: int) -> _Node:
        look: bool | None = None
        if self.text.startswith("?", self.at):
            for mark, value in (("?:", None), ("?=", True), ("?!", False)):
                if self.text.startswith(mark, self.at):
                    self.at += 2
                    look = value
                    break
            else:
                raise self._refused(f"it uses ({self.text[self.at : self.at + 2]}")
        inner = self._alternatives(depth + 1)
        if self._peek() != ")":
            raise self._refused("a bracket is not closed")
        self.at += 1
        return inner if look is None else self._node(_look(inner, look))

    def _class(self) -> Callable[[str], bool]:
        negated = self._peek() == "^"
        self.at += negated
        tests: list[Callable[[str], bool]] = []
        first = True
        while first or self._peek() != "]":
            first = False
            char = self._peek()
            self.at += 1
            if not char:
                raise self._refused("a character class is not closed")
            if char == "\\":
                tests.append(self._escaped(self._peek()))
                self.at += 1
            elif self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]", "\\"):
                tests.append(_between(char, self.text[self.at + 1]))
                self.at += 2
            else:
                tests.append(char.__eq__)
        self.at += 1
        return lambda found: any(test(found) for test in tests) is not negated

    def _repeated(self, atom: _Node) -> _Node:
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        char = self._peek()
        if char == "{":
            found = re.compile(r"\{(\d{1,4})(?:(,)(\d{1,4})?)?\}").match(self.text, self.at)
            if not found:
                raise self._refused("it holds a brace that is no repeat")
            least = int(found[1])
            most = None if found[2] and not found[3] else int(found[3] or found[1])
            if max(least, most or 0) > _MAX_REPEAT:
                raise self._refused(f"it repeats more than {_MAX_REPEAT} times")
            self.at = found.end()
        elif char in bounds and char:
            least, most = bounds[char]
            self.at += 1
        else:
            return atom
        if self._peek() == "?":  # lazy or greedy: the same names match
            self.at += 1
        if self._peek() and self._peek() in "*+?{":
            raise self._refused("one repeat follows another")
        return self._node(_repeat(atom, least, most))

    def _node(self, node: _Node) -> _Node:
        """``node`` that counts its work."""

        def counted(match: _Match, places: int) -> int:
            match.budget -= 1
            if match.budget < 0:
                raise self._refused("it needs too long to match")
            return node(match, places)

        return counted


# --- nodes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _One:
    """One character: a given one, or any that passes ``test``."""

    char: str
    test: Callable[[str], bool] | None = None

    def fitting(self, match: _Match) -> int:
        """The places of all characters that fit."""
        if self.test is None:
            return match.where.get(self.char, 0)
        found = 0
        for char, places in match.where.items():
            if self.test(char):
                found |= places
        return found

    def __call__(self, match: _Match, places: int) -> int:
        return (places & self.fitting(match)) << 1


def _between(low: str, high: str) -> Callable[[str], bool]:
    return lambda found: low <= found <= high


def _one_after_another(pieces: list[_Node]) -> _Node:
    def node(match: _Match, places: int) -> int:
        for piece in pieces:
            if not places:
                break
            places = piece(match, places)
        return places

    return node


def _either(choices: list[_Node]) -> _Node:
    def node(match: _Match, places: int) -> int:
        ends = 0
        for choice in choices:
            ends |= choice(match, places)
        return ends

    return node


def _repeat(piece: _Node, least: int, most: int | None) -> _Node:
    def node(match: _Match, places: int) -> int:
        for _ in range(least):
            places = piece(match, places)
        if most is None and isinstance(piece, _One):
            # Adding carries each place through the run of fitting characters that it begins in, to the run's end.
            fitting = piece.fitting(match)
            return ((fitting + (places & fitting)) ^ fitting) | places
        ends = places
        # A place that was reached before, with more repeats left, leads nowhere new.
        rounds = 0
        while places and (most is None or rounds < most - least):
            places = piece(match, places) & ~ends
            ends |= places
            rounds += 1
        return ends

    return node


def _look(inner: _Node, wanted: bool) -> _Node:
    def node(match: _Match, places: int) -> int:
        ends, rest = 0, places
        while rest:
            place = rest & -rest
            rest ^= place
            if bool(inner(match, place)) is wanted:
                ends |= place
        return ends

    return node


def _start(match: _Match, places: int) -> int:
    return places & 1


def _end(match: _Match, places: int) -> int:
    return places & (1 << len(match.text))


def _boundary(match: _Match, places: int) -> int:
    inside = [False, *map(_CLASSES["w"], match.text), False]
    return places & sum(1 << at for at in range(len(match.text) + 1) if inside[at] != inside[at + 1])
