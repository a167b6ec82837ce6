"""Routes for the operator, off unless --enable-admin-routes is given."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from aiakq.errors import error
from aiakq.server.api.parsing import parse
from aiakq.server.api.protocol import AbortRequest
from aiakq.server.api.service import Service
from aiakq.server.http.body import read_body
from aiakq.server.http.streaming import JSONAnswer


def add_admin_routes(app: FastAPI, service: Service) -> None:
    """Add them to ``app``."""

    @app.post("/abort_requests")
    async def abort_requests(request: Request) -> Response:
        """Stop the requests whose ids are given, or all; says how many there were. Their clients get an error."""
        body = await read_body(request, service.body_limit)
        asked = parse(AbortRequest, body) if body else AbortRequest()
        return JSONAnswer({"aborted": service.table.abort(asked.request_ids, error("aborted"))})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Let no later prompt reuse what was computed for earlier ones."""
        service.check_open()
        service.table.reset_prefix_cache()
        return Response()
