"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aiakq.errors import AiakqError
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.api.chat import ChatResponseBuilder
from aiakq.server.api.generation import generate
from aiakq.server.api.messages.errors import MessagesError
from aiakq.server.api.messages.output import Block, BlockDeltaEvent, BlockStartEvent, BlockStopEvent, ContentBlocks
from aiakq.server.api.messages.request import CountTokensRequest, MessagesRequest
from aiakq.server.api.request_model import parse_body
from aiakq.server.api.routes import GENERATION, TOKENIZATION, UNAVAILABLE, Route
from aiakq.server.api.service import Service
from aiakq.server.http.body import read_body
from aiakq.server.http.responses import JSONResponse
from aiakq.server.http.streaming import NamedEvent, cancel_on_disconnect
from aiakq.server.process.request_stream import RequestDeltas
from aiakq.server.process.text_process import TextRequest

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Token counts. Those of the prompt that were taken from the prefix cache are not among ``input_tokens``."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(msgspec.Struct, kw_only=True):
    """The whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessageStartEvent(NamedEvent, kw_only=True):
    """The answer begins."""

    type: Literal["message_start"] = "message_start"
    message: MessagesResponse


class PingEvent(NamedEvent, kw_only=True):
    """Nothing."""

    type: Literal["ping"] = "ping"


class StopDelta(msgspec.Struct):
    """Why the answer ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDeltaEvent(NamedEvent, kw_only=True):
    """The answer has ended."""

    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: MessagesUsage


class MessageStopEvent(NamedEvent, kw_only=True):
    """The last event."""

    type: Literal["message_stop"] = "message_stop"


class CountTokensResponse(msgspec.Struct):
    """The tokens of a conversation in the model's chat template."""

    input_tokens: int


class MessagesBuilder(ChatResponseBuilder):
    """Builds responses of /v1/messages from the events of chat."""

    id_prefix = "msg_"
    end_of_stream = b""

    def __init__(self, service: Service, request: MessagesRequest, *arguments: Any) -> None:
        super().__init__(service, request.chat, *arguments)
        self.content = ContentBlocks()
        self._begun = False
        self._stop = StopDelta(None, None)

    def response(self, outputs: Sequence[Delta]) -> msgspec.Struct:
        for _ in self._add(outputs[0], ended=True):
            pass
        return self._message()

    def chunks(self, deltas: RequestDeltas) -> Sequence[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        for _, delta in deltas:
            content = list(self._add(delta, ended=delta.finish_reason is not None))
            if not self._begun:
                self._begun = True
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
        """The events of more output."""
        state = self.states[0]
        self._update(state, delta)
        yield from self.content.add(self.events(state, delta, ended))
        if ended:
            yield from self.content.close()
            self._stop = self._stop_of(delta)

    def _stop_of(self, delta: Delta) -> StopDelta:
        if delta.finish_reason == "length":
            return StopDelta("max_tokens", None)
        if self.messages is not None and self.messages.has_calls(0):
            return StopDelta("tool_use", None)
        if isinstance(delta.stop_reason, str):
            return StopDelta("stop_sequence", delta.stop_reason)
        return StopDelta("end_turn", None)

    def _message(self) -> MessagesResponse:
        return MessagesResponse(
            id=self.id,
            model=self.service.model.names[0],
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


async def messages(service: Service, request: Request) -> Response:
    """Answer a conversation, as Anthropic's Messages API does."""
    return await generate(service, request, MessagesRequest, MessagesBuilder)


async def count_tokens(service: Service, request: Request) -> Response:
    """The number of tokens of a conversation, as Anthropic's API returns it."""
    body = await read_body(request, service.max_body_bytes, service.max_values)
    await asyncio.sleep(0)  # it may be large
    given = parse_body(CountTokensRequest, body, service.on_unknown_field)
    service.model.check_name(given.model)
    given.check_combinations()
    given.switch_reasoning(service)
    try:
        arguments = given.chat.template_kwargs(service.chat_template)
    except AiakqError as failure:
        raise given.rename_param(failure) from None
    text = TextRequest(0, messages=given.chat.conversation(), arguments=arguments, add_special_tokens=False, max_ids=1)
    reply = await cancel_on_disconnect(request, service.text.run(text))
    return JSONResponse(CountTokensResponse(reply.counts[0]))


_EVENTS = (
    *(MessageStartEvent, PingEvent, MessageDeltaEvent, MessageStopEvent),
    *(BlockStartEvent, BlockDeltaEvent, BlockStopEvent),
)

ROUTES = (
    Route(
        "POST",
        "/v1/messages",
        messages,
        "generation",
        request=(MessagesRequest,),
        response=MessagesResponse,
        description="The answer; with stream=true as server-sent events.",
        streams=_EVENTS,
        errors=(*TOKENIZATION, *UNAVAILABLE, *GENERATION),
        error_body=MessagesError,
        generates=True,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "tokenization",
        request=(CountTokensRequest,),
        response=CountTokensResponse,
        description="The number of tokens.",
        errors=TOKENIZATION,
        error_body=MessagesError,
    ),
)
