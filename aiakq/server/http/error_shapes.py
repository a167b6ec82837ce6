"""Errors in the format of the API that the request's path belongs to, even before routing."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from aiakq.errors import AiakqError
from aiakq.server.http.responses import ErrorBody, ErrorResponse
from aiakq.server.http.root_path import route_path


class ErrorShapes:
    """Middleware that sets ``request.state.error_body`` to the error format of the path.

    shapes     error formats by path, where they differ from OpenAI's.
    root_path  path prefix under which a proxy exposes the server.
    """

    def __init__(self, app: ASGIApp, shapes: Mapping[str, type[ErrorBody]], root_path: str = "") -> None:
        self.app = app
        self.shapes = shapes
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shape = self.shapes.get(route_path(scope.get("path", ""), self.root_path).removesuffix("/"))
        if shape is not None:
            scope.setdefault("state", {})["error_body"] = shape
        await self.app(scope, receive, send)


def error_body(scope: Scope, failure: AiakqError) -> ErrorBody:
    """Return the body of an error response to the request of ``scope``."""
    shape: type[ErrorBody] = scope.get("state", {}).get("error_body", ErrorResponse)
    return shape.from_error(failure)
