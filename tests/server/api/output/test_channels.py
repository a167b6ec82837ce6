"""Messages in the channels of gpt-oss: reasoning, calls of tools and answers, in any order and cut anywhere."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiakq.server.api.chat_message import message_of
from aiakq.server.api.message_parser import MessageParser
from aiakq.server.api.output.channels import MARKS
from aiakq.server.api.reasoning_parsers import REASONING_PARSERS
from aiakq.server.api.tool_parsers import TOOL_PARSERS

TOOLS = {"get_weather": {"type": "object", "properties": {"city": {"type": "string"}}}, "get_time": {}}
#: As the model writes a call after its reasoning, and as its template does.
BEHIND = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
BEFORE = '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"


def parse(*pieces: str, reasoning: bool = True, tools: bool = True, is_open: bool = False):
    """(reasoning, content, calls as (name, arguments)) of a message in pieces."""
    parser = MessageParser(
        REASONING_PARSERS.load("gptoss")(is_open) if reasoning else None,
        TOOL_PARSERS.load("openai")(TOOLS) if tools else None,
    )
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.feed("", ended=True)
    message = message_of("assistant", events)
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.reasoning, message.content, calls


@pytest.mark.parametrize("call", [BEHIND, "<|start|>assistant" + BEHIND, BEFORE])
@pytest.mark.parametrize("reasoning", [True, False])
def test_a_message_to_a_function_is_a_call(call, reasoning):
    found = parse(THOUGHT + call, reasoning=reasoning)
    assert found == ("Hm." if reasoning else None, None if reasoning else "Hm.", [("get_weather", '{"city": "Rome"}')])
    assert parse(*(THOUGHT + call), reasoning=reasoning) == found


def test_reasoning_calls_and_answers_may_alternate():
    text = f"{THOUGHT}<|start|>assistant{BEHIND}<|start|>assistant{THOUGHT}{BEFORE}"
    text += "<|start|>assistant<|channel|>commentary to=functions.get_time<|message|><|call|>"
    text += "<|start|>assistant<|channel|>final<|message|>Sunny.<|return|>"
    reasoning, content, calls = parse(text)
    assert (reasoning, content) == ("Hm.Hm.", "Sunny.")
    assert [(name, json.loads(given)) for name, given in calls] == [
        ("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Rome"}), ("get_time", {}),
    ]  # fmt: skip


def test_without_tools_commentary_is_content():
    assert parse(THOUGHT + BEHIND, tools=False) == ("Hm.", '{"city": "Rome"}', [])


def test_other_recipients_are_no_calls():
    text = "<|channel|>analysis to=browser.search <|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>A"
    assert parse(text) == ("{}", "A", [])
    assert parse("to=functions.get_time") == (None, "to=functions.get_time", [])


def test_reasoning_that_the_prompt_opened_comes_first():
    assert parse("Hm.<|end|><|start|>assistant" + BEHIND, is_open=True)[::2] == (
        "Hm.",
        [("get_weather", '{"city": "Rome"}')],
    )


@pytest.mark.parametrize("text", [THOUGHT + BEHIND, THOUGHT + BEFORE])
def test_a_call_that_is_cut_off_has_the_beginning_of_its_arguments(text):
    whole = parse(text)
    for at in range(len(text)):
        reasoning, content, calls = parse(text[:at])
        assert not calls or (whole[2][0][1].startswith(calls[0][1]) and not content)


@given(
    parts=st.lists(
        st.sampled_from(
            [*MARKS, THOUGHT, BEHIND, BEFORE, "analysis", "final", "to=functions.f", "{", '"a": 1}', " ", "x"]
        ),
        max_size=12,
    ),
    data=st.data(),
)
def test_any_text_in_any_pieces_gives_the_same(parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for reasoning in (True, False):
        assert parse(*pieces, reasoning=reasoning) == parse(text, reasoning=reasoning)


FINAL = "<|channel|>final<|message|>Bye"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel|>analysis Hello<|channel|>final<|message|>Bye", "Hello", "Bye"),
        ("<|channel|>analysis Hello<|end|><|start|>assistant" + FINAL, "Hello", "Bye"),
        ("<|channel|>final Hello you", None, "Hello you"),
        ("<|channel|>final Hello<|return|>", None, "Hello"),
        ("<|channel|>Hello you<|end|>", None, "Hello you"),
        ("<|channel|>final Hello <|message|>Bye", None, "Hello Bye"),
        ("<|channel|>final Hello you <|message|>Bye", None, "Hello you Bye"),
        (THOUGHT + "Hello <|start|>assistant" + FINAL, "Hm.", "Hello Bye"),
        (THOUGHT + "assistants <|start|>assistant" + FINAL, "Hm.", "assistants Bye"),
        ("<|start|>assistant Hello <|channel|>final<|message|>Bye", None, "Hello Bye"),
        ("<|start|>Hello you <|message|>Bye", None, "Hello you Bye"),
        ("<|start|>assistant<|message|>Bye", None, "Bye"),
        ("<|channel|>analysis code<|message|>1<|end|>" + FINAL, "1", "Bye"),
        ("<|start|>assistant<|channel|>anal", None, "anal"),
        ("<|start|>assistant", None, ""),
        (THOUGHT + "Hello", "Hm.", "Hello"),
    ],
)
def test_text_in_a_header_is_text_of_the_message(text, reasoning, content):
    assert parse(text) == (reasoning, content, [])
    assert parse(*text) == (reasoning, content, [])
    assert parse(text, reasoning=False) == (None, f"{reasoning or ''}{content or ''}", [])


def test_a_recipient_may_come_before_the_first_mark():
    """The prompt ends with <|start|>assistant."""
    call = BEFORE.removeprefix("<|start|>assistant")
    for reasoning in (True, False):
        assert parse(*call, reasoning=reasoning) == parse(call, reasoning=reasoning)
        assert parse(call, reasoning=reasoning) == (None, None, [("get_weather", '{"city": "Rome"}')])
    text = "to=functions.get_time is how a call begins"
    assert parse(text) == (None, text, [])
    assert parse(text + FINAL) == (None, text + "Bye", [])


@example(parts=["<|channel|>", "<|constrain|>", "two three"])
@given(parts=st.lists(st.sampled_from([*MARKS, "analysis", "final", " ", "one", "two three", "\n"]), max_size=12))
def test_no_word_of_the_model_is_lost(parts):
    """Besides what headers consist of."""
    text = "".join(parts)
    reasoning, content, _ = parse(text, tools=False)
    shown = f"{reasoning or ''}{content or ''}"
    assert [shown.count(word) for word in ("two", "three")] == [text.count(word) for word in ("two", "three")]
