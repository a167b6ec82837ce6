"""Responses of a collector, which are read only as far as needed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
import requests

from aiakq.server.telemetry.collector_session import MAX_HEADER_BYTES, CollectorSession


@contextlib.contextmanager
def collector(answer: bytes, repeated: bytes = b"") -> Iterator[tuple[str, list[int]]]:
    """A collector that answers once, repeating the end until it is cut off: its address, and the bytes it sent."""
    sent = [0]

    def serve() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            connection.settimeout(10)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            connection.recv(1 << 16)
            connection.sendall(answer)
            while repeated and sent[0] < 64 << 20:
                connection.sendall(repeated)
                sent[0] += len(repeated)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces", sent
        thread.join(20)


@pytest.mark.parametrize(
    ("answer", "repeated"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X-A: " + b"y" * 60_000 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\nX-A: ", b"y" * 60_000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
        (b"HTTP/1.1 200 ", b"y" * 60_000),
    ],
    ids=["headers", "one header", "interim answers", "status line"],
)
def test_the_headers_of_an_answer_are_bounded(answer, repeated):
    with collector(answer, repeated) as (url, sent):
        with pytest.raises(requests.RequestException), CollectorSession() as session:
            session.post(url, data=b"spans", timeout=5)
    assert sent[0] < 3 << 20  # what the sockets buffer


def test_an_answer_within_the_bounds_is_taken():
    many = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 500) for number in range(90))
    assert len(many) < MAX_HEADER_BYTES
    with collector(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + many + b"\r\nok") as (
        url,
        _,
    ):
        with CollectorSession() as session:
            response = session.post(url, data=b"spans", timeout=5)
    assert response.status_code == 200 and response.headers["X-89"] == "y" * 500
