"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from aiakq.errors import error
from aiakq.server.api.conversation import ConversationFields
from aiakq.server.api.foreign_fields import DETOKENIZATION_FIELDS, TOKENIZATION_FIELDS
from aiakq.server.api.generation_request import ModelName, TokenId
from aiakq.server.api.request_model import FailFastList, RequestModel, parse_body
from aiakq.server.api.routes import TOKENIZATION, Route
from aiakq.server.api.service import Service
from aiakq.server.http.body import read_body
from aiakq.server.http.responses import JSONResponse
from aiakq.server.http.streaming import cancel_on_disconnect
from aiakq.server.process.text_messages import TextRequest


class TokenizeFields(RequestModel):
    """Fields of both forms of /tokenize."""

    model: ModelName | None = Field(None, description="A served name.")
    add_special_tokens: bool | None = Field(None, description="True if not given for a prompt, false for messages.")
    return_token_strs: bool | None = Field(None, description="Return every token as the vocabulary spells it, too.")
    with_pieces: bool | None = Field(None, description="Return tokens as objects with id and piece, like llama.cpp.")


class TokenizeRequest(TokenizeFields):
    """The body of POST /tokenize for a text."""

    foreign_fields = TOKENIZATION_FIELDS

    prompt: str | None = Field(None, description="The text. It is required; llama.cpp's clients call it content.")

    def text(self) -> str:
        """Return the text. Raises ``missing_field``."""
        if self.prompt is None:
            raise error("missing_field", param="prompt")
        return self.prompt


class TokenizeChatRequest(ConversationFields, TokenizeFields):
    """The body of POST /tokenize for a conversation."""

    foreign_fields = {**ConversationFields.foreign_fields, **TOKENIZATION_FIELDS}


class Piece(msgspec.Struct):
    """A token with its text, or its bytes if they are not Unicode."""

    id: int
    piece: str | list[int]


class TokenizeResponse(msgspec.Struct):
    """The token ids of a text. ``token_strs`` are spelled as in the vocabulary: "Ġthe" or "▁the"."""

    count: int
    max_model_len: int
    tokens: list[int | Piece]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    """The body of POST /detokenize."""

    foreign_fields = DETOKENIZATION_FIELDS

    model: ModelName | None = Field(None, description="A served name.")
    tokens: FailFastList[TokenId] = Field(description="The token ids.")


class DetokenizeResponse(msgspec.Struct):
    """The text of token ids."""

    prompt: str


async def tokenize(service: Service, request: Request) -> Response:
    """Tokenize a text, or a conversation in the model's chat template."""
    body = await read_body(request, service.max_body_bytes, service.max_values)
    payload: TokenizeRequest | TokenizeChatRequest
    await asyncio.sleep(0)  # it may be large
    if _has_messages(body):
        payload = parse_body(TokenizeChatRequest, body, service.renderer.unknown_fields)
        payload.name_hidden(service.renderer.text.loaded.facts, service.renderer.unknown_fields)
        service.model.check_name(payload.model)
        text_request = await service.renderer.chat_request(
            payload.conversation(),
            service.renderer.template_arguments(
                payload.template_kwargs(service.renderer.chat_template, service.renderer.unknown_fields)
            ),
            bool(payload.add_special_tokens),
            payload.media_settings,
        )
    else:
        payload = parse_body(TokenizeRequest, body, service.renderer.unknown_fields)
        service.model.check_name(payload.model)
        text_request = TextRequest(
            0, texts=[payload.text()], add_special_tokens=payload.add_special_tokens is not False
        )
    # There may be millions of ids, so the worker process encodes them as JSON.
    text_request.as_json, text_request.with_token_texts = True, bool(payload.return_token_strs)
    text_request.with_pieces = bool(payload.with_pieces)
    reply = await cancel_on_disconnect(request, service.renderer.text.run(text_request))
    tokens: Any = msgspec.Raw(reply.ids_json)
    texts: Any = msgspec.Raw(reply.token_texts_json) if payload.return_token_strs else None
    return JSONResponse(TokenizeResponse(reply.counts[0], service.model.limits.max_model_len, tokens, texts))


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids."""
    body = await read_body(request, service.max_body_bytes, service.max_values)
    payload = parse_body(DetokenizeRequest, body, service.renderer.unknown_fields)
    service.model.check_name(payload.model)
    last = service.model.limits.vocab_size - 1
    await asyncio.sleep(0)  # there may be many
    if payload.tokens and not 0 <= min(payload.tokens) <= max(payload.tokens) <= last:
        wrong = next(token_id for token_id in payload.tokens if not 0 <= token_id <= last)
        raise error("invalid_token_id", param="tokens", value=wrong, last=last)
    text = await cancel_on_disconnect(request, service.renderer.decode(payload.tokens))
    return JSONResponse(DetokenizeResponse(text))


async def tokenizer_info(service: Service, request: Request) -> Response:
    """The tokenizer's configuration: its class, special tokens and chat template, as in tokenizer_config.json."""
    if not service.renderer.tokenizer.has_text:
        raise error("no_tokenizer")
    return JSONResponse(msgspec.Raw(service.renderer.text.loaded.config))


def _has_messages(body: bytes) -> bool:
    """Whether ``body`` has messages. Bodies other than objects are left to ``parse_body``."""
    try:
        value = json.loads(body, parse_int=len, parse_float=len)  # numbers need not be converted
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
    Route(
        "GET",
        "/tokenizer_info",
        tokenizer_info,
        "tokenization",
        response="application/json",
        description="The configuration.",
        errors=("no_tokenizer",),
        enabled_by="enable_tokenizer_info_endpoint",
    ),
)
