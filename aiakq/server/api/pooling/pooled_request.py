"""Handling of pooling requests: admission, execution in batches, and errors.

A request may have thousands of texts. They are tokenized and computed in batches, so that it takes no more memory and
engine queue slots than other requests.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.pooling_params import Pooled, Pooling, PoolingLimits, PoolingParams
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.request import Request as RuntimeRequest
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.server.api.pooling.pooling_fields import PoolingFields
from aiakq.server.api.request_model import parse_body
from aiakq.server.api.request_options import options_of
from aiakq.server.api.request_tracker import RequestTracker
from aiakq.server.api.routes import PROMPT_ERRORS, Handler, Route
from aiakq.server.api.service import Service
from aiakq.server.http.body import read_body
from aiakq.server.http.responses import JSONResponse
from aiakq.server.http.streaming import ClientDisconnected, cancel_on_disconnect
from aiakq.server.process.request_stream import MAX_PROMPTS, RequestStream

#: Maximum number of texts, or pairs of texts, of one request.
MAX_INPUTS = 2048
#: Number of concurrent batches of a request, so that the engine has the next when one is done.
_CONCURRENT_BATCHES = 2
#: Errors after which a batch is retried, and the seconds between retries.
_RETRIED_ERRORS = ("overloaded", "engine_restarting")
_RETRY_SECONDS = 0.05


class PoolingUsage(msgspec.Struct):
    """Number of tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class PooledPrompt:
    """Output for a prompt of ``num_tokens`` tokens."""

    pooled: Pooled
    num_tokens: int


Payload = TypeVar("Payload", bound=PoolingFields)
Entry = TypeVar("Entry")


class PoolingCall(Generic[Payload]):
    """One request, parsed as ``payload``.

    id      id of the response.
    limits  pooling limits of the served model.
    params  what the request says about its prompts.
    """

    def __init__(
        self, service: Service, request: Request, payload: Payload, id_prefix: str, tracker: RequestTracker
    ) -> None:
        self.service, self.payload = service, payload
        self.id = id_prefix + (getattr(request.state, "client_request_id", None) or request.state.request_id)
        self.limits: PoolingLimits = service.model.limits.pools()
        self._tracker = tracker
        self._arrival_time: float | None = tracker.arrival_time
        self._num_rows = 0
        # All batches have the adapter that has the requested name when the first one starts.
        self._adapter = functools.cache(lambda: service.model.adapter(payload.model))
        self._request = request
        self.params = SamplingParams(
            max_tokens=0,
            detokenize=False,
            truncate_prompt_tokens=payload.truncate_prompt_tokens,
            truncation_side=payload.truncation_side,
        )
        self._pad_token_id = _pad_token_id(service) if payload.padding == "max_length" else None

    @property
    def model(self) -> str:
        """Model name in the response."""
        return self.service.model.shown_name(self.payload.model)

    async def pool(
        self, inputs: Sequence[str | list[int]], params: PoolingParams, add_special_tokens: bool = True
    ) -> list[PooledPrompt]:
        """Pool each of ``inputs``, texts or token ids. Raises the errors of tokenization and the engine."""
        pooling = self.limits.resolve(params)

        async def part(inputs: Sequence[str | list[int]]) -> list[PooledPrompt]:
            prompts = await self.service.tokenize_prompts(inputs, add_special_tokens, self.params)
            return await self._run(prompts, pooling)

        return await self._in_batches(inputs, part)

    async def pool_pairs(self, pairs: Sequence[tuple[str, str]], params: PoolingParams) -> list[PooledPrompt]:
        """Pool each pair of texts as one prompt."""
        pooling = self.limits.resolve(params)

        async def part(pairs: Sequence[tuple[str, str]]) -> list[PooledPrompt]:
            if self.limits.concatenates:
                prompts = await self.service.tokenize_prompts([one + two for one, two in pairs], True, self.params)
            else:
                prompts = await self.service.tokenize_pairs(pairs, self.params)
            return await self._run(prompts, pooling)

        return await self._in_batches(pairs, part)

    async def cut(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """Cut each of ``texts`` after ``max_tokens`` tokens; 0: not at all."""
        if max_tokens == 0:
            return list(texts)
        cut: dict[str, str] = {}
        distinct = list(dict.fromkeys(texts))
        for start in range(0, len(distinct), MAX_PROMPTS):
            batch = distinct[start : start + MAX_PROMPTS]
            cut |= zip(batch, await self.service.cut_texts(batch, max_tokens), strict=True)
        return [cut[text] for text in texts]

    async def _in_batches(
        self, entries: Sequence[Entry], run: Callable[[Sequence[Entry]], Awaitable[list[PooledPrompt]]]
    ) -> list[PooledPrompt]:
        """Call ``run`` on batches of ``entries``, several concurrently, and return the results in order."""
        if len(entries) > MAX_INPUTS:
            raise error("too_many_prompts", param="input", value=len(entries), limit=MAX_INPUTS)
        outputs: list[PooledPrompt] = []
        running: deque[asyncio.Task[list[PooledPrompt]]] = deque()
        try:
            for start in range(0, len(entries), MAX_PROMPTS):
                if len(running) == _CONCURRENT_BATCHES:
                    outputs += await running[0]
                    running.popleft()
                running.append(asyncio.ensure_future(run(entries[start : start + MAX_PROMPTS])))
            while running:
                outputs += await running[0]
                running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return outputs

    async def _run(self, prompts: list[Prompt], pooling: Pooling) -> list[PooledPrompt]:
        """Run ``prompts`` on the engine, padded if the request says so."""
        service = self.service
        if self._pad_token_id is not None:
            prompts = [self._padded(prompt, self._pad_token_id) for prompt in prompts]
        self._num_rows += sum(pooling.num_rows(prompt.token_ids) for prompt in prompts)
        self.limits.check_rows(self._num_rows, "input")
        service.log_request(self.id, prompts, self.params)
        stream = await self._start(prompts, pooling)
        self._tracker.start(self.id, self.params, self.payload, stream)
        try:
            outputs: dict[int, Pooled] = {}
            async for deltas in stream:
                outputs |= {index: delta.pooled for index, delta in deltas if delta.pooled is not None}
        finally:
            stream.close()
        return [PooledPrompt(outputs[index], len(prompt.token_ids)) for index, prompt in enumerate(prompts)]

    def _padded(self, prompt: Prompt, pad: int) -> Prompt:
        """Return ``prompt`` with ``pad`` on the side of the tokenizer, up to the longest prompt."""
        limits = self.service.model.limits
        missing = min(limits.max_model_len, limits.max_kv_tokens) - len(prompt.token_ids)
        padding, is_left = [pad] * missing, self.service.text.loaded.pads_left
        return Prompt(None, [*padding, *prompt.token_ids] if is_left else [*prompt.token_ids, *padding])

    async def _start(self, prompts: list[Prompt], pooling: Pooling) -> RequestStream:
        """Start a batch. If the queue is full or the engine restarts, the first one fails and later ones wait."""
        service = self.service
        while True:
            service.check_open()
            arrival = time.monotonic() if self._arrival_time is None else self._arrival_time
            try:
                options = options_of(service, self._request, self.payload, self._adapter(), pooling)
                stream = service.manager.start(
                    RuntimeRequest(self.id, prompts, self.params, options, arrival, final_only=True)
                )
            except AiakqError as failure:
                if failure.id not in _RETRIED_ERRORS or self._arrival_time is not None:
                    raise
            else:
                # Later batches have not been waiting since the arrival of the request.
                self._arrival_time = None
                return stream
            await asyncio.sleep(_RETRY_SECONDS)


def _pad_token_id(service: Service) -> int:
    """Return the padding token. Raises ``unsupported_parameter``."""
    pad = service.text.loaded.pad_token_id
    if pad is None or pad >= service.model.limits.vocab_size:
        reason = "the tokenizer has no padding token" if pad is None else "the model does not have the padding token"
        raise error("unsupported_parameter", param="padding", reason=reason)
    return pad


def usage_of(prompts: Sequence[PooledPrompt]) -> PoolingUsage:
    """Return the token counts of ``prompts``."""
    count = sum(prompt.num_tokens for prompt in prompts)
    return PoolingUsage(count, count)


def pooling_route(
    path: str, handler: Handler, request: type[PoolingFields], response: type[msgspec.Struct], description: str
) -> Route:
    """Return a pooling route; ``description`` is that of its response."""
    return Route(
        "POST",
        path,
        handler,
        "pooling",
        request=(request,),
        response=response,
        description=description,
        errors=PROMPT_ERRORS,
        generates=True,
    )


async def answer(
    service: Service,
    request: Request,
    model: type[Payload],
    id_prefix: str,
    respond: Callable[[PoolingCall[Payload]], Awaitable[msgspec.Struct | Response]],
) -> Response:
    """Run a request with a body of type ``model``; ``respond`` returns the response, or its JSON body."""
    tracker = RequestTracker(service, request.scope)
    payload: Payload | None = None
    try:
        service.check_available()
        with tracker.record.phase("read_body"):
            body = await read_body(request, service.max_body_bytes, service.max_values)
        payload = parse_body(model, body, service.unknown_fields)
        service.model.check_name(payload.model)
        call = PoolingCall(service, request, payload, id_prefix, tracker)
        answered = await cancel_on_disconnect(request, respond(call))
        response = answered if isinstance(answered, Response) else JSONResponse(answered)
    except (ClientDisconnected, ClientDisconnect):
        tracker.finish("abort")
        raise
    except BaseException as failure:
        tracker.finish("error", failure)
        if isinstance(failure, AiakqError):
            service.metrics.request_refused(failure)
            if (name := _sent_name(failure, payload)) != failure.param:
                raise error(failure.id, **failure.fields | {"param": name}) from None
        raise
    tracker.finish("stop")
    return response


def _sent_name(failure: AiakqError, payload: PoolingFields | None) -> str | None:
    """Return the parameter that ``failure`` names, as the client calls it."""
    if failure.param == "prompt" and payload is not None:
        return "input"
    if failure.param == "activation":
        names = ("raw_scores", "use_activation")
        return next((name for name in names if getattr(payload, name, None) is not None), "activation")
    return failure.param
