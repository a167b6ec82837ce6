"""Middleware that limits the total bytes of request bodies, from their arrival to the end of the response."""

from __future__ import annotations

from collections import Counter

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiakq.errors import error

#: Bodies up to this size in bytes are always accepted, since the limit on connections bounds their total.
SMALL_BODY_BYTES = 64 << 10


class BodyBudget:
    """Makes ``receive`` raise ``bodies_too_large`` for a body that exceeds the rest of ``limit``.

    One client, identified by API key or address, gets at most half of it. A body with a content-length is reserved in
    advance, so that it is refused before it is received; a chunked body is reserved as it arrives.

    limit      maximum total bytes of all bodies.
    num_bytes  bytes currently reserved.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit
        self.num_bytes = 0
        self._max_used = 0
        self._by_client: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client = scope.get("state", {}).get("owner") or (scope["client"] or ("",))[0]
        announced = Headers(scope=scope).get("content-length", "")
        size = int(announced) if announced.isdecimal() else 0
        received = reserved = 0

        async def counted() -> Message:
            nonlocal received, reserved
            reserved += self._reserve(client, size, reserved)
            message = await receive()
            received += len(message.get("body", b""))
            reserved += self._reserve(client, received, reserved)
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self.num_bytes -= reserved
            self._by_client[client] -= reserved
            if not self._by_client[client]:
                del self._by_client[client]

    def take_max_used(self) -> int:
        """Return the peak of reserved bytes since the last call."""
        most, self._max_used = self._max_used, self.num_bytes
        return most

    def _reserve(self, client: str, size: int, reserved: int) -> int:
        """Reserve the bytes of a body of ``size`` bytes beyond ``reserved``; return their number."""
        more = max(0, size - reserved)
        if more and size > SMALL_BODY_BYTES:
            if self.num_bytes + more > self.limit or self._by_client[client] + more > self.limit // 2:
                raise error("bodies_too_large", limit=self.limit)
        self.num_bytes += more
        self._by_client[client] += more
        self._max_used = max(self._max_used, self.num_bytes)
        return more
