"""Handling of generation requests: admission, execution, and the response as JSON or an event stream.

A route that generates supplies two classes: a request model that satisfies ``GenerationInput``, and a
``ResponseBuilder``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.request import Request as RuntimeRequest
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.api.request_model import parse_body
from aiakq.server.api.request_options import options_of
from aiakq.server.api.request_tracker import RequestTracker
from aiakq.server.api.service import Service
from aiakq.server.http.body import read_body
from aiakq.server.http.responses import ErrorResponse, JSONResponse
from aiakq.server.http.streaming import ClientDisconnected, EventStream, cancel_on_disconnect, encode_events
from aiakq.server.process.request_stream import RequestDeltas, RequestStream, merge_deltas


class GenerationInput(Protocol):
    """A request model for ``generate``."""

    model: str | None
    stream: bool | None
    priority: int | None
    cache_salt: str | None

    def check_combinations(self) -> None:
        """Raise ``unsupported_parameter`` or ``value_out_of_range`` for values that exclude each other."""

    def sampling_params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """Return the sampling parameters: the request's values, else ``defaults`` from the model."""

    async def tokenize(self, service: Service, params: SamplingParams) -> list[Prompt]:
        """Tokenize the prompts."""

    def rename_param(self, failure: AiakqError) -> AiakqError:
        """Return ``failure`` with the request field's name in place of the sampling parameter's."""

    async def grammar_of(self, service: Service, prompts: Sequence[Prompt], grammar: Grammar | None) -> Grammar | None:
        """Return the grammar of the response after checking it; ``grammar``: that of the structured output fields."""

    async def with_budgets(self, service: Service, prompts: Sequence[Prompt], params: SamplingParams) -> list[Prompt]:
        """Return the prompts with the budgets of thoughts, which ``params`` has. Raises ``unsupported_parameter``."""


class ResponseBuilder:
    """Builds the response to one request, complete or as chunks of a stream. Subclasses define its format.

    id             request id in the response.
    end_of_stream  data sent after the last chunk of a complete stream.
    kept_special_tokens  special tokens that must be kept in the text.
    """

    id_prefix = ""
    end_of_stream = b""
    kept_special_tokens: frozenset[int] = frozenset()

    def __init__(
        self, service: Service, request: object, request_id: str, prompts: Sequence[Prompt], params: SamplingParams
    ) -> None:
        self.service = service
        self.request = request
        self.prompts = prompts
        self.params = params
        self.id = self.id_prefix + request_id

    @property
    def finish_reason(self) -> str:
        """Return the finish reason for the metrics: "stop" or "length"."""
        raise NotImplementedError

    def response(self, outputs: Sequence[Delta]) -> msgspec.Struct:
        """Return the complete response; ``outputs`` are the finished sequences, grouped by prompt."""
        raise NotImplementedError

    def chunks(self, deltas: RequestDeltas) -> Sequence[msgspec.Struct]:
        """Return the chunks for new output."""
        raise NotImplementedError

    def final_chunks(self) -> Sequence[msgspec.Struct]:
        """Return the chunks after the last output."""
        return []

    def error_chunks(self, failure: AiakqError) -> Sequence[msgspec.Struct]:
        """Return the chunks that end a failed stream."""
        return [ErrorResponse.from_error(failure)]


async def generate(service: Service, request: Request, model: type[object], builder: type[ResponseBuilder]) -> Response:
    """Run a generation request. ``model`` satisfies ``GenerationInput``; ``builder`` builds the response."""
    tracker = RequestTracker(service, request.scope)
    try:
        service.check_available()
        with tracker.record.phase("read_body"):
            body = await read_body(request, service.max_body_bytes, service.max_values)
        service.model.limits.check_generates()
        return await cancel_on_disconnect(request, _run(service, request, body, model, builder, tracker))
    except (ClientDisconnected, ClientDisconnect):
        tracker.finish("abort")
        raise
    except BaseException as failure:
        tracker.finish("error", failure)
        if isinstance(failure, AiakqError):
            service.metrics.request_refused(failure)
        raise


async def _run(
    service: Service,
    request: Request,
    body: bytes,
    model: type[object],
    builder_type: type[ResponseBuilder],
    tracker: RequestTracker,
) -> Response:
    with tracker.record.phase("tokenize"):
        payload, prompts, params = await read_generation_request(service, body, model)
    grammar = None if params.grammar is None else service.model.limits.grammars.apply(params.grammar)
    try:
        with tracker.record.phase("check_grammar"):
            params.grammar = await payload.grammar_of(service, prompts, grammar)
        if params.thinking_token_budget is not None:
            prompts = await payload.with_budgets(service, prompts, params)
    except AiakqError as failure:
        raise payload.rename_param(failure) from None
    bad_words = await service.bad_word_ids(params)
    service.check_available()  # tokenization takes time
    state = request.state
    request_id = getattr(state, "client_request_id", None) or getattr(payload, "request_id", None) or state.request_id
    builder = builder_type(service, payload, request_id, prompts, params)
    service.log_request(builder.id, prompts, params)
    try:
        stream = service.manager.start(
            RuntimeRequest(
                builder.id,
                prompts,
                params,
                options_of(service, request, payload, service.model.adapter(payload.model)),
                tracker.arrival_time,
                final_only=not payload.stream,
                bad_words=bad_words,
                kept_special_tokens=builder.kept_special_tokens,
            )
        )
    except AiakqError as failure:
        raise payload.rename_param(failure) from None
    service.configure_stream(stream)
    tracker.start(builder.id, params, payload, stream)
    deltas = aiter(stream)
    try:
        if payload.stream:
            # An error before the first output gets its own HTTP status, unless that takes too long for a proxy.
            first = await _first_output(deltas, service.options.keep_alive_seconds)
            return _event_stream(builder, stream, first, deltas, tracker)
        outputs = await _collect(deltas, params.n)
        complete = [outputs[index] for index in range(len(prompts) * params.n)]
        if params.prompt_logprobs is None:
            response = JSONResponse(builder.response(complete))
        else:  # can take seconds, so not on the event loop
            response = await asyncio.to_thread(lambda: JSONResponse(builder.response(complete)))
    except BaseException:
        stream.close()
        raise
    stream.close()
    tracker.finish(builder.finish_reason)
    return response


async def read_generation_request(
    service: Service, body: bytes, model: type[Any]
) -> tuple[GenerationInput, list[Prompt], SamplingParams]:
    """Parse a body as ``model``, validate it, and derive sampling parameters and tokenized prompts."""
    payload: GenerationInput = parse_body(model, body, service.unknown_fields)
    service.model.check_name(payload.model)
    payload.check_combinations()
    try:
        params = payload.sampling_params(service.model.default_sampling)
    except AiakqError as failure:
        raise payload.rename_param(failure) from None
    try:
        prompts = await payload.tokenize(service, params)
    except AiakqError as failure:
        raise payload.rename_param(failure) from None
    return payload, prompts, params


async def _first_output(deltas: AsyncIterator[RequestDeltas], seconds: float) -> asyncio.Future[RequestDeltas]:
    """Wait for the first output, at most ``seconds`` (0: no limit). Raises the error of a failed request."""
    first = asyncio.ensure_future(anext(deltas))
    try:
        await asyncio.wait({first}, timeout=seconds or None)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        raise
    return first


async def _collect(deltas: AsyncIterator[RequestDeltas], n: int) -> dict[int, Delta]:
    """Return the complete outputs, ``n`` for every prompt, by choice index."""
    outputs: dict[int, Delta] = {}
    async for batch in deltas:
        for prompt_index, delta in batch:
            index = prompt_index * n + delta.index
            outputs[index] = merge_deltas(outputs[index], delta) if index in outputs else delta
    return outputs


def _event_stream(
    builder: ResponseBuilder,
    stream: RequestStream,
    first: asyncio.Future[RequestDeltas],
    rest: AsyncIterator[RequestDeltas],
    tracker: RequestTracker,
) -> EventStream:
    tracker.record.streamed = True

    async def events() -> AsyncIterator[bytes]:
        if builder.params.prompt_logprobs is None:
            yield encode_events(builder.chunks(await first))
        else:
            deltas = await first
            yield await asyncio.to_thread(lambda: encode_events(builder.chunks(deltas)))
        async for deltas in rest:
            yield encode_events(builder.chunks(deltas))
        yield encode_events(builder.final_chunks()) + builder.end_of_stream

    def on_end(outcome: str) -> None:
        first.cancel()
        stream.close()
        tracker.finish(builder.finish_reason if outcome == "complete" else outcome, stream.failure)

    return EventStream(events(), builder.error_chunks, on_end, builder.service.options.keep_alive_seconds)
