"""Schemas, formats and vocabularies for the tests of grammars of calls."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.formats import tag_grammar_of
from aiakq.runtime.structured.matcher import GrammarMatcher
from aiakq.server.api.chat_message import message_of
from aiakq.server.api.message_parser import MessageParser
from aiakq.server.api.tool_parsers import TOOL_PARSERS
from aiakq.server.api.tool_parsers.base import PlainJsonParser, ToolParser

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
            "unit": {"enum": ["C", 'F "'] + [None]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "get_time": {"type": "object", "properties": {}, "additionalProperties": False},
    "send_mail": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "What to say."},
            "copy": {"type": ["string", "null"], "default": None},
            "to": {"$ref": "#/$defs/People"},
            "urgent": {"type": "boolean"},
            "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "kind": {"const": "mail"},
        },
        "required": ["to", "kind"],
        "additionalProperties": False,
        "$defs": {
            "People": {"type": "array", "items": {"$ref": "#/$defs/Name"}, "minItems": 1, "maxItems": 2},
            "Name": {"type": "string", "maxLength": 20},
        },
    },
}
PARSERS: dict[str, type[ToolParser]] = {"plain": PlainJsonParser}
PARSERS |= {name: TOOL_PARSERS.load(name) for name in TOOL_PARSERS}
KNOWN = [name for name, parser in PARSERS.items() if parser.has_grammar(SCHEMAS)]
MARKED = [name for name in KNOWN if PARSERS[name].triggers]
#: Formats whose calls may begin a message without a mark.
UNMARKED = {"llama3_json", "llama4_json", "pythonic", "llama4_pythonic"}
LIKE = Grammar("structural_tag", "", closed=True)
WORDS = [
    '{"',
    '": "',
    "get_",
    '"arguments": ',
    ", ",
    '"}',
    "}\n",
    "[]",
    '"city',
    'days": [',
    "send_mail",
    "text",
    "</p",
    "\n</parameter>\n",
]
#: What ends a value, so that texts do not become long.
CLOSING = {b'"', b"}", b"]", b"\n</parameter>\n", b"</arg_value>"}


class Vocab:
    """The tokens of a model whose marks are special tokens, or text like any other."""

    def __init__(self, parser: type[ToolParser], marks_are_special: bool) -> None:
        texts = [bytes([byte]) for byte in range(256)]
        texts += [word.encode() for word in [*WORDS, *parser.marks]]
        special = list(range(len(texts) - len(parser.marks), len(texts))) if marks_are_special else []
        texts += [b"<other>", b"<end>"]
        self.texts, self.end, self.other = texts, len(texts) - 1, len(texts) - 2
        vocabulary = Vocabulary(texts, [*special, self.other, self.end])
        self.compiler = GrammarCompiler(vocabulary.resized(len(texts), [self.end]))

    def sample(self, grammar: Grammar, rng: random.Random, begin: bytes = b"", most: int = 2000) -> bytes:
        """A text of random tokens that ``grammar`` allows, after ``begin``."""
        matcher, text = self.compiler.matcher(grammar), b""
        while begin:
            token = max((i for i, one in enumerate(self.texts) if one and begin.startswith(one)), key=self._length)
            text, begin = text + self.texts[token], begin[len(self.texts[token]) :]
            matcher.advance(token)
        mask = torch.zeros(matcher.num_words, dtype=torch.int32)
        for _ in range(most):
            if matcher.is_finished:
                return text
            matcher.fill_mask(mask.data_ptr())
            assert matcher.failure is None, (matcher.failure, text)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed = [i for i in np.flatnonzero(bits).tolist() if i < len(self.texts)]
            ends = [i for i in allowed if i == self.end]
            # Brackets and quotes are likely: texts are short.
            token = ends[0] if ends and rng.random() < 0.5 else rng.choice(allowed)
            closing = [i for i in allowed if self.texts[i] in CLOSING]
            token = rng.choice(closing) if token != self.end and closing and rng.random() < 0.3 else token
            if token == self.end:
                return text
            text += self.texts[token]
            matcher.advance(token)
        raise AssertionError(f"too long: {text[:200]!r}")

    def may_end(self, matcher: GrammarMatcher) -> bool:
        mask = torch.zeros(matcher.num_words, dtype=torch.int32)
        matcher.fill_mask(mask.data_ptr())
        return bool(mask[self.end // 32] >> (self.end % 32) & 1)

    def _length(self, token: int) -> int:
        return len(self.texts[token])


def calls_in(parser: type[ToolParser], text: bytes, schemas: dict[str, Any] = SCHEMAS) -> tuple[list[Any], str | None]:
    """The calls in a text, and the rest of it."""
    reader = MessageParser(None, parser(schemas))
    message = message_of("assistant", reader.feed(text.decode(errors="replace"), ended=True))
    return list(message.tool_calls or []), message.content


def after(vocab: Vocab, part: dict[str, Any], text: str) -> bool | None:
    """Whether a message may end after ``text``; None if ``text`` is not allowed."""
    matcher, rest = vocab.compiler.matcher(tag_grammar_of(part)), text.encode()
    mask = torch.zeros(matcher.num_words, dtype=torch.int32)
    while rest:
        matcher.fill_mask(mask.data_ptr())
        allowed = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
        tokens = [i for i, one in enumerate(vocab.texts) if one and allowed[i] and rest.startswith(one)]
        if not tokens:
            return None
        token = max(tokens, key=vocab._length)
        rest = rest[len(vocab.texts[token]) :]
        matcher.advance(token)
    return vocab.may_end(matcher)
