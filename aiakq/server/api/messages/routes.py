"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aiakq.errors import AiakqError
from aiakq.server.api.execution import answer
from aiakq.server.api.generation import TokenResults
from aiakq.server.api.messages.builder import (
    MessageDeltaEvent,
    MessagesBuilder,
    MessagesResponse,
    MessageStartEvent,
    MessageStopEvent,
    PingEvent,
)
from aiakq.server.api.messages.errors import MessagesError
from aiakq.server.api.messages.output import BlockDeltaEvent, BlockStartEvent, BlockStopEvent
from aiakq.server.api.messages.request import CountTokensRequest, MessagesRequest
from aiakq.server.api.request_model import parse_body
from aiakq.server.api.routes import PROMPT_ERRORS, TOKENIZATION, Route
from aiakq.server.api.service import Service
from aiakq.server.http.body import read_body
from aiakq.server.http.responses import JSONResponse
from aiakq.server.http.streaming import cancel_on_disconnect


class CountTokensResponse(msgspec.Struct):
    """The number of tokens of a conversation in the model's chat template."""

    input_tokens: int


async def messages(service: Service, request: Request) -> Response:
    """Generate the next message of a conversation, as in Anthropic's Messages API."""
    return await answer(service, request, TokenResults(MessagesRequest, MessagesBuilder))


async def count_tokens(service: Service, request: Request) -> Response:
    """Count the tokens of a conversation, as in Anthropic's API."""
    body = await read_body(request, service.max_body_bytes, service.max_values)
    await asyncio.sleep(0)  # it may be large
    payload = parse_body(CountTokensRequest, body, service.renderer.unknown_fields)
    service.model.check_name(payload.model)
    payload.check_combinations()
    payload.switch_reasoning(service.renderer)
    try:
        arguments = service.renderer.template_arguments(payload.chat.template_kwargs(service.renderer.chat_template))
    except AiakqError as failure:
        raise payload.rename_param(failure) from None
    text = await service.renderer.chat_request(payload.chat.conversation(), arguments, add_special_tokens=False)
    text.max_ids = 1
    reply = await cancel_on_disconnect(request, service.renderer.text.run(text))
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
        errors=PROMPT_ERRORS,
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
