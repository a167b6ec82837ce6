"""Middleware that assigns an id to every request."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: A client's request id that is safe in headers and log lines.
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")


def client_id_of(headers: Mapping[str, str]) -> str:
    """Return the id that the client has given its request; empty if there is none, or it is unsafe to repeat."""
    given = headers.get("x-request-id", "")
    return given if _CLIENT_ID.fullmatch(given) else ""


class RequestIds:
    """Sets ``request.state.request_id`` and the header x-request-id of the response.

    The response also gets traceparent if the request is traced, and x-ignored-fields if fields of it were ignored.

    from_clients  use the id in the request's x-request-id header, if there is one;
                  ``request.state.client_request_id`` is then set to it. If false, clients' ids are ignored.
    """

    def __init__(self, app: ASGIApp, from_clients: bool = False) -> None:
        self.app = app
        self.from_clients = from_clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        request_id = secrets.token_hex(16)
        if self.from_clients:
            given = client_id_of(Headers(scope=scope))
            if given:
                request_id = state["client_request_id"] = given
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(b"x-request-id", request_id.encode())]
                if "ignored_fields" in state and state["ignored_fields"].names:
                    own.append((b"x-ignored-fields", state["ignored_fields"].header().encode()))
                if "traceparent" in state:  # W3C names the response header traceresponse
                    own += [(name, state["traceparent"].encode()) for name in (b"traceparent", b"traceresponse")]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        await self.app(scope, receive, send_with_id)
