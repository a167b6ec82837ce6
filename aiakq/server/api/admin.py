"""Admin routes, enabled by ``--enable-admin-routes``."""

from __future__ import annotations

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from aiakq.errors import error
from aiakq.runtime.protocol.command import EnableDrafts, ResetPrefixCache
from aiakq.server.api.request_model import FailFastList, RequestModel, parse_body
from aiakq.server.api.routes import UNAVAILABLE, Route
from aiakq.server.api.service import Service
from aiakq.server.http.body import read_body
from aiakq.server.http.responses import JSONResponse


class AbortRequest(RequestModel):
    """The body of POST /abort_requests."""

    request_ids: FailFastList[str] | None = Field(None, description="Ids of responses, like cmpl-...; all if absent.")


class AbortResponse(msgspec.Struct):
    """The number of aborted requests."""

    aborted: int


async def abort_requests(service: Service, request: Request) -> Response:
    """Abort the requests with the given ids, or all requests. Their clients get an error. Returns their number."""
    body = await read_body(request, service.max_body_bytes)
    payload = parse_body(AbortRequest, body) if body else AbortRequest(request_ids=None)
    return JSONResponse(AbortResponse(service.state.manager.abort(payload.request_ids, error("aborted"))))


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Clear the prefix cache, so that later prompts reuse no cached pages."""
    service.state.check_available()
    service.state.manager.send(ResetPrefixCache())
    return Response()


class SpeculationRequest(RequestModel):
    """The body of POST /speculation."""

    enabled: bool = Field(description="Whether draft tokens are proposed.")


async def set_speculation(service: Service, request: Request) -> Response:
    """Switch draft tokens off, or on again, to measure what they bring. Outputs do not change. Proposers start anew and
    know no outputs of earlier requests. Without speculative decoding there are none.
    """
    service.state.check_available()
    body = await read_body(request, service.max_body_bytes)
    service.state.manager.send(EnableDrafts(parse_body(SpeculationRequest, body).enabled))
    return Response()


ROUTES = (
    Route(
        "POST",
        "/abort_requests",
        abort_requests,
        "admin",
        request=(AbortRequest,),
        body_required=False,
        response=AbortResponse,
        description="How many there were.",
        enabled_by="enable_admin_routes",
    ),
    Route(
        "POST",
        "/reset_prefix_cache",
        reset_prefix_cache,
        "admin",
        errors=UNAVAILABLE,
        enabled_by="enable_admin_routes",
    ),
    Route(
        "POST",
        "/speculation",
        set_speculation,
        "admin",
        request=(SpeculationRequest,),
        errors=UNAVAILABLE,
        enabled_by="enable_admin_routes",
    ),
)
