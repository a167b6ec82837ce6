"""JSON responses, and error bodies in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, Self

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aiakq.errors import REGISTRY, AiakqError

#: Bytes of a response that are sent before others get their turn.
_PIECE_BYTES = 1 << 20


class ErrorBody(Protocol):
    """The JSON body of an error; an API with another shape than OpenAI's has a class of its own."""

    @classmethod
    def from_error(cls, failure: AiakqError) -> Self: ...


class ErrorDetail(msgspec.Struct):
    """``code`` is the id of the error in docs/errors.md; ``param`` is the request field it is about."""

    message: str
    type: str
    param: str | None
    code: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(REGISTRY)})]


class ErrorResponse(msgspec.Struct):
    """An error as the OpenAI API returns it."""

    error: ErrorDetail

    @classmethod
    def from_error(cls, failure: AiakqError) -> Self:
        return cls(ErrorDetail(str(failure), failure.kind.type, failure.param, failure.id))


class LoadingStatus(msgspec.Struct):
    """How far loading is: the seconds so far and the phases that are done."""

    seconds: float
    done: list[str]


class NotReadyResponse(ErrorResponse):
    """The error of /ready; while a model is loading, with its progress."""

    loading: LoadingStatus | msgspec.UnsetType = msgspec.UNSET


class JSONResponse(Response):
    """``content`` as JSON; a ``msgspec.Struct`` or anything else msgspec can encode. Sent in pieces, if it is large."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, max(1, len(self.body)), _PIECE_BYTES):
            end = start + _PIECE_BYTES
            piece = {"body": self.body[start:end], "more_body": end < len(self.body)}
            await send({"type": "http.response.body", **piece})
            if piece["more_body"]:
                await asyncio.sleep(0)


class NoResponse(Response):
    """Sends nothing: the client has closed the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


def error_response(
    failure: AiakqError, headers: Mapping[str, str] | None = None, body: ErrorBody | None = None
) -> JSONResponse:
    """The response for ``failure``. 503 says in retry-after when to try again. ``body`` replaces OpenAI's shape."""
    headers = dict(headers or {})
    if failure.retry_after is not None:
        headers["retry-after"] = str(failure.retry_after)
    return JSONResponse(body or ErrorResponse.from_error(failure), failure.http_status, headers)


def not_ready_response(failure: AiakqError, progress: Mapping[str, Any]) -> JSONResponse:
    """The response of /ready while nothing can be generated."""
    body = NotReadyResponse.from_error(failure)
    body.loading = msgspec.convert(progress, LoadingStatus)
    return error_response(failure, body=body)
