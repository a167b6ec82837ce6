"""What the server and the tokenizer's process exchange, as MessagePack."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from aiakq.runtime.structured.grammars import Grammar
from aiakq.runtime.text.infill import Infill
from aiakq.runtime.text.tokenizer import TokenizerSource

#: The stages of a request.
Part = Literal["template", "tokenizer", "grammar"]


class Setup(msgspec.Struct):
    """The tokenizer, the template that replaces its own, and the maximum length of a rendered conversation."""

    source: TokenizerSource
    chat_template: str | None
    max_chars: int


class Loaded(msgspec.Struct):
    """The reply to ``Setup``.

    failure           error that the tokenizer failed to load with (id in the error registry, fields), or None.
    description       description for the start-up table.
    longest_token     maximum number of characters of a token; 0 if unknown.
    decoder           argument of ``TokenDecoder``; empty if the tokenizer is not compiled.
    config            contents of tokenizer_config.json as JSON, see ``Tokenizer.config``.
    has_template      whether conversations can be rendered.
    tools_template    the template for conversations with tools.
    template_failure  why the template cannot be used, if there is one.
    vocabulary        encoded ``Vocabulary`` for compiling grammars.
    grammar_failure   why there is no vocabulary.
    infill            tokens for fill-in-the-middle, or None if the model does not support it.
    """

    failure: tuple[str, dict[str, Any]] | None = None
    description: str = ""
    longest_token: int = 0
    decoder: str = ""
    config: bytes = b"{}"
    has_template: bool = False
    tools_template: str = ""
    template_failure: str = ""
    vocabulary: bytes = b""
    grammar_failure: str = ""
    infill: Infill | None = None


class TextRequest(msgspec.Struct):
    """One request; numbers start at 1.

    messages, arguments  conversation to render with these template arguments and tokenize, instead of ``texts``.
    texts                texts to tokenize.
    pairs                pairs of texts to tokenize instead, each to one list of ids.
    add_special_tokens   see ``Tokenizer.encode``.
    max_chars            maximum number of characters of a text.
    max_ids              number of token ids to return of each text; None for all.
    from_start           whether they are those at its start, instead of its end.
    as_json              return the ids as JSON, because encoding many would block the event loop.
    with_token_texts     also return the spelling of each token in the vocabulary.
    token_ids            ids to decode; all other fields but ``skip_special_tokens`` are then ignored.
    grammar              grammar to compile; all other fields are then ignored.
    """

    number: int
    messages: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] = {}
    texts: list[str] = []
    pairs: list[tuple[str, str]] = []
    add_special_tokens: bool = True
    max_chars: int | None = None
    max_ids: int | None = None
    from_start: bool = False
    as_json: bool = False
    with_token_texts: bool = False
    token_ids: list[int] | None = None
    skip_special_tokens: bool = False
    grammar: Grammar | None = None


class TextReply(msgspec.Struct):
    """The result, or the ``failure``. ``counts`` has the total number of tokens of each text."""

    number: int
    text: str = ""
    counts: list[int] = []
    token_ids: list[list[int]] = []
    ids_json: bytes = b""
    token_texts_json: bytes = b""
    num_chars: int = 0
    failure: str = ""
    failed: Part = "tokenizer"


class Drop(msgspec.Struct):
    """Drop request ``number``, whose client is gone and on which the worker on socket ``slot`` may be working."""

    slot: int
    number: int
