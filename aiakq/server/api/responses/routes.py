"""POST /v1/responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from aiakq.server.api.execution import answer
from aiakq.server.api.generation import TokenResults
from aiakq.server.api.responses.builder import ResponseEvent, ResponsesBuilder, ResponsesResponse
from aiakq.server.api.responses.output import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ItemEvent,
    PartEvent,
    TextDeltaEvent,
    TextDoneEvent,
)
from aiakq.server.api.responses.request import ResponsesRequest
from aiakq.server.api.routes import PROMPT_ERRORS, Route
from aiakq.server.api.service import Service


async def responses(service: Service, request: Request) -> Response:
    """Generate the next output of a conversation, as in OpenAI's Responses API. Responses are not stored."""
    return await answer(service, request, TokenResults(ResponsesRequest, ResponsesBuilder))


ROUTES = (
    Route(
        "POST",
        "/v1/responses",
        responses,
        "generation",
        request=(ResponsesRequest,),
        response=ResponsesResponse,
        description="The response; with stream=true as server-sent events, the last of which has all of it.",
        streams=(
            *(ResponseEvent, ItemEvent, PartEvent, TextDeltaEvent, TextDoneEvent),
            *(ArgumentsDeltaEvent, ArgumentsDoneEvent),
        ),
        errors=PROMPT_ERRORS,
        generates=True,
    ),
)
