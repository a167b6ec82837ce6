"""Limits of a connection in size, number and time, tested with raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn
from starlette.responses import Response
from uvicorn.server import ServerState

from aiakq.server.background import RunningServer
from aiakq.server.http.connection import GuardedConnection, Limits

TIMES = {"header_timeout": 1.0, "body_timeout": 1.5, "idle_timeout": 2.0, "write_timeout": 1.0}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def strict(start_server) -> Iterator[RunningServer]:
    """A server that waits for no one, with room for 100 connections from one address."""
    with start_server(**TIMES, max_connections_per_address=100, max_body_bytes=100_000) as running:
        yield running


@pytest.fixture
def dial(strict) -> Iterator[Callable[[], socket.socket]]:
    """``dial()`` -> a new connection to it."""
    host, port = strict.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:

        def connect() -> socket.socket:
            return opened.enter_context(socket.create_connection((host, int(port)), timeout=20))

        yield connect


def everything(connection: socket.socket) -> bytes:
    """All that comes until the server closes; the connection being cut is an end, too."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def check(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    failure = json.loads(body)["error"]
    assert set(failure) == {"message", "type", "param", "code"} and failure["code"] == code
    assert b"connection: close" in head and b"x-request-id: " in head


def send(connection: socket.socket, *pieces: bytes) -> bytes:
    """Send, and everything that comes back; the server may stop listening on the way."""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
    return everything(connection)


REFUSED = [
    ("65 KiB in one header", HEAD + b"x-long: " + b"a" * (65 << 10) + b"\r\n\r\n", 431, "headers_too_large"),
    ("a long target", b"GET /" + b"a" * (65 << 10) + b" HTTP/1.1\r\nhost: a\r\n\r\n", 431, "headers_too_large"),
    ("without an end", HEAD + b"x-long: " + b"a" * (200 << 10), 431, "headers_too_large"),
    ("101 headers", HEAD + b"".join(b"x-%d: 1\r\n" % i for i in range(99)) + b"\r\n", 431, "headers_too_large"),
    (
        "length and chunks",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "invalid_http",
    ),
    ("two lengths", HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}{}{}", 400, "invalid_http"),
    ("a negative length", HEAD + b"content-length: -5\r\n\r\n", 400, "invalid_http"),
    ("a bare line feed", HEAD + b"x-a: 1\nx-b: 2\r\ncontent-length: 2\r\n\r\n{}", 400, "invalid_http"),
    ("an end of bare line feeds", b"GET /health HTTP/1.1\nhost: 127.0.0.1\n\n", 400, "invalid_http"),
    ("a folded header", HEAD + b"x-a: 1\r\n 2\r\ncontent-length: 2\r\n\r\n{}", 400, "invalid_http"),
    ("a blank in a name", HEAD + b"x a: 1\r\n\r\n", 400, "invalid_http"),
    ("no host", b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    ("an unknown coding", HEAD + b"transfer-encoding: gzip\r\n\r\n", 400, "invalid_http"),
    ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "invalid_http"),
    ("another version", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_http"),
    (
        "a bare line feed in trailers",
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-a: 1\nx-b: 2\r\n\r\n",
        400,
        "invalid_http",
    ),
    (
        "trailers that end with a bare line feed",
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\n",
        400,
        "invalid_http",
    ),
    (
        "a folded trailer",
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-a: 1\r\n 2\r\n\r\n",
        400,
        "invalid_http",
    ),
    ("a bad chunk", HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", 400, "invalid_http"),
]


def test_a_few_empty_lines_before_a_request_are_skipped(dial):
    get = b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n%b\r\n"
    last = get % b"connection: close\r\n"
    bare = ((b"\n" + last,), (b"\n" * 4, last), (b"\r\n\n\r\n" + last,), (b"\n\r", b"\n" + last))
    for pieces in (*bare, (b"\r\n" + last,), (b"\r\n" * 16 + last,), (b"\r", b"\n", last), (b"\r\n", last)):
        connection = dial()
        for piece in pieces[:-1]:
            connection.sendall(piece)
            time.sleep(0.05)
        assert send(connection, pieces[-1]).startswith(b"HTTP/1.1 200"), pieces
    assert send(dial(), get % b"" + b"\r\n\r\n" + last).count(b"HTTP/1.1 200") == 2
    assert send(dial(), get % b"" + b"\n" + get % b"" + b"\r\n" + last).count(b"HTTP/1.1 200") == 3
    for line in (b"\r\n", b"\n"):
        check(send(dial(), line * 17 + last), 400, "invalid_http")
    for line in (b"\r", b"\r\r\n", b" \r\n", b"\t\n"):
        check(send(dial(), line + last), 400, "invalid_http")


def test_empty_lines_do_not_extend_the_time_for_a_request(dial):
    began = time.monotonic()
    connection = dial()
    connection.sendall(b"\r\n")
    closes_within(connection, 0.9, TIMES["header_timeout"], began)


@pytest.mark.parametrize(("request_", "status", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_invalid_request_heads_are_refused(dial, strict, request_, status, code):
    check(send(dial(), request_), status, code)
    assert httpx.get(f"{strict.url}/health", trust_env=False).status_code == 200


def test_request_heads_at_the_limit_are_accepted(dial):
    headers = b"".join(b"x-%d: 1\r\n" % i for i in range(97)) + b"connection: close\r\n"
    assert send(dial(), b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + headers + b"\r\n").startswith(b"HTTP/1.1 200")
    request = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\nx: " + b"a" * 65_000 + b"\r\n\r\n"
    assert len(request) < 64 << 10 and send(dial(), request).startswith(b"HTTP/1.1 200")


def test_trailers_are_accepted(dial):
    body = b'{"prompt": [5], "max_tokens": 1}'
    chunks = b"%x\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n" % (len(body), body)
    answer = send(dial(), HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
    assert answer.startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_limited_one_by_one(dial):
    """Two hundred requests sent at once: each head is counted by itself, and each is answered in order."""
    one = b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\nx-filler: " + b"a" * 2000 + b"\r\n\r\n"
    last = one.replace(b"x-filler", b"connection: close\r\nx-filler")
    answer = send(dial(), one * 199 + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 200


def test_bodies_over_the_limit_are_refused_early(dial):
    """With a length they are refused unread; without one, soon after the limit."""
    connection = dial()
    began = time.monotonic()
    answer = send(connection, HEAD + b"content-length: 1000000000\r\n\r\n{")
    assert b"HTTP/1.1 413 " in answer and b"request_too_large" in answer and b"\r\nconnection: close\r\n" in answer
    assert time.monotonic() - began < 10  # the server does not wait for the rest
    connection = dial()
    sent, chunk = 0, b"1000\r\n" + b" " * 4096 + b"\r\n"
    with contextlib.suppress(ConnectionError):
        connection.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        connection.settimeout(5)
        while sent < 64 << 20:
            connection.sendall(chunk)
            sent += 4096
    assert sent < 64 << 20


def test_too_many_chunks_are_refused(dial):
    flood = b"1\r\n \r\n" * 2049
    check(send(dial(), HEAD + b"transfer-encoding: chunked\r\n\r\n", flood), 400, "invalid_http")


def test_an_unread_body_closes_the_connection(dial):
    answer = send(dial(), b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000000\r\n\r\n" + b"x" * 1000)
    assert answer.startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (b"content-encoding: gzip", b"unsupported_encoding"),
        (b"content-encoding: identity, br", b"unsupported_encoding"),
        (b"content-type: text/plain", b"unsupported_media_type"),
        (b"content-type: application/x-www-form-urlencoded", b"unsupported_media_type"),
        (b"content-type: multipart/form-data; boundary=x", b"unsupported_media_type"),
    ],
)
def test_encoded_bodies_and_other_media_types_are_refused(dial, header, code):
    request = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: 2\r\n"
    answer = send(dial(), request + header + b"\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 415 ") and code in answer


# --- time


def closes_within(connection: socket.socket, least: float, most: float, began: float) -> bytes:
    received = everything(connection)
    assert least <= time.monotonic() - began <= most + 5  # a second, and a slow machine
    return received


def test_slowly_sent_headers_time_out(dial):
    began = time.monotonic()
    connection, stop = dial(), threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            for byte in HEAD * 10:
                connection.sendall(bytes([byte]))
                if stop.wait(0.1):
                    return

    sender = threading.Thread(target=trickle)
    sender.start()
    check(closes_within(connection, 0.9, TIMES["header_timeout"], began), 408, "read_timeout")
    stop.set()
    sender.join()


def test_an_incomplete_body_times_out(dial):
    began = time.monotonic()
    connection = dial()
    connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
    check(closes_within(connection, 1.4, TIMES["body_timeout"], began), 408, "read_timeout")


def test_a_connection_without_a_request_is_closed(dial):
    began = time.monotonic()
    assert closes_within(dial(), 0.9, TIMES["header_timeout"], began) == b""


def test_an_idle_connection_is_closed(dial):
    began = time.monotonic()
    connection = dial()
    connection.sendall(b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    assert closes_within(connection, 1.9, TIMES["idle_timeout"], began).startswith(b"HTTP/1.1 200 OK")


def test_an_incomplete_second_request_times_out(dial):
    connection = dial()
    connection.sendall(b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    connection.recv(1 << 16)
    began = time.monotonic()
    connection.sendall(b"GET /ver")
    assert b" 408 " in closes_within(connection, 0.9, TIMES["header_timeout"], began)


def test_a_long_response_does_not_time_out(dial):
    """Answers may take longer than any of these times."""
    body = {"prompt": "Long", "n": 16, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    wanted = json.dumps(body).encode()
    connection = dial()
    connection.settimeout(120)
    answer = send(connection, HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(wanted) + wanted)
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.rstrip().endswith(b"}")


def test_a_client_that_does_not_read_is_disconnected(strict, metrics_of):
    host, port = strict.url.removeprefix("http://").split(":")
    body = {"prompt": "Long", "n": 16, "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
    wanted = json.dumps(body | {"logprobs": 5}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(wanted) + wanted)
        deadline = time.monotonic() + 60
        while not metrics_of(strict.url)["vllm:num_requests_running"]:
            assert time.monotonic() < deadline
        while metrics_of(strict.url)["vllm:num_requests_running"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert metrics_of(strict.url)["vllm:kv_cache_usage_perc"] == 0
        connection.settimeout(20)
        assert b"[DONE]" not in everything(connection)


# --- number


def test_connections_per_address_are_limited(strict, dial):
    """The 101st of one address is refused; other addresses are served; closed connections free their places."""
    host, port = strict.url.removeprefix("http://").split(":")
    health = f"{strict.url}/health"
    for _ in range(100):
        dial()
    refused = httpx.get(health, trust_env=False)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "too_many_connections"
    assert "one address" in refused.json()["error"]["message"]
    with socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0)) as other:
        other.sendall(b"GET /version HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert other.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
    deadline = time.monotonic() + 10
    while httpx.get(health, trust_env=False).status_code != 200:
        assert time.monotonic() < deadline, "their places are free again"
        time.sleep(0.05)


def test_the_total_of_connections_is_limited():
    limits = Limits(2, 5, 1, 1, 1, 1)
    assert limits.refusal("a") is None
    limits.open.update("ab")
    assert "at most 2" in str(limits.refusal("c"))


def test_slow_clients_do_not_delay_others(strict, dial):
    """Ninety connections that send half a head; a good client is answered all the while, and they are closed."""
    slow = [dial() for _ in range(90)]
    for connection in slow:
        connection.sendall(b"GET / HTTP/1.1\r\nx-")
    body = {"prompt": "Once", "max_tokens": 4}
    for _ in range(5):
        assert httpx.post(f"{strict.url}/v1/completions", json=body, trust_env=False, timeout=30).status_code == 200
    for connection in slow:
        check(everything(connection), 408, "read_timeout")


# --- the end


async def _meet(seen: list[float] | None = None) -> tuple[GuardedConnection, socket.socket]:
    """A connection of a server in this process, and its client, which resets it when it is closed.

    seen  grows by how long ago each request arrived when it was its turn.
    """
    loop = asyncio.get_running_loop()
    met: asyncio.Future[GuardedConnection] = loop.create_future()

    async def app(scope, receive, send) -> None:
        if seen is not None:
            seen.append(time.monotonic() - scope["state"]["arrival_time"])
        await Response(status_code=204)(scope, receive, send)

    config = uvicorn.Config(app=app, lifespan="off", log_config=None, timeout_keep_alive=24 * 3600)
    config.load()

    def connection() -> GuardedConnection:
        limits = Limits(2, 2, 1, 1, 1, 1)
        made = GuardedConnection(config=config, server_state=ServerState(), app_state={}, limits=limits)
        loop.call_soon(met.set_result, made)
        return made

    server = await loop.create_server(connection, "127.0.0.1", 0)
    client = socket.create_connection(server.sockets[0].getsockname())
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made = await met
    server.close()
    return made, client


def test_a_client_may_disconnect_while_the_server_closes(caplog):
    """Nothing can be said to it any more; that is no error of the server."""

    async def cut() -> None:
        connection, client = await _meet()
        connection.transport.pause_reading()  # as while an answer is made: its end is not noticed
        client.close()
        await asyncio.sleep(0.05)
        connection._time_out("headers", 1.0, respond=False)
        await asyncio.sleep(0.05)
        assert connection.transport.is_closing()

    asyncio.run(cut())
    assert not caplog.records


def test_a_reset_connection_is_garbage_collected():
    async def reset() -> None:
        connection, client = await _meet()
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 204 ")
        client.close()
        await asyncio.sleep(0.05)
        left = weakref.ref(connection)
        del connection
        gc.collect()
        assert left() is None

    asyncio.run(reset())


def test_time_the_event_loop_was_blocked_does_not_count():
    """A server that did nothing for three seconds has not waited for three seconds."""

    async def late() -> None:
        connection, client = await _meet()
        now = asyncio.get_running_loop().time()
        connection.sweep(now + 3.0, late=2.8)
        assert not connection._lingering
        connection.sweep(now + 4.0)
        assert connection._lingering, "1.2 s of its own were too long"
        client.close()

    asyncio.run(late())


def test_the_arrival_time_is_when_the_head_was_read():
    """Not when its turn came: among many at once, that is much later."""

    async def arrive() -> None:
        seen: list[float] = []
        connection, client = await _meet(seen)
        request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
        connection.data_received(request)
        time.sleep(0.2)  # others have their turns
        await asyncio.sleep(0.05)
        connection.data_received(request)
        await asyncio.sleep(0.05)
        assert len(seen) == 2 and seen[0] >= 0.2
        client.close()

    asyncio.run(arrive())
