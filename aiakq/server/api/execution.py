"""Execution of requests by the engine: admission, tracking, errors and cancellation, for routes that generate or pool.

A route passes a ``ResultBuilder`` to ``answer``, which alone decides what the request returns: ``TokenResults`` or
``PooledResults``.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.request import Request
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.server.api.request_model import RequestModel, parse_body
from aiakq.server.api.request_tracker import RequestTracker
from aiakq.server.api.service import Service
from aiakq.server.http.auth import client_of
from aiakq.server.http.body import read_body
from aiakq.server.http.streaming import ClientDisconnected, cancel_on_disconnect
from aiakq.server.process.request_stream import RequestStream
from aiakq.server.telemetry.logs import OutputLog, request_logger

#: Errors after which a later part of a request is started again, and the seconds between attempts.
_RETRIED_ERRORS = ("overloaded", "engine_restarting")
_RETRY_SECONDS = 0.05

Payload = TypeVar("Payload", bound=RequestModel)


#: Reads a body of up to so many bytes, and JSON values.
BodyReader = Callable[[HTTPRequest, int, int], Awaitable[bytes]]


class ResultBuilder(Protocol):
    """What a request returns."""

    async def respond(self, execution: Execution, body: bytes) -> Response:
        """Parse ``body``, execute what it asks for, and return the response.

        Calls ``execution.finish`` when the response is complete, which may be later than this returns.
        """


class Execution:
    """One HTTP request, from its arrival to the end of its response.

    record  its data for observers.
    id      id of the request; set by ``parse``.
    """

    id: str
    _payload: Any
    _adapter: AdapterRef | None

    def __init__(self, service: Service, request: HTTPRequest) -> None:
        self.service = service
        self._request = request
        self._tracker = RequestTracker(service, request.scope)
        self.record = self._tracker.record
        self._streams: list[RequestStream] = []

    def parse(self, model: type[Payload], body: bytes) -> Payload:
        """Return the validated body. Raises the errors of ``parse_body`` and of names of models."""
        payload = parse_body(model, body, self.service.renderer.unknown_fields)
        self.service.model.check_name(getattr(payload, "model", None))
        state = self._request.state
        chosen = getattr(state, "client_request_id", None) or getattr(payload, "request_id", None)
        self._payload, self.id = payload, chosen or state.request_id
        return payload

    async def execute(self, request: Request) -> RequestStream:
        """Start ``request`` with the client's priority and adapter, and return its output.

        An HTTP request may execute several. If the queue is full or the engine restarts, the first one fails and later
        ones wait. Raises the errors of ``RequestManager.start``.
        """
        service = self.service
        _log(service, request)
        while True:
            try:
                service.state.check_available()
                stream = service.state.manager.start(self._completed(request))
                break
            except AiakqError as failure:
                if failure.id not in _RETRIED_ERRORS or not self._streams:
                    raise
            await asyncio.sleep(_RETRY_SECONDS)
            service.state.check_open()
        stream.interval = service.options.stream_interval
        if service.options.log_outputs and request.params.detokenize:
            stream.output_log = OutputLog(request.id)
        self._streams.append(stream)
        self._tracker.start(request.id, request.params, self._payload.model, stream)
        return stream

    def _completed(self, request: Request) -> Request:
        """Return ``request`` with what the engine gets of the HTTP request besides prompts and parameters."""
        service, payload, state = self.service, self._payload, self._request.state
        arrival_time = time.monotonic()
        if not self._streams:
            # All have the adapter that has the requested name when the first one starts.
            self._adapter, arrival_time = service.model.adapter(payload.model), self._tracker.arrival_time
        options = msgspec.structs.replace(
            request.options,
            priority=payload.priority or 0,
            cache_salt=_cache_salt(getattr(state, "owner", ""), getattr(payload, "cache_salt", None)),
            client=client_of(self._request) if service.options.fair_share else "",
            adapter=self._adapter,
        )
        return replace(request, options=options, arrival_time=arrival_time)

    def finish(self, reason: str, failure: BaseException | None = None) -> None:
        """End the request for one of ``metrics.FINISH_REASONS``, and abort what still runs. Later calls do nothing."""
        for stream in self._streams:
            stream.close()
        self._tracker.finish(reason, failure)


async def answer(
    service: Service, request: HTTPRequest, builder: ResultBuilder, read: BodyReader = read_body
) -> Response:
    """Execute an HTTP request, and return the response that ``builder`` builds of the body that ``read`` returns."""
    execution = Execution(service, request)
    try:
        service.state.check_available()
        with execution.record.phase("read_body"):
            body = await read(request, service.max_body_bytes, service.max_values)
        return await cancel_on_disconnect(request, builder.respond(execution, body))
    except (ClientDisconnected, ClientDisconnect):
        execution.finish("abort")
        raise
    except BaseException as failure:
        execution.finish("error", failure)
        if isinstance(failure, AiakqError):
            service.state.metrics.request_refused(failure)
        raise


def _cache_salt(owner: str, salt: str | None) -> str:
    """Return the salt of the prefix hashes: requests share pages only with equal API keys and ``cache_salt``."""
    return hashlib.sha256(f"{owner} {salt or ''}".encode()).hexdigest()[:32] if owner or salt else ""


def _log(service: Service, request: Request) -> None:
    """Log a request that is about to start, with --enable-log-requests."""
    if service.options.log_prompts is None:
        return
    length = None if math.isinf(service.options.log_prompts) else int(service.options.log_prompts)
    prompts, defaults = request.prompts, SamplingParams()
    shown = [(prompt.token_ids if prompt.text is None else prompt.text)[:length] for prompt in prompts]
    changed = {name: value for name, value in vars(request.params).items() if value != getattr(defaults, name)}
    changed.pop("stop_strings", None)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    request_logger.info("request %s: prompts %r of %s tokens, params %r", request.id, shown, lengths, changed)
