"""A route of the server. POST /count_tokens: how many tokens a text has."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aiakq.server.api.request_model import RequestModel, parse_body
from aiakq.server.api.routes import TOKENIZATION, Route
from aiakq.server.api.service import Service
from aiakq.server.http.body import read_body
from aiakq.server.http.responses import JSONResponse


class CountTokensRequest(RequestModel):
    """The body of POST /count_tokens."""

    text: str


class CountTokensResponse(msgspec.Struct):
    """The number of tokens of a text."""

    count: int


async def count_tokens(service: Service, request: Request) -> Response:
    """The number of tokens of a text, without special tokens."""
    body = parse_body(CountTokensRequest, await read_body(request, service.max_body_bytes))
    return JSONResponse(CountTokensResponse(len(await service.renderer.encode(body.text, add_special_tokens=False))))


ROUTES = (
    Route(
        "POST",
        "/count_tokens",
        count_tokens,
        "tokenization",
        request=(CountTokensRequest,),
        response=CountTokensResponse,
        description="The number.",
        errors=TOKENIZATION,
    ),
)
