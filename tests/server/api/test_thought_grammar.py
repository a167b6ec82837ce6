"""Grammars of messages with a thought: nothing is enforced in it, and what follows it is enforced."""

from __future__ import annotations

import asyncio
import json
import random
import re
from types import SimpleNamespace

import jsonschema
import pytest
from call_grammars import KNOWN, LIKE, MARKED, PARSERS, SCHEMAS, UNMARKED, Vocab, after

from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.structured.formats import (
    either,
    regex,
    schema,
    some_tags,
    tag_grammar_of,
    text_with_tags,
    with_thoughts,
)
from aiakq.server.api.answer_grammar import Reasoning, answer_grammar
from aiakq.server.api.chat_message import message_of
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.message_parser import MessageFormat, MessageParser
from aiakq.server.api.reasoning_parsers import REASONING_PARSERS
from aiakq.server.api.request_model import parse_body
from aiakq.server.api.tool_parsers.hermes import HermesParser


class Thinking(HermesParser):
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.mark.parametrize("may_end", [True, False])
def test_a_message_may_end_in_reasoning_if_no_format_is_set(may_end):
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


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("is_open", [True, False], ids=["opened by the prompt", "opened by the model"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_message_with_forced_calls_may_end_within_its_thought_if_a_call_is_its_end(name, is_open, special):
    parser, reasoning = PARSERS[name], REASONING_PARSERS.load("qwen3")

    class Marked(parser):
        marks = ("<think>", "</think>", *parser.marks)

    vocab = Vocab(Marked, special)
    calls = some_tags(parser.call_tags(SCHEMAS, True), parser.separator, only_one=True)
    call = vocab.sample(tag_grammar_of(calls, LIKE), random.Random(4)).decode()
    part = Reasoning(reasoning, is_open).before(calls, "tools", may_end_with_call=True)
    begin = "" if is_open else "<think>"
    mark = (parser.triggers or parser.marks or ("[",))[0]
    cut = re.split('"|et_|end_', call)[0]
    mention = f"Hm. {mark} no; {cut}; {mark}, "
    for thought in ("", "Hm.\n", mention):
        for end in ("", "\n"):
            assert after(vocab, part, f"{begin}{thought}{call}{end}") is True
            written = f"{begin}{thought}{call}{end}"
            for pieces in ([written], [*written, ""]):
                reader = MessageParser(reasoning(is_open), parser(SCHEMAS), only_calls=True)
                events = [event for at, one in enumerate(pieces) for event in reader.feed(one, at + 1 == len(pieces))]
                message = message_of("assistant", events)
                assert len(message.tool_calls) == 1 and message.reasoning == (thought.strip() or None)
        for end in ("", f"{call}.", f"{call} no", call[:-1], f"{call}</think>"):
            assert after(vocab, part, f"{begin}{thought}{end}") is False
        assert after(vocab, part, f"{begin}{thought}{call}</think>\n{call}") is True
        assert after(vocab, part, f"{begin}{thought}</think>Hm. {call}") is None


@pytest.mark.parametrize("name", ["hermes", "granite", "mistral", "jamba", "llama3_json", "phi4_mini_json"])
def test_a_call_that_ends_a_thought_may_be_spelled_as_the_model_is_used_to(name):
    parser, reasoning = PARSERS[name], REASONING_PARSERS.load("qwen3")
    calls = some_tags(parser.call_tags(SCHEMAS, True), parser.separator, only_one=True)
    part = Reasoning(reasoning, True).before(calls, "tools", may_end_with_call=True)
    begin = (parser.call_begins or ("",))[0]
    end = ("]" if begin.endswith("[") else "") + "".join(parser.ends[:1])
    vocab = Vocab(parser, True)
    for key in ("arguments", "parameters"):
        for call in (f'{{"name":"get_time","{key}":{{}}}}', f'{{\n  "name": "get_time",\n  "{key}": {{}}\n}}'):
            text = f"Hm. {begin}{call}{end}"
            assert after(vocab, part, text) is True and after(vocab, part, text + ".") is False
            message = MessageParser(reasoning(True), parser(SCHEMAS), only_calls=True).feed(text, ended=True)
            assert [call.function.name for call in message_of("assistant", message).tool_calls] == ["get_time"]


def renderer_with_tools() -> SimpleNamespace:
    """What the grammar of a request with tools needs of the renderer."""

    async def check_grammar(grammar: Grammar, param: str) -> Grammar:
        return grammar

    return SimpleNamespace(
        message_format=MessageFormat(HermesParser, auto_tool_choice=True),
        text=SimpleNamespace(check_grammar=check_grammar),
        limits=SimpleNamespace(grammars=SimpleNamespace(apply=lambda grammar: grammar)),
    )


@pytest.mark.parametrize(
    "fields, may_end, may_end_with_call",
    [
        ({}, True, False),
        ({"tool_choice": "required"}, False, True),
        ({"tool_choice": {"type": "function", "function": {"name": "get_time"}}}, False, True),
        ({"response_format": {"type": "json_object"}}, False, True),
    ],
    ids=["auto", "required", "named", "response format"],
)
def test_how_a_message_with_tools_may_end_within_its_thought(fields, may_end, may_end_with_call):
    renderer = renderer_with_tools()
    tools = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, **fields}
    request = parse_body(ChatCompletionRequest, json.dumps(body).encode())
    own = schema({"type": "object"}) if "response_format" in fields else None
    reasoning = Reasoning(REASONING_PARSERS.load("deepseek_r1"), is_open=True)
    grammar = asyncio.run(answer_grammar(renderer, request, own and tag_grammar_of(own), reasoning))
    part = json.loads(grammar.text)["format"]
    assert (part["may_end"], part["may_end_with_call"]) == (may_end, may_end_with_call)


def test_an_answer_in_json_does_not_end_within_a_call_that_it_quotes():
    vocab, parser = Vocab(Thinking, False), REASONING_PARSERS.load("qwen3")
    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    answer = schema({"type": "object", "properties": {"a": {"type": "string"}}})
    calls = some_tags(HermesParser.call_tags(SCHEMAS, True), "", only_one=True)
    for is_open in (True, False):
        part = Reasoning(parser, is_open).before(either(calls, answer), "tools", may_end_with_call=True)
        quoted = call.replace('"', '\\"')
        for begin in ("<think>Hm. </think>", "Hm.</think>" if is_open else ""):
            assert after(vocab, part, f'{begin}{{"a": "{quoted}') is False
            assert after(vocab, part, f'{begin}{{"a": "{quoted}"}}') is True
            assert after(vocab, part, f"{begin}{call}") is True


def test_a_draft_of_a_call_in_a_thought_is_followed_by_the_end():
    vocab, parser = Vocab(Thinking, True), REASONING_PARSERS.load("qwen3")
    calls = some_tags(HermesParser.call_tags(SCHEMAS, True), "", only_one=True)
    grammar = tag_grammar_of(Reasoning(parser, True).before(calls, "tools", may_end_with_call=True))
    matcher = vocab.compiler.matcher(grammar)
    for token in (*b"Hm. ", vocab.texts.index(b"<tool_call>"), *b'{"name": "get_time", "arguments": {}}'):
        matcher.advance(token)
    end = vocab.texts.index(b"</tool_call>")
    assert not vocab.may_end(matcher) and vocab.may_end(matcher.after(end)) and not vocab.may_end(matcher)
    matcher.advance(end)
    assert vocab.may_end(matcher) and matcher.after(vocab.end).failure == "the text is complete"
    assert not vocab.may_end(matcher.after(ord("."))) and not matcher.is_finished
    matcher.advance(vocab.end)
    assert matcher.is_finished and matcher.failure is None


def test_white_space_does_not_lead_into_a_thought_where_text_may_not_begin_with_it():
    vocab, parser = Vocab(Thinking, True), REASONING_PARSERS.load("qwen3")
    calls = some_tags(HermesParser.call_tags(SCHEMAS, True), "", only_one=True)
    for answer in (schema({"type": "object"}), calls):
        part = Reasoning(parser, False).before(answer, "tools")
        assert after(vocab, part, "<think>") is False and after(vocab, part, "\n") is None


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("only_one", [True, False], ids=["one", "many"])
@pytest.mark.parametrize("name", sorted(set(MARKED) - UNMARKED))
def test_nothing_is_enforced_in_a_thought_that_opens_after_text(name, only_one, special):
    parser, reasoning = PARSERS[name], REASONING_PARSERS.load("qwen3")

    class Marked(parser):
        marks = ("<think>", "</think>", *parser.marks)

    vocab = Vocab(Marked, special)
    calls = some_tags(parser.call_tags(SCHEMAS, True), parser.separator, only_one=True)
    call = vocab.sample(tag_grammar_of(calls, LIKE), random.Random(4)).decode()
    mention = f"{parser.triggers[0]}?"
    answer = with_thoughts(parser.answer_format(SCHEMAS, only_one), reasoning.starts, reasoning.ends)
    part = Reasoning(reasoning, False).before(answer, "tools", may_end=True)
    for begin in ("Well ", "<think>a</think>\n", f"<think>a {call}</think>Well, <other> "):
        assert after(vocab, part, f"{begin}{mention}") is None
        for thought in (mention, call, f"{call} <other> {mention}"):
            text = f"{begin}<think>maybe {thought}"
            assert after(vocab, part, text) is True and after(vocab, part, f"{text}</think>so") is True
            assert after(vocab, part, f"{text}</think>{mention}") is None
            assert after(vocab, part, f"{text}</think> so {call}") is True
            assert after(vocab, part, f"{text}</think> so <think>{mention}</think> {call}") is True


def test_a_thought_that_opens_after_text_is_free_for_requests_with_tools():
    renderer = renderer_with_tools()
    tools = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    for is_closed, expected in ((False, True), (True, None)):
        reasoning = Reasoning(REASONING_PARSERS.load("qwen3"), False, is_closed)
        request = parse_body(ChatCompletionRequest, json.dumps(body).encode())
        grammar = asyncio.run(answer_grammar(renderer, request, None, reasoning))
        part = json.loads(grammar.text)["format"]
        assert after(Vocab(Thinking, True), part, "Well <think> <tool_call>?") is expected


@pytest.mark.parametrize("name", KNOWN)
def test_a_call_that_may_end_a_thought_is_found_behind_broken_ones(name):
    parser, reasoning = PARSERS[name], REASONING_PARSERS.load("qwen3")

    class Marked(parser):
        marks = ("<think>", "</think>", *parser.marks)

    vocab = Vocab(Marked, True)
    calls = some_tags(parser.call_tags(SCHEMAS, True), parser.separator, only_one=True)
    call = vocab.sample(tag_grammar_of(calls, LIKE), random.Random(4)).decode()
    part = Reasoning(reasoning, True).before(calls, "tools", may_end_with_call=True)
    broken = [
        '{"',
        "'",
        '"',
        '{{"',
        "{[",
        "[ [",
        '\\"',
        '{"name": "send_mail", "parameters": {"text": "',
        "[send_mail(text='",
    ]
    broken += [call[:at] for at in range(1, len(call), 5)]
    rng = random.Random(7)
    for _ in range(40):
        text = "".join(rng.choice(broken) for _ in range(rng.randint(1, 3))) + call
        if after(vocab, part, text) is True:
            for pieces in ([text], [*text, ""]):
                reader = MessageParser(reasoning(True), parser(SCHEMAS), only_calls=True)
                events = [event for at, one in enumerate(pieces) for event in reader.feed(one, at + 1 == len(pieces))]
                [*_, found] = message_of("assistant", events).tool_calls
                jsonschema.validate(json.loads(found.function.arguments), SCHEMAS[found.function.name])
