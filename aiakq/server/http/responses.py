"""JSON responses, and error bodies in OpenAI's format."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Protocol, Self

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aiakq.errors import REGISTRY, AiakqError

#: Bytes of a response to send before yielding to other tasks.
_PIECE_BYTES = 1 << 20


class ErrorBody(Protocol):
    """The JSON body of an error; APIs whose format differs from OpenAI's have their own class."""

    @classmethod
    def from_error(cls, failure: AiakqError) -> Self: ...


class ErrorDetail(msgspec.Struct):
    """``code`` is the id of the error in docs/errors.md, ``param`` the request field that caused it."""

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
    """Progress of loading: the elapsed seconds and the finished phases."""

    seconds: float
    done: list[str]


class NotReadyResponse(ErrorResponse):
    """The error of /ready, with the progress while a model is loading."""

    loading: LoadingStatus | msgspec.UnsetType = msgspec.UNSET


class JSONResponse(Response):
    """A JSON response of anything that msgspec can encode. Large responses are sent in pieces."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
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
    """Sends nothing, since the client has closed the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


def error_response(
    failure: AiakqError, headers: Mapping[str, str] | None = None, body: ErrorBody | None = None
) -> JSONResponse:
    """Return the response for ``failure``, with retry-after for status 503. ``body`` replaces OpenAI's format."""
    headers = dict(headers or {})
    if failure.retry_after is not None:
        headers["retry-after"] = str(failure.retry_after)
    return JSONResponse(body or ErrorResponse.from_error(failure), failure.http_status, headers)


def not_ready_response(failure: AiakqError, progress: Mapping[str, object]) -> JSONResponse:
    """Return the response of /ready while requests cannot be served."""
    body = NotReadyResponse.from_error(failure)
    body.loading = msgspec.convert(progress, LoadingStatus)
    return error_response(failure, body=body)
