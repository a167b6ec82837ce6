"""Past calls in the forms that chat templates take."""

from __future__ import annotations

import json

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aiakq.runtime.text.message_forms import message_forms

ARGUMENTS = '{"city":  "São"}'


def conversation(arguments: object, content: str | None = None) -> list[dict]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content, "tool_calls": [call]}]


def rendered(template: str, messages: list[dict]) -> str:
    """As the worker renders: the first form that the template takes."""
    failures = []
    for form in message_forms(messages):
        try:
            return ImmutableSandboxedEnvironment().from_string(template.replace("CALL", CALL)).render(messages=form)
        except Exception as failure:
            failures.append(failure)
    raise failures[0]


CALL = "messages[1].tool_calls[0].function"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ CALL.arguments | tojson }}", '{"city": "S\\u00e3o"}'),
        ("{% for name, value in CALL.arguments | items %}{{ name }}={{ value }}{% endfor %}", "city=São"),
        ("{{ 'call: ' + CALL.arguments }}", f"call: {ARGUMENTS}"),
        ("{{ 'no' if messages[1].content is none else 'yes' }}", "no"),
        ("{{ messages[1].content + '!' }}", "!"),
        ("{{ messages[1].content + CALL.arguments }}", ARGUMENTS),
    ],
)
def test_a_template_gets_the_form_it_takes(template, expected):
    assert rendered(template, conversation(ARGUMENTS)) == expected


def test_an_object_may_become_text():
    assert json.loads(rendered("{{ '' + CALL.arguments }}", conversation({"a": [1]}))) == {"a": [1]}


def test_content_with_calls_is_kept():
    assert rendered("{{ messages[1].content }}", conversation(ARGUMENTS, "Well.")) == "Well."


def test_without_calls_there_is_one_form():
    messages = [{"role": "user", "content": "Hi", "name": None}]
    assert list(message_forms(messages)) == [[{"role": "user", "content": "Hi"}]]


def test_the_first_failure_is_reported():
    with pytest.raises(Exception, match="nothing"):
        rendered("{{ messages[1].nothing.arguments }}", conversation(ARGUMENTS))


def test_later_system_messages_become_a_part_of_what_the_user_wrote():
    def said(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    messages = [
        said("system", "A"),
        said("user", "B"),
        said("system", "C"),
        said("assistant", "D"),
        said("system", "E"),
        said("system", "F"),
        said("user", "G"),
        said("user", "H"),
        said("tool", "I"),
        said("system", "J"),
    ]
    first, folded = message_forms(messages)
    assert first == messages
    assert folded == [
        said("system", "A"),
        said("user", "B\n\nC"),
        said("assistant", "D"),
        said("user", "E\n\nF\n\nG"),
        said("user", "H"),
        said("tool", "I\n\nJ"),
    ]
    assert len(list(message_forms(messages[:2]))) == 1
    grown = [*messages, said("assistant", "K"), said("system", "L")]
    assert list(message_forms(grown))[1][: len(folded)] == folded, "the beginning stays as it is"
