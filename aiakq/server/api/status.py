"""Status routes: /live, /health, /ready, /ping, /load, /version and /metrics."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import aiakq
from aiakq.errors import AiakqError
from aiakq.server.api.routes import UNAVAILABLE, Route
from aiakq.server.api.service import Service
from aiakq.server.http.responses import JSONResponse, NotReadyResponse, not_ready_response
from aiakq.server.telemetry.metrics import CONTENT_TYPE


class ReadyResponse(msgspec.Struct):
    """The model is loaded."""

    ready: Literal[True] = True


class LoadResponse(msgspec.Struct):
    """The current load."""

    server_load: int
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_perc: float


class VersionResponse(msgspec.Struct):
    """The version of aiakq."""

    version: str


async def live(service: Service, request: Request) -> Response:
    """Return 200 while this process responds, even if it is loading, draining or restarting an engine."""
    return Response()


async def health(service: Service, request: Request) -> Response:
    """Return 200 while the server can handle requests, else 503 with the reason."""
    service.state.check_healthy()
    return Response()


async def ready(service: Service, request: Request) -> Response:
    """Return 200 once the model is loaded; before that, and while an engine restarts, 503 with the progress."""
    try:
        service.state.check_healthy()
    except AiakqError as failure:
        return not_ready_response(failure, service.state.progress())
    return JSONResponse(ReadyResponse())


async def ping(service: Service, request: Request) -> Response:
    """Same as /health, under the name that some platforms use."""
    service.state.check_healthy()
    return Response()


async def load(service: Service, request: Request) -> Response:
    """Return the current load: unfinished requests, running and waiting sequences, KV pages in use."""
    stats = service.state.manager.stats
    return JSONResponse(LoadResponse(service.state.num_in_flight, stats.num_running, stats.num_waiting, stats.kv_usage))


async def version(service: Service, request: Request) -> Response:
    """The version of aiakq."""
    return JSONResponse(VersionResponse(aiakq.__version__))


async def metrics(service: Service, request: Request) -> Response:
    """Prometheus metrics."""
    limits, state = service.model.limits.adapters, service.state
    if limits is not None:
        state.metrics.show_adapters(*state.manager.adapters_of_requests(), limits.max_loras, time.time())
    return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE})


ROUTES = (
    Route("GET", "/live", live, "status", needs_key=False),
    Route("GET", "/health", health, "status", errors=(*UNAVAILABLE, "tokenizer_stuck"), needs_key=False),
    Route(
        "GET",
        "/ready",
        ready,
        "status",
        response=ReadyResponse,
        description="The model is loaded.",
        errors=(*UNAVAILABLE, "tokenizer_stuck"),
        error_body=NotReadyResponse,
        needs_key=False,
    ),
    Route(("GET", "POST"), "/ping", ping, "status", errors=(*UNAVAILABLE, "tokenizer_stuck"), needs_key=False),
    Route("GET", "/load", load, "status", response=LoadResponse, description="How much work there is."),
    Route("GET", "/version", version, "status", response=VersionResponse, description="The version.", needs_key=False),
    Route(
        "GET",
        "/metrics",
        metrics,
        "status",
        response="text/plain",
        description="Prometheus metrics.",
        needs_key="metrics_without_key",
    ),
)
