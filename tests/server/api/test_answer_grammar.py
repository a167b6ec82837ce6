"""Grammars of calls: whatever they allow, the parser of the format reads, and it matches the schema of the tool."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.formats import some_tags, tag_grammar_of, text_with_tags
from aiakq.runtime.structured.grammars import Grammar
from aiakq.runtime.structured.matcher import GrammarMatcher
from aiakq.runtime.structured.vocabulary import Vocabulary
from aiakq.server.api.answer_grammar import Reasoning
from aiakq.server.api.chat_message import message_of
from aiakq.server.api.message_parser import MessageParser
from aiakq.server.api.reasoning_parsers import REASONING_PARSERS
from aiakq.server.api.tool_parsers import TOOL_PARSERS
from aiakq.server.api.tool_parsers.base import PlainJsonParser, ToolParser
from aiakq.server.api.tool_parsers.hermes import HermesParser

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
}
PARSERS: dict[str, type[ToolParser]] = {"plain": PlainJsonParser}
PARSERS |= {name: TOOL_PARSERS.load(name) for name in TOOL_PARSERS}
KNOWN = [name for name, parser in PARSERS.items() if parser.has_grammar(SCHEMAS)]
MARKED = [name for name in KNOWN if PARSERS[name].triggers]
LIKE = Grammar("structural_tag", "", closed=True)
WORDS = ['{"', '": "', "get_", '"arguments": ', ", ", '"}', "}\n", "[]", '"city', 'days": [']


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
            closing = [i for i in allowed if self.texts[i] in (b'"', b"}", b"]")]
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


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("only_one", [True, False], ids=["one", "many"])
@pytest.mark.parametrize("name", KNOWN)
def test_forced_calls_are_calls_that_match_their_schema(name, only_one, special):
    parser = PARSERS[name]
    tags = parser.call_tags(SCHEMAS, only_one)
    grammar = tag_grammar_of(some_tags(tags, parser.separator, only_one=only_one or not parser.separator), LIKE)
    vocab, rng, counts = Vocab(parser, special), random.Random(5), set()
    for _ in range(16):
        text = vocab.sample(grammar, rng)
        calls, content = calls_in(parser, text)
        assert calls and not content, text
        counts.add(len(calls))
        for call in calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert (counts == {1}) == only_one


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("name", MARKED)
def test_calls_in_a_text_match_their_schema(name, special):
    parser = PARSERS[name]
    grammar = tag_grammar_of(text_with_tags(parser.call_tags(SCHEMAS, True), parser.triggers, only_one=True), LIKE)
    vocab, rng = Vocab(parser, special), random.Random(6)
    for begin in (b"", b"Let me <other>see. "):
        for trigger in parser.triggers:
            calls, content = calls_in(parser, vocab.sample(grammar, rng, begin + trigger.encode()))
            assert len(calls) == 1 and (content or "").strip() == begin.decode().strip()
            jsonschema.validate(json.loads(calls[0].function.arguments), SCHEMAS[calls[0].function.name])


@pytest.mark.parametrize("name", MARKED)
def test_a_text_without_calls_may_be_anything(name):
    parser = PARSERS[name]
    grammar = tag_grammar_of(text_with_tags(parser.call_tags(SCHEMAS, False), parser.triggers, only_one=False), LIKE)
    vocab = Vocab(parser, True)
    matcher = vocab.compiler.matcher(grammar)
    for token in [*b'{"name": "x"} <a> [f(a=1)]\n', vocab.other, *b"more", vocab.other, vocab.other]:
        matcher.advance(token)
        assert matcher.failure is None
    assert vocab.may_end(matcher)


@pytest.mark.parametrize("name", KNOWN)
def test_a_tool_may_have_any_name(name):
    """Quotes, marks and special tokens in a name are text; a format that cannot write it has no grammar for it."""
    parser, schema = PARSERS[name], SCHEMAS["get_time"]
    for odd in ('a "quoted" {name}', "<end>", "[ARGS]", "x:0", "naïve", "n" * 256):
        vocab = Vocab(parser, True)
        if parser.has_grammar([odd]):
            tags = parser.call_tags({odd: schema}, True)
            grammar = tag_grammar_of(some_tags(tags, parser.separator, only_one=True))
            [call], content = calls_in(parser, vocab.sample(grammar, random.Random(3)), {odd: schema})
            assert call.function.name == odd and not content and json.loads(call.function.arguments) == {}
        else:
            assert name == "kimi_k2"


@pytest.mark.parametrize("may_end", [True, False])
def test_open_reasoning_may_be_all_where_nothing_is_asked_for(may_end):
    class Marked(HermesParser):
        marks = ("</think>", "<tool_call>", "</tool_call>")

    parser = REASONING_PARSERS.load("qwen3")
    answer = text_with_tags(HermesParser.call_tags(SCHEMAS, True), HermesParser.triggers, only_one=True)
    part = Reasoning(parser, is_open=True).before(answer, "tools", may_end=may_end)
    for special in (True, False):
        vocab = Vocab(Marked, special)
        matcher = vocab.compiler.matcher(tag_grammar_of(part))
        for token in b"Hm. <tool_call>?":
            matcher.advance(token)
        assert matcher.failure is None and vocab.may_end(matcher) is may_end
        text = vocab.sample(tag_grammar_of(part), random.Random(1), b"Hm.</think>\n\n<tool_call>")
        reader = MessageParser(parser(True), HermesParser(SCHEMAS))
        message = message_of("assistant", reader.feed(text.decode(errors="replace"), ended=True))
        [call] = message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        assert message.reasoning == "Hm."
