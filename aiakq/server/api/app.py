"""The HTTP routes. Every answer that is not 2xx has the shape of ``AiakqError.body``."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import aiakq
from aiakq.errors import AiakqError, error
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.server.api.admin import add_admin_routes
from aiakq.server.api.chat import ChatAnswer
from aiakq.server.api.completions import CompletionAnswer
from aiakq.server.api.openapi import describe
from aiakq.server.api.parsing import parse
from aiakq.server.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from aiakq.server.api.request_stream import Prompt, check_count
from aiakq.server.api.responses import Answer
from aiakq.server.api.service import CHAT_COMPLETIONS, COMPLETIONS, Service, Ticket
from aiakq.server.http.body import read_body
from aiakq.server.http.streaming import ClientGone, EventStream, JSONAnswer, NoAnswer, error_answer, unless_gone
from aiakq.server.process.engine_client import as_failure
from aiakq.server.telemetry.metrics import CONTENT_TYPE

logger = logging.getLogger("aiakq.server")

#: How a kind of request is read: body -> (class of its answer, request, prompts, params).
Read = Callable[[Service, bytes], Awaitable[tuple[type[Answer], Any, list[Prompt], SamplingParams]]]


def create_app(service: Service, asks_for_key: bool = False, open_paths: frozenset[str] = frozenset()) -> FastAPI:
    """The application that serves ``service``. Whoever asks for keys does so before it, but on ``open_paths``."""
    app = FastAPI(
        title="aiakq",
        version=aiakq.__version__,
        redoc_url=None,
        redirect_slashes=False,
        root_path=service.root_path,
    )
    app.add_exception_handler(AiakqError, _on_aiakq_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    _add_generation_routes(app, service)
    _add_token_routes(app, service)
    _add_state_routes(app, service)
    if service.admin:
        add_admin_routes(app, service)
    describe(app, service, asks_for_key, open_paths)
    return app


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post(COMPLETIONS)
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await _generate(service, request, _read_completion)

    @app.post(CHAT_COMPLETIONS)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _generate(service, request, _read_chat)


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a conversation in the model's chat template."""
        body = await read_body(request, service.body_limit)
        asked: TokenizeRequest | TokenizeChatRequest
        if _has_messages(body):
            asked = parse(TokenizeChatRequest, body)
            service.check_model(asked.model)
            ids = (await service.chat_prompt(asked, bool(asked.add_special_tokens))).token_ids
        else:
            asked = parse(TokenizeRequest, body)
            service.check_model(asked.model)
            ids = await service.encode(asked.prompt, asked.add_special_tokens is not False)
        texts = [service.token_text(token) for token in ids] if asked.return_token_strs else None
        answer = {"count": len(ids), "max_model_len": service.limits.max_model_len, "tokens": ids, "token_strs": texts}
        return JSONAnswer(answer)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        asked = parse(DetokenizeRequest, await read_body(request, service.body_limit))
        service.check_model(asked.model)
        last = service.limits.vocab_size - 1
        for token in asked.tokens:
            if not 0 <= token <= last:
                raise error("invalid_token_id", param="tokens", value=token, last=last)
        return JSONAnswer({"prompt": await service.decode(asked.tokens)})


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """The served model, once per name."""
        return JSONAnswer({"object": "list", "data": [_card(service, name) for name in service.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One served name."""
        service.check_model(name)
        return JSONAnswer(_card(service, name))

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are answered, else 503 with the reason."""
        service.check_open()
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        """200 once the model is loaded; until then, and while an engine is started again, 503 with how far that is."""
        try:
            service.check_open()
        except AiakqError as failure:
            return error_answer(failure, loading=service.progress())
        return JSONAnswer({"ready": True})

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> Response:
        """The same under the name some platforms ask for."""
        service.check_open()
        return Response()

    @app.get("/load")
    async def load() -> Response:
        """How much work there is: requests not answered yet, sequences running and waiting, KV pages in use."""
        return JSONAnswer(service.load())

    @app.get("/version")
    async def version() -> Response:
        """aiakq's version."""
        return JSONAnswer({"version": aiakq.__version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})


async def _generate(service: Service, request: Request, read: Read) -> Response:
    """Admit, run and answer one request to generate, as JSON or as a stream."""
    ticket = Ticket(service, request.state.arrived)
    try:
        service.check_open()
        body = await read_body(request, service.body_limit)
        return await unless_gone(request, _run(service, request, read, body, ticket))
    except (ClientGone, ClientDisconnect):
        ticket.close("abort")
        raise
    except BaseException as failure:
        ticket.close("error")
        if isinstance(failure, AiakqError):
            service.metrics.request_refused(failure)
        raise


async def _run(service: Service, request: Request, read: Read, body: bytes, ticket: Ticket) -> Response:
    kind, asked, prompts, params = await read(service, body)
    service.check_open()  # tokenizing took a while
    answer = kind(service, asked, request.state.request_id, prompts, params)
    service.log_request(answer.id, prompts, params)
    try:
        priority = asked.priority or 0
        salt = _cache_salt(getattr(request.state, "owner", ""), asked.cache_salt)
        generation = service.table.start(answer.id, prompts, params, ticket.arrived, not asked.stream, priority, salt)
    except AiakqError as failure:
        raise asked.as_spelled(failure) from None
    news = aiter(generation)
    try:
        if asked.stream:
            # Everything that fails before the first news is told with its own HTTP status.
            return EventStream(generation, await anext(news), news, answer, ticket)
        whole = await answer.whole(news)
    except BaseException:
        generation.close()
        raise
    generation.close()
    ticket.close(answer.reason)
    return JSONAnswer(whole)


async def _read_completion(
    service: Service, body: bytes
) -> tuple[type[Answer], CompletionRequest, list[Prompt], SamplingParams]:
    asked = parse(CompletionRequest, body)
    service.check_model(asked.model)
    asked.check_combinations()
    params = asked.sampling(service.sampling)
    given = asked.prompts()
    check_count(len(given), params)  # before any of them costs anything
    prompts = await service.prompts(given, asked.add_special_tokens is not False)
    return CompletionAnswer, asked, service.shortened(prompts, params), params


async def _read_chat(service: Service, body: bytes) -> tuple[type[Answer], ChatRequest, list[Prompt], SamplingParams]:
    asked = parse(ChatRequest, body)
    service.check_model(asked.model)
    asked.check_combinations()
    try:
        params = asked.sampling(service.sampling)
    except AiakqError as failure:
        raise asked.as_spelled(failure) from None
    # The template writes the special tokens itself.
    prompt = await service.chat_prompt(asked, bool(asked.add_special_tokens))
    return ChatAnswer, asked, service.shortened([prompt], params), params


def _cache_salt(owner: str, given: str | None) -> str:
    """What requests that may share pages have in common: whose key they were sent with, and the salt they name."""
    return hashlib.sha256(f"{owner} {given or ''}".encode()).hexdigest()[:32] if owner or given else ""


def _has_messages(body: bytes) -> bool:
    """Which of the two forms of /tokenize a body is; one that is no object is left to ``parse``."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "messages" in value


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "aiakq",
        "root": service.model,
        "parent": None,
        "max_model_len": service.limits.max_model_len,
        "vocab_size": service.limits.vocab_size,
        "default_sampling": service.sampling,
    }


async def _on_aiakq_error(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, AiakqError)
    return error_answer(failure)


async def _on_http_exception(request: Request, failure: Exception) -> Response:
    """What the router refuses: an unknown route or a method that a route does not take."""
    assert isinstance(failure, HTTPException)
    path = request.scope["path"][:64]
    if failure.status_code == 404:
        refusal = error("not_found", path=path)
    elif failure.status_code == 405:
        refusal = error("method_not_allowed", path=path, method=request.method[:16])
    else:
        refusal = error("request_failed", reason=f"HTTP status {failure.status_code}")
    return error_answer(refusal, failure.headers)


async def _on_client_gone(request: Request, failure: Exception) -> Response:
    return NoAnswer()


async def _on_bug(request: Request, failure: Exception) -> Response:
    """An exception nobody expected: told without its details; the HTTP server logs it."""
    return error_answer(as_failure(failure))


class RequestIds:
    """Gives every request an id of the server's own, in ``request.state.request_id`` and the header x-request-id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        await self.app(scope, receive, with_id)
