"""TextScanner: text that arrives in pieces, for parsers written as generators.

A parser reads with ``yield from`` and is suspended when it needs more text. What it reads does not depend on how the
text is split into pieces. Text that has been read is dropped: the scanner buffers at most a partial mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

Result = TypeVar("Result")
#: A generator of a parser, resumed when more text arrives or the text ends.
Parsing = Generator[None, None, Result]
#: Receives pieces of text.
Emit = Callable[[str], None]

#: Maximum number of characters that are read again.
MAX_READ_AGAIN = 1 << 17
_SPACES = re.compile(r"[ \t\r\n]+")


def num_bytes_of(text: str) -> int:
    """Return the length of ``text`` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class Marks:
    """Strings to search for, none of which may contain another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._longest = max(map(len, texts))
        beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        longest_first = sorted(map(re.escape, beginnings), key=len, reverse=True)
        self._partial = re.compile(rf"(?:{'|'.join(longest_first)})\Z") if longest_first else None
        self.beginning = _beginning_of(*texts)

    def search(self, text: str, position: int) -> re.Match[str] | None:
        """Return the first mark in ``text`` from ``position`` on."""
        return self._pattern.search(text, position)

    def partial_start(self, text: str, position: int) -> int:
        """Return the start of a suffix of ``text`` that may be a partial mark; its length if there is none."""
        if self._partial is None:
            return len(text)
        match = self._partial.search(text, max(position, len(text) - self._longest + 1))
        return match.start() if match else len(text)

    def may_begin_in(self, text: str, position: int = 0) -> bool:
        """Whether a mark may begin in ``text`` from ``position`` on."""
        return self.beginning.search(text, position) is not None


@lru_cache
def _beginning_of(*texts: str) -> re.Pattern[str]:
    """A pattern of the characters with which ``texts`` begin."""
    return re.compile("|".join(sorted({re.escape(text[0]) for text in texts})))


@lru_cache
def marks_of(*texts: str) -> Marks:
    """Return ``Marks(*texts)``, made once."""
    return Marks(*texts)


#: A mark that no text contains.
_NOTHING = Marks("\ud800")


class MarkFound(Exception):
    """Raised where text of a message has a watched mark, which has been read."""

    def __init__(self, mark: str) -> None:
        super().__init__(mark)
        self.mark = mark


class TextScanner:
    """Text in pieces.

    ended      whether no more text will come.
    num_bytes  number of UTF-8 bytes read.
    num_chars  number of characters read.
    sought     marks up to which text is read, while more text is awaited; else None.
    """

    def __init__(self) -> None:
        self.ended = False
        self.num_bytes = 0
        self.num_chars = 0
        self.sought: Marks | None = None
        self._text = ""
        self._position = 0
        self._record: list[str] | None = None
        self._part: list[str] | None = None
        self._may_read_again = MAX_READ_AGAIN
        self._watched: tuple[Marks, Emit] | None = None

    @property
    def is_exhausted(self) -> bool:
        """Whether the text has ended and all of it has been read."""
        return self.ended and self._position == len(self._text)

    def feed(self, text: str, ended: bool = False) -> None:
        """Add text."""
        self._text = self._text[self._position :] + text
        self._position = 0
        self.ended = ended

    def watch(self, marks: Marks | None, emit: Emit) -> None:
        """Look for ``marks``, if any, in text that ``emit`` gets. Where one is, ``until`` raises ``MarkFound``."""
        self._watched = None if marks is None else (marks, emit)

    def record(self, text: str = "") -> None:
        """Record what is read from now on, after ``text``, for ``recorded``. A new part begins with ``text``."""
        self._record = [text]
        self.begin_part(text)

    def keep_parts(self) -> None:
        """Keep the text of the current part from now on, for ``part``."""
        self._part = []

    def begin_part(self, text: str = "") -> None:
        """Begin a new part of the text, which starts with ``text``."""
        if self._part is not None:
            self._part = [text]

    def read_again(self, text: str, keep: int) -> str:
        """Put back ``text``, the end of what was read, from position ``keep`` on, and return the rest of it.

        Nothing is put back if that would be too much for one scanner.
        """
        again = text[keep:]
        if not 0 < len(again) <= self._may_read_again:
            return text
        self._may_read_again -= len(again)
        if self._text.endswith(again, 0, self._position):
            self._position -= len(again)
        else:  # it arrived in several pieces
            self._text, self._position = again + self._text[self._position :], 0
        self.num_bytes -= num_bytes_of(again)
        self.num_chars -= len(again)
        return text[:keep]

    def part(self) -> str:
        """Return the text of the current part, as far as it has been read."""
        return "".join(self._part or ())

    def recorded(self) -> str:
        """Return the text that was read since ``record``."""
        record, self._record = self._record, None
        return "".join(record or ())

    def peek(self) -> Parsing[str]:
        """Return the next character without reading it; "" at the end."""
        while self._position == len(self._text) and not self.ended:
            yield
        return self._text[self._position : self._position + 1]

    def take(self) -> str:
        """Read the next character, which ``peek`` must have returned."""
        return self._take(self._position + 1)

    def span(self, pattern: re.Pattern[str]) -> str:
        """Read the available part of a run of characters that match ``pattern``, a repeated character class."""
        match = pattern.match(self._text, self._position)
        return self._take(match.end()) if match else ""

    def skip_spaces(self) -> Parsing[str]:
        """Read and return white space up to the next other character."""
        spaces = [self.span(_SPACES)]
        while (yield from self.peek()) in (" ", "\t", "\r", "\n"):
            spaces.append(self.span(_SPACES))
        return "".join(spaces)

    def is_before(self, mark: str) -> Parsing[bool]:
        """Return whether ``mark`` comes next, without reading it."""
        while True:
            rest = self._text[self._position : self._position + len(mark)]
            if rest == mark or self.ended or not mark.startswith(rest):
                return rest == mark
            yield

    def match(self, *texts: str) -> Parsing[str]:
        """Read and return the longest of ``texts`` that matches here; "" if none does."""
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
        """Read like ``match``; at the end of the text also a truncated one of ``texts``."""
        matched = yield from self.match(*texts)
        rest = self._text[self._position :] if self.ended and not matched else ""
        if rest and any(each.startswith(rest) for each in texts):
            self._take(len(self._text))
        return matched

    def until(self, marks: Marks, emit: Emit, read_mark: bool = True, keep_rest: bool = True) -> Parsing[str]:
        """Emit the text up to the first of ``marks``, and read and return that mark; "" at the end.

        keep_rest  whether to emit a truncated mark at the end of the text.
        """
        watched = self._watched[0] if self._watched is not None and self._watched[1] == emit else None
        beginning = marks.beginning if watched is None else _beginning_of(*marks.texts, *watched.texts)
        while True:
            match, end = None, len(self._text)
            if beginning.search(self._text, self._position):  # no mark begins in most text
                match = marks.search(self._text, self._position)
                if match:
                    end = match.start()
                elif not (self.ended and keep_rest):
                    end = marks.partial_start(self._text, self._position)
                if watched is not None:
                    end = self._up_to(watched, end, emit)
            if end > self._position:
                emit(self._take(end))
            if match and match.start() == end:
                if read_mark:
                    self._take(match.end())
                return match[0]
            if self.ended:
                self._take(len(self._text))
                return ""
            self.sought = marks
            yield
            self.sought = None

    def _up_to(self, watched: Marks, end: int, emit: Emit) -> int:
        """Return the position up to which no watched mark can be, at most ``end``. Raises ``MarkFound``."""
        match = watched.search(self._text, self._position)
        if match is not None and match.start() <= end:
            if match.start() > self._position:
                emit(self._take(match.start()))
            self._take(match.end())
            raise MarkFound(match[0])
        return end if self.ended else min(end, watched.partial_start(self._text, self._position))

    def rest(self, emit: Emit) -> Parsing[None]:
        """Emit all text up to the end."""
        yield from self.until(_NOTHING, emit)

    def _take(self, end: int) -> str:
        text, self._position = self._text[self._position : end], end
        self.num_bytes += len(text) if text.isascii() else num_bytes_of(text)
        self.num_chars += len(text)
        if self._record is not None:
            self._record.append(text)
        if self._part is not None:
            self._part.append(text)
        return text
