"""Messages of chat responses and their stream deltas, built from parser events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from aiakq.server.api.output.events import ArgumentsPiece, CallStarted, ContentPiece, Event, ReasoningPiece


class FunctionCall(msgspec.Struct):
    """The called function. ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ResponseMessage(msgspec.Struct):
    """A generated message.

    ``content`` is null if there are only calls or only reasoning. ``reasoning_content`` and ``reasoning`` are the same
    text, null without a reasoning parser. ``tool_calls`` is absent if there are none.
    """

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class FunctionCallDelta(msgspec.Struct):
    """Increment of a function call: first the name, then pieces of the arguments' JSON."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct):
    """Increment of tool call number ``index``; the first one has the id, type and name."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, kw_only=True):
    """Increment of a message; the first chunk has the ``role``."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


def message_of(role: str, events: Iterable[Event], echoed: str = "") -> ResponseMessage:
    """Return the complete message; ``echoed`` is prepended to its content."""
    content, reasoning = [echoed], []
    calls: list[tuple[CallStarted, list[str]]] = []
    for event in events:
        if isinstance(event, ContentPiece):
            content.append(event.text)
        elif isinstance(event, ReasoningPiece):
            reasoning.append(event.text)
        elif isinstance(event, CallStarted):
            calls.append((event, []))
        elif isinstance(event, ArgumentsPiece):
            calls[event.index][1].append(event.text)
    message = ResponseMessage(role, "".join(content))
    if reasoning:
        message.reasoning_content = message.reasoning = "".join(reasoning)
    if calls:
        message.tool_calls = [
            ToolCall(id=call.id, function=FunctionCall(call.name, "".join(arguments))) for call, arguments in calls
        ]
    if (reasoning or calls) and not message.content:
        message.content = None
    return message


def deltas_of(events: Iterable[Event]) -> Iterator[MessageDelta]:
    """Return the deltas of the message for new events."""
    for event in events:
        if isinstance(event, ContentPiece):
            yield MessageDelta(content=event.text)
        elif isinstance(event, ReasoningPiece):
            yield MessageDelta(reasoning_content=event.text, reasoning=event.text)
        elif isinstance(event, CallStarted):
            function = FunctionCallDelta(event.name)
            yield MessageDelta(tool_calls=[ToolCallDelta(event.index, function, event.id, "function")])
        elif isinstance(event, ArgumentsPiece):
            yield MessageDelta(tool_calls=[ToolCallDelta(event.index, FunctionCallDelta(arguments=event.text))])
