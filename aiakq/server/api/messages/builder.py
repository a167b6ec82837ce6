"""Builds the responses of /v1/messages, complete and as stream events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from aiakq.errors import AiakqError
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.api.chat import ChatResponseBuilder
from aiakq.server.api.chat_parsing import events_of
from aiakq.server.api.messages.errors import MessagesError
from aiakq.server.api.messages.output import Block, ContentBlocks
from aiakq.server.api.messages.request import MessagesRequest
from aiakq.server.api.service import Service
from aiakq.server.http.streaming import NamedEvent
from aiakq.server.process.request_stream import RequestDeltas

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Token counts. ``input_tokens`` excludes prompt tokens found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(msgspec.Struct, kw_only=True):
    """The complete response."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageStartEvent(NamedEvent, kw_only=True):
    """The start of a response."""

    type: Literal["message_start"] = "message_start"
    message: MessagesResponse


class PingEvent(NamedEvent, kw_only=True):
    """A keep-alive event."""

    type: Literal["ping"] = "ping"


class StopDelta(msgspec.Struct):
    """Why the response ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDeltaEvent(NamedEvent, kw_only=True):
    """The end of a response, with its token counts."""

    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: MessagesUsage


class MessageStopEvent(NamedEvent, kw_only=True):
    """The last event of a stream."""

    type: Literal["message_stop"] = "message_stop"


class MessagesBuilder(ChatResponseBuilder):
    """Builds responses of /v1/messages from the events of chat."""

    id_prefix = "msg_"
    end_of_stream = b""

    def __init__(self, service: Service, request: MessagesRequest, *arguments: object) -> None:
        super().__init__(service, request.chat, *arguments)
        self.content = ContentBlocks()
        self._has_started = False
        self._stop = StopDelta(None, None)

    def response(self, outputs: Sequence[Delta]) -> msgspec.Struct:
        for _ in self._add(outputs[0], ended=True):
            pass
        return self._message()

    def chunks(self, deltas: RequestDeltas) -> Sequence[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        for _, delta in deltas:
            content = list(self._add(delta, ended=delta.finish_reason is not None))
            if not self._has_started:
                self._has_started = True
                start = self._message()
                start.content, start.stop_reason, start.stop_sequence = [], None, None
                events += [MessageStartEvent(message=start), PingEvent()]
            events += content
        return events

    def final_chunks(self) -> Sequence[msgspec.Struct]:
        return [MessageDeltaEvent(delta=self._stop, usage=self._usage()), MessageStopEvent()]

    def error_chunks(self, failure: AiakqError) -> Sequence[msgspec.Struct]:
        return [MessagesError.from_error(failure)]

    def _add(self, delta: Delta, ended: bool) -> Iterator[NamedEvent]:
        """Return the events for more output."""
        state = self.states[0]
        self._update(state, delta)
        yield from self.content.add(events_of(self.messages, 0, delta, ended))
        if ended:
            yield from self.content.close()
            self._stop = self._stop_of(delta)

    def _stop_of(self, delta: Delta) -> StopDelta:
        if delta.finish_reason == "length":
            return StopDelta("max_tokens", None)
        if self.messages is not None and self.messages.has_valid_calls(0):
            return StopDelta("tool_use", None)
        if isinstance(delta.stop_reason, str):
            return StopDelta("stop_sequence", delta.stop_reason)
        return StopDelta("end_turn", None)

    def _message(self) -> MessagesResponse:
        return MessagesResponse(
            id=self.id,
            model=self.service.model.shown_name(self.request.model),
            content=list(self.content.blocks),
            stop_reason=self._stop.stop_reason,
            stop_sequence=self._stop.stop_sequence,
            usage=self._usage(),
        )

    def _usage(self) -> MessagesUsage:
        usage = self.usage()
        cached = 0 if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )
