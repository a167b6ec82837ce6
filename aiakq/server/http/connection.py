"""HTTP/1.1 connections over uvicorn and h11, with additional limits on size, number and time.

uvicorn creates a ``GuardedConnection`` per connection; its h11 parser is a ``StrictParser``. Timeouts are checked by
``sweep``, which the server calls five times per second.
"""

from __future__ import annotations

import asyncio
import fcntl
import re
import secrets
import termios
import time
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from aiakq.errors import AiakqError, error
from aiakq.server.http.request_target import split_absolute

#: Seconds that a refused client gets to read the response before the connection is closed.
LINGER_SECONDS = 2.0
#: Bytes that are still read from it meanwhile, because many clients send a whole body before they read a response.
MAX_DISCARDED = 8 << 20
_END_OF_HEAD = re.compile(rb"\n\r?\n")
#: A bare line feed, or a header continued on the next line, which servers interpret differently.
_AMBIGUOUS = re.compile(rb"(?<!\r)\n|\n[ \t]")
_LINE_ENDS = "its lines do not end as they must"
#: Empty lines that may come before a request, with or without a carriage return; some clients send one after a body.
MAX_EMPTY_LINES = 16
_EMPTY_LINES = (b"\n", b"\r\n")


@dataclass
class Limits:
    """Limits per connection, and on the number of connections. ``open`` counts them by address.

    lingering  maximum number of refused connections that stay open until the client has read the response.
    """

    connections: int
    per_address: int
    header_seconds: float
    body_seconds: float
    idle_seconds: float
    write_seconds: float
    header_bytes: int = 64 << 10
    header_count: int = 100
    chunks: int = 1 << 11
    lingering: int = 1 << 11
    open: Counter[str] = field(default_factory=Counter)

    @property
    def full(self) -> bool:
        """Whether the limit on connections is reached."""
        return self.open.total() >= self.connections

    def refusal(self, address: str) -> AiakqError | None:
        """Return the error for another connection from ``address``; None if it is allowed."""
        if self.open[address] >= self.per_address:
            return error("too_many_connections", limit=self.per_address, scope="are taken from one address")
        if self.full:
            return error("too_many_connections", limit=self.connections, scope="are taken")
        return None


class StrictBuffer(ReceiveBuffer):
    """h11's receive buffer. ``ambiguous`` is set if a line of a head or of trailers was ambiguous."""

    ambiguous = False
    _cutting_lines = False

    def maybe_extract_lines(self) -> list[bytearray] | None:
        self._cutting_lines = True
        lines = super().maybe_extract_lines()
        self._cutting_lines = False
        return lines

    def _extract(self, count: int) -> bytearray:
        cut = super()._extract(count)
        if self._cutting_lines and _AMBIGUOUS.search(cut):
            self.ambiguous = True
        return cut


class StrictParser(h11.Connection):
    """h11 with limits on headers and chunks, and strict where servers disagree on where a request ends.

    refusal       the reason for which ``next_event`` raised RemoteProtocolError.
    num_requests  number of request heads read so far.
    state         becomes ``request.state`` of the next request. ``arrival_time``, on ``time.monotonic``, is set in it.
    """

    def __init__(self, limits: Limits, state: dict[str, object]) -> None:
        super().__init__(h11.SERVER, limits.header_bytes)
        self._receive_buffer = self._strict_buffer = StrictBuffer()
        self.limits = limits
        self.state = state
        self.refusal: AiakqError | None = None
        self.num_requests = 0
        self._head = bytearray()  # bytes since the last request, up to the end of the next head
        self._num_chunks = 0
        self._num_empty_lines = 0

    @property
    def is_idle(self) -> bool:
        return self.their_state is h11.IDLE

    @property
    def has_partial_head(self) -> bool:
        return self.is_idle and bool(self._head)

    def receive_data(self, data: bytes) -> None:
        if self.is_idle:
            self._head += data
        super().receive_data(data)

    def start_next_cycle(self) -> None:
        super().start_next_cycle()
        self._head = bytearray(self.trailing_data[0])
        self._num_chunks = 0
        self._num_empty_lines = 0

    def next_event(self) -> Any:
        if self._head.startswith((b"\r", b"\n")) and self.is_idle and not self._skip_empty_lines():
            return h11.NEED_DATA
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as failure:
            self.refusal = self._too_large() if failure.error_status_hint == 431 else _invalid(str(failure))
            raise
        if isinstance(event, h11.Request):
            self.num_requests += 1
            self.state["arrival_time"] = time.monotonic()
            self._check_head(event)
            return self._in_origin_form(event)
        elif isinstance(event, h11.EndOfMessage) and self._strict_buffer.ambiguous:
            self._refuse(_invalid(_LINE_ENDS))
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._num_chunks += 1
            if self._num_chunks > self.limits.chunks:
                self._refuse(_invalid(f"its body is cut into more than {self.limits.chunks} chunks"))
        return event

    def send(self, event: Any) -> Any:  # h11 has an overload for each kind of event
        head = super().send(event)
        if head is not None and isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            # The rest of the body and later requests will not be read. If h11 knew that, uvicorn would close
            # the connection before the client has read this.
            return head.removesuffix(b"\r\n") + b"connection: close\r\n\r\n"
        return head

    def _skip_empty_lines(self) -> bool:
        """Discard empty lines before a request; whether it is known that there are no more."""
        while self._head.startswith(_EMPTY_LINES) and self._num_empty_lines < MAX_EMPTY_LINES:
            self._num_empty_lines += 1
            length = 1 if self._head[:1] == b"\n" else 2
            self._strict_buffer.maybe_extract_at_most(length)
            del self._head[:length]
        return self._head != b"\r"

    def _in_origin_form(self, request: h11.Request) -> h11.Request:
        """Return ``request`` with path and Host of a target like http://host/path, whose host takes precedence."""
        if request.target[:1] == b"/":
            return request
        try:
            target, host = split_absolute(request.target, request.method)
        except ValueError:
            self._refuse(_invalid("its target is no address of this server"))
        if host is None:
            return request
        headers = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"host"]
        return h11.Request(
            method=request.method,
            target=target,
            headers=[(b"Host", host), *headers],
            http_version=request.http_version,
        )

    def _check_head(self, request: h11.Request) -> None:
        end = _END_OF_HEAD.search(self._head)
        head = self._head[: end.end() if end else None]
        self._head = bytearray()
        names = {name for name, _ in request.headers}
        if len(head) > self.limits.header_bytes or len(request.headers) > self.limits.header_count:
            self._refuse(self._too_large())
        if request.http_version not in (b"1.0", b"1.1"):
            self._refuse(_invalid("it is not HTTP/1.1"))
        if self._strict_buffer.ambiguous:
            self._refuse(_invalid(_LINE_ENDS))
        if {b"content-length", b"transfer-encoding"} <= names:
            self._refuse(_invalid("it has both a length and chunks"))

    def _too_large(self) -> AiakqError:
        return error("headers_too_large", count=self.limits.header_count, limit=self.limits.header_bytes)

    def _refuse(self, refusal: AiakqError) -> None:
        self.refusal = refusal
        raise h11.RemoteProtocolError(refusal.id, error_status_hint=refusal.http_status)


#: Phases of a connection without a request.
_IDLE_PHASES = ("head", "idle")


def _has_unread_bytes(transport: asyncio.BaseTransport) -> bool:
    """Whether bytes have arrived that the event loop has not read yet."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:
        return False
    return any(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)))


class GuardedConnection(H11Protocol):
    """uvicorn's connection under ``limits``."""

    conn: StrictParser

    def __init__(self, *args: Any, limits: Limits, **values: Any) -> None:
        super().__init__(*args, **values)
        self.limits = limits
        self.conn = StrictParser(limits, self.app_state)
        self._address: str | None = None
        self._lingering = False
        self._discarded = 0
        self._phase: tuple[str, int] = ("head", 0)
        self._since = self.loop.time()
        self._unsent = 0
        self._last_progress = self._since

    # --- called by asyncio and uvicorn

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if self.limits.full and self.limits.open[address] < self.limits.per_address:
            self._close_idle_connection()
        refusal = self.limits.refusal(address)
        if refusal is not None:
            if len(self.connections) > self.limits.connections + self.limits.lingering:
                self.transport.abort()
            else:
                self._refuse(refusal)
            return
        self._address = address
        self.limits.open[address] += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._uncount()
        # If the client resets the connection, uvicorn leaves its timer running, which keeps its objects alive.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._discarded += len(data)
            if self._discarded > MAX_DISCARDED:
                self.transport.pause_reading()
            return
        super().data_received(data)
        self._track()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self.conn.refusal or _invalid("it cannot be read"))

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:
            # The response was sent before the body had arrived; the rest of the body would only be discarded.
            self.server_state.total_requests += 1
            self._linger()
        else:
            super().on_response_complete()
            self._track()

    def resume_writing(self) -> None:
        self._last_progress = self.loop.time()
        super().resume_writing()

    def shutdown(self) -> None:
        if self._lingering:
            self.transport.abort()
        else:
            super().shutdown()

    # --- timeouts

    def sweep(self, now: float, late: float = 0.0) -> None:
        """Close the connection if the client has exceeded a timeout; ``now`` is on the event loop's clock.

        late  seconds for which the event loop was blocked, which do not count against the client.
        """
        self._since += late
        self._last_progress += late
        self._track()
        limits, waited = self.limits, now - self._since
        if self._is_stalled(now):
            self.transport.abort()
        elif self._lingering:
            if waited > LINGER_SECONDS:
                self.transport.abort()
        elif self._phase[0] == "head" and waited > limits.header_seconds:
            self._time_out("headers", limits.header_seconds, respond=self.conn.has_partial_head)
        elif self._phase[0] == "body" and waited > limits.body_seconds:
            self._time_out("body", limits.body_seconds, respond=True)
        elif self._phase[0] == "idle" and waited > limits.idle_seconds:
            self._linger()

    def _track(self) -> None:
        """Update the part of a request that the connection waits for, and since when."""
        phase = (self._current_phase(), self.conn.num_requests)
        if phase != self._phase:
            self._phase, self._since = phase, self.loop.time()

    def _current_phase(self) -> str:
        if self._lingering:
            return "end"
        if self.conn.is_idle:
            return "idle" if self.conn.num_requests and not self.conn.has_partial_head else "head"
        return "body" if self.conn.their_state is h11.SEND_BODY else "response"

    def _is_stalled(self, now: float) -> bool:
        """Whether the client has not read written data for too long."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent or not (self.flow.write_paused or self.transport.is_closing()):
            self._last_progress = now
        self._unsent = unsent
        return now - self._last_progress > self.limits.write_seconds

    # --- closing

    def _close_idle_connection(self) -> None:
        """Close the oldest idle connection of the address that has the most, to make room for a new connection.

        Connections that have sent nothing since their last response are closed before those that have sent part of a
        head. A connection with an unread request is not idle.
        """
        idle = [
            other
            for other in self.connections
            if isinstance(other, GuardedConnection) and other._address is not None and other._phase[0] in _IDLE_PHASES
        ]
        for other in sorted(idle, key=GuardedConnection._closing_order):
            if not _has_unread_bytes(other.transport):
                other._uncount()
                other.transport.abort()
                return

    def _closing_order(self) -> tuple[int, bool, float]:
        """Return the sort key of idle connections; the smallest is closed first."""
        return -self.limits.open[self._address or ""], self.conn.has_partial_head, self._since

    def _uncount(self) -> None:
        """Stop counting the connection against the limits."""
        if self._address is not None:
            self.limits.open[self._address] -= 1
            if not self.limits.open[self._address]:
                del self.limits.open[self._address]
            self._address = None

    def _time_out(self, part: str, limit: float, *, respond: bool) -> None:
        if respond:
            self._refuse(error("read_timeout", part=part, limit=limit))
        else:
            self._linger()

    def _refuse(self, refusal: AiakqError) -> None:
        """Respond with an error, if no response has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(encode_refusal(refusal))
        self._linger()

    def _linger(self) -> None:
        """Shut down the sending side and wait; closing immediately could discard the response before it is read."""
        if self._lingering:
            return
        self._lingering = True
        self._track()
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.flow.resume_reading()
        try:
            self.transport.write_eof()
        except OSError:  # the client has just closed it
            self.transport.abort()


def encode_refusal(refusal: AiakqError) -> bytes:
    """Return a complete HTTP response, after which the connection is closed."""
    body = msgspec.json.encode(refusal.body())
    head = [
        f"HTTP/1.1 {refusal.http_status} {HTTPStatus(refusal.http_status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        f"x-request-id: {secrets.token_hex(16)}",
        *([f"retry-after: {refusal.retry_after}"] if refusal.retry_after is not None else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def _invalid(reason: str) -> AiakqError:
    return error("invalid_http", reason=reason[:64])
