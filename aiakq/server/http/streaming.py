"""Streaming responses, and detection of disconnected clients."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aiakq.errors import AiakqError
from aiakq.server.errors import as_aiakq_error

logger = logging.getLogger("aiakq.server")

Result = TypeVar("Result")

#: Headers that tell proxies not to buffer events.
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


#: An empty comment, which clients ignore (see the server-sent events standard).
_COMMENT = b": keep-alive\n\n"


class ClientDisconnected(Exception):
    """The client has closed the connection and does not wait for a response."""


async def cancel_on_disconnect(request: Request, work: Awaitable[Result]) -> Result:
    """Await ``work``, and cancel it if the client disconnects. Raises ``ClientDisconnected``.

    The request body must have been read before.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        await _cancel(task, disconnect)


class NamedEvent(msgspec.Struct):
    """A server-sent event whose name is its field ``type``."""

    type: str


def encode_events(objects: Iterable[object]) -> bytes:
    """Encode objects as server-sent events with JSON data; a ``NamedEvent`` also has a name."""
    lines = []
    for each in objects:
        name = f"event: {each.type}\n".encode() if isinstance(each, NamedEvent) else b""
        lines.append(name + b"data: " + msgspec.json.encode(each) + b"\n\n")
    return b"".join(lines)


class EventStream(Response):
    """A response of server-sent events.

    events        encoded events; an exception ends the stream.
    error_events  function that returns the events for an exception.
    on_end        called once with the outcome: "complete", "error", or "abort" if the client disconnected.
    keep_alive_seconds  seconds without events after which a comment is sent; 0 for never.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        error_events: Callable[[AiakqError], Iterable[object]],
        on_end: Callable[[str], None],
        keep_alive_seconds: float = 0.0,
    ) -> None:
        super().__init__()
        self.raw_headers = list(_HEADERS)
        self._events = events
        self._error_events = error_events
        self._on_end = on_end
        self._keep_alive_seconds = keep_alive_seconds
        self._num_sent = 0
        self._has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_events(send))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        comments = asyncio.ensure_future(self._send_comments(send))
        outcome = "error"
        try:
            await asyncio.wait({sender, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            outcome = sender.result() if sender.done() else "abort"
        finally:
            await _cancel(sender, disconnect, comments)
            self._on_end(outcome)

    async def _send_comments(self, send: Send) -> None:
        """Send a comment whenever there were no events for ``keep_alive_seconds``."""
        num_sent = -1
        while self._keep_alive_seconds and not self._has_ended:
            if num_sent == self._num_sent:
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
            num_sent = self._num_sent
            await asyncio.sleep(self._keep_alive_seconds)

    async def _send_events(self, send: Send) -> str:
        """Send all events; return "complete" or "error"."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        outcome = "error"
        try:
            async for body in self._events:
                if body:
                    self._num_sent += 1
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            outcome = "complete"
        except Exception as failure:
            if not isinstance(failure, AiakqError):
                logger.exception("a stream failed")
            body = encode_events(self._error_events(as_aiakq_error(failure)))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        self._has_ended = True
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return outcome


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel ``tasks`` and wait for them; results and exceptions are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
