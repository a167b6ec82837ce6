"""The table of routes, from which the application, the OpenAPI document, docs/routes.md and route tests are made.

A module of routes defines ``ROUTES``, a tuple of ``Route``. Other packages add modules as entry points of
``aiakq.routes``; see docs/adding.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from aiakq.errors import error
from aiakq.registry import Registry
from aiakq.server.api.request_model import RequestModel
from aiakq.server.api.service import Service
from aiakq.server.http.responses import ErrorBody, ErrorResponse

Handler = Callable[[Service, Request], Awaitable[Response]]

#: Modules of routes, by name, in the order of the OpenAPI document.
ROUTE_MODULES = Registry(
    "aiakq.routes",
    {
        "completions": "aiakq.server.api.completions",
        "chat": "aiakq.server.api.chat",
        "responses": "aiakq.server.api.responses.routes",
        "messages": "aiakq.server.api.messages.routes",
        "embeddings": "aiakq.server.api.pooling.embeddings",
        "scores": "aiakq.server.api.pooling.scores",
        "models": "aiakq.server.api.models",
        "tokenization": "aiakq.server.api.tokenization",
        "status": "aiakq.server.api.status",
        "admin": "aiakq.server.api.admin",
        "adapters": "aiakq.server.api.adapter_routes",
        "playground": "aiakq.server.playground.routes",
    },
)

# Groups of errors, for ``Route.errors``.
#: Nothing can be generated: there is no engine, or the server is shutting down.
UNAVAILABLE = ("engine_dead", "engine_restarting", "shutting_down")
#: Between text and token ids.
TOKENIZATION = ("no_tokenizer", "no_chat_template", "chat_template", "tokenization", "invalid_token_id")
#: Of a request that generates, beside those of its fields.
GENERATION = (
    *("empty_prompt", "too_many_prompts", "context_length_exceeded", "nothing_left", "overloaded", "queue_timeout"),
    *("time_limit", "numerical_error", "engine_restarted", "engine_timeout", "request_quarantined", "aborted"),
    *("slow_reader", "task_mismatch", "adapter_lost"),
)
#: Of a request whose prompt goes to the engine, all the way.
PROMPT_ERRORS = (*TOKENIZATION, *UNAVAILABLE, *GENERATION)


@dataclass(frozen=True)
class Route:
    """One route.

    method         HTTP method, or several: ("GET", "POST").
    path           as in Starlette: "/v1/models/{name:path}".
    handler        called with the service and the request; its docstring is the description.
    tag            the group of routes it belongs to.
    request        models of the JSON body; several if the body may have one of several forms.
    body_required  whether there must be a body, if there is a request model.
    response       what 200 returns: a ``msgspec.Struct``, a media type like "text/plain" ("application/json" is any
                   object), or None for an empty body.
    description    of the response.
    streams        whether it can return server-sent events instead; one or several ``msgspec.Struct`` are the JSON in
                   their data.
    errors         ids of errors it can return, beyond those that every route, and every route with a body, can return.
    error_body     the shape of its errors.
    needs_key      whether it needs an API key where the server has any; a string names the option that lifts that.
    enabled_by     the option without which the route does not exist.
    disabled_by    the option with which it does not.
    generates      whether its requests are counted by the request metrics and wait in the engine's queue.
    """

    method: str | tuple[str, ...]
    path: str
    handler: Handler
    tag: str
    request: tuple[type[RequestModel], ...] = ()
    body_required: bool = True
    response: type[Any] | str | None = None
    description: str = "Empty."
    streams: bool | type[Any] | tuple[type[Any], ...] = False
    errors: tuple[str, ...] = ()
    error_body: type[ErrorBody] = ErrorResponse
    needs_key: bool | str = True
    enabled_by: str | None = None
    disabled_by: str | None = None
    generates: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        return (self.method,) if isinstance(self.method, str) else self.method

    @property
    def openapi_path(self) -> str:
        """The path without converters: /v1/models/{name}."""
        return self.path.replace(":path}", "}")

    @property
    def summary(self) -> str:
        """The first paragraph of the handler's docstring, on one line."""
        return " ".join((self.handler.__doc__ or "").split("\n\n")[0].split())


def load_routes(args: Mapping[str, Any]) -> tuple[Route, ...]:
    """All routes that exist under the server arguments ``args``. Raises ``plugin`` for two routes with one path."""
    routes = [route for name in ROUTE_MODULES for route in ROUTE_MODULES.load(name).ROUTES]
    paths: set[str] = set()
    for route in routes:
        if route.path in paths:
            raise error("plugin", reason=f"two routes have the path {route.path}")
        paths.add(route.path)
    return tuple(
        route
        for route in routes
        if (route.enabled_by is None or args[route.enabled_by])
        and (route.disabled_by is None or not args[route.disabled_by])
    )


def error_shapes(routes: Iterable[Route]) -> dict[str, type[ErrorBody]]:
    """The shapes of errors that are not OpenAI's, by path."""
    return {route.path: route.error_body for route in routes if not issubclass(route.error_body, ErrorResponse)}


def keyless_paths(routes: Iterable[Route], args: Mapping[str, Any]) -> frozenset[str]:
    """The paths that need no API key."""
    return frozenset(
        route.path
        for route in routes
        if not route.needs_key or (isinstance(route.needs_key, str) and args[route.needs_key])
    )
