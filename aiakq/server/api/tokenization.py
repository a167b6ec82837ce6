"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from aiakq.errors import error
from aiakq.server.api.conversation import ConversationFields
from aiakq.server.api.openai import ModelName
from aiakq.server.api.request_model import LIMITED_BY, FailFastList, RequestModel, parse_body
from aiakq.server.api.routes import TOKENIZATION, Route
from aiakq.server.api.service import Service
from aiakq.server.http.body import read_body
from aiakq.server.http.responses import JSONResponse


class TokenizeFields(RequestModel):
    """The fields of both forms of /tokenize."""

    model: ModelName | None = Field(None, description="A served name.")
    add_special_tokens: bool | None = Field(None, description="True if not given for a prompt, false for messages.")
    return_token_strs: bool | None = Field(None, description="Return the text of every token, too.")


class TokenizeRequest(TokenizeFields):
    """The body of POST /tokenize for a text."""

    prompt: str = Field(description="The text.")


class TokenizeChatRequest(ConversationFields, TokenizeFields):
    """The body of POST /tokenize for a conversation."""


class TokenizeResponse(msgspec.Struct):
    """The token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    """The body of POST /detokenize."""

    model: ModelName | None = Field(None, description="A served name.")
    tokens: FailFastList[Annotated[int, Field(json_schema_extra={LIMITED_BY: "token_id"})]] = Field(
        description="The token ids."
    )


class DetokenizeResponse(msgspec.Struct):
    """The text of token ids."""

    prompt: str


async def tokenize(service: Service, request: Request) -> Response:
    """The token ids of a text, or of a conversation in the model's chat template."""
    body = await read_body(request, service.max_body_bytes)
    given: TokenizeRequest | TokenizeChatRequest
    if _has_messages(body):
        given = parse_body(TokenizeChatRequest, body)
        service.model.check_name(given.model)
        prompt = await service.tokenize_chat(
            given.conversation(), given.template_kwargs(), bool(given.add_special_tokens)
        )
        token_ids = prompt.token_ids
    else:
        given = parse_body(TokenizeRequest, body)
        service.model.check_name(given.model)
        token_ids = await service.encode(given.prompt, given.add_special_tokens is not False)
    texts = [service.token_text(token_id) for token_id in token_ids] if given.return_token_strs else None
    return JSONResponse(TokenizeResponse(len(token_ids), service.model.limits.max_model_len, token_ids, texts))


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids."""
    given = parse_body(DetokenizeRequest, await read_body(request, service.max_body_bytes))
    service.model.check_name(given.model)
    last = service.model.limits.vocab_size - 1
    for token_id in given.tokens:
        if not 0 <= token_id <= last:
            raise error("invalid_token_id", param="tokens", value=token_id, last=last)
    return JSONResponse(DetokenizeResponse(await service.decode(given.tokens)))


def _has_messages(body: bytes) -> bool:
    """Whether ``body`` is the form with messages. What is not an object is left to ``parse_body``."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "messages" in value


ROUTES = (
    Route(
        "POST",
        "/tokenize",
        tokenize,
        "tokenization",
        request=(TokenizeRequest, TokenizeChatRequest),
        response=TokenizeResponse,
        description="The token ids.",
        errors=TOKENIZATION,
    ),
    Route(
        "POST",
        "/detokenize",
        detokenize,
        "tokenization",
        request=(DetokenizeRequest,),
        response=DetokenizeResponse,
        description="The text.",
        errors=TOKENIZATION,
    ),
)
