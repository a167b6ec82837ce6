"""Conversations of which a template would lose a part: they are rendered so that it shows all of them, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.text.chat_template import ChatTemplate

EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TURNS = "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{% endfor %}"
FIRST = "{% if messages[0].role in ROLES %}[S]{{ messages[0].content }}{% endif %}" + TURNS
LAST = (
    "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set ns.s = m.content %}{% endfor %}"
    "[S]{{ ns.s }}" + TURNS
)
RAISES = "{% for m in messages[1:] if m.role in ROLES %}{{ raise_exception('late') }}{% endfor %}" + FIRST
INSTRUCTED = {
    "the first system message only": FIRST.replace("ROLES", "('system',)"),
    "the first instructions only": FIRST.replace("ROLES", "('system', 'developer')"),
    "the last system message only": LAST,
    "developers only": FIRST.replace("ROLES", "('developer',)"),
    "refuses later ones": RAISES.replace("ROLES", "('system', 'developer')"),
    "all": EACH,
}
TEMPLATE_ROLES = ("system", "developer")


def said(*messages: str) -> list[dict[str, Any]]:
    return [dict(zip(("role", "content"), message.split(":"), strict=True)) for message in messages]


def checked(text: str, **options: Any) -> ChatTemplate:
    return ChatTemplate.checked(text, {}, source="of the test", **options)


@pytest.mark.parametrize("name", INSTRUCTED)
@pytest.mark.parametrize("role", TEMPLATE_ROLES)
@pytest.mark.parametrize("lead", [[], ["system:S1"], ["developer:S1"]])
@pytest.mark.parametrize(
    "messages",
    [
        ["user:U1", "assistant:A1", "ROLE:L1", "user:U2"],
        ["ROLE:L1", "user:U1"],
        ["user:U1", "ROLE:L1"],
        ["user:U1", "assistant:A1", "ROLE:L1", "ROLE:L2", "user:U2", "assistant:A2", "ROLE:L3", "user:U3"],
    ],
)
def test_no_instructions_are_lost_wherever_they_are(name, role, lead, messages):
    conversation = said(*lead, *(each.replace("ROLE", role) for each in messages))
    text = checked(INSTRUCTED[name]).render(conversation)
    assert all(message["content"] in text for message in conversation)


def test_later_instructions_go_to_the_message_of_the_user_at_their_position():
    conversation = said("system:S", "developer:T", "user:U", "assistant:A", "system:L", "user:V")
    for name in ("the first system message only", "the last system message only"):
        assert checked(INSTRUCTED[name]).render(conversation) == "[S]S\n\nT[user]U[assistant]A[user]L\n\nV"
    shown = "[system]S[developer]T[user]U[assistant]A[system]L[user]V"
    assert checked(EACH).render(conversation) == shown, "a template that shows them gets them as they are"


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages[-1].content }}",
        "{{ (messages | selectattr('role', 'equalto', 'user') | list)[-1].content }}",
        "{% for m in messages[-2:] %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if loop.first or loop.last %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_conversation_of_which_the_template_shows_some_turns_is_refused(text):
    template = checked(text)
    assert "U" in template.render(said("user:U")) and not template.facts.shows_turns
    for messages in (["user:U", "assistant:A", "user:V"], ["user:U", "assistant:A"]):
        with pytest.raises(AiakqError, match="no place for") as caught:
            template.render(said(*messages))
        assert caught.value.id == "template_loses" and caught.value.http_status == 400


def test_messages_of_the_user_in_a_row_become_one_where_the_template_leaves_one_out():
    text = (
        "{% for m in messages %}{% if loop.last or messages[loop.index].role != m.role %}[{{ m.content }}]{% endif %}"
    )
    assert checked(text + "{% endfor %}").render(said("user:U", "user:V", "assistant:A", "user:W")) == "[U\n\nV][A][W]"


@pytest.mark.parametrize("cut", ["m.content[:40]", "m.content | truncate(500)", "m.content.split('\n')[0]"])
def test_a_template_that_cuts_texts_off_is_refused(cut):
    with pytest.raises(AiakqError, match="leaves out the end of long texts") as caught:
        checked("{% for m in messages %}{{ " + cut + " }}{% endfor %}")
    assert caught.value.id == "template_loses_users"


# --- calls

CALL = "<{{ c.function.name }} {{ c.function.arguments | tojson }}>"
SHOWN = {
    "the first call only": "{{ m.content or '' }}{% for c in (m.tool_calls or [])[:1] %}" + CALL + "{% endfor %}",
    "one call or none": "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}",
    "no text beside calls": "{% if m.tool_calls %}{% for c in m.tool_calls %}" + CALL + "{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}",
    "no calls beside text": "{% if m.content %}{{ m.content }}{% else %}{% for c in m.tool_calls or [] %}"
    + CALL
    + "{% endfor %}{% endif %}",
    "one part": "{{ m.content[0].text }}",
}


def call(id: str | None, word: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": {"a": word}}}


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("ids", [("x", "y"), (None, None)])
def test_no_call_result_or_text_with_them_is_lost(name, ids):
    template = checked("{% for m in messages %}[{{ m.role }}]" + SHOWN[name] + "{% endfor %}")
    asked = {"role": "assistant", "content": "T1", "tool_calls": [call(ids[0], "C1"), call(ids[1], "C2")]}
    results = [
        {"role": "tool", "tool_call_id": id, "content": word} for id, word in zip(ids, ("R1", "R2"), strict=True)
    ]
    text = template.render([*said("user:U1"), asked, *results, *said("user:U2")])
    assert all(text.count(word) == 1 for word in ("U1", "T1", "C1", "C2", "R1", "R2", "U2"))


ALTERNATING = (
    "{% set turns = messages | selectattr('role', 'in', ['user', 'assistant']) | rejectattr('tool_calls') | list %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{% endfor %}{% for m in messages %}[{{ m.role }}]" + SHOWN["no text beside calls"] + "{% endfor %}"
)


@pytest.mark.parametrize("content", ["T{}", [{"type": "text", "text": "T{}"}]])
def test_texts_beside_calls_are_joined_where_users_and_assistants_alternate(content):
    def asked(number: int) -> list[dict[str, Any]]:
        text = [{**content[0], "text": f"T{number}"}] if isinstance(content, list) else f"T{number}"
        calling = {"role": "assistant", "content": text, "tool_calls": [call(f"c{number}", f"C{number}")]}
        return [calling, {"role": "tool", "tool_call_id": f"c{number}", "content": f"R{number}"}]

    render = checked(ALTERNATING).render
    c = ["", *(f'[assistant]<f {{"a": "C{number}"}}>[tool]R{number}' for number in (1, 2))]
    assert render([*said("user:U"), *asked(1)]) == f"[user]U[assistant]T1{c[1]}"
    two = [*said("user:U"), *asked(1), *asked(2)]
    between = "\n" if isinstance(content, list) else "\n\n"
    assert render(two) == f"[user]U{c[1]}[assistant]T1{between}T2{c[2]}"
    later = said("assistant:A", "user:V")
    text = render([*two, *later, *asked(1)])
    assert text.startswith(f"[user]U{c[1]}{c[2]}[assistant]T1") and text.endswith(f"A[user]V[assistant]T1{c[1]}")
    with pytest.raises(Exception, match="alternate"):
        render(said("user:U", "user:V"))


@pytest.mark.parametrize("role", TEMPLATE_ROLES)
def test_instructions_are_shown_where_the_template_shows_them_to_the_last_user_only(role):
    shown = "{% if m.role == 'user' and loop.last and s %}{{ s }}|{% endif %}{{ m.content or '' }}"
    calls = "{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}"
    text = "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    text += (
        "{% for m in messages if m.role in ('user', 'assistant', 'tool') %}[{{ m.role }}]"
        + shown
        + calls
        + "{% endfor %}"
    )
    render = checked(text).render
    asked = said(f"{role}:S", "user:U")
    called = [
        {"role": "assistant", "tool_calls": [call("x", "C")]},
        {"role": "tool", "tool_call_id": "x", "content": "R"},
    ]
    assert render(asked) == "[user]S|U", "as the template shows them"
    assert render([*asked, *called]) == '[user]S\n\nU[assistant]<f {"a": "C"}>[tool]R'
    assert render([*asked, *called, *said("user:V")]).endswith("[user]S|V")
    assert render([*asked, *said("assistant:A")]) == "[user]S\n\nU[assistant]A"


def test_calls_are_followed_by_their_results_where_the_template_takes_one_at_a_time():
    template = checked("{% for m in messages %}[{{ m.role }}]" + SHOWN["the first call only"] + "{% endfor %}")
    asked = {"role": "assistant", "tool_calls": [call("x", "C1"), call("y", "C2")]}
    results = [{"role": "tool", "tool_call_id": id, "content": f"R{id}"} for id in ("y", "x")]
    text = template.render([*said("user:U"), asked, *results])
    assert text == '[user]U[assistant]<f {"a": "C1"}>[tool]Rx[assistant]<f {"a": "C2"}>[tool]Ry'


# --- faults

FAULTY = [
    "{% for m in messages %}{{ m.role }}: {{ mesage.content }}{% endfor %}",
    "{{ render(messages) }}",
    "{% for m in messages %}{{ m.content.stripp() }}{% endfor %}",
    "{% for m in messages %}{{ m.content + suffix }}{% endfor %}",
    "{% for i in range(999999999) %}{% endfor %}{{ messages[0].content }}",
    "{{ raise_exception('use the processor') }}",
]


@pytest.mark.parametrize("text", FAULTY)
@pytest.mark.parametrize("with_tools", [False, True])
def test_a_template_that_fails_for_every_conversation_is_refused(text, with_tools):
    with pytest.raises(AiakqError, match="of the test cannot be used: it fails for every conversation: ") as caught:
        checked(text, with_tools=with_tools)
    assert caught.value.id == "template_unusable" and "\n" not in str(caught.value)


def test_a_variable_of_every_conversation_is_known_when_the_template_is_checked():
    template = checked(FAULTY[3], arguments={"suffix": "!"})
    assert template.render(said("user:U"), suffix="!") == "U!"
    with pytest.raises(AiakqError, match="'suffix' is undefined; --default-chat-template-kwargs can set a variable"):
        checked(FAULTY[3])


def test_a_template_that_refuses_other_conversations_on_purpose_is_no_fault():
    needs = "{% if messages[0].role != 'functions' %}{{ raise_exception('functions first') }}{% endif %}" + EACH
    template = checked(needs)
    assert template.facts.refusal == "functions first" and not template.facts.failures
    assert template.render(said("functions:F", "user:U")) == "[functions]F[user]U"
    no_system = checked("{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + EACH)
    assert not no_system.facts.failures and not no_system.facts.refusal


def test_a_fault_in_the_branch_of_a_role_is_known():
    faulty = "{% for m in messages if m.role == 'assistant' %}{{ mesage.content }}{% endfor %}"
    assert checked(faulty + EACH).facts.failures["assistant"] == "'mesage' is undefined"
    tools = "{% for t in tools or [] %}{{ t.functoin.name }}{% endfor %}" + EACH
    assert "functoin" in checked(tools, with_tools=True).facts.failures["tools"]


# --- tools and empty contents

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
_TOOL_TEXT = "<{{ t.function.name }}>{{ t.function.description }}{{ t.function.parameters.properties | join }}"
LISTED = "{% for t in tools or [] %}" + _TOOL_TEXT + "{% endfor %}"


@pytest.mark.parametrize(
    "condition",
    [
        "messages[0].role in ('system', 'developer')",
        "messages[0].role in ('system', 'user')",
        "messages[0].role != 'system' or messages[0].content",
        "messages[0].content",
    ],
)
@pytest.mark.parametrize("lead", [[], ["system:S"], ["developer:S"], ["system:"]])
def test_tools_are_shown_however_a_conversation_begins(condition, lead):
    text = "{% if " + condition + " %}" + LISTED + "{% endif %}" + EACH
    for with_tools in (False, True):
        shown = checked(text, with_tools=with_tools).render(said(*lead, "user:U"), tools=[TOOL])
        assert "<add>" in shown and "U" in shown and ("S" in shown) == ("S" in "".join(lead)[-1:])


def test_instructions_of_developers_with_listed_tools_are_not_lost():
    template = checked(TURNS, with_tools=True)
    for lead in (["developer:D"], ["system:S", "developer:D"], ["user:U", "assistant:A", "developer:D"]):
        text = template.render(said(*lead, "user:V"), tools=[TOOL])
        assert '"name": "add"' in text and all(each.split(":")[1] in text for each in (*lead, "user:V"))


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["absent", "null"])
def test_a_message_without_content_and_calls_is_empty(role, content):
    template = checked("{% for m in messages %}[{{ m.role }}]{{ m.content.strip() }}{% endfor %}")
    assert template.render([*said("user:U"), {"role": role, **content}, *said("user:V")]) == f"[user]U[{role}][user]V"


def test_a_template_may_read_how_many_tools_there_are():
    template = checked("{% if tools | length > 0 %}" + LISTED + "{% endif %}" + EACH)
    assert template.render(said("user:U")) == "[user]U"
    assert template.render(said("user:U"), tools=[TOOL]) == "<add>[user]U"


def test_calls_that_are_shown_only_with_tools_are_written_as_text_without_them():
    shown = "{% if tools %}{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}{% endif %}"
    text = "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}" + shown + "{% endfor %}"
    asked = {"role": "assistant", "content": None, "tool_calls": [call("x", "C1")]}
    messages = [*said("user:U"), asked, {"role": "tool", "tool_call_id": "x", "content": "R"}]
    assert '<tool_call>{"name": "f", "arguments": {"a": "C1"}}</tool_call>' in checked(text).render(messages)
    beside = checked(text, with_tools=True).render(messages, tools=[TOOL])
    assert beside.endswith('[user]U[assistant]<f {"a": "C1"}>[tool]R')


def test_a_result_without_a_call_is_shown_or_refused():
    asks = "{% for m in messages %}{% if m.role != 'tool' or loop.index0 and messages[loop.index0 - 1].tool_calls %}"
    template = checked(asks + "[{{ m.role }}]{{ m.content or '' }}{{ m.tool_calls }}{% endif %}{% endfor %}")
    with pytest.raises(AiakqError, match="no place for messages of the role 'tool'") as caught:
        template.render([{"role": "tool", "tool_call_id": "x", "content": "R1"}, *said("user:U")])
    assert caught.value.param == "messages[0].role"


# --- parts of long conversations

EACH_TURN = (
    "{% for m in messages %}[{{ m.role }}]TEXT{% for c in m.tool_calls or [] %}" + CALL + "{% endfor %}{% endfor %}"
)


def showing(text: str, role: str = "", messages: str = "messages") -> str:
    """A template that shows ``text`` for messages of ``role``, and the content of others."""
    text = (
        "{{ m.content or '' }}" if not role else "{{ " + text + f" if m.role == '{role}' else m.content or '' " + "}}"
    )
    return EACH_TURN.replace("TEXT", text).replace("in messages", f"in {messages}")


RESULTS = [
    {"role": "assistant", "tool_calls": [call("x", "C1"), call("y", "C2")]},
    {"role": "tool", "tool_call_id": "x", "content": "word " * 100 + "R1"},
    {"role": "tool", "tool_call_id": "y", "content": "R2"},
]
TURNS_OF_TEN = said("user:first", *["assistant:A", "user:U"] * 5)
PARTLY_SHOWN = {
    "the last eight messages": (showing("", messages="messages[-8:]"), TURNS_OF_TEN, "user"),
    "the first eight messages": (showing("", messages="messages[:8]"), TURNS_OF_TEN, "user"),
    "the beginning of answers": (
        showing("m.content[:100]", "assistant"),
        said("user:U", "assistant:" + "word " * 100, "user:V"),
        "assistant",
    ),
    "the first line of instructions": (
        showing("m.content.split('\n')[0]", "system"),
        said("system:S1\nS2", "user:U"),
        "system",
    ),
    "the beginning of results": (
        showing("m.content | truncate(90)", "tool"),
        [*said("user:U"), *RESULTS],
        "tool",
    ),
    "the first of two answers": (
        "{% for m in messages %}{% if m.role == 'user' or messages[loop.index0 - 1].role == 'user' %}"
        "[{{ m.content }}]{% endif %}{% endfor %}",
        said("user:U", "assistant:A1", "assistant:A2", "user:V"),
        "assistant",
    ),
}


@pytest.mark.parametrize("name", PARTLY_SHOWN)
def test_a_conversation_of_which_a_message_or_its_end_is_lost_is_refused_by_its_role(name):
    text, conversation, role = PARTLY_SHOWN[name]
    template = checked(text)
    assert role in template.facts.partly_shown
    with pytest.raises(AiakqError, match=f"message of the role '{role}' is cut off or left out") as caught:
        template.render(conversation)
    assert caught.value.id == "template_loses" and caught.value.http_status == 400
    short = said("system:S", "user:U", "assistant:A", "user:V")
    assert all(each["content"] in template.render(short) for each in short if each["role"] != "system")


def test_a_template_that_shows_everything_is_rendered_once():
    assert checked(showing("")).facts.partly_shown == []


def test_each_of_two_results_follows_its_call_where_the_template_shows_one_result_in_a_row():
    template = checked(showing("('' if messages[loop.index0 - 1].role == 'tool' else m.content)", "tool"))
    text = template.render([*said("user:U"), *RESULTS])
    assert all(text.count(word) == 1 for word in ("C1", "C2", "R1", "R2"))
