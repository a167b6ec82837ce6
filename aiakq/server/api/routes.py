"""The route table, from which the application, the OpenAPI document, docs/routes.md and route tests are generated.

A module of routes defines ``ROUTES``, a tuple of ``Route``. Other packages add modules as entry points of
``aiakq.routes``; see docs/adding.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aiakq.arguments.server import ServerArguments
from aiakq.errors import error
from aiakq.registry import Registry
from aiakq.server.api.request_model import RequestModel
from aiakq.server.api.service import Service
from aiakq.server.http.responses import ErrorBody, ErrorResponse

Handler = Callable[[Service, Request], Awaitable[Response]]


class RouteModule(Protocol):
    """A module of routes."""

    @property
    def ROUTES(self) -> Sequence[Route]: ...


#: Name -> module of routes, in the order of the OpenAPI document.
ROUTE_MODULES: Registry[RouteModule] = Registry(
    "aiakq.routes",
    {
        "completions": "aiakq.server.api.completions",
        "chat": "aiakq.server.api.chat",
        "responses": "aiakq.server.api.responses.routes",
        "messages": "aiakq.server.api.messages.routes",
        "embeddings": "aiakq.server.api.pooling.embeddings",
        "scores": "aiakq.server.api.pooling.scores",
        "transcriptions": "aiakq.server.api.transcriptions",
        "models": "aiakq.server.api.models",
        "tokenization": "aiakq.server.api.tokenization",
        "status": "aiakq.server.api.status",
        "admin": "aiakq.server.api.admin",
        "adapters": "aiakq.server.api.adapter_routes",
        "playground": "aiakq.server.playground.routes",
    },
)

# Groups of errors, for ``Route.errors``.
#: Nothing can be generated, because there is no engine or the server is shutting down.
UNAVAILABLE = ("engine_dead", "engine_restarting", "shutting_down")
#: Tokenization.
TOKENIZATION = (
    *("no_tokenizer", "no_chat_template", "no_default_template", "chat_template", "template_loses"),
    *("template_unusable", "template_loses_users", "tokenization", "tokenizer_mismatch", "invalid_token_id"),
    *("media_refused", "no_pillow"),
)
#: Generation requests, in addition to the errors of their fields.
GENERATION = (
    *("empty_prompt", "too_many_prompts", "context_length_exceeded", "nothing_left", "overloaded", "queue_timeout"),
    *("time_limit", "numerical_error", "engine_restarted", "engine_timeout", "request_quarantined", "aborted"),
    *("slow_reader", "task_mismatch", "adapter_lost", "media_failed"),
)
#: Requests with a prompt, from tokenization to the engine.
PROMPT_ERRORS = (*TOKENIZATION, *UNAVAILABLE, *GENERATION)


@dataclass(frozen=True)
class Route:
    """One route.

    method         HTTP method, or several: ("GET", "POST").
    path           path as in Starlette: "/v1/models/{name:path}".
    handler        function of the service and the request; its docstring is the description of the route.
    tag            group of routes it belongs to.
    request        model of the JSON body, or several alternatives.
    form           model of the fields of a form with a file, in place of a JSON body.
    body_required  whether there must be a body, if there is a request model.
    response       body of status 200: a ``msgspec.Struct``, a media type like "text/plain" ("application/json" is any
                   object), or None for an empty body.
    description    description of the response.
    streams        whether it can return server-sent events instead; one or several ``msgspec.Struct`` are the types of
                   their JSON data.
    errors         ids of errors it can return, in addition to those common to all routes, and to all with a body.
    error_body     error format.
    needs_key      whether it needs an API key if the server has any; a string is the option that lifts this.
    enabled_by     option that the route requires to exist.
    disabled_by    option that removes the route.
    generates      whether its requests are counted by the request metrics and wait in the engine's queue.
    """

    method: str | tuple[str, ...]
    path: str
    handler: Handler
    tag: str
    request: tuple[type[RequestModel], ...] = ()
    form: type[RequestModel] | None = None
    body_required: bool = True
    response: type[msgspec.Struct] | str | None = None
    description: str = "Empty."
    streams: bool | type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] = False
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
    def administrates(self) -> bool:
        """Whether it needs a key of --admin-api-key, if the server has any."""
        return self.tag == "admin"

    @property
    def openapi_path(self) -> str:
        """The path without converters, like /v1/models/{name}."""
        return self.path.replace(":path}", "}")

    @property
    def summary(self) -> str:
        """The first paragraph of the handler's docstring, on one line."""
        return " ".join((self.handler.__doc__ or "").split("\n\n")[0].split())


def load_routes(args: ServerArguments) -> tuple[Route, ...]:
    """Return all routes enabled by the server arguments ``args``. Raises ``plugin`` for duplicate paths."""
    modules: list[RouteModule] = [ROUTE_MODULES.load(name) for name in ROUTE_MODULES]
    routes = [route for module in modules for route in module.ROUTES]
    paths: set[str] = set()
    for route in routes:
        if route.path in paths:
            raise error("plugin", reason=f"two routes have the path {route.path}")
        paths.add(route.path)
    return tuple(
        route
        for route in routes
        if (route.enabled_by is None or _is_set(args, route.enabled_by))
        and (route.disabled_by is None or not _is_set(args, route.disabled_by))
    )


def _is_set(args: ServerArguments, option: str) -> bool:
    """Return whether the option that a route names is set."""
    return bool(getattr(args, option))


def error_shapes(routes: Iterable[Route]) -> dict[str, type[ErrorBody]]:
    """Return path -> error format of the routes whose format is not OpenAI's."""
    return {route.path: route.error_body for route in routes if not issubclass(route.error_body, ErrorResponse)}


def keyless_paths(routes: Iterable[Route], args: ServerArguments) -> frozenset[str]:
    """Return the paths that need no API key."""
    return frozenset(
        route.path
        for route in routes
        if not route.needs_key or (isinstance(route.needs_key, str) and _is_set(args, route.needs_key))
    )
