"""Answers that arrive in pieces, and clients that leave before the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aiakq.errors import AiakqError
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.api.request_stream import Generation
from aiakq.server.api.service import Ticket
from aiakq.server.process.engine_client import as_failure

logger = logging.getLogger("aiakq.server")

Result = TypeVar("Result")
News = Sequence[tuple[int, Delta]]

#: Pieces must pass proxies at once.
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class NoAnswer(Response):
    """For a client that is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


class JSONAnswer(Response):
    """A JSON body. Not-a-number cannot occur in it: it would be written as null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class Chunks(Protocol):
    """What turns news into the JSON objects of a stream."""

    def chunks(self, news: News) -> list[dict[str, Any]]: ...

    def last_chunks(self) -> list[dict[str, Any]]: ...

    @property
    def reason(self) -> str: ...


def error_answer(
    failure: AiakqError, headers: Mapping[str, str] | None = None, loading: Mapping[str, Any] | None = None
) -> JSONAnswer:
    """The answer for an error; 503 says when to try again. ``loading`` stands beside the error, for /ready."""
    headers = dict(headers or {})
    if failure.retry_after is not None:
        headers["retry-after"] = str(failure.retry_after)
    body = failure.body() | ({"loading": dict(loading)} if loading is not None else {})
    return JSONAnswer(body, status_code=failure.http_status, headers=headers)


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled if the client leaves first. Raises ``ClientGone``.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancelled(task, watch)


class EventStream(Response):
    """Server-sent events of one generation. It ends with ``[DONE]`` only if the answer is complete.

    ``first`` is the first news, already taken, so that everything that fails before it had its own HTTP status.
    """

    def __init__(
        self,
        generation: Generation,
        first: News,
        rest: AsyncIterator[News],
        shaper: Chunks,
        ticket: Ticket,
    ) -> None:
        super().__init__()
        self._generation = generation
        self._first = first
        self._rest = rest
        self._shaper = shaper
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
            self._ticket.close(pump.result() if pump.done() else "abort")
        finally:
            await _cancelled(pump, watch)
            self._generation.close()
            self._ticket.close("error")

    async def _pump(self, send: Send) -> str:
        """Send everything; returns why the request ended."""
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        reason = "error"
        try:
            await self._send(send, self._shaper.chunks(self._first))
            async for news in self._rest:
                await self._send(send, self._shaper.chunks(news))
            await self._send(send, self._shaper.last_chunks(), _DONE)
            reason = self._shaper.reason
        except Exception as failure:
            if not isinstance(failure, AiakqError):
                logger.exception("a stream failed")
            await self._send(send, [as_failure(failure).body()])
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return reason

    async def _send(self, send: Send, chunks: Sequence[Mapping[str, Any]], end: bytes = b"") -> None:
        body = b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + end
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for it; failures of cancelled work are of no interest."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
