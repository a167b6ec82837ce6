"""TokenResults: generates tokens for a request, and returns them as JSON or an event stream.

A route that generates supplies two classes: a request model that satisfies ``GenerationInput``, and a
``ResponseBuilder``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.request import Prompt, Request
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.api.execution import Execution
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.service import Service
from aiakq.server.http.responses import ErrorResponse, JSONResponse
from aiakq.server.http.streaming import EventStream, encode_events
from aiakq.server.process.request_stream import RequestDeltas, RequestStream


class GenerationInput(Protocol):
    """A request model for ``TokenResults``."""

    model: str | None
    stream: bool | None
    priority: int | None

    def check_combinations(self) -> None:
        """Raise ``unsupported_parameter`` or ``value_out_of_range`` for values that exclude each other."""

    def sampling_params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """Return the sampling parameters: the request's values, else ``defaults`` from the model."""

    async def tokenize(self, renderer: Renderer, params: SamplingParams) -> list[Prompt]:
        """Tokenize the prompts."""

    def rename_param(self, failure: AiakqError) -> AiakqError:
        """Return ``failure`` with the request field's name in place of the sampling parameter's."""

    async def grammar_of(self, renderer: Renderer, prompts: list[Prompt], grammar: Grammar | None) -> Grammar | None:
        """Return the grammar of the response after checking it; ``grammar``: that of the structured output fields."""

    async def with_budgets(self, renderer: Renderer, prompts: Sequence[Prompt], params: SamplingParams) -> list[Prompt]:
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


class TokenResults:
    """Result builder of requests that generate tokens.

    model    body of the request; satisfies ``GenerationInput``.
    builder  builds the response.
    """

    def __init__(self, model: type[Any], builder: type[ResponseBuilder]) -> None:
        self._model, self._builder = model, builder

    async def respond(self, execution: Execution, body: bytes) -> Response:
        """See ResultBuilder."""
        service = execution.service
        service.model.limits.check_generates()
        with execution.record.phase("tokenize"):
            payload: GenerationInput = execution.parse(self._model, body)
            payload.check_combinations()
            try:
                params = payload.sampling_params(service.model.default_sampling)
                prompts = await payload.tokenize(service.renderer, params)
            except AiakqError as failure:
                raise payload.rename_param(failure) from None
        try:
            builder, stream = await self._start(execution, payload, prompts, params)
        except AiakqError as failure:
            raise payload.rename_param(failure) from None
        if payload.stream:
            # An error before the first output gets its own HTTP status, unless that takes too long for a proxy.
            deltas = aiter(stream)
            first = await _first_output(deltas, service.options.keep_alive_seconds)
            return _event_stream(execution, builder, stream, first, deltas)
        outputs = await stream.collect()
        if params.prompt_logprobs is None:
            response = JSONResponse(builder.response(outputs))
        else:  # can take seconds, so not on the event loop
            response = await asyncio.to_thread(lambda: JSONResponse(builder.response(outputs)))
        execution.finish(builder.finish_reason)
        return response

    async def _start(
        self, execution: Execution, payload: GenerationInput, prompts: list[Prompt], params: SamplingParams
    ) -> tuple[ResponseBuilder, RequestStream]:
        """Check the grammar and the budget of thoughts, and start the request."""
        service = execution.service
        grammar = None if params.grammar is None else service.model.limits.grammars.apply(params.grammar)
        with execution.record.phase("check_grammar"):
            params.grammar = await payload.grammar_of(service.renderer, prompts, grammar)
        if params.thinking_token_budget is not None:
            prompts = await payload.with_budgets(service.renderer, prompts, params)
        bad_words = await service.renderer.bad_word_ids(params)
        builder = self._builder(service, payload, execution.id, prompts, params)
        request = Request(
            builder.id,
            prompts,
            params,
            final_only=not payload.stream,
            bad_words=bad_words,
            kept_special_tokens=builder.kept_special_tokens,
        )
        return builder, await execution.execute(request)


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


def _event_stream(
    execution: Execution,
    builder: ResponseBuilder,
    stream: RequestStream,
    first: asyncio.Future[RequestDeltas],
    rest: AsyncIterator[RequestDeltas],
) -> EventStream:
    execution.record.streamed = True

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
        execution.finish(builder.finish_reason if outcome == "complete" else outcome, stream.failure)

    return EventStream(events(), builder.error_chunks, on_end, builder.service.options.keep_alive_seconds)
