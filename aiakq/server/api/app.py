"""The ASGI application, built from the route table. Every error has the body that its route declares."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette import routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from aiakq.errors import AiakqError, error
from aiakq.server.api.openapi import openapi_document
from aiakq.server.api.request_tracker import RequestTracker
from aiakq.server.api.routes import Route
from aiakq.server.api.service import ServerState, Service
from aiakq.server.api.unknown_fields import IgnoredFields, ignored_fields
from aiakq.server.errors import as_aiakq_error, copy_error
from aiakq.server.http.auth import OnRefusal
from aiakq.server.http.error_shapes import error_body
from aiakq.server.http.responses import JSONResponse, NoResponse, error_response
from aiakq.server.http.root_path import route_path
from aiakq.server.http.streaming import ClientDisconnected
from aiakq.server.process.text_client import client_of_request
from aiakq.server.telemetry.load_report import FORMAT_HEADER, REPORT_HEADER, load_report


class RoutePaths:
    """Middleware that removes a trailing slash from paths, except that of the root page, and sets ASGI's root_path."""

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self.app = app
        self.root = root_path.rstrip("/") + "/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path + "/" == self.root:
            path = self.root
        elif path != self.root and path.endswith("/"):
            path = path[:-1] or "/"
        await self.app({**scope, "path": path, "root_path": self.root[:-1]}, receive, send)


def create_app(
    service: Service,
    routes: Sequence[Route],
    *,
    root_path: str = "",
    keyless_paths: frozenset[str] | None = None,
    with_docs: bool = True,
) -> Starlette:
    """Return the application that serves ``service`` on ``routes``.

    root_path      path prefix under which a proxy exposes the server.
    keyless_paths  for the OpenAPI document: paths that need no key; None if the server requires no keys. Keys are
                   checked before the application.
    with_docs      whether /openapi.json is served.
    """

    @functools.cache
    def document() -> dict[str, object]:
        accepts_unknown = not service.renderer.unknown_fields.refuses
        found = openapi_document(routes, service.model, keyless_paths, accepts_unknown)
        return found | {"servers": [{"url": root_path.rstrip("/")}]} if root_path.rstrip("/") else found

    async def openapi(request: Request) -> Response:
        return JSONResponse(document())

    served = [routing.Route(route.path, _endpoint(route, service), methods=route.methods) for route in routes]
    if with_docs:
        served.append(routing.Route("/openapi.json", openapi))
    app = Starlette(
        routes=served,
        middleware=[Middleware(RoutePaths, root_path=root_path)],
        exception_handlers={
            AiakqError: _on_aiakq_error,
            HTTPException: _on_http_exception,
            ClientDisconnected: _on_disconnect,
            ClientDisconnect: _on_disconnect,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    return app


def _endpoint(route: Route, service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        request.state.error_body = route.error_body
        if route.administrates and not getattr(request.state, "administrates", True):
            raise error("admin_key_required")
        client = request.client
        request.state.ignored_fields = names = IgnoredFields()
        ignored_fields.set(names)
        client_of_request.set(getattr(request.state, "owner", "") or (client.host if client else ""))
        try:
            response = await route.handler(service, request)
            if route.generates and FORMAT_HEADER in request.headers:
                _report_load(service.state, request.headers[FORMAT_HEADER], response)
            return response
        except asyncio.CancelledError:
            # The server is ending, and has waited long enough. Generation requests have failed before.
            if service.state.closing is None:
                raise
            raise copy_error(service.state.closing) from None

    return endpoint


def _report_load(state: ServerState, format: str, response: Response) -> None:
    """Add the load of the server to the headers of ``response``."""
    stats = state.manager.stats
    loads = {"kv_cache_usage_perc": stats.kv_usage, "num_requests_waiting": stats.num_waiting}
    report = load_report(format, loads)
    if report is not None:
        response.headers[REPORT_HEADER] = report


def count_refusals(service: Service, routes: Sequence[Route], root_path: str) -> OnRefusal:
    """Return a callback for access control that counts rejected generation requests in the metrics."""
    paths = {route.path for route in routes if route.generates}

    def on_refusal(scope: Scope, failure: AiakqError) -> None:
        if scope["method"] == "POST" and route_path(scope["path"], root_path).removesuffix("/") in paths:
            RequestTracker(service, scope).finish("error", failure)
            service.state.metrics.request_refused(failure)

    return on_refusal


def _respond(request: Request, failure: AiakqError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response for ``failure`` in the error format of the route."""
    return error_response(failure, headers, error_body(request.scope, failure))


async def _on_aiakq_error(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, AiakqError)
    return _respond(request, failure)


async def _on_http_exception(request: Request, failure: Exception) -> Response:
    """Handle the errors of the router: unknown paths and unsupported methods."""
    assert isinstance(failure, HTTPException)
    path = request.scope["path"][:64]
    if failure.status_code == 404:
        refusal = error("not_found", path=path)
    elif failure.status_code == 405:
        refusal = error("method_not_allowed", path=path, method=request.method[:16])
    else:
        refusal = error("request_failed", reason=f"HTTP status {failure.status_code}")
    headers = {name: ", ".join(sorted(value.split(", "))) for name, value in (failure.headers or {}).items()}
    return _respond(request, refusal, headers)


async def _on_disconnect(request: Request, failure: Exception) -> Response:
    return NoResponse()


async def _on_bug(request: Request, failure: Exception) -> Response:
    """Handle an unexpected exception: clients get no details, and the HTTP server logs it."""
    return _respond(request, as_aiakq_error(failure))
