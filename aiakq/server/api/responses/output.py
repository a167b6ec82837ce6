"""The output items of a response, and the stream events that transmit them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from aiakq.server.api.output.events import ArgumentsPiece, CallEnded, CallStarted, ContentPiece, Event, ReasoningPiece
from aiakq.server.api.responses.items import encoded_reasoning
from aiakq.server.http.streaming import NamedEvent

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag="output_text"):
    """Text of the answer."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[Any] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """Text of the reasoning."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag="message"):
    """The answer message."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag="reasoning"):
    """The reasoning before the answer, without a summary."""

    id: str
    summary: list[Any] = msgspec.field(default_factory=list)
    content: list[ReasoningText]
    encrypted_content: str | None = None
    status: Status


class FunctionCallItem(msgspec.Struct, kw_only=True, tag="function_call"):
    """A tool call; ``arguments`` is a JSON object as text."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    status: Status


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class StreamEvent(NamedEvent, kw_only=True):
    """A stream event; events are numbered from 0."""

    sequence_number: int = 0


class ItemEvent(StreamEvent, kw_only=True):
    """Events response.output_item.added and .done."""

    output_index: int
    item: OutputItem


class PartEvent(StreamEvent, kw_only=True):
    """Events response.content_part.added and .done."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextDeltaEvent(StreamEvent, kw_only=True):
    """Events response.output_text.delta and response.reasoning_text.delta."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[Any] | UnsetType = UNSET


class TextDoneEvent(StreamEvent, kw_only=True):
    """Events response.output_text.done and response.reasoning_text.done."""

    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[Any] | UnsetType = UNSET


class ArgumentsDeltaEvent(StreamEvent, kw_only=True):
    """Event response.function_call_arguments.delta."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(StreamEvent, kw_only=True):
    """Event response.function_call_arguments.done."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class OutputItems:
    """Builds the items of one response from the events of its message.

    items  complete items.
    """

    def __init__(
        self,
        response_id: str,
        members: Mapping[str, tuple[str, str]],
        encrypts_reasoning: bool,
        logprobs_of: Callable[[Event], list[object]] = lambda event: [],
    ) -> None:
        """Create the items of a response.

        members      tool name used by the model -> (namespace, name).
        logprobs_of  returns the log-probabilities of each event; called in order.
        """
        self.items: list[OutputItem] = []
        self._response_id = response_id
        self._members = members
        self._encrypts_reasoning = encrypts_reasoning
        self._call: CallStarted | None = None
        self._kind: type[Event] | None = None  # of the open item: ReasoningPiece, ContentPiece or CallStarted
        self._texts: list[str] = []
        self._logprobs_of = logprobs_of
        self._logprobs: list[object] = []

    def add(self, events: Iterable[Event]) -> Iterator[StreamEvent]:
        """Return the stream events for more events of the message."""
        for event in events:
            logprobs = self._logprobs_of(event)
            if isinstance(event, CallEnded):
                yield from self.close("completed" if event.is_valid else "incomplete")
            elif isinstance(event, CallStarted):
                yield from self.close("completed")
                self._call = event
                yield from self._open(CallStarted)
            elif isinstance(event, ArgumentsPiece):
                self._texts.append(event.text)
                name = "response.function_call_arguments.delta"
                yield ArgumentsDeltaEvent(type=name, delta=event.text, **self._position)
            else:
                if self._kind is not type(event):
                    yield from self.close("completed")
                    yield from self._open(type(event))
                self._texts.append(event.text)
                self._logprobs += logprobs
                name = f"response.{self._part_name}.delta"
                yield TextDeltaEvent(type=name, delta=event.text, **self._position, **self._with(logprobs))

    def close(self, status: Status) -> Iterator[StreamEvent]:
        """Return the stream events that end the open item, if there is one."""
        if self._kind is None:
            return
        item, text = self._item(status), "".join(self._texts)
        if isinstance(item, FunctionCallItem):
            name = "response.function_call_arguments.done"
            yield ArgumentsDoneEvent(type=name, name=item.name, arguments=text, **self._position)
        else:
            name = f"response.{self._part_name}.done"
            yield TextDoneEvent(type=name, text=text, **self._position, **self._with(self._logprobs))
            yield PartEvent(type="response.content_part.done", part=item.content[0], **self._position)
        yield ItemEvent(type="response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._kind = None

    def _open(self, kind: type[Event]) -> Iterator[StreamEvent]:
        self._kind = kind
        self._texts, self._logprobs = [], []
        item = self._item("in_progress")
        yield ItemEvent(type="response.output_item.added", output_index=len(self.items), item=item)
        if not isinstance(item, FunctionCallItem):
            part = OutputText("") if kind is ContentPiece else ReasoningText("")
            yield PartEvent(type="response.content_part.added", part=part, **self._position)

    def _item(self, status: Status) -> OutputItem:
        """Return the open item in its current state. Its content is empty until it ends."""
        ended, text = status != "in_progress", "".join(self._texts)
        if self._kind is ReasoningPiece:
            encrypted = encoded_reasoning(text) if ended and self._encrypts_reasoning else None
            thoughts = [ReasoningText(text)] if ended else []
            return ReasoningItem(id=self._id, content=thoughts, encrypted_content=encrypted, status=status)
        if self._kind is ContentPiece:
            content = [OutputText(text, logprobs=self._logprobs)] if ended else []
            return OutputMessage(id=self._id, content=content, status=status)
        assert self._call is not None
        member = self._members.get(self._call.name)
        item = FunctionCallItem(id=self._id, call_id=self._call.id, name=self._call.name, arguments=text, status=status)
        if member is not None:
            item.namespace, item.name = member
        return item

    @property
    def _id(self) -> str:
        prefix = {ReasoningPiece: "rs", ContentPiece: "msg"}.get(self._kind or CallStarted, "fc")
        return f"{prefix}_{self._response_id}_{len(self.items)}"

    @property
    def _part_name(self) -> str:
        return "output_text" if self._kind is ContentPiece else "reasoning_text"

    @property
    def _position(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.items)}

    def _with(self, logprobs: list[object]) -> dict[str, Any]:
        """Return the field of events with log-probabilities, which those of reasoning do not have."""
        return {"logprobs": logprobs} if self._kind is ContentPiece else {}
