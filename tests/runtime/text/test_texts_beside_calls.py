"""Texts beside calls that a template shows in some conversations only: they are shown in all, and once."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aiakq.runtime.text.chat_template import ChatTemplate

CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
#: When a template leaves out the text of a message with calls.
HIDDEN = {
    "an answer follows": "answers[loop.index:] | rejectattr('tool_calls') | list",
    "another question follows": "answers[loop.index:] | selectattr('role', 'equalto', 'user') | list",
    "not the last calls": "answers[loop.index:] | selectattr('tool_calls') | list",
    "not at the end": "loop.index + 1 < answers | length",
    "there is reasoning": "m.reasoning_content",
    "always": "true",
}
#: As that of GPT-OSS: texts are shown in a channel for reasoning until an answer follows, which ends it.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}"
    "{% set ns = namespace(found=false) %}{% for n in messages[loop.index:] %}"
    "{% if n.role == 'assistant' and 'tool_calls' not in n %}{% set ns.found = true %}{% endif %}{% endfor %}"
    "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{% if not ns.found and (m.content or m.thinking) %}[analysis]{{ m.content or m.thinking }}{% endif %}"
    + CALLS
    + "{% else %}[{{ 'final' if m.role == 'assistant' else m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)


def hiding(when: str) -> str:
    text = "{% set answers = messages | rejectattr('role', 'equalto', 'tool') | list %}"
    text += "{% for m in answers %}[{{ m.role }}]"
    text += "{% if not (m.tool_calls and (" + HIDDEN[when] + ")) %}{{ m.content or '' }}{% endif %}" + CALLS
    return text + "{% endfor %}{% for m in messages if m.role == 'tool' %}{{ m.content }}{% endfor %}"


def rendered(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """Return the text of messages, with calls written in short."""
    return re.sub(r'<f {"a": "(C\d)"}>', r"<\1>", template.render(messages))


def said(role: str, text: str, **fields: str) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


def calling(number: int, **fields: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": {"a": f"C{number}"}}
    call = {"id": f"call0000{number}", "type": "function", "function": function}
    asking = {**said("assistant", f"T{number}", **fields), "tool_calls": [call]}
    return [asking, {"role": "tool", "tool_call_id": call["id"], "content": f"R{number}"}]


USER, ANSWER, LATER = said("user", "U"), said("assistant", "A"), said("user", "V")
CONVERSATIONS = {
    "open": [USER, *calling(1)],
    "two open": [USER, *calling(1), *calling(2)],
    "answered": [USER, *calling(1), *calling(2), ANSWER, LATER],
    "the next turn": [USER, *calling(1), ANSWER, LATER, *calling(2), *calling(3)],
    "no answer": [USER, *calling(1), LATER],
    "with reasoning": [USER, *calling(1, reasoning_content="H"), ANSWER, LATER, *calling(2, reasoning_content="H")],
}


@pytest.mark.parametrize("when", HIDDEN)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_text_with_calls_is_shown_once_whatever_follows(when, name):
    template, messages = ChatTemplate.checked(hiding(when), {}), CONVERSATIONS[name]
    text = template.render(messages)
    words = [message["content"] for message in messages]
    assert [text.count(word) for word in words] == [1] * len(words)


def test_with_channels_texts_before_an_answer_are_answers_and_later_ones_as_the_template_shows_them():
    template = ChatTemplate.checked(CHANNELS, {})
    assert rendered(template, CONVERSATIONS["open"]) == "[user]U[analysis]T1<C1>[tool]R1"
    assert rendered(template, CONVERSATIONS["two open"]) == "[user]U[analysis]T1<C1>[tool]R1[analysis]T2<C2>[tool]R2"
    answered = "[user]U[final]T1<C1>[tool]R1[final]T2<C2>[tool]R2[final]A[user]V"
    assert rendered(template, CONVERSATIONS["answered"]) == answered
    later = "[user]U[final]T1<C1>[tool]R1[final]A[user]V[analysis]T2<C2>[tool]R2[analysis]T3<C3>[tool]R3"
    assert rendered(template, CONVERSATIONS["the next turn"]) == later


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_with_channels_a_text_with_calls_and_reasoning_keeps_both(field):
    """The template refuses both in one message."""
    template = ChatTemplate.checked(CHANNELS, {})
    assert rendered(template, [USER, *calling(1, **{field: "H"})]) == "[user]U[final]T1[analysis]H<C1>[tool]R1"
    silent = calling(1, **{field: "H"})
    silent[0]["content"] = None
    assert rendered(template, [USER, *silent]) == "[user]U[analysis]H<C1>[tool]R1"


def test_parts_of_text_with_calls_are_kept():
    parts = "{% for p in m.content or [] %}{{ p.text }}{% endfor %}"
    text = "{% for m in messages %}[{{ m.role }}]{% if not (m.tool_calls and not loop.last) %}" + parts
    template = ChatTemplate.checked(text + "{% endif %}" + CALLS + "{% endfor %}", {})
    messages = [USER, *calling(1), ANSWER, LATER]
    messages[1]["content"] = [{"type": "text", "text": "T1"}, {"type": "text", "text": "S1"}]
    assert rendered(template, messages) == "[user]U[assistant]T1S1[assistant]<C1>[tool]R1[assistant]A[user]V"
