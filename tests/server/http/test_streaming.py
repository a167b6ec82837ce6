"""Server-sent events: comments that keep silent streams open, and how streams end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from aiakq.errors import error
from aiakq.server.http.responses import ErrorResponse
from aiakq.server.http.streaming import EventStream

COMMENT = b": keep-alive\n\n"


def sent_by(pauses: list[float], keep_alive: float, failure: Exception | None = None) -> tuple[list[bytes], str]:
    """The bodies of a stream whose events come after ``pauses``, and how it ended."""
    outcomes: list[str] = []
    bodies: list[bytes] = []

    async def events() -> AsyncIterator[bytes]:
        for number, pause in enumerate(pauses):
            await asyncio.sleep(pause)
            yield b"data: %d\n\n" % number
        if failure is not None:
            raise failure

    async def receive() -> dict[str, str]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        assert not bodies or bodies[-1] != b"", "something was sent after the end"
        if message["type"] == "http.response.body":
            bodies.append(message["body"])

    stream = EventStream(events(), lambda failure: [ErrorResponse.from_error(failure)], outcomes.append, keep_alive)
    asyncio.run(stream({"type": "http"}, receive, send))
    return bodies, outcomes[0]


def test_silent_streams_get_comments():
    bodies, outcome = sent_by([0.5, 0.01, 0.01, 0.5], 0.1)
    assert outcome == "complete" and bodies[-1] == b""
    assert [body for body in bodies if body != COMMENT] == [b"data: %d\n\n" % number for number in range(4)] + [b""]
    places = [at for at, body in enumerate(bodies) if body == COMMENT]
    assert 2 <= len(places) <= 10
    first, last = bodies.index(b"data: 0\n\n"), bodies.index(b"data: 2\n\n")
    assert min(places) < first and max(places) > last and not any(first < at < last for at in places)


@pytest.mark.parametrize("keep_alive", [0.0, 30.0])
def test_streams_without_pauses_get_none(keep_alive):
    bodies, _ = sent_by([0.05] * 4, keep_alive)
    assert COMMENT not in bodies and len(bodies) == 5


def test_a_stream_that_failed_ends_with_the_error():
    bodies, outcome = sent_by([0.0], 0.1, error("time_limit", limit=1.0))
    assert outcome == "error" and b"time_limit" in bodies[-2] and bodies[-1] == b""


def test_a_stream_that_waits_in_the_queue_is_kept_alive(start_server):
    """One sequence at a time: the second stream begins with comments, and its late failure is an event."""
    options = {"max_num_seqs": 1, "sse_keep_alive_interval": 0.05, "max_queue_seconds": 1.0}
    body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with start_server(**options) as server, httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body) as running:
            lines = running.iter_lines()
            next(lines)
            with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 2}) as waiting:
                assert waiting.status_code == 200
                found = list(waiting.iter_lines())
            assert found[0] == ": keep-alive"
            ends = [line for line in found if line.startswith("data: ")]
            assert ends[-1] == "data: [DONE]" or "queue_timeout" in ends[-1]
        refused = client.post("/v1/completions", json=body | {"max_tokens": -1})
        assert refused.status_code == 400, "errors that come at once have their status"
