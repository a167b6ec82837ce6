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
from aiakq.runtime.structured.formats import regex, schema, some_tags, tag_grammar_of, text_with_tags
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


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("only_one", [True, False], ids=["one", "many"])
@pytest.mark.parametrize("name", KNOWN)
def test_forced_calls_are_calls_that_match_their_schema(name, only_one, special):
    parser = PARSERS[name]
    tags = parser.call_tags(SCHEMAS, only_one)
    grammar = tag_grammar_of(some_tags(tags, parser.separator, only_one=only_one or not parser.separator), LIKE)
    vocab, rng, counts = Vocab(parser, special), random.Random(5), set()
    for _ in range(40):
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
    grammar = tag_grammar_of(parser.answer_format(SCHEMAS, True), LIKE)
    vocab, rng = Vocab(parser, special), random.Random(6)
    for begin in (b"", b"Let me see. " if name in UNMARKED else b"Let me <other>see. "):
        for trigger in parser.triggers:
            calls, content = calls_in(parser, vocab.sample(grammar, rng, begin + trigger.encode()))
            assert len(calls) == 1 and (content or "").strip() == begin.decode().strip()
            jsonschema.validate(json.loads(calls[0].function.arguments), SCHEMAS[calls[0].function.name])


@pytest.mark.parametrize("name", MARKED)
def test_a_text_without_calls_may_be_anything(name):
    parser = PARSERS[name]
    grammar = tag_grammar_of(parser.answer_format(SCHEMAS, False), LIKE)
    vocab = Vocab(parser, True)
    matcher = vocab.compiler.matcher(grammar)
    others = [] if name in UNMARKED else [vocab.other, *b"more", vocab.other, vocab.other]
    for token in [*b'{"name": "x"} <a> [f(a=1)]\n', *others]:
        matcher.advance(token)
        assert matcher.failure is None
    assert vocab.may_end(matcher)


@pytest.mark.parametrize(
    "name, begin",
    [
        (name, begin)
        for name in sorted(UNMARKED)
        for begin in (['{"name": "get_', ' {"type" : "function", "name":'] if "json" in name else ["[get_", " [ get_"])
    ],
)
def test_what_begins_a_message_like_a_call_is_one_or_text(name, begin):
    parser = PARSERS[name]
    vocab, rng = Vocab(parser, True), random.Random(8)
    grammar = tag_grammar_of(parser.answer_format(SCHEMAS, False), LIKE)
    for _ in range(8):
        text = vocab.sample(grammar, rng, begin.encode(), 20_000)
        calls, content = calls_in(parser, text)
        assert calls or content == text.decode(errors="replace")
        for call in calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("name", sorted(UNMARKED))
def test_json_and_lists_may_be_the_answer(name):
    parser = PARSERS[name]
    for text in ('{"name": "Alice", "parameters": {}}', '{"type": "function"}', "[1, 2]", "[get(a=1)]", ""):
        vocab = Vocab(parser, True)
        matcher = vocab.compiler.matcher(tag_grammar_of(parser.answer_format(SCHEMAS, False), LIKE))
        for byte in text.encode():
            matcher.advance(byte)
        assert matcher.failure is None and vocab.may_end(matcher)
        calls, content = calls_in(parser, text.encode())
        assert (not calls and (content or "") == text) or text == "[get(a=1)]"


ODD = {
    "a reference to another document": {"properties": {"a": {"$ref": "other.json#/a"}}},
    "a reference that is not there": {"properties": {"a": {"$ref": "#/$defs/a"}}},
    "a circle": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "alternatives": {"anyOf": [{"required": ["a"]}], "properties": {"a": {}}},
    "properties by pattern": {"patternProperties": {"a": {}}},
    "a name that is no word": {"properties": {"a b": {"type": "integer"}}},
    "other properties": {"properties": {"a": {"type": "integer"}}, "additionalProperties": True},
    "definitions that are none": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": []},
    "requirements that are no names": {"properties": {"a": {}}, "required": [["a"]]},
    "a requirement without a property": {"properties": {}, "required": ["a"], "additionalProperties": False},
}
TEXT_ODD = {
    "no type": {"properties": {"a": {"minLength": 2}}},
    "a pattern": {"properties": {"a": {"type": "string", "pattern": "a+"}}},
    "a format": {"properties": {"a": {"type": "string", "format": "date"}}},
    "strings and numbers": {"properties": {"a": {"type": ["string", "integer"]}}},
    "a value with the end of one": {"properties": {"a": {"enum": ["</tool_call>"]}}},
    "a type that is none": {"properties": {"a": {"type": {"string": 1}}}},
    "types that are none": {"properties": {"a": {"type": ["string", ["null"]]}}},
    "alternatives that are none": {"properties": {"a": {"anyOf": 5}}},
    "values that are none": {"properties": {"a": {"enum": 5}}},
    "a length that is none": {"properties": {"a": {"type": "string", "maxLength": -1}}},
    "alternatives that are strings": {"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 1}]}}},
}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
def test_schemas_that_cannot_be_written_in_a_format_have_no_grammar(name):
    parser = PARSERS[name]
    for odd in [*ODD.values(), *([] if name == "pythonic" else TEXT_ODD.values())]:
        assert not parser.has_grammar({"f": {"type": "object", **odd}}), odd
        assert not parser.has_grammar({"f": SCHEMAS["get_time"], "g": {"type": "object", **odd}})


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_the_end_of_a_value_may_be_in_a_string_in_json(name):
    parser, value = PARSERS[name], ['say "</parameter>"', "</tool_call> \\", "</arg_value></function>"]
    schemas = {"f": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}}}
    text = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
    }[name].format(json.dumps(value))
    matcher = Vocab(parser, False).compiler.matcher(
        tag_grammar_of(some_tags(parser.call_tags(schemas, True), "", only_one=True), LIKE)
    )
    for byte in text.encode():
        matcher.advance(byte)
    assert matcher.failure is None
    [call], content = calls_in(parser, text.encode(), schemas)
    assert json.loads(call.function.arguments) == {"a": value} and not content


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("odd", [odd for odd in (ODD | TEXT_ODD).values() if "properties" in odd])
def test_arguments_of_odd_schemas_are_read(name, odd):
    text = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    }[name]
    [call], content = calls_in(PARSERS[name], text.encode(), {"f": {"type": "object", **odd}})
    assert json.loads(call.function.arguments)["a"] in (1, "1") and not content


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic"])
def test_any_arguments_are_written_in_every_format(name):
    parser, schemas = PARSERS[name], {"f": {"type": "object"}}
    vocab, rng = Vocab(parser, True), random.Random(2)
    for _ in range(12):
        grammar = tag_grammar_of(some_tags(parser.call_tags(schemas, True), "", only_one=True), LIKE)
        [call], content = calls_in(parser, vocab.sample(grammar, rng, most=20_000), schemas)
        assert isinstance(json.loads(call.function.arguments), dict) and not content


@pytest.mark.parametrize("name", KNOWN)
def test_a_tool_may_have_any_name(name):
    """Quotes, marks and special tokens in a name are text; a format that cannot write it has no grammar for it."""
    parser, schema = PARSERS[name], SCHEMAS["get_time"]
    for odd in ('a "quoted" {name}', "<end>", "[ARGS]", "x:0", "naïve", "n" * 256):
        vocab = Vocab(parser, True)
        if parser.has_grammar({odd: schema}):
            tags = parser.call_tags({odd: schema}, True)
            grammar = tag_grammar_of(some_tags(tags, parser.separator, only_one=True))
            [call], content = calls_in(parser, vocab.sample(grammar, random.Random(3)), {odd: schema})
            assert call.function.name == odd and not content and json.loads(call.function.arguments) == {}
        else:
            assert (
                name in ("kimi_k2", "deepseek_v3", "qwen3_coder", "glm45", "glm47", "qwen3_xml") or "pythonic" in name
            )


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


class Thinking(HermesParser):
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")


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


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("is_open", [True, False], ids=["opened by the prompt", "opened by the model"])
def test_nothing_is_enforced_in_a_thought(special, is_open):
    vocab, parser = Vocab(Thinking, special), REASONING_PARSERS.load("qwen3")
    tools = text_with_tags(HermesParser.call_tags(SCHEMAS, False), HermesParser.triggers, only_one=False)
    part = Reasoning(parser, is_open).before(tools, "tools", may_end=True)
    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    for begin in ("", "<think>", "\n\n<think>") if is_open else ("<think>", "\n <think>"):
        for thought in ("", "I could write <tool_call> tags, but no.", f"{call} or <think>", "<tool_call>{<tool_call>"):
            assert after(vocab, part, f"{begin}{thought}") is True
            assert after(vocab, part, f"{begin}{thought}</think>\n\nHello <think> {call}") is True
            assert after(vocab, part, f"{begin}{thought}</think>\n\nHello <tool_call>?") is None
        other = f"{begin}a <other> b <tool_call>?"
        assert after(vocab, part, other) is True and after(vocab, part, f"{other}</think><tool_call>?") is None
    for answer in ("" if is_open else "Hello. <think> ", "" if is_open else "<th"):
        if answer:
            assert after(vocab, part, f"{answer}{call}") is True and after(vocab, part, f"{answer}<tool_call>?") is None


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
def test_a_required_answer_follows_the_thought(special):
    vocab, parser = Vocab(Thinking, special), REASONING_PARSERS.load("qwen3")
    part = Reasoning(parser, False).before(schema(SCHEMAS["get_weather"]), "response_format")
    answer = '{"city": "a", "unit": "C"}'
    assert after(vocab, part, answer) is True
    assert after(vocab, part, f"<think>a {answer} <tool_call>?</think>{answer}") is True
    assert after(vocab, part, f"<think>a {answer}") is False
    for text in ("a", "<think></think>a", f"{answer}<think>"):
        assert after(vocab, part, text) is None
    part = Reasoning(parser, False).before(regex("(.|\n)*"), "structured_outputs")
    assert special or after(vocab, part, "a <think>") is True
    assert after(vocab, part, "a") is True and after(vocab, part, "<think>a") is False


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
def test_a_thought_that_the_prompt_has_closed_is_the_only_one(special):
    vocab, parser = Vocab(Thinking, special), REASONING_PARSERS.load("qwen3")
    part = Reasoning(parser, False, True).before(schema(SCHEMAS["get_weather"]), "response_format")
    assert after(vocab, part, '{"city": "a", "unit": "C"}') is True
    assert after(vocab, part, "<") is None and after(vocab, part, "<think>") is None


@pytest.mark.parametrize("spaces", ["", "\n", "\n\n", " ", "\r\n\t\n\n\n"])
@pytest.mark.parametrize("name", sorted(UNMARKED))
def test_a_call_without_a_mark_may_follow_a_thought(name, spaces):
    class Marked(PARSERS[name]):
        marks = ("<think>", "</think>", *PARSERS[name].marks)

    vocab, call = Vocab(Marked, True), "[get_time(" if "pythonic" in name else '{"name": "get_time", "parameters": {'
    close = ")]" if "pythonic" in name else "}}"
    for state in ((True, False), (False, False)):
        part = Reasoning(REASONING_PARSERS.load("qwen3"), *state).before(
            PARSERS[name].answer_format(SCHEMAS, False), "tools", may_end=True
        )
        assert after(vocab, part, f"<think>{call}!</think>{spaces}{call}{close}") is True
        assert after(vocab, part, f"<think>{call}!</think>{spaces}{call}!") is None
        assert after(vocab, part, f"<think>{call}!</think>{spaces}Well, {call}!") is True
        assert after(vocab, part, f"<think>{call}!") is True
    for one in (part, part["answer"]):
        assert after(vocab, one, f"{spaces}{call}{close}") is True and after(vocab, one, f"{spaces}{call}!") is None


@pytest.mark.parametrize("is_open", [True, False], ids=["opened by the prompt", "opened by the model"])
@pytest.mark.parametrize("name", MARKED)
def test_calls_of_every_format_may_follow_a_thought(name, is_open):
    parser, schemas = PARSERS[name], {"get_time": SCHEMAS["get_time"]}

    class Marked(parser):
        marks = ("<think>", "</think>", *parser.marks)

    tags = tag_grammar_of(some_tags(parser.call_tags(schemas, True), parser.separator, only_one=True), LIKE)
    answer = parser.answer_format(schemas, False)
    for special in (True, False):
        vocab = Vocab(Marked, special)
        part = Reasoning(REASONING_PARSERS.load("qwen3"), is_open).before(answer, "tools", may_end=True)
        call = vocab.sample(tags, random.Random(4)).decode()
        for spaces in ("", "\n", "\n\n", " \n"):
            assert after(vocab, part, f"<think>Hm.</think>{spaces}{call}") is True
            assert after(vocab, part, f"<think>Hm.</think>{spaces}I call it.{spaces}{call}") is True


@pytest.mark.parametrize(
    "spelled", ['{"name":"get_time","parameters":{}}', '{\n  "name": "get_time",\n  "parameters": {}\n}']
)
def test_the_name_of_a_call_without_a_mark_may_be_spelled_as_the_model_is_used_to(spelled):
    parser = PARSERS["llama3_json"]
    vocab, begin = Vocab(parser, True), spelled.partition("{}")[0]
    assert after(vocab, parser.answer_format(SCHEMAS, False), begin + "{}}") is True
    assert after(vocab, parser.answer_format(SCHEMAS, False), begin + "[") is None


def test_white_space_does_not_lead_into_a_thought_where_text_may_not_begin_with_it():
    vocab, parser = Vocab(Thinking, True), REASONING_PARSERS.load("qwen3")
    calls = some_tags(HermesParser.call_tags(SCHEMAS, True), "", only_one=True)
    for answer in (schema({"type": "object"}), calls):
        part = Reasoning(parser, False).before(answer, "tools")
        assert after(vocab, part, "<think>") is False and after(vocab, part, "\n") is None
