"""Parser events of a generated message, in order: reasoning, content, and tool calls with pieces of arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

_SPACES = " \t\r\n"


@dataclass(frozen=True)
class ContentPiece:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningPiece:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class CallStarted:
    """The start of a call of the tool ``name``; calls are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """A piece of the arguments of a call; concatenated, the pieces are JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """The end of a call."""

    index: int


Event = ContentPiece | ReasoningPiece | CallStarted | ArgumentsPiece | CallEnded


class EventSink:
    """Collects the events of one message.

    White space around reasoning and calls is dropped; all other text is kept unchanged.

    call_id      returns the id of a call for its number.
    max_calls    maximum number of calls (1 with ``parallel_tool_calls: false``); further calls are dropped.
    num_calls    number of calls so far.
    reasoning_bytes  UTF-8 length of the text up to the end of the reasoning; None if absent or not ended.
    """

    def __init__(self, call_id: Callable[[int], str], max_calls: int | None = None) -> None:
        self.num_calls = 0
        self.has_reasoning = False
        self.reasoning_bytes: int | None = None
        self._call_id = call_id
        self._max_calls = max_calls
        self._events: list[Event] = []
        self._dropped = False  # the current call is dropped
        self._has_arguments = False
        self._content = _Trimmed(lambda text: self._add(ContentPiece(text)))
        self._reasoning = _Trimmed(lambda text: self._add(ReasoningPiece(text)), at_start=True)

    def content(self, text: str) -> None:
        """Add text of the answer."""
        self._content.add(text)

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
        self._content.trim()
        self._has_arguments = False
        self._dropped = self._max_calls is not None and self.num_calls >= self._max_calls
        if not self._dropped:
            self._add(CallStarted(self.num_calls, id or self._call_id(self.num_calls), name))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the current call."""
        if text and not self._dropped:
            self._has_arguments = True
            self._add(ArgumentsPiece(self.num_calls - 1, text))

    def end_call(self) -> None:
        """End the current call. If no arguments were added, they are ``{}``."""
        if not self._dropped:
            if not self._has_arguments:
                self.arguments("{}")
            self._add(CallEnded(self.num_calls - 1))
        self._content.trim()

    def finish(self) -> None:
        """End the message."""
        if not self.num_calls:
            self._content.flush()

    def take(self) -> list[Event]:
        """Remove and return the events collected so far."""
        events, self._events = self._events, []
        return events

    def _add(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if (
            isinstance(event, ContentPiece | ReasoningPiece | ArgumentsPiece)
            and isinstance(last, type(event))
            and getattr(last, "index", 0) == getattr(event, "index", 0)
        ):
            self._events[-1] = replace(last, text=last.text + event.text)
        else:
            self._events.append(event)


class _Trimmed:
    """Passes text on, but holds back trailing white space, which may have to be dropped."""

    def __init__(self, emit: Callable[[str], None], at_start: bool = False) -> None:
        self._emit = emit
        self._at_start = at_start  # drop white space until there is other text
        self._spaces: list[str] = []

    def add(self, text: str) -> None:
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
