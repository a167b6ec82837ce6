"""Grammar of a message whose answer may follow a thought: any text between marks, in which nothing is enforced.

Marks are matched as special tokens and also as text: a model may spell them out, and parsers of messages see only text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Format = dict[str, Any]

_ANY_TEXT: Format = {"type": "any_text"}
#: White space that may come before a thought.
SPACES = b" \n\r\t"
BLANKS: Format = {"type": "regex", "pattern": r"[ \n\r\t]{0,4}"}


class Rules(Protocol):
    """The rules of a grammar; see ``structural_tags``."""

    def of(self, part: Format) -> str: ...
    def rule(self, body: str, options: str = "") -> str: ...
    def free(self, part: Format) -> str: ...
    def parts(self, text: str) -> list[str]: ...
    def spelled(self, text: str) -> str: ...
    def special_except(self, marks: list[str]) -> str: ...
    def until(self, text: str, mark: str) -> list[str]: ...


def thought_rule(rules: Rules, part: Mapping[str, object]) -> str:
    """Return the name of the rule for a format object of ``formats.after_thought``."""
    return _Thought(rules, part).rule()


class ThoughtsInText:
    """Thoughts that open in the text between tags; nothing is enforced in them.

    text    terminal of the text.
    marks   the ``starts`` and ``ends`` of thoughts.
    """

    def __init__(self, rules: Rules, text: str, marks: Mapping[str, Any]) -> None:
        self._rules, self._marks = rules, marks
        self._closed, self._unclosed = _bodies(rules, marks["ends"])
        self.closed, self.unclosed = self.after(text)

    def after(self, text: str) -> tuple[str, str]:
        """Return the rules of ``text`` and a thought that is closed, and of ``text`` and one that is not."""
        opened = self._rules.rule(
            " | ".join(way for mark in self._marks["starts"] for way in self._rules.until(text, mark))
        )
        return self._rules.rule(f"{opened} {self._closed}"), self._rules.rule(f"{opened} {self._unclosed}")


def _bodies(rules: Rules, ends: list[str]) -> tuple[str, str]:
    """Return the rules of the rest of a thought up to one of ``ends``, and of one without an end."""
    others, text = rules.special_except(ends), rules.free(_ANY_TEXT)
    more = f"({text} {others})*" if others else ""
    closed = rules.rule(" | ".join(f"{more} {end}" for end in _closing(rules, text, ends)))
    return closed, rules.rule(f"{more} {text}")


def _closing(rules: Rules, text: str, ends: list[str]) -> list[str]:
    """Return what ends a thought, of which ``text`` is the last part."""
    marks = " | ".join(map(rules.spelled, ends))
    special = [rules.parts(mark) for mark in ends]
    tokens = [" ".join([text, *parts]) for parts in special if parts[0].startswith("<[")]
    return [*tokens, rules.rule(f"{text} ({marks})", "[lazy]")]


class _Thought:
    """Builds the rules.

    others  special tokens that may be in a thought: all but those that end it, or the message.
    first   the answer without a thought. White space may come before a thought only if it may begin this answer, or the
            model could no longer answer without a thought.
    """

    def __init__(self, rules: Rules, part: Mapping[str, Any]) -> None:
        self._rules, self._part = rules, part
        self._starts, self._ends = part["starts"], part["ends"]
        self._first = _not_beginning_with(part["answer"], self._starts)
        self._has_blanks = self._first != part["answer"]
        self._others = rules.special_except(self._ends)
        self._closed, self._unclosed = _bodies(rules, self._ends)

    def rule(self) -> str:
        answer: Format = self._part["answer"]
        behind = self._rules.of({"type": "sequence", "elements": [BLANKS, answer]})
        thoughts = [""] if self._part["is_open"] else self._opening()
        ways = [f"{opened} {self._closed} {behind}" for opened in thoughts]
        if self._part["may_end"]:
            ways += [f"{opened} {self._unclosed}" for opened in thoughts]
        if not self._part["is_open"]:
            ways += self._spelled_start(behind)
            ways.append(self._rules.of(self._first))
        return self._rules.rule(" | ".join(ways))

    def _opening(self) -> list[str]:
        """Return the special tokens that open a thought."""
        marks = [self._rules.parts(mark) for mark in self._starts]
        blanks = self._rules.free(BLANKS) if self._has_blanks else ""
        return [" ".join([blanks, *parts]) for parts in marks if parts[0].startswith("<[")]

    def _spelled_start(self, behind: str) -> list[str]:
        """Return thoughts that begin with a mark as text, which single tokens do not distinguish from other text."""
        blanks = r"[ \n\r\t]*" if self._has_blanks else ""
        pattern = rf"{blanks}({'|'.join(map(re.escape, self._starts))})(.|\n)*"
        begin = self._rules.free({"type": "regex", "pattern": pattern})
        ways = [f"{end} {behind}" for end in _closing(self._rules, begin, self._ends)]
        ways += [f"{begin} {self._others} {self._closed} {behind}"] if self._others else []
        if self._part["may_end"]:
            ways += [begin, *([f"{begin} {self._others} {self._unclosed}"] if self._others else [])]
        return ways


def _not_beginning_with(part: Format, marks: Sequence[str]) -> Format:
    """``part``, but where it begins with free text, none that begins with white space and one of ``marks``."""
    kind = part.get("type")
    if kind in ("any_text", "regex", "triggered_tags"):
        return part | {"not_beginning_with": list(marks)}
    if kind == "or":
        return part | {"elements": [_not_beginning_with(one, marks) for one in part["elements"]]}
    if kind == "sequence":
        first, *rest = part["elements"]
        return part | {"elements": [_not_beginning_with(first, marks), *rest]}
    return part
