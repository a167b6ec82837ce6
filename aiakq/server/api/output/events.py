"""What a generated message consists of, in order: reasoning, content, and calls of tools with pieces of arguments."""

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
    """A call of the tool ``name``; calls are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """A part of the arguments of a call. The parts joined are its JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """The arguments of a call are complete."""

    index: int


Event = ContentPiece | ReasoningPiece | CallStarted | ArgumentsPiece | CallEnded


class EventSink:
    """Collects the events of one message.

    White space around reasoning and beside calls is dropped; all other text is kept as it is.

    call_id      the id of a call, from its number.
    max_calls    calls beyond are dropped, with ``parallel_tool_calls: false``.
    num_calls    started so far.
    reasoning_bytes  of the text up to the end of the reasoning; None if there is none or it has not ended.
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
        """The reasoning ends; so much text has been read."""
        self.reasoning_bytes = num_bytes
        self._reasoning.trim()
        self._content.trim()

    def start_call(self, name: str, id: str = "") -> None:
        """A call begins; ``id`` if the model wrote one."""
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
        """The current call is complete. Without arguments they are ``{}``."""
        if not self._dropped:
            if not self._has_arguments:
                self.arguments("{}")
            self._add(CallEnded(self.num_calls - 1))
        self._content.trim()

    def finish(self) -> None:
        """There is no more text."""
        if not self.num_calls:
            self._content.flush()

    def take(self) -> list[Event]:
        """The events since the last call."""
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
    """Passes text on, but for white space at its end, which may have to be dropped."""

    def __init__(self, emit: Callable[[str], None], at_start: bool = False) -> None:
        self._emit = emit
        self._at_start = at_start  # white space is dropped until there is something else
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
        """Drop the white space here, before and after."""
        self._spaces.clear()
        self._at_start = True

    def flush(self) -> None:
        if self._spaces:
            self._emit("".join(self._spaces))
        self._spaces.clear()
