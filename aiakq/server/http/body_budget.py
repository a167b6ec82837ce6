"""Middleware that limits the total bytes of request bodies and of their images, until the end of the response."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiakq.errors import error

#: Bodies up to this size in bytes are always accepted, since the limit on connections bounds their total.
SMALL_BODY_BYTES = 64 << 10


class BodyBudget:
    """Makes ``receive`` raise ``bodies_too_large`` for a body that exceeds the rest of ``limit``.

    One client, identified by API key or address, gets at most half of it. A body with a content-length is reserved in
    advance, so that it is refused before it is received; a chunked body is reserved as it arrives.

    Images count with ``ImageBytes``.

    limit      maximum total bytes of all bodies and images.
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
        images = ImageBytes(self, client)
        image_bytes.set(images)

        def reserve(total: int) -> None:
            nonlocal reserved
            if (more := total - reserved) > 0:
                self.reserve(client, more, total > SMALL_BODY_BYTES)
                reserved = total

        async def counted() -> Message:
            nonlocal received
            reserve(size)
            message = await receive()
            received += len(message.get("body", b""))
            reserve(received)
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self.release(client, reserved + images.num_bytes)

    def take_max_used(self) -> int:
        """Return the peak of reserved bytes since the last call."""
        most, self._max_used = self._max_used, self.num_bytes
        return most

    def reserve(self, client: str, num_bytes: int, is_limited: bool = True) -> None:
        """Reserve bytes for a client, who has to release them. Raises ``bodies_too_large`` if ``is_limited``."""
        if is_limited:
            if self.num_bytes + num_bytes > self.limit or self._by_client[client] + num_bytes > self.limit // 2:
                raise error("bodies_too_large", limit=self.limit)
        self.num_bytes += num_bytes
        self._by_client[client] += num_bytes
        self._max_used = max(self._max_used, self.num_bytes)

    def release(self, client: str, num_bytes: int) -> None:
        """Release bytes of a client."""
        self.num_bytes -= num_bytes
        self._by_client[client] -= num_bytes
        if not self._by_client[client]:
            del self._by_client[client]


class ImageBytes:
    """The bytes of images that a request holds in memory until its response ends: its files, then its pixels.

    num_bytes  bytes currently reserved.
    """

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget, self._client = budget, client
        self.num_bytes = 0

    def hold(self, num_bytes: int, param: str) -> None:
        """Reserve ``num_bytes``, instead of what was reserved before.

        Raises ``bodies_too_large``, and ``media_refused`` for more than a client may ever have.
        """
        most = self._budget.limit // 2
        if num_bytes > most:
            reason = f"the media of the request take {num_bytes >> 20} MiB of memory, more than the {most >> 20} MiB "
            raise error("media_refused", param=param, reason=f"{reason}of a client; see --max-total-body-bytes")
        if num_bytes > self.num_bytes:
            self._budget.reserve(self._client, num_bytes - self.num_bytes)
        else:
            self._budget.release(self._client, self.num_bytes - num_bytes)
        self.num_bytes = num_bytes


#: The images of the current request; None outside of the HTTP server.
image_bytes: ContextVar[ImageBytes | None] = ContextVar("image_bytes", default=None)
