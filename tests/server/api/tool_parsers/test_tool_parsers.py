"""Every tool parser on the texts of its family, in one piece and in many."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from call_texts import ESCAPED, LLAMA, SIMPLE, TOOLS, TYPES, WITHOUT_MARK, WRITERS
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples

from aiakq.server.api.message_parser import MessageParser
from aiakq.server.api.output.events import ArgumentsPiece, CallEnded, CallStarted, ContentPiece, Event
from aiakq.server.api.tool_parsers import TOOL_PARSERS


def parser_of(name: str, max_calls: int | None = None) -> MessageParser:
    return MessageParser(None, TOOL_PARSERS.load(name)(TOOLS), "seed", max_calls)


def parse(name: str, *pieces: str, max_calls: int | None = None) -> tuple[str, list[tuple[str, str, str]], int]:
    """The content, the calls as (name, arguments, id), and how many calls were complete."""
    parser = parser_of(name, max_calls)
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)]
    events += parser.feed("", ended=True)
    content = "".join(event.text for event in events if isinstance(event, ContentPiece))
    calls = []
    for event in events:
        if isinstance(event, CallStarted):
            assert event.index == len(calls)
            calls.append([event.name, "", event.id])
        elif isinstance(event, ArgumentsPiece):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    return content, [tuple(call) for call in calls], sum(isinstance(event, CallEnded) for event in events)


def values(calls: list[tuple[str, str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments, _ in calls]


def test_every_parser_is_tested():
    assert set(WRITERS) | {"gptoss", "openai"} == set(
        TOOL_PARSERS
    )  # channels: tests/server/api/output/test_channels.py


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "calls",
    [
        [("get_weather", SIMPLE)],
        [("get_weather", SIMPLE), ("get_time", {}), ("get_weather", {"city": "Rio", "days": 0})],
        [("get_weather", TYPES)],
        [("get_time", {})],
        [("get_weather", ESCAPED)],
    ],
    ids=["one", "several", "types", "no arguments", "escapes"],
)
def test_calls_are_found(name, calls):
    text = WRITERS[name](calls)
    content, found, ended = parse(name, text)
    assert (content, values(found), ended) == ("", calls, len(calls))
    assert len({id for *_, id in found}) == len(calls)
    assert parse(name, *text) == (content, found, ended), "one character at a time"


@pytest.mark.parametrize("name", WRITERS)
def test_every_cut_into_two_gives_the_same(name):
    text = WRITERS[name]([("get_weather", TYPES), ("get_time", {})])
    text = text if name in WITHOUT_MARK else f"Let me look.\n\n{text}\n"
    whole = parse(name, text)
    assert whole[0] == ("" if name in WITHOUT_MARK else "Let me look.") and len(whole[1]) == 2
    for at in range(len(text)):
        assert parse(name, text[:at], text[at:]) == whole, text[:at]


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=examples(80))
@given(data=st.data())
def test_any_text_in_any_pieces_gives_the_same_and_loses_nothing(name, data):
    """Texts made of the marks of the format, of pieces of calls and of plain text."""
    call = WRITERS[name]([("get_weather", SIMPLE)])
    parts = [*TOOL_PARSERS.load(name).marks, call, call[: len(call) // 2], call[len(call) // 2 :]]
    parts += [
        "[",
        "]",
        "{",
        "}",
        '"name": ',
        '"',
        "get_time",
        "(",
        ")",
        "=",
        ",",
        ";",
        " ",
        "\n",
        "\\",
        "text",
        "<",
        "1",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(name, text)
    assert parse(name, *pieces) == whole
    if not whole[1]:
        assert whole[0] == text


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello!",
        "# A\n\n- b\n- c\n\n",
        "a < b and [1, 2] {x}",
        '{"answer": [1]}',
        "[1, 2]",
        "[x(1)]",
        "[note] f(a=1)",
    ],
)
def test_text_without_calls_is_kept(name, text):
    assert parse(name, text) == parse(name, *text) == (text, [], 0)


@pytest.mark.parametrize("name", sorted(set(WRITERS) - WITHOUT_MARK))
def test_malformed_calls_are_content(name):
    mark = TOOL_PARSERS.load(name).marks[0]
    for body in ("", "{", '{"name": 3}', '{"nom": "f"}', "nothing like it", "[]", "{}"):
        text = f"See {mark}{body}"
        content, calls, _ = parse(name, text)
        assert content == text and calls == [], text
        assert parse(name, *text) == (content, calls, 0)


@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_is_cut_off_is_no_content(name):
    """All beginnings of a call: at no point does any of it appear twice, and arguments are a beginning, too."""
    text = WRITERS[name]([("get_weather", {"city": "Tokyo", "tags": [1, [2]]})])
    whole = parse(name, text)[1][0][1]
    for at in range(len(text)):
        content, calls, _ = parse(name, text[:at])
        if calls:
            assert content == "" and whole.startswith(calls[0][1])
        else:
            assert content == text[:at]


@pytest.mark.parametrize("name", WRITERS)
def test_text_around_calls_is_content(name):
    call = WRITERS[name]([("get_time", {})])
    if name in WITHOUT_MARK:
        assert parse(name, call + "\nDone.")[0] == "Done."
        content, calls, _ = parse(name, "Well: " + call)
        assert (
            (content, calls) == ("Well: " + call, []) if name == "pythonic" else content == "Well:" and len(calls) == 1
        )
    else:
        content, calls, _ = parse(name, f"First.\n\n{call}\n\nThen\n{call}")
        assert content == "First.Then" and len(calls) == 2


@pytest.mark.parametrize("name", WRITERS)
def test_only_the_first_call_is_kept_without_parallel_calls(name):
    text = WRITERS[name]([("get_weather", SIMPLE), ("get_time", {})])
    content, calls, ended = parse(name, text, max_calls=1)
    assert (content, values(calls), ended) == ("", [("get_weather", SIMPLE)], 1)


@pytest.mark.parametrize("name", WRITERS)
def test_ids_repeat_with_the_request(name):
    text = WRITERS[name]([("get_time", {}), ("get_time", {})])
    ids = [id for *_, id in parse(name, text)[1]]
    assert ids == [id for *_, id in parse(name, *text)[1]]
    if name == "mistral":
        assert all(len(id) == 9 and id.isalnum() for id in ids)
    elif name == "kimi_k2":
        assert ids == ["functions.get_time:0", "functions.get_time:1"]
    else:
        assert all(id.startswith("chatcmpl-tool-") for id in ids)


@pytest.mark.parametrize("name", WRITERS)
def test_time_grows_with_the_text(name):
    """Long text, long arguments, and marks that begin nothing, in one piece and in small ones."""
    mark = (TOOL_PARSERS.load(name).marks or ("[",))[0]
    call = WRITERS[name]([("get_weather", {"city": "x" * 200_000, "tags": [1] * 50_000})])
    for text in (mark * 20_000, mark[:-1] * 20_000, mark + "{" * 100_000, mark + '{"' * 100_000, call, "[" * 100_000):
        start = time.process_time()
        parse(name, text)
        parse(name, *[text[at : at + 7] for at in range(0, len(text), 7)])
        assert time.process_time() - start < 8


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("hermes", '<tool_call>{"arguments": {"city": "A"}, "name": "f"}</tool_call>', [("f", {"city": "A"})], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})], ""),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})], ""),
        ("hermes", '<tool_call>{"id": 7, "name": "f", "parameters": {}, "x": [1]}</tool_call>', [("f", {})], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', [("f", {"a": 1})], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', [("f", {})], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and so on', [("f", {})], "and so on"),
        ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {"a": 1}}', [("other", {"a": 1})], ""),
        ("llama3_json", '{"type": "function", "name": "get_time", "parameters": {}}', [("get_time", {})], ""),
        ("llama3_json", '{"name": "Bob", "age": 3}', [], '{"name": "Bob", "age": 3}'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": {}}', [("f", {"a": 1}), ("g", {"b": {}})], ""),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', [("f", {"a": 1})], ""),
        ("llama3_json", f"Here is the call: {LLAMA}", [("get_weather", SIMPLE)], "Here is the call:"),
        ("llama3_json", f"Two: {LLAMA}; {LLAMA} Done.", [("get_weather", SIMPLE)] * 2, "Two:Done."),
        ("llama3_json", f"```json\n{LLAMA}\n```", [("get_weather", SIMPLE)], "```json```"),
        ("llama3_json", f'No {{"name": "x", "parameters": {LLAMA}}}', [], f'No {{"name": "x", "parameters": {LLAMA}}}'),
        ("llama3_json", f'{{"a": "\\"", "b": [{LLAMA}]}}', [], f'{{"a": "\\"", "b": [{LLAMA}]}}'),
        ("llama3_json", f"x {{ y({LLAMA}) }}", [("get_weather", SIMPLE)], "x { y() }"),
        ("llama3_json", f"Not {LLAMA.replace('Tokyo', '')[:-4]}", [], f"Not {LLAMA.replace('Tokyo', '')[:-4]}"),
        ("llama3_json", 'Not {"name": "get_weather", "parameters": {"city": 1}}', [], None),
        ("llama3_json", 'Not {"name": "get_weather", "parameters": {"city": x}}', [], None),
        ("mistral", "[TOOL_CALLS]no call\n", [], "[TOOL_CALLS]no call\n"),
        ("mistral", '[TOOL_CALLS] junk [{"name": "f", "arguments": {}}] end', [("f", {})], "end"),
        ("mistral", '[TOOL_CALLS] [TOOL_CALLS] [{"name": "f", "arguments": {}}]', [("f", {})], ""),
        ("mistral", '[TOOL_CALLS][TOOL_CALLS] {"name": "f", "arguments": {}}', [("f", {})], ""),
        ("mistral", '[TOOL_CALLS][TOOL_CALLS]f[ARGS]{"a": 1}', [("f", {"a": 1})], ""),
        ("mistral", '[TOOL_CALLS]no [TOOL_CALLS]f{"a": 1}', [("f", {"a": 1})], "[TOOL_CALLS]no"),
        ("mistral", '[TOOL_CALLS]I say: {"a": 1}', [], '[TOOL_CALLS]I say: {"a": 1}'),
        ("granite", '<tool_call>[{"name": "f", "arguments": {}}]', [("f", {})], ""),
        ("internlm", '<|action_start|> <|plugin|>\n{"name": "f", "parameters": {}}<|action_end|>', [("f", {})], ""),
        (
            "pythonic",
            "[get_weather(city='A', tags=[1, (2,)],), other.f()]",
            [("get_weather", {"city": "A", "tags": [1, [2]]}), ("other.f", {})],
            "",
        ),
        ("pythonic", "[get_weather(city=unknown(1))]", [("get_weather", {"city": "unknown(1)"})], ""),
        ("pythonic", "<|python_tag|>[f(a=true)]", [("f", {"a": True})], ""),
        ("pythonic", "[get_weather('A')]", [("get_weather", {})], "'A')]"),
        ("qwen3_coder", "<function=f><parameter=a>\n1\n</function>", [("f", {"a": 1})], ""),
        (
            "qwen3_coder",
            "<function=f><parameter=a>1<parameter=b>x</parameter></function></tool_call>",
            [("f", {"a": 1, "b": "x"})],
            "",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a\n1\n</parameter></function>",
            [("f", {})],
            "<parameter=a\n1\n</parameter></function>",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\na </b>\n\nc\n</parameter>\n</function></tool_call>",
            [("get_weather", {"city": "a </b>\n\nc"})],
            "",
        ),
        (
            "deepseek_v3",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [("f", {"a": 1})],
            "",
        ),
        ("glm45", "<tool_call>f</tool_call>", [("f", {})], ""),
        ("glm45", "<tool_call>two\nlines</tool_call>", [], "<tool_call>two\nlines</tool_call>"),
        ("phi4_mini_json", "import functools\n[1]", [], "import functools\n[1]"),
    ],
)
def test_forms_that_models_also_write(name, text, calls, content):
    found = parse(name, text)
    assert (values(found[1]), found[0]) == (calls, text if content is None else content)
    assert parse(name, *text) == found
