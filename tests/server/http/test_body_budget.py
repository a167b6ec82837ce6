"""Limits for all clients together: request bodies and connections; and the access log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from aiakq.errors import AiakqError
from aiakq.server.background import RunningServer
from aiakq.server.http.body import read_body
from aiakq.server.http.body_budget import SMALL_BODY_BYTES, BodyBudget, image_bytes

MIB = 1 << 20


@pytest.fixture(scope="module")
def crowded(start_server) -> Iterator[RunningServer]:
    """A server with room for 24 connections and 8 MiB of bodies."""
    limits = {"max_connections": 24, "max_connections_per_address": 10, "max_total_body_bytes": 8 * MIB}
    with start_server(**limits, uvicorn_log_level="info", body_timeout=60.0, header_timeout=60.0) as running:
        yield running


def dial(server: RunningServer, address: str = "127.0.0.1") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20, source_address=(address, 0))


def test_idle_connections_of_several_addresses_do_not_block_new_ones(crowded):
    """Three addresses take every connection and send nothing; the oldest idle ones are closed for new ones."""
    with contextlib.ExitStack() as opened:
        idle = [opened.enter_context(dial(crowded, f"127.0.0.{2 + number // 8}")) for number in range(24)]
        for _ in range(5):
            assert httpx.get(f"{crowded.url}/health", trust_env=False).status_code == 200
        idle[0].settimeout(5)
        assert idle[0].recv(1) == b""
        busy = opened.enter_context(dial(crowded, "127.0.0.9"))
        body = json.dumps({"prompt": "Long", "max_tokens": 500, "temperature": 0, "ignore_eos": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        busy.sendall(head % len(body) + body)
        more = [opened.enter_context(dial(crowded, f"127.0.0.{20 + number}")) for number in range(24)]
        answer = b""
        while piece := busy.recv(1 << 16):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200"), "a connection with a request is not idle"
        assert len(more) == 24


def test_all_bodies_together_are_limited(crowded):
    """Unfinished bodies: those beyond the limit are refused, others are served, and the budget becomes free again."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n{"
    completions = f"{crowded.url}/v1/completions"
    large = json.dumps({"prompt": [5], "max_tokens": 1, "metadata": {"a": "x" * MIB}})
    with contextlib.ExitStack() as opened:
        waiting = []
        for number in range(4):
            waiting.append(opened.enter_context(dial(crowded, f"127.0.0.{2 + number}")))
            waiting[-1].sendall(head % (2 * MIB))
        time.sleep(0.5)
        refused = httpx.post(completions, content=large, trust_env=False, timeout=20)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0, refused.text
        assert refused.json()["error"]["code"] == "bodies_too_large"
        small = {"prompt": [5], "max_tokens": 1}
        assert httpx.post(completions, json=small, trust_env=False, timeout=20).status_code == 200
    deadline = time.monotonic() + 20
    while httpx.post(completions, content=large, trust_env=False, timeout=20).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_access_log_holds_no_query_strings(crowded):
    assert httpx.get(f"{crowded.url}/version?key=secret", trust_env=False).status_code == 200
    deadline = time.monotonic() + 20
    while not any("GET /version HTTP/1.1" in event.message for event in crowded.events):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not any("secret" in event.message for event in crowded.events)


def test_one_client_gets_half_of_the_budget():
    """By key, or by address without one. Small bodies are never refused, and what was reserved is released."""
    limit = 4 * MIB
    inside = []

    async def app(scope, receive, send) -> None:
        await read_body(Request(scope, receive), limit)
        inside.append(budget.num_bytes)
        await Response(status_code=204)(scope, receive, send)

    budget = BodyBudget(app, limit)

    async def post(size: int, client: str, owner: str = "", *, chunked: bool = False, pieces: int = 8) -> int:
        headers = [] if chunked else [(b"content-length", str(size).encode())]
        scope: dict[str, Any] = {"type": "http", "client": (client, 1), "headers": headers, "state": {"owner": owner}}
        left = pieces

        async def receive() -> dict[str, Any]:
            nonlocal left
            await asyncio.sleep(0)
            left -= 1
            return {"type": "http.request", "body": b" " * (size // pieces), "more_body": left > 0}

        async def send(message: dict[str, Any]) -> None: ...

        try:
            await budget(scope, receive, send)
        except AiakqError as failure:
            assert failure.id == "bodies_too_large"
            return 503
        return 204

    async def run() -> None:
        assert await post(3 * MIB, "a") == await post(3 * MIB, "a", chunked=True) == 503
        assert await asyncio.gather(*(post(MIB, "a") for _ in range(3))) == [204, 204, 503]
        assert await asyncio.gather(*(post(MIB, "a", owner) for owner in "xyzwv")) == [204] * 4 + [503]
        assert await asyncio.gather(*(post(MIB, client) for client in "abcd")) == [204] * 4
        small = [post(SMALL_BODY_BYTES, "a", chunked=index % 2 == 0) for index in range(100)]
        assert await asyncio.gather(*small) == [204] * 100

    asyncio.run(run())
    assert budget.num_bytes == 0 and not budget._by_client
    assert max(inside) > limit and budget.take_max_used() > limit and budget.take_max_used() == 0


def test_images_of_unfinished_requests_are_limited_with_the_bodies():
    """Files, then the pixels in their place; half of the limit for a client, and nothing is left of ended requests."""
    held: list[int] = []

    async def post(client: str, *sizes: int) -> str:
        async def app(scope, receive, send) -> None:
            images = image_bytes.get()
            assert images is not None
            for size in sizes:
                images.hold(size, "messages")
            held.append(budget.num_bytes)
            await asyncio.sleep(0.01)

        budget.app = app
        try:
            await budget({"type": "http", "client": (client, 1), "headers": []}, None, None)  # type: ignore[arg-type]
        except AiakqError as failure:
            return failure.id
        return ""

    async def run() -> None:
        assert await post("a", 3 * MIB) == "media_refused", "trying again would not help"
        assert await post("a", 2 * MIB, MIB, 2 * MIB) == "" and held.pop() == 2 * MIB
        assert await asyncio.gather(*(post("a", size) for size in (MIB, MIB, 9))) == ["", "", "bodies_too_large"]
        assert await asyncio.gather(*(post(name, 2 * MIB) for name in "abc")) == ["", "", "bodies_too_large"]

    budget = BodyBudget(None, 4 * MIB)  # type: ignore[arg-type]
    asyncio.run(run())
    assert budget.num_bytes == 0 and not budget._by_client
