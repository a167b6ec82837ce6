"""Every tool parser on the texts of its family, in one piece and in many."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiakq.server.api.chat_message import message_of
from aiakq.server.api.message_parser import MessageParser
from aiakq.server.api.output.events import ArgumentsPiece, CallEnded, CallStarted, ContentPiece, Event
from aiakq.server.api.tool_parsers import TOOL_PARSERS

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "metric": {"type": "boolean"},
        "tags": {"type": "array"},
        "where": {"type": "object"},
        "note": {"type": ["string", "null"]},
        "free": {},
    },
}
TOOLS = {"get_weather": PARAMETERS, "get_time": {"type": "object", "properties": {}}}

SIMPLE = {"city": "Tokyo"}
TYPES = {
    "city": "Bergen",
    "days": 3,
    "ratio": -0.5,
    "metric": True,
    "tags": ["a", 1, None, {"b": []}],
    "where": {"at": {"x": [[1], [2]]}, "empty": {}},
    "note": None,
}
ESCAPED = {"city": 'a "b" \\ c\n\t{"d": ["}"]} é 🙂 <b>'}


def as_json(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def as_tags(name: str, arguments: dict[str, Any]) -> str:
    """Qwen3-Coder's form."""
    values = [
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    ]
    return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"


def as_pairs(name: str, arguments: dict[str, Any], between: str = "\n") -> str:
    """GLM's form."""
    values = [
        f"<arg_key>{key}</arg_key>{between}"
        f"<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>{between}"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}{between}{''.join(values)}</tool_call>"


def as_python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def deepseek(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps(arguments, ensure_ascii=False)
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{body}\n```<｜tool▁call▁end｜>"


def kimi(name: str, arguments: dict[str, Any], number: int = 0) -> str:
    body = json.dumps(arguments, ensure_ascii=False)
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{body}<|tool_call_end|>"


LLAMA = json.dumps({"name": "get_weather", "parameters": SIMPLE})

#: Calls -> the text of them all, as each family writes it.
WRITERS: dict[str, Any] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{as_json(*call)}\n</tool_call>" for call in calls),
    "llama3_json": lambda calls: "; ".join(as_json(*call, key="parameters") for call in calls),
    "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(as_json(*call) for call in calls)}]",
    "pythonic": lambda calls: f"[{', '.join(as_python(*call) for call in calls)}]",
    "llama4_pythonic": lambda calls: f"<|python_start|>[{', '.join(as_python(*call) for call in calls)}]<|python_end|>",
    "granite": lambda calls: f"<|tool_call|>[{', '.join(as_json(*call) for call in calls)}]",
    "granite-20b-fc": lambda calls: "".join(f"<function_call> {as_json(*call)}" for call in calls),
    "internlm": lambda calls: "\n".join(
        f"<|action_start|><|plugin|>\n{as_json(*call, key='parameters')}<|action_end|>" for call in calls
    ),
    "jamba": lambda calls: f"<tool_calls>[\n{', '.join(as_json(*call) for call in calls)}\n]</tool_calls>",
    "phi4_mini_json": lambda calls: f"functools[{', '.join(as_json(*call) for call in calls)}]",
    "qwen3_coder": lambda calls: "\n".join(as_tags(*call) for call in calls),
    "glm45": lambda calls: "\n".join(as_pairs(*call) for call in calls),
    "glm47": lambda calls: "".join(as_pairs(*call, between="") for call in calls),
    "deepseek_v3": lambda calls: (
        f"<｜tool▁calls▁begin｜>{chr(10).join(deepseek(*call) for call in calls)}<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": lambda calls: (
        "<|tool_calls_section_begin|>"
        + "".join(kimi(*call, number) for number, call in enumerate(calls))
        + "<|tool_calls_section_end|>"
    ),
}
WRITERS["llama4_json"] = WRITERS["llama3_json"]
WRITERS["qwen3_xml"] = WRITERS["qwen3_coder"]
WRITERS["qwen3_json"] = WRITERS["hermes"]
#: Formats whose calls are the beginning of the message.
WITHOUT_MARK = {"llama3_json", "llama4_json", "pythonic"}


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
@settings(max_examples=40, deadline=None)
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
        parser = parser_of(name)
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
        parser = parser_of(name)
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
@settings(max_examples=40, deadline=None)
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
