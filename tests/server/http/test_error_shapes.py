"""Errors before a route is found have the shape of its API."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from aiakq.arguments.server import ServerArguments
from aiakq.errors import AiakqError, error
from aiakq.server.http.error_shapes import ErrorShapes, error_body
from aiakq.server.http.http_server import Gateway
from aiakq.server.http.responses import ErrorResponse


class Other(msgspec.Struct):
    """The shape of another API."""

    kind: str

    @classmethod
    def from_error(cls, failure: AiakqError) -> Other:
        return cls(failure.id)


def answer(app: Any, path: str) -> Any:
    """The JSON that ``app`` answers."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    asyncio.run(app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send))
    return msgspec.json.decode(sent[-1]["body"])


@pytest.mark.parametrize("path", ["/other", "/other/", "/proxy/other"])
def test_a_server_that_loads_answers_in_the_shape_of_the_path(path):
    app = ErrorShapes(Gateway(ServerArguments(disable_playground=True)), {"/other": Other}, "/proxy")
    assert answer(app, path) == {"kind": "loading"}


def test_other_paths_have_openais_shape():
    app = ErrorShapes(Gateway(ServerArguments(disable_playground=True)), {"/other": Other}, "/proxy")
    for path in ("/", "/other/more", "/v1/models"):
        assert answer(app, path)["error"]["code"] == "loading"
    assert error_body({"type": "http"}, error("loading")) == ErrorResponse.from_error(error("loading"))
