"""Errors of the client if a server refuses it, or is no server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from aiakq.bench.client import served_model
from aiakq.errors import AiakqError
from aiakq.terminal.usage_errors import server_url


def ask(answer: Callable[[httpx.Request], httpx.Response], **headers: str) -> AiakqError:
    async def run() -> None:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(base_url="http://server:1", transport=transport, headers=headers) as client:
            await served_model(client, None)

    with pytest.raises(AiakqError) as caught:
        asyncio.run(run())
    return caught.value


@pytest.mark.parametrize(
    ("headers", "said"),
    [({}, "requires an API key, and none was sent"), ({"authorization": "Bearer x"}, "the API key that was sent")],
)
def test_a_key_that_is_missing_or_wrong(headers, said):
    problem = ask(lambda request: httpx.Response(401, json={"error": {"message": "no"}}), **headers)
    assert problem.id == "server_key" and said in str(problem) and "--api-key" in str(problem)
    assert "developer.mozilla.org" not in str(problem)


def test_another_kind_of_server():
    problem = ask(lambda request: httpx.Response(404, text="nothing here"))
    assert problem.id == "no_answer" and "status 404" in str(problem)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_usual_forms_of_an_address_are_one(url):
    assert server_url("--base-url", url) == "http://h:1"
    assert server_url("--base-url", url.replace("h:1", "h:1/llm")) == "http://h:1/llm"
