"""Parser events of a generated message, in order: reasoning, content, and tool calls with pieces of arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from aiakq.server.api.output.json_values import decoded
from aiakq.server.api.output.scanner import TextScanner

_SPACES = " \t\r\n"


class ContentPiece(msgspec.Struct, frozen=True):
    """Text of the answer."""

    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    """Text of the reasoning before the answer."""

    text: str


class CallStarted(msgspec.Struct, frozen=True):
    """The start of a call of the tool ``name``; calls are numbered from 0."""

    index: int
    id: str
    name: str


class ArgumentsPiece(msgspec.Struct, frozen=True):
    """A piece of the arguments of a call; concatenated, the pieces are a JSON object if the call is valid."""

    index: int
    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """The end of a call; ``is_valid``: its arguments are a JSON object."""

    index: int
    is_valid: bool = True


Event = ContentPiece | ReasoningPiece | CallStarted | ArgumentsPiece | CallEnded


class NoCall(Exception):
    """Raised by a sink if the text that a parser took for a call is none. The parser starts afresh behind it."""


@dataclass
class _Call:
    """A call that has not ended.

    index      its number; None if it is dropped.
    """

    name: str
    id: str
    index: int | None
    arguments: list[str] = field(default_factory=list)


class EventSink:
    """Collects the events of one message.

    White space around reasoning and calls is dropped; all other text is kept unchanged.

    call_id      returns the id of a call for its number.
    max_calls    maximum number of calls (1 with ``parallel_tool_calls: false``); further calls are dropped.
    text         the scanner that the parsers read.
    only_calls   whether other text than reasoning and calls is dropped: the beginning of a forced call.
    holds_calls  whether a call is passed on only when it has ended and is valid, else as text.
    num_calls    number of calls so far.
    reasoning_bytes  UTF-8 length of the text up to the end of the reasoning; None if absent or not ended.
    """

    def __init__(
        self,
        call_id: Callable[[int], str],
        max_calls: int | None = None,
        text: TextScanner | None = None,
        only_calls: bool = False,
    ) -> None:
        self.num_calls = 0
        self.has_reasoning = False
        self.reasoning_bytes: int | None = None
        self.holds_calls = False
        self._text = text or TextScanner()
        self._call_id = call_id
        self._max_calls = max_calls
        self._only_calls = only_calls
        self._events: list[Event] = []
        self._kind: type[ContentPiece | ReasoningPiece] | int = ContentPiece  # of the open event; a number: arguments
        self._pieces: list[str] = []  # of the open event
        self._call: _Call | None = None
        self._before_call = ""
        self._num_invalid = 0
        self._content = _Trimmed(partial(self._add, ContentPiece))
        self._reasoning = _Trimmed(partial(self._add, ReasoningPiece), at_start=True)

    @property
    def has_valid_calls(self) -> bool:
        """Whether there are calls, and all of them have ended and are valid."""
        is_open = self._call is not None and self._call.index is not None
        return self.num_calls > 0 and not self._num_invalid and not is_open

    def content(self, text: str) -> None:
        """Add text of the answer."""
        if text:
            self._before_call = ""
            self._text.begin_part()
            if not self._only_calls:
                self._content.add(text)

    def before_call(self, text: str) -> None:
        """Add text of the answer if a call follows; if none does, ``content`` gets it as a part of all text read."""
        self._before_call = text

    def reasoning(self, text: str) -> None:
        """Add reasoning. The parser calls ``end_reasoning`` when it ends."""
        self.has_reasoning = True
        self._reasoning.add(text)

    def end_reasoning(self, num_bytes: int) -> None:
        """End the reasoning after ``num_bytes`` of text."""
        self.reasoning_bytes = num_bytes
        self._reasoning.trim()
        self._content.trim()

    def start_call(self, name: str, id: str = "") -> None:
        """Start a call; ``id`` is the one that the model wrote, if any."""
        self._call = _Call(name, id, None)
        if not self.holds_calls:
            self._pass_on(self._call)

    def arguments(self, text: str) -> None:
        """Add to the arguments of the current call."""
        if text and self._call is not None:
            self._call.arguments.append(text)
            if self._call.index is not None:
                self._add(self._call.index, text)

    def end_call(self, is_complete: bool = True) -> None:
        """End the current call. If no arguments were added, they are ``{}``.

        is_complete  whether the text has everything that belongs to a call of the format.

        Raises ``NoCall`` if the call is held back and is not valid.
        """
        call, self._call = self._call, None
        if call is None:
            return
        is_valid = is_complete and isinstance(decoded("".join(call.arguments) or "{}", strict=True), dict)
        if self.holds_calls:
            if not is_valid:
                raise NoCall
            self._pass_on(call)
            if call.index is not None:
                self._add(call.index, "".join(call.arguments))
        if call.index is not None:
            if not call.arguments:
                self._add(call.index, "{}")
            self._num_invalid += not is_valid
            self._end_piece()
            self._events.append(CallEnded(call.index, is_valid))
        self._content.trim()
        self._text.begin_part()

    @property
    def has_open_call(self) -> bool:
        """Whether a call has not ended."""
        return self._call is not None

    def drop_call(self) -> None:
        """Drop a call that is held back and has not ended."""
        self._call = None

    def end_text(self) -> None:
        """The text has ended: a call that is held back has no end, and is text."""
        if self.holds_calls and self._call is not None:
            self._call = None
            self.content(self._text.part())

    def finish(self) -> None:
        """End the message."""
        if not self.num_calls:
            self._content.flush()

    def take(self) -> list[Event]:
        """Remove and return the events collected so far."""
        self._end_piece()
        events, self._events = self._events, []
        return events

    def _pass_on(self, call: _Call) -> None:
        """Add the start of ``call``, unless there are too many calls."""
        if self._before_call and not self._only_calls:
            self._content.add(self._before_call)
        self._before_call = ""
        self._content.trim()
        if self._max_calls is None or self.num_calls < self._max_calls:
            call.index = self.num_calls
            self._end_piece()
            self._events.append(CallStarted(call.index, call.id or self._call_id(call.index), call.name))
            self.num_calls += 1

    def _add(self, kind: type[ContentPiece | ReasoningPiece] | int, text: str) -> None:
        """Add text to the last event, or start one; ``kind`` is the number of a call for arguments."""
        if self._kind != kind:
            self._end_piece()
            self._kind = kind
        if text:
            self._pieces.append(text)

    def _end_piece(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            kind = self._kind
            self._events.append(ArgumentsPiece(kind, text) if isinstance(kind, int) else kind(text))
            self._pieces.clear()


class _Trimmed:
    """Passes text on, but holds back trailing white space, which may have to be dropped."""

    def __init__(self, emit: Callable[[str], None], at_start: bool = False) -> None:
        self._emit = emit
        self._at_start = at_start  # drop white space until there is other text
        self._spaces: list[str] = []

    def add(self, text: str) -> None:
        if not self._at_start and not self._spaces and text[-1:] not in _SPACES:  # most text
            self._emit(text)
            return
        body = text.rstrip(_SPACES)
        spaces = text[len(body) :]
        if body:
            if self._at_start:
                body, self._at_start = body.lstrip(_SPACES), False
            self._emit("".join([*self._spaces, body]))
            self._spaces.clear()
        if spaces and not self._at_start:
            self._spaces.append(spaces)

    def trim(self) -> None:
        """Drop pending white space and white space that follows."""
        self._spaces.clear()
        self._at_start = True

    def flush(self) -> None:
        if self._spaces:
            self._emit("".join(self._spaces))
        self._spaces.clear()
