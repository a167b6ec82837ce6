"""Calls that are malformed or cut off: content in a whole message; in a stream, they are reported as not valid."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from call_texts import SIMPLE, TOOLS, WITHOUT_MARK, WRITERS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples

from aiakq.server.api.chat_message import message_of
from aiakq.server.api.message_parser import MessageParser
from aiakq.server.api.tool_parsers import TOOL_PARSERS

#: Format -> a call that has ended, and whose arguments are no JSON object.
MALFORMED = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": 1,}}\n</tool_call>',
    "qwen3_json": '<tool_call>\n{"name": "get_weather", "arguments": {invalid json}}\n</tool_call>',
    "llama3_json": '{"name": "get_weather", "arguments": {invalid json}}',
    "llama4_json": '<|python_tag|>{"name": "get_weather", "parameters": {"city": NaN}}',
    "mistral": "[TOOL_CALLS]get_weather{1,2}",
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": 01}}]',
    "granite-20b-fc": '<function_call> {"name": "get_weather", "arguments": [1]}',
    "internlm": '<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": 3}<|action_end|>',
    "jamba": '<tool_calls>[{"name": "get_weather", "arguments": "Tokyo"}]</tool_calls>',
    "phi4_mini_json": 'functools[{"name": "get_weather", "arguments": {"city": tokyo}}]',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n in Tokyo </tool_call>",
    "qwen3_xml": "<function=get_weather>\n<parameter=city\nTokyo\n</parameter>\n</function>",
    "glm45": "<tool_call>get_weather<arg_key>city</arg_key>Tokyo</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</tool_call>",
    "pythonic": "[get_weather('Tokyo')]",
    "llama4_pythonic": "<|python_start|>[get_weather(city=)]<|python_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{city: 1}\n"
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    "{1, 2}<|tool_call_end|><|tool_calls_section_end|>",
}


def whole(name: str, text: str, **options: Any) -> tuple[str, list[tuple[str, Any]], bool]:
    """The content and the calls of a message that is parsed as a whole, and whether all calls are valid."""
    parser = MessageParser(None, TOOL_PARSERS.load(name)(TOOLS), "seed", **options)
    message = message_of("assistant", parser.feed(text, ended=True))
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return message.content or "", calls, parser.has_valid_calls


@pytest.mark.parametrize("name", WRITERS)
def test_a_malformed_call_is_content(name):
    text = MALFORMED[name]
    text = text if name in WITHOUT_MARK else f"Hm.\n\n{text}"
    assert whole(name, text) == (text, [], False)
    assert whole(name, f"{text} Yes.\n") == (f"{text} Yes.\n", [], False)
    call = WRITERS[name]([("get_time", {})])
    if name != "pythonic":  # which has a call at the beginning only
        assert whole(name, f"{text}\n{call}") == (text, [("get_time", {})], True)


@pytest.mark.parametrize("name", WRITERS)
def test_a_malformed_call_that_has_been_streamed_is_not_valid(name):
    for text in (MALFORMED[name], f"{MALFORMED[name]}\n{WRITERS[name]([('get_time', {})])}"):
        parser = MessageParser(None, TOOL_PARSERS.load(name)(TOOLS), "seed")
        for character in text:
            parser.feed(character)
        parser.feed("", ended=True)
        assert not parser.has_valid_calls


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_is_cut_off_is_content_unless_it_has_been_streamed(name):
    call = WRITERS[name]([("get_weather", {"city": "Tokyo", "tags": [1, [2]]})])
    text = call if name in WITHOUT_MARK else f"Hm. {call}"
    for at in range(len(text)):
        content, calls, is_valid = whole(name, text[:at])
        assert calls or (content, is_valid) == (text[:at], False)
        parser = MessageParser(None, TOOL_PARSERS.load(name)(TOOLS), "seed")
        events = [event for character in text[:at] for event in parser.feed(character)]
        events += parser.feed("", ended=True)
        assert parser.has_valid_calls is bool(calls)
    both = WRITERS[name]([("get_time", {}), ("get_weather", SIMPLE)])
    at = both.rindex("Tokyo")
    _, calls, is_valid = whole(name, both[:at])
    assert (calls, is_valid) == ([("get_time", {})], True)


@pytest.mark.parametrize("name", WRITERS)
def test_the_beginning_of_a_call_is_no_content_where_only_calls_are_allowed(name):
    text = WRITERS[name]([("get_weather", {"city": "Tokyo"})])
    for at in range(len(text)):
        parser = MessageParser(None, TOOL_PARSERS.load(name)(TOOLS), "seed", only_calls=True)
        message = message_of("assistant", parser.feed(text[:at], ended=True))
        assert not message.content and not parser.has_valid_calls or message.tool_calls


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=examples(80))
@given(data=st.data())
def test_any_text_has_valid_calls_only_and_loses_nothing_else(name, data):
    call = WRITERS[name]([("get_weather", SIMPLE)])
    parts = [*TOOL_PARSERS.load(name).marks, call, call[: len(call) // 2], call[len(call) // 2 :], MALFORMED[name]]
    parts += ["[", "]", "{", "}", '"', "get_time", "(", ")", ",", ";", " ", "\n", "text", "1"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    content, calls, is_valid = whole(name, text)
    assert all(isinstance(arguments, dict) for _, arguments in calls) and is_valid is bool(calls)
    if not calls:
        assert content == text


def test_many_marks_and_escapes_are_joined_once():
    text = "<tool_call>" * 256_000
    start = time.process_time()
    assert whole("hermes", text)[0] == text
    escapes = "\\n" * 256_000
    _, [(_, arguments)], _ = whole("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": "{escapes}"}}}}')
    assert len(arguments["a"]) == 256_000
    assert time.process_time() - start < 8


SECTIONS = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
}


def streamed(name: str, text: str) -> tuple[str, list[str]]:
    """The content and the names of the calls of a message that arrives by characters."""
    parser = MessageParser(None, TOOL_PARSERS.load(name)(TOOLS), "seed")
    events = [event for character in text for event in parser.feed(character)]
    message = message_of("assistant", [*events, *parser.feed("", ended=True)])
    return message.content or "", [call.function.name for call in message.tool_calls or ()]


def letters(text: str) -> str:
    """The text without white space, which is dropped around calls."""
    return "".join(text.split())


@pytest.mark.parametrize("name", SECTIONS)
def test_marks_of_a_section_with_calls_are_not_shown_if_there_is_text_in_it(name):
    begin, end = SECTIONS[name]
    call = WRITERS[name]([("get_time", {})]).removeprefix(begin).removesuffix(end)
    for text, content in (
        (f"Hm. {begin} I call: {call}{end}", "Hm. I call:"),
        (f"Hm. {begin}{call} and that. {end}", "Hm.  and that. "),
        (f"Hm. {begin} now {call} then {call} Yes. {end}", "Hm. now then  Yes. "),
    ):
        found, calls, _ = whole(name, text)
        assert (letters(found), {called for called, _ in calls}) == (letters(content), {"get_time"})
        found, names = streamed(name, text)
        assert (letters(found), set(names)) == (letters(content), {"get_time"})
    for text in (f"Hm. {begin} nothing {end}", f"Hm. {begin}{'x' * 1000}", f"Hm. {begin} cut", f"Hm. {end}"):
        assert whole(name, text)[:2] == (text, []) and streamed(name, text) == (text, [])


def test_marks_of_a_section_of_kimi_in_the_singular_are_not_shown():
    begin, end = SECTIONS["kimi_k2"]
    for text, content in (
        (f"Hm. {begin}CALL{end}", "Hm."),
        (f"Hm. {begin} I call: CALL{end} Yes.", "Hm. I call: Yes."),
        (f"Hm. {begin}CALL and that. {end}", "Hm. and that."),
    ):
        call = WRITERS["kimi_k2"]([("get_time", {})]).removeprefix(begin).removesuffix(end)
        text = text.replace("tool_calls_section", "tool_call_section").replace("CALL", call)
        found, calls, _ = whole("kimi_k2", text)
        assert (letters(found), calls) == (letters(content), [("get_time", {})])
        found, names = streamed("kimi_k2", text)
        assert (letters(found), names) == (letters(content), ["get_time"])


def test_a_call_of_deepseek_with_another_word_before_its_name_stays_text():
    begin, end = SECTIONS["deepseek_v3"]

    def written(first: str, second: str) -> str:
        fence = f"{second}\n```json\n{{}}\n```"
        return f"{begin}<｜tool▁call▁begin｜>{first}<｜tool▁sep｜>{fence}<｜tool▁call▁end｜>{end}"

    for first, second in (("function", "get_time"), ("get_time", "get_time"), ("", "get_time"), ("get_time", "")):
        assert whole("deepseek_v3", written(first, second))[:2] == ("", [("get_time", {})])
    for first, second in (("get_weather", "get_time"), ("As asked, I call", "get_time"), ("function", "")):
        text = written(first, second)
        assert whole("deepseek_v3", text)[:2] == (text, []) == (streamed("deepseek_v3", text)[0], [])


def test_marks_that_begin_no_call_are_text_in_their_order():
    text = "<｜tool▁calls▁begin｜><｜tool▁sep｜><｜tool▁call▁begin｜>"
    assert whole("deepseek_v3", text)[:2] == (text, [])
