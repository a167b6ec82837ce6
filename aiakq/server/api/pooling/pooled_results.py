"""PooledResults: pools the prompts of a request, and returns what is made of the vectors and scores.

A request may have thousands of texts. They are tokenized and computed in batches, so that it takes no more memory and
engine queue slots than other requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.late_interaction import LateInteraction
from aiakq.runtime.protocol.pooling_params import Pooled, Pooling, PoolingParams
from aiakq.runtime.protocol.request import Prompt, Request, RequestOptions
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import check_truncation
from aiakq.server.api.execution import Execution, answer
from aiakq.server.api.pooling.pooling_fields import PoolingFields
from aiakq.server.api.routes import PROMPT_ERRORS, Route
from aiakq.server.api.service import Service
from aiakq.server.http.responses import JSONResponse
from aiakq.server.process.request_stream import MAX_PROMPTS

#: Maximum number of texts, or pairs of texts, of one request.
MAX_INPUTS = 2048
#: Number of concurrent batches of a request, so that the engine has the next when one is done.
_CONCURRENT_BATCHES = 2


class PoolingUsage(msgspec.Struct):
    """Number of tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int


class PooledList(msgspec.Struct):
    """Results in the order of the inputs."""

    id: str
    created: int
    model: str
    data: list[Any]
    usage: PoolingUsage
    object: Literal["list"] = "list"


@dataclass(frozen=True)
class PooledPrompt:
    """Output for a prompt of ``num_tokens`` tokens."""

    pooled: Pooled
    num_tokens: int


Payload = TypeVar("Payload", bound=PoolingFields)
Entry = TypeVar("Entry")
Listed = TypeVar("Listed", bound=PooledList)


class PooledResults(Generic[Payload]):
    """Result builder of requests that pool prompts. Subclasses decide what a route returns.

    fields     body of the request.
    id_prefix  of the response's id.
    payload    the validated body; ``limits`` those of pooling of the served model.
    params     what the request says about its prompts.
    """

    fields: type[Payload]
    id_prefix: str
    service: Service
    payload: Payload

    async def response(self) -> msgspec.Struct | Response:
        """Return the response, or its JSON body. The docstring of a subclass describes its route."""
        raise NotImplementedError

    async def respond(self, execution: Execution, body: bytes) -> Response:
        """See ResultBuilder."""
        try:
            self._read(execution, body)
            built = await self.response()
        except AiakqError as failure:
            if (name := _sent_name(failure, getattr(self, "payload", None))) != failure.param:
                raise error(failure.id, **failure.fields | {"param": name}) from None
            raise
        response = built if isinstance(built, Response) else JSONResponse(built)
        execution.finish("stop")
        return response

    def _read(self, execution: Execution, body: bytes) -> None:
        """Parse and check the body."""
        self._execution, self.service = execution, execution.service
        self.payload = payload = execution.parse(self.fields, body)
        self.id = self.id_prefix + execution.id
        self.limits = self.service.model.limits.pools()
        self._num_rows = 0
        self.params = SamplingParams(
            max_tokens=0,
            detokenize=False,
            truncate_prompt_tokens=payload.truncate_prompt_tokens,
            truncation_side=payload.truncation_side or ("right" if self.limits.reads_both_ways else None),
        )
        # Encoders do not read padding.
        pads = payload.padding == "max_length" and not self.limits.reads_both_ways
        self._pad_token_id = _pad_token_id(self.service) if pads else None

    @property
    def model(self) -> str:
        """Model name in the response."""
        return self.service.model.shown_name(self.payload.model)

    def listed(self, kind: type[Listed], data: list[Any], outputs: Sequence[PooledPrompt]) -> Listed:
        """Return the response of type ``kind`` with ``data``, made of ``outputs``."""
        return kind(self.id, int(time.time()), self.model, data, usage_of(outputs))

    async def pool(
        self, inputs: Sequence[str | list[int]], params: PoolingParams, add_special_tokens: bool = True
    ) -> list[PooledPrompt]:
        """Pool each of ``inputs``, texts or token ids. Raises the errors of tokenization and the engine."""
        tokenize, before = self.service.renderer.tokenize_prompts, self.limits.before(params)
        if before:
            inputs = [before + each if isinstance(each, str) else each for each in inputs]
        if self.limits.late is not None and isinstance(inputs[0], str):
            return await self._in_batches(inputs, params, self._late(self.limits.late, params))
        return await self._in_batches(inputs, params, lambda part: tokenize(part, add_special_tokens, self.params))

    def _late(
        self, late: LateInteraction, params: PoolingParams
    ) -> Callable[[Sequence[str | list[int]]], Awaitable[list[Prompt]]]:
        """Return a function that tokenizes queries or documents as a ColBERT model reads them."""
        role, limits = late.role(params.input_type), self.service.model.limits
        check_truncation(self.params, limits)
        keep = late.room(role, limits.longest, self.params.truncate_prompt_tokens)
        cut = dataclasses.replace(self.params, truncate_prompt_tokens=keep, truncation_side="right")

        async def tokenize(part: Sequence[str | list[int]]) -> list[Prompt]:
            prompts = []
            for prompt in await self.service.renderer.tokenize_prompts(part, True, cut):
                ids, num_unread = late.marked(role, prompt.token_ids)
                prompts.append(Prompt(prompt.text, ids, num_unread=num_unread))
            return prompts

        return tokenize

    async def pool_pairs(self, pairs: Sequence[tuple[str, str]], params: PoolingParams) -> list[PooledPrompt]:
        """Pool each pair of texts as one prompt."""
        if self.limits.concatenates:
            return await self.pool([one + two for one, two in pairs], params)
        tokenize = self.service.renderer.tokenize_pairs
        return await self._in_batches(pairs, params, lambda part: tokenize(part, self.params))

    async def cut(self, texts: Sequence[str], max_tokens: int) -> list[str]:
        """Cut each of ``texts`` after ``max_tokens`` tokens; 0: not at all."""
        if max_tokens == 0:
            return list(texts)
        cut: dict[str, str] = {}
        distinct = list(dict.fromkeys(texts))
        for start in range(0, len(distinct), MAX_PROMPTS):
            batch = distinct[start : start + MAX_PROMPTS]
            cut |= zip(batch, await self.service.renderer.cut_texts(batch, max_tokens), strict=True)
        return [cut[text] for text in texts]

    async def _in_batches(
        self,
        entries: Sequence[Entry],
        params: PoolingParams,
        tokenize: Callable[[Sequence[Entry]], Awaitable[list[Prompt]]],
    ) -> list[PooledPrompt]:
        """Tokenize and pool batches of ``entries``, several concurrently, and return the results in order."""
        pooling, self._num_rows = self.limits.resolve(params), 0
        if len(entries) > MAX_INPUTS:
            raise error("too_many_prompts", param="input", value=len(entries), limit=MAX_INPUTS)

        async def run(part: Sequence[Entry]) -> list[PooledPrompt]:
            return await self._run(await tokenize(part), pooling)

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
        if self._pad_token_id is not None:
            prompts = [self._padded(prompt, self._pad_token_id) for prompt in prompts]
        self._num_rows += sum(pooling.num_rows(prompt.token_ids) for prompt in prompts)
        self.limits.check_rows(self._num_rows, "input")
        options = RequestOptions(pooling=pooling)
        stream = await self._execution.execute(Request(self.id, prompts, self.params, options, final_only=True))
        outputs = await stream.collect()
        pooled = []
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.pooled is not None, "requests that fail raise"
            pooled.append(PooledPrompt(output.pooled, len(prompt.token_ids)))
        return pooled

    def _padded(self, prompt: Prompt, pad: int) -> Prompt:
        """Return ``prompt`` with ``pad`` on the side of the tokenizer, up to the longest prompt."""
        limits = self.service.model.limits
        missing = limits.longest - len(prompt.token_ids)
        padding, is_left = [pad] * missing, self.service.renderer.text.loaded.pads_left
        return Prompt(None, [*padding, *prompt.token_ids] if is_left else [*prompt.token_ids, *padding])


def _pad_token_id(service: Service) -> int:
    """Return the padding token. Raises ``unsupported_parameter``."""
    pad = service.renderer.text.loaded.pad_token_id
    if pad is None or pad >= service.model.limits.vocab_size:
        reason = "the tokenizer has no padding token" if pad is None else "the model does not have the padding token"
        raise error("unsupported_parameter", param="padding", reason=reason)
    return pad


def usage_of(prompts: Sequence[PooledPrompt]) -> PoolingUsage:
    """Return the token counts of ``prompts``."""
    count = sum(prompt.num_tokens for prompt in prompts)
    return PoolingUsage(count, count)


def pooling_route(
    path: str, results: type[PooledResults[Any]], response: type[msgspec.Struct], description: str
) -> Route:
    """Return a pooling route; ``description`` is that of its response."""

    async def handler(service: Service, request: HTTPRequest) -> Response:
        return await answer(service, request, results())

    handler.__doc__ = results.response.__doc__
    return Route(
        "POST",
        path,
        handler,
        "pooling",
        request=(results.fields,),
        response=response,
        description=description,
        errors=PROMPT_ERRORS,
        generates=True,
    )


def _sent_name(failure: AiakqError, payload: PoolingFields | None) -> str | None:
    """Return the parameter that ``failure`` names, as the client calls it; ``payload`` is None if it was not read."""
    if failure.param == "prompt" and payload is not None:
        return "input"
    if failure.param == "activation":
        names = ("raw_scores", "use_activation")
        return next((name for name in names if getattr(payload, name, None) is not None), "activation")
    return failure.param
