"""Behaviour of every route."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

import httpx

from aiakq.arguments.server import checked
from aiakq.server.http.http_server import METHODS, Gateway


def ask(server, request: bytes) -> bytes:
    """Return everything that comes back on a new connection, until the server closes it."""
    host, port = server.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def test_head_is_answered_like_get_without_a_body(server):
    for path in ("/health", "/live", "/ready", "/ping", "/version", "/v1/models", "/", "/metrics", "/docs", "/nothing"):
        line = b"%b " + path.encode() + b" HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        head, _, body = ask(server, line % b"HEAD").partition(b"\r\n\r\n")
        wanted, _, content = ask(server, line % b"GET").partition(b"\r\n\r\n")
        assert head.split(b"\r\n")[0] == wanted.split(b"\r\n")[0] and body == b"", path
        if path not in ("/metrics", "/nothing"):
            assert b"content-length: %d" % len(content) in head, path
    answer = httpx.head(f"{server.url}/v1/completions", trust_env=False)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert set(httpx.post(f"{server.url}/version", trust_env=False).headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_options_for_the_whole_server_are_answered_with_the_methods_of_routes(server):
    for target in (b"*", b"http://127.0.0.1"):
        answer = ask(server, b"OPTIONS %b HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n" % target)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 204 ") and b"\r\nallow: GET, HEAD, OPTIONS, POST" in head and not body
    answer = ask(server, b"GET * HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404")


def test_options_for_the_whole_server_are_answered_while_the_model_is_loading():
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    gateway = Gateway(checked({"disable_playground": True}, server=True))
    scope = {"type": "http", "method": "OPTIONS", "path": "*", "headers": []}
    asyncio.run(gateway(scope, cast(Any, None), send))
    assert sent[0]["status"] == 204 and (b"allow", METHODS.encode()) in sent[0]["headers"]
