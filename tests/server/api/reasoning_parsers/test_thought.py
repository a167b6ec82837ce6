"""Calls in a thought: text if the thought is closed, calls if the message ends in it, in every format."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples

from aiakq.server.api.chat_message import ResponseMessage, message_of
from aiakq.server.api.message_parser import MessageParser
from aiakq.server.api.output.events import ReasoningPiece
from aiakq.server.api.reasoning_parsers import REASONING_PARSERS, thought
from aiakq.server.api.tool_parsers import TOOL_PARSERS

TOOLS = {
    "find": {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}, "required": ["q"]},
    "stop": {},
}
ARGUMENTS = {"q": 'a "b" é 🙂', "n": 3}


def as_json(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def as_tags(name: str, arguments: dict[str, Any]) -> str:
    values = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"


def as_pairs(name: str, arguments: dict[str, Any]) -> str:
    values = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()]
    return f"<tool_call>{name}\n{''.join(values)}</tool_call>"


#: Format -> the text of a call.
CALLS = {
    "hermes": lambda *call: f"<tool_call>\n{as_json(*call)}\n</tool_call>",
    "llama3_json": lambda *call: f"<|python_tag|>{as_json(*call, key='parameters')}",
    "mistral": lambda *call: f"[TOOL_CALLS][{as_json(*call)}]",
    "pythonic": lambda name, values: f"[{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})]",
    "llama4_pythonic": lambda *call: f"<|python_start|>{CALLS['pythonic'](*call)}<|python_end|>",
    "granite": lambda *call: f"<|tool_call|>[{as_json(*call)}]",
    "granite-20b-fc": lambda *call: f"<function_call> {as_json(*call)}",
    "internlm": lambda *call: f"<|action_start|><|plugin|>\n{as_json(*call, key='parameters')}<|action_end|>",
    "jamba": lambda *call: f"<tool_calls>[{as_json(*call)}]</tool_calls>",
    "phi4_mini_json": lambda *call: f"functools[{as_json(*call)}]",
    "qwen3_coder": as_tags,
    "glm45": as_pairs,
    "deepseek_v3": lambda name, values: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        f"{json.dumps(values, ensure_ascii=False)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": lambda name, values: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        f"{json.dumps(values, ensure_ascii=False)}<|tool_call_end|><|tool_calls_section_end|>"
    ),
}
#: Format -> number of characters that are cut off, so that the call is not complete.
CUT = dict.fromkeys(CALLS, 16) | {"deepseek_v3": 60, "kimi_k2": 60, "granite": 3, "mistral": 3, "phi4_mini_json": 3}
CUT |= {"pythonic": 2, "llama4_pythonic": 20, "granite-20b-fc": 2, "llama3_json": 2, "jamba": 18, "hermes": 15}
MARKS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek_r1": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here's my thought process:", "Here's my response:"),
}
FORMATS = pytest.mark.parametrize("name", CALLS)


def parse(name: str, *pieces: str, reasoning: str = "qwen3", is_open: bool = True, **options: Any) -> ResponseMessage:
    parser = MessageParser(
        REASONING_PARSERS.load(reasoning)(is_open), TOOL_PARSERS.load(name)(TOOLS), "seed", **options
    )
    if len(pieces) == 1:
        return message_of("assistant", parser.feed(pieces[0], ended=True))
    events = [event for piece in pieces for event in parser.feed(piece)]
    return message_of("assistant", events + parser.feed("", ended=True))


def calls_of(message: ResponseMessage) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_every_format_is_tested():
    assert {TOOL_PARSERS.load(name) for name in [*CALLS, "gptoss"]} == {TOOL_PARSERS.load(one) for one in TOOL_PARSERS}
    assert {*MARKS, "gptoss"} == set(REASONING_PARSERS)


@FORMATS
@pytest.mark.parametrize("reasoning", MARKS)
def test_a_message_that_ends_in_its_thought_has_the_call(name, reasoning):
    start, _ = MARKS[reasoning]
    text = f"I look it up.\n{CALLS[name]('find', ARGUMENTS)}"
    for is_open, written in ((True, text), (False, f"{start}{text}"), (True, f"\n{start}\n{text}")):
        message = parse(name, written, reasoning=reasoning, is_open=is_open)
        assert (message.reasoning, message.content) == ("I look it up.", None)
        assert calls_of(message) == [("find", ARGUMENTS)]
        assert parse(name, *written, reasoning=reasoning, is_open=is_open) == message


@FORMATS
@pytest.mark.parametrize("reasoning", MARKS)
def test_a_call_in_a_closed_thought_is_text(name, reasoning):
    _, end = MARKS[reasoning]
    body = f"I could write {CALLS[name]('find', ARGUMENTS)} here."
    text = f"{body}\n{end}\n\nDone."
    message = parse(name, text, reasoning=reasoning)
    assert (message.reasoning, message.content, calls_of(message)) == (body, "Done.", [])
    assert parse(name, *text, reasoning=reasoning) == message
    later = parse(name, f"{body}{end}{CALLS[name]('stop', {})}", reasoning=reasoning)
    assert (later.reasoning, later.content, calls_of(later)) == (body, None, [("stop", {})])


@FORMATS
@pytest.mark.parametrize(
    "call",
    [("other", ARGUMENTS), ("find", {"q": "a", "n": "many"}), ("find", {"n": 1})],
    ids=["name", "type", "missing"],
)
def test_what_is_no_valid_call_stays_in_the_thought(name, call):
    text = f"Not {CALLS[name](*call)} and not {CALLS[name]('find', ARGUMENTS)[: -CUT[name]]}"
    message = parse(name, text)
    assert (message.reasoning, message.content, calls_of(message)) == (text, None, [])
    assert parse(name, *text) == message
    text = f"Not {CALLS[name](*call)} but {CALLS[name]('find', ARGUMENTS)}"
    message = parse(name, text)
    assert message.reasoning == f"Not {CALLS[name](*call)} but" and calls_of(message) == [("find", ARGUMENTS)]
    assert parse(name, *text) == message


@FORMATS
def test_marks_that_are_only_mentioned_stay_in_the_thought(name):
    for mark in TOOL_PARSERS.load(name).marks:
        text = f"I could write {mark} here, but no"
        assert parse(name, text).reasoning == parse(name, *text).reasoning == text
        closed = parse(name, *f"{text}.</think>\n\nHello there.")
        assert (closed.reasoning, closed.content) == (f"{text}.", "Hello there.")


@FORMATS
def test_a_call_is_found_after_marks_that_are_only_mentioned(name):
    call = CALLS[name]("find", ARGUMENTS)
    cut = re.split('"|nd', call)[0]
    for mark in TOOL_PARSERS.load(name).triggers or TOOL_PARSERS.load(name).marks:
        for mention in (
            f"{mark} no; {cut}; ",
            f"{mark} or {mark} no; {mark}, {mark} x\n",
            f"{mark} {mark} no; ",
        ):
            text = f"Hm. {mention}{call}"
            message = parse(name, text)
            assert message.reasoning == f"Hm. {mention}".strip() and message.content is None
            assert calls_of(message) == [("find", ARGUMENTS)]
            pairs = [text[at : at + 2] for at in range(0, len(text), 2)]
            assert parse(name, *text) == parse(name, *pairs) == parse(name, text, "") == message


@pytest.mark.parametrize("name", [name for name in CALLS if TOOL_PARSERS.load(name).quotes_values])
def test_a_call_is_found_after_one_that_is_broken_off_in_a_string(name):
    call = CALLS[name]("find", ARGUMENTS)
    for part in re.findall(r'.*?"(?=\w)', call)[-3:]:
        text = f"Hm. {call[: call.index(part) + len(part)]}x and again: {call}"
        message = parse(name, text)
        assert calls_of(message) == [("find", ARGUMENTS)] and message.content is None
        assert message.reasoning == text.removesuffix(call).strip()
        for size in (1, 5):
            assert parse(name, *[text[at : at + size] for at in range(0, len(text), size)]) == message


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
@pytest.mark.parametrize("json_text", ['{"a": "x\\n"}', '{"é": [é, "b"', '{"a": {é'])
def test_json_before_a_call_is_read_alike_in_any_pieces(name, json_text):
    text = f"Hm {json_text} {CALLS[name]('find', ARGUMENTS)}"
    assert calls_of(parse(name, text)) == [("find", ARGUMENTS)]
    for size in (1, 2, 3):
        assert parse(name, *[text[at : at + size] for at in range(0, len(text), size)]) == parse(name, text)


def test_text_in_which_no_call_begins_is_not_parsed(monkeypatch):
    parser = MessageParser(REASONING_PARSERS.load("qwen3")(True), TOOL_PARSERS.load("hermes")(TOOLS))
    parser.feed("Hm. A <b> or <tool_")
    parser.feed("x ")
    monkeypatch.setattr(thought.Thought, "_parse", None)
    for piece in (" 1 + 1 = 2,", ' "quoted" (é) `code` {', "}\n"):
        parser.feed(piece)
    with pytest.raises(TypeError):
        parser.feed(" <t")


@FORMATS
def test_several_calls_and_text_follow_the_thought(name):
    call = CALLS[name]
    text = f"Hm.\n{call('find', ARGUMENTS)}\n{call('stop', {})}\nDone."
    if name in ("mistral", "pythonic"):  # what follows a call in these formats is read as it is in an answer
        text = text.removesuffix("\nDone.")
    message = parse(name, text)
    assert message.reasoning == "Hm." and calls_of(message) == [("find", ARGUMENTS), ("stop", {})]
    assert message.content == ("Done." if text.endswith("Done.") else None)
    assert parse(name, *text) == message
    only = parse(name, *text, max_calls=1)
    assert calls_of(only) == [("find", ARGUMENTS)]


@FORMATS
@pytest.mark.parametrize("reasoning", MARKS)
@pytest.mark.parametrize("begin", ["Well, ", "Hm.END", "Hm.ENDWell, "])
def test_a_thought_that_opens_after_text_follows_the_same_rule(name, reasoning, begin):
    start, end = MARKS[reasoning]
    call = CALLS[name]("find", ARGUMENTS)
    is_open = "END" in begin
    first, _, before = begin.rpartition("END")
    thinks = f"{before}{start} maybe {call} or"
    for after in ("", " Done.", f" so {start} {call}{end} no"):
        text = f"{thinks}{end}{after}"
        message = parse(name, f"{first}{end if is_open else ''}{text}", reasoning=reasoning, is_open=is_open)
        assert (message.content, calls_of(message)) == (text, []), "closed: all of it is text"
        assert message.reasoning == ("Hm." if is_open else None)
        assert parse(name, *f"{first}{end if is_open else ''}{text}", reasoning=reasoning, is_open=is_open) == message
    text = f"{first}{end if is_open else ''}{before}{start} maybe {call}"
    message = parse(name, text, reasoning=reasoning, is_open=is_open)
    assert calls_of(message) == [("find", ARGUMENTS)] and message.content == f"{before}{start} maybe"
    assert parse(name, *text, reasoning=reasoning, is_open=is_open) == message
    invalid = f"{first}{end if is_open else ''}{before}{start} maybe {CALLS[name]('find', {'n': 1})}"
    assert not calls_of(parse(name, invalid, reasoning=reasoning, is_open=is_open))


@FORMATS
def test_a_mark_of_a_thought_in_an_argument_opens_none(name):
    arguments = {"q": "a <think> b"}
    for text in (CALLS[name]("find", arguments), f"Hm.</think>{CALLS[name]('find', arguments)}"):
        message = parse(name, text, is_open="</think>" in text)
        assert calls_of(message) == [("find", arguments)] and message.content is None
        assert parse(name, *text, is_open="</think>" in text) == message


@FORMATS
def test_a_second_call_that_is_cut_off_is_no_call(name):
    call = CALLS[name]("find", ARGUMENTS)
    text = f"Hm.\n{call}\n{call[: -CUT[name]]}"
    message = parse(name, text)
    assert message.reasoning == "Hm." and calls_of(message) == [("find", ARGUMENTS)]
    assert message.content == call[: -CUT[name]] and parse(name, *text) == message


@FORMATS
def test_a_held_call_is_not_streamed_as_reasoning(name):
    parser = MessageParser(REASONING_PARSERS.load("qwen3")(True), TOOL_PARSERS.load(name)(TOOLS))
    assert parser.feed("I look") == [ReasoningPiece("I look")]
    assert parser.feed(f"\n{CALLS[name]('find', ARGUMENTS)}") == []
    assert parser.feed(" Or not?") == []
    assert parser.reasoning_bytes is None
    events = parser.feed("</think>Yes")
    assert events[0] == ReasoningPiece(f"\n{CALLS[name]('find', ARGUMENTS)} Or not?")


@FORMATS
@settings(max_examples=examples(80))
@given(data=st.data())
def test_any_text_in_any_pieces_gives_the_same(name, data):
    call, other = CALLS[name]("find", ARGUMENTS), CALLS[name]("find", {"n": "x"})
    parts = [call, call, other, CALLS[name]("stop", {}), call[: len(call) // 2], call[len(call) // 2 :]]
    parts += [
        *TOOL_PARSERS.load(name).marks,
        "<think>",
        "</think>",
        "</thi",
        "text",
        " ",
        "\n",
        "[",
        "{",
        "}",
        '"',
        "; ",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=10)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    streamed = parse(name, *text, "")
    assert parse(name, *pieces, "") == streamed
    if "</think>" not in text:  # no call of an answer, which is streamed before it is known to be valid
        assert parse(name, text) == streamed
        for arguments in calls_of(streamed):
            assert isinstance(arguments[1], dict)
        if not streamed.tool_calls:
            assert (streamed.reasoning or "") == text.strip().removeprefix("<think>").strip()


@FORMATS
def test_what_is_held_back_is_bounded(name, monkeypatch):
    monkeypatch.setattr(thought, "MAX_HELD", 400)
    text = f"Hm. {CALLS[name]('find', ARGUMENTS)}{' no' * 200}"
    message = parse(name, text)
    assert (message.reasoning, calls_of(message)) == (text, [])
    assert parse(name, *text) == message
    assert parse(name, *[text[at : at + 7] for at in range(0, len(text), 7)]) == message


@FORMATS
def test_time_grows_with_the_text(name):
    call = CALLS[name]("find", {"q": "x"})
    mark = (TOOL_PARSERS.load(name).marks or ("[",))[0]
    for text in (mark * 5_000, call * 500, call[:-3] * 500, CALLS[name]("other", {"q": "x"}) * 500):
        start = time.process_time()
        parse(name, text)
        parse(name, *[text[at : at + 7] for at in range(0, len(text), 7)])
        assert time.process_time() - start < 8


@pytest.mark.parametrize("is_open", [True, False])
def test_a_prompt_that_closes_the_thought_leaves_no_room_for_another(is_open):
    for name, (start, end) in MARKS.items():
        parser = REASONING_PARSERS.load(name)
        prompt = f"Hi {start}\n\n{end}\n\n"
        assert parser.closed_by(prompt) and not parser.closed_by(f"Hi {start}\n") and not parser.closed_by("Hi")
        assert parser.closed_by("x", f"{start}a{end}b") and not parser.closed_by("x", f"{start}a")
        message = MessageParser(parser(parser.opened_by(prompt), parser.closed_by(prompt)), None)
        text = f"{start}a{end}b"
        found = message_of("assistant", message.feed(text, ended=True))
        assert (found.reasoning, found.content) == (None, text)


@FORMATS
@pytest.mark.parametrize(
    ("number", "given", "is_valid"),
    [({"multipleOf": 0.1}, 0.3, True), ({"multipleOf": 0.1}, 0.1 + 0.2, False), ({"multipleOf": 3}, 2**53 + 1, True)],
)
def test_numbers_of_a_call_in_a_thought_are_compared_as_they_are_written(name, number, given, is_valid):
    tools = {"find": {"type": "object", "properties": {"n": {"type": "number", **number}}, "required": ["n"]}}
    parser = MessageParser(REASONING_PARSERS.load("qwen3")(True), TOOL_PARSERS.load(name)(tools))
    message = message_of("assistant", parser.feed(f"Hm.\n{CALLS[name]('find', {'n': given})}", ended=True))
    assert calls_of(message) == ([("find", {"n": given})] if is_valid else [])
