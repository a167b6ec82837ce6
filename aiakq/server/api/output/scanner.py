"""TextScanner: generated text that arrives in pieces, for parsers that are generators.

A parser reads through ``yield from``; it is suspended where it needs more text. How the text was cut makes no
difference to what it reads. What has been read is dropped: the scanner holds no more than the beginning of a mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
#: A part of a parser. It is resumed when there is more text, or none any more.
Parsing = Generator[None, None, Result]
#: Takes pieces of text.
Emit = Callable[[str], None]

_SPACES = re.compile(r"[ \t\r\n]+")


class Marks:
    """Texts to look for. None may contain another one."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._longest = max(map(len, texts))

    def search(self, text: str, position: int) -> re.Match[str] | None:
        """The first mark in ``text`` from ``position`` on."""
        return self._pattern.search(text, position)

    def held(self, text: str, position: int) -> int:
        """Where the end of ``text`` begins that may be the beginning of a mark; its length if there is none."""
        for start in range(max(position, len(text) - self._longest + 1), len(text)):
            if any(mark.startswith(text[start:]) for mark in self.texts):
                return start
        return len(text)


class TextScanner:
    """Text in pieces.

    ended      whether no more text will come.
    num_bytes  of UTF-8 that have been read.
    """

    def __init__(self) -> None:
        self.ended = False
        self.num_bytes = 0
        self._text = ""
        self._position = 0
        self._record: list[str] | None = None

    @property
    def is_exhausted(self) -> bool:
        """Whether all text there will ever be has been read."""
        return self.ended and self._position == len(self._text)

    def feed(self, text: str, ended: bool = False) -> None:
        """Add text."""
        self._text = self._text[self._position :] + text
        self._position = 0
        self.ended = ended

    def record(self, text: str = "") -> None:
        """Remember what is read from now on, behind ``text``, for ``recorded``."""
        self._record = [text]

    def recorded(self) -> str:
        """Return the text that was read since ``record``."""
        record, self._record = self._record, None
        return "".join(record or ())

    def peek(self) -> Parsing[str]:
        """The next character, which is not read; "" at the end."""
        while self._position == len(self._text) and not self.ended:
            yield
        return self._text[self._position : self._position + 1]

    def take(self) -> str:
        """Read the next character, which ``peek`` has returned."""
        return self._take(self._position + 1)

    def span(self, pattern: re.Pattern[str]) -> str:
        """Read what is there now of a run of characters that ``pattern``, a repeated character class, matches."""
        match = pattern.match(self._text, self._position)
        return self._take(match.end()) if match else ""

    def skip_spaces(self) -> Parsing[str]:
        """Read white space up to another character; returns it."""
        spaces = [self.span(_SPACES)]
        while (yield from self.peek()) in (" ", "\t", "\r", "\n"):
            spaces.append(self.span(_SPACES))
        return "".join(spaces)

    def match(self, *texts: str) -> Parsing[str]:
        """Read the longest of ``texts`` the text goes on with; "" if there is none."""
        ordered = sorted(texts, key=len, reverse=True)
        while True:
            rest = self._text[self._position : self._position + len(ordered[0])] if ordered else ""
            matched = next((each for each in ordered if rest.startswith(each)), "")
            longer = [each for each in ordered if len(each) > max(len(matched), len(rest)) and each.startswith(rest)]
            if self.ended or not longer:
                self._take(self._position + len(matched))
                return matched
            yield

    def skip(self, *texts: str) -> Parsing[str]:
        """Read as ``match`` does, at the end also the beginning of one of ``texts``: it was cut off."""
        matched = yield from self.match(*texts)
        rest = self._text[self._position :] if self.ended and not matched else ""
        if rest and any(each.startswith(rest) for each in texts):
            self._take(len(self._text))
        return matched

    def until(self, marks: Marks, emit: Emit, read_mark: bool = True, keep_rest: bool = True) -> Parsing[str]:
        """Emit the text up to the first of ``marks``, which is read, too, and returned; "" at the end.

        Without ``keep_rest``, the beginning of a mark at the end is not emitted: it was cut off.
        """
        while True:
            match = marks.search(self._text, self._position)
            keep = self.ended and keep_rest
            end = match.start() if match else len(self._text) if keep else marks.held(self._text, self._position)
            if end > self._position:
                emit(self._take(end))
            if match:
                if read_mark:
                    self._take(match.end())
                return match[0]
            if self.ended:
                self._take(len(self._text))
                return ""
            yield

    def _take(self, end: int) -> str:
        text, self._position = self._text[self._position : end], end
        self.num_bytes += len(text.encode("utf-8", "surrogatepass"))
        if self._record is not None:
            self._record.append(text)
        return text
