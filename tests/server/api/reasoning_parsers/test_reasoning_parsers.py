"""Every reasoning parser on what the end of a prompt and the text of a message can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiakq.server.api.chat_message import message_of
from aiakq.server.api.message_parser import MessageParser, ReasoningTokens
from aiakq.server.api.reasoning_parsers import REASONING_PARSERS

#: The marks that a model of each family writes.
MARKS = {
    "deepseek_r1": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "gptoss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
}
THOUGHT, ANSWER = "First a < b.\n\nThen [c].", "# Yes\n\n- d\n"


def parse(name: str, prompt: str, *pieces: str, continued: str | None = None) -> tuple[str | None, str | None]:
    """Reasoning and content."""
    parser = REASONING_PARSERS.load(name)
    message = MessageParser(parser(parser.opened_by(prompt, continued)), None)
    events = [event for piece in pieces for event in message.feed(piece)] + message.feed("", ended=True)
    found = message_of("assistant", events)
    assert found.reasoning == found.reasoning_content
    return found.reasoning, found.content


def test_every_parser_is_tested():
    assert set(MARKS) == set(REASONING_PARSERS)


@pytest.mark.parametrize("name", MARKS)
def test_reasoning_is_separated_however_it_is_cut(name):
    start, end = MARKS[name]
    text = f"{start}\n{THOUGHT}\n{end}\n\n{ANSWER}"
    for at in range(len(text)):
        assert parse(name, "Hi", text[:at], text[at:]) == (THOUGHT, ANSWER), text[:at]
    assert parse(name, "Hi", *text) == (THOUGHT, ANSWER)


@pytest.mark.parametrize("name", MARKS)
def test_the_end_of_the_prompt_opens_and_closes_a_thought(name):
    start, end = MARKS[name]
    assert parse(name, f"x {start}\n", f"{THOUGHT}{end}{ANSWER}") == (THOUGHT, ANSWER)
    assert parse(name, f"x {start}", f"{start}{THOUGHT}{end}{ANSWER}") == (THOUGHT, ANSWER), "the mark is repeated"
    if name != "gptoss":
        assert parse(name, f"x {start}\n\n{end}\n\n", ANSWER) == (None, ANSWER)
    default = REASONING_PARSERS.load(name).open_default
    assert parse(name, f"What does {start} mean? Assistant:", f"{THOUGHT}") == (
        (THOUGHT, None) if default else (None, THOUGHT)
    )


@pytest.mark.parametrize("name", MARKS)
def test_a_continued_message_says_whether_its_thought_is_open(name):
    start, end = MARKS[name]
    assert parse(name, "x", f" more{end}{ANSWER}", continued=f"{start}Some")[0] == "more"
    if name != "gptoss":
        assert parse(name, "x", ANSWER, continued=f"{start}Some{end}It is") == (None, ANSWER)
        assert parse(name, "x", ANSWER, continued="It is") == (None, ANSWER)


@pytest.mark.parametrize("name", MARKS)
def test_reasoning_that_is_cut_off_has_no_answer(name):
    start, _ = MARKS[name]
    assert parse(name, "x", f"{start}{THOUGHT}") == (THOUGHT, None)


@pytest.mark.parametrize("name", MARKS)
def test_a_mark_in_the_answer_is_content(name):
    if name in ("deepseek_r1", "gptoss"):
        return
    start, end = MARKS[name]
    text = f"The mark {start} and the mark {end}"
    assert parse(name, "x", text) == (None, text)


@pytest.mark.parametrize("name", MARKS)
@given(data=st.data())
def test_any_text_in_any_pieces_gives_the_same(name, data):
    start, end = MARKS[name]
    parts = [start, end, start[:4], end[:5], "a", " ", "\n", "<", "[", "Here", "<|end|>", "<|start|>", "<|channel|>"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=10)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    prompt = data.draw(st.sampled_from(["x", f"x{start}", f"x{start}{end}"]))
    assert parse(name, prompt, *pieces) == parse(name, prompt, text)


def test_the_channels_of_gpt_oss_may_alternate():
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|> Two.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    assert parse("gptoss", "<|start|>assistant", text) == parse("gptoss", "<|start|>assistant", *text)
    reasoning, content = parse("gptoss", "<|start|>assistant", text)
    assert reasoning == "One.Two." and content == "Wait.Done."


def test_tokens_are_counted_up_to_the_end_of_the_reasoning():
    texts = ["<think>", "a", " \u00e9", "</think>", "\n\n", "b", ""]
    parser = MessageParser(REASONING_PARSERS.load("qwen3")(False), None)
    tokens = ReasoningTokens(parser, lambda id: len(texts[id].encode()))
    counts = []
    for id, text in enumerate(texts):
        tokens.add([id])
        parser.feed(text)
        counts.append(tokens.count)
    assert counts == [0, 2, 3, 4, 4, 4, 4]
