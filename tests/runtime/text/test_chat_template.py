"""Chat templates: their behaviour is found by rendering probes, and conversations take a form they support."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from aiakq.errors import AiakqError
from aiakq.runtime.text.chat_template import ChatTemplate

PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
BOTH = "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"


def each(content: str, before: str = "", after: str = "") -> str:
    return before + "{% for m in messages %}[{{ m.role }}]" + content + "{% endfor %}" + after


def checked(text: str, content_format: str = "auto") -> ChatTemplate:
    return ChatTemplate.checked(text, {"bos_token": "<s>"}, content_format, source="of the test")


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


FORMS = {
    "string": (each("{{ m.content }}"), ["string"]),
    "parts": (each(PARTS), ["openai"]),
    "both": (each(BOTH), ["string", "openai"]),
    "first part": (each("{{ m['content'][0]['text'] }}"), ["part"]),
    "parts by a macro": (
        "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}" + each("{{ show(m.content) }}"),
        ["openai"],
    ),
    "stripped": (each("{{ m.content.strip() }}"), ["string"]),
    "another case": (each("{{ m.content | upper }}"), ["string"]),
    "quoted": (each("{{ m.content | tojson }}"), ["string"]),
    "named in a comment": ("{# part.type #}" + each("{{ m.content + '' }}"), ["string"]),
    "needs a system message": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + each("{{ m.content }}"),
        ["string"],
    ),
    "needs an answer before": (
        "{% if messages | length < 3 %}{{ raise_exception('short') }}{% endif %}" + each(PARTS),
        ["openai"],
    ),
    "needs documents": (
        "{{ documents[0].title + '' }}{% for d in documents[1:] %}{{ d.title }}{% endfor %}" + each(PARTS),
        ["openai"],
    ),
    "parts of users only": (
        each("{% if m.role == 'user' %}" + PARTS + "{% else %}{{ m.content }}{% endif %}"),
        ["openai"],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_content_is_found_by_rendering(name):
    text, forms = FORMS[name]
    template = checked(text)
    assert template.facts.forms["user"] == forms
    for content in ("Which capital?", [part("Which capital?")]):
        conversation = [
            said("system", "Be brief."),
            said("user", "Hi"),
            said("assistant", "Yes?"),
            said("user", content),
        ]
        shown = (
            template.render(conversation, documents=[{"title": "T"}])
            if "documents" in name
            else template.render(conversation)
        )
        assert "which capital?" in shown.lower() and "'type'" not in shown
        assert all(word in shown.lower() for word in ("be brief.", "yes?"))


def test_parts_are_passed_as_they_are_or_joined():
    content = [part("One"), part("Two")]
    assert checked(each("{{ m.content }}")).render([said("user", content)]) == "[user]One\nTwo"
    assert checked(each(BOTH)).render([said("user", content)]) == "[user]OneTwo"
    assert checked(each("{{ m.content[0].text }}")).render([said("user", content)]) == "[user]One\nTwo"


@pytest.mark.parametrize("text", ["{{ 'Hello' }}", each(""), each("{{ m.text }}"), each("{{ m.content[0].value }}")])
def test_a_template_that_loses_the_text_of_users_is_refused(text):
    with pytest.raises(AiakqError, match="of the test leaves out the text of users") as caught:
        checked(text)
    assert caught.value.id == "template_loses_users" and caught.value.http_status == 500


def test_the_operator_may_choose_the_form():
    content = [part("One"), part("Two")]
    assert checked(each(BOTH), "string").render([said("user", content)]) == "[user]One\nTwo"
    assert checked(each(BOTH), "openai").render([said("user", "One")]) == "[user]One"
    assert (
        checked("{% for m in messages %}{{ m.content is string }}{{ m.content }}{% endfor %}").render(
            [said("user", "A")]
        )
        == "TrueA"
    )
    strict = each("{% if m.role == 'system' %}{{ m.content + '' }}{% else %}" + BOTH + "{% endif %}")
    rendered = checked(strict, "openai").render([said("system", "Be brief."), said("user", "Hi")])
    assert rendered == "[system]Be brief.[user]Hi", "a role for which it cannot be used keeps its own form"
    for text, form in ((each(PARTS), "string"), (each("{{ m.content }}"), "openai")):
        with pytest.raises(AiakqError, match=f"--chat-template-content-format {form}"):
            checked(text, form)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for m in messages %}\n{{ m.content }}", "line 2: "),
        ("\n\n{% summon messages %}", "line 3: .*summon"),
        ("{{ messages | conjure }}", "line 1: .*conjure"),
        ("{{ messages[0].content", "line 1: "),
    ],
)
def test_a_template_that_does_not_compile_is_named_with_its_line(text, says):
    with pytest.raises(AiakqError, match=says) as caught:
        checked(text)
    assert caught.value.id == "template_unusable" and "\n" not in str(caught.value)


def test_system_text_that_a_template_leaves_out_goes_to_the_user():
    template = checked("{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert template.render([said("system", "Be brief."), said("user", "Hi")]) == "[user]Be brief.\n\nHi"


def test_a_template_may_show_the_system_message_only_beside_tools():
    shown = "{% if tools %}{{ tools | tojson }}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endif %}"
    text = each(shown + "{% if m.role == 'user' %}{{ m.content }}{% endif %}")
    messages = [said("system", "Be brief."), said("user", "Hi")]
    assert checked(text).render(messages) == "[user]Be brief.\n\nHi"
    with_tools = ChatTemplate.checked(text, {}, with_tools=True)
    assert with_tools.render(messages, tools=[{}]) == "[system][{}]Be brief.[user][{}]Hi"


def test_answers_that_a_template_leaves_out_are_refused():
    template = checked("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    assert template.render([said("user", "Hi")]) == "Hi"
    with pytest.raises(AiakqError, match="no place for messages of the assistant") as caught:
        template.render([said("user", "Hi"), said("assistant", "Yes?"), said("user", "Well")])
    assert caught.value.id == "template_loses" and caught.value.param == "messages[1]"


def test_instructions_of_developers_are_those_of_the_system_unless_the_template_knows_them():
    known = "{% if m.role in ('user', 'system', 'assistant') %}{{ m.content }}{% endif %}"
    messages = [said("developer", "Be brief."), said("user", "Hi")]
    assert checked(each(known)).render(messages) == "[system]Be brief.[user]Hi"
    assert checked(each("{{ m.content }}")).render(messages) == "[developer]Be brief.[user]Hi"
    with pytest.raises(AiakqError, match="no place for messages of the role 'critic'"):
        checked(each(known)).render([said("user", "Hi"), said("critic", "Hmm")])
    assert checked(each("{{ m.content }}")).render([said("critic", "Hmm")]) == "[critic]Hmm"


def test_documents_reach_the_template_or_are_refused():
    documents = [{"title": "T", "text": "x"}]
    template = checked("{% for d in documents or [] %}<{{ d.title }}>{% endfor %}" + each("{{ m.content }}"))
    assert template.render([said("user", "Hi")], documents=documents) == "<T>[user]Hi"
    with pytest.raises(AiakqError, match="no place for documents"):
        checked(each("{{ m.content }}")).render([said("user", "Hi")], documents=documents)


# --- tools

SENT = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}},
    {
        "function": {"parameters": {}, "strict": True, "name": "g", "response": {"x": 1.0}},
        "type": "function",
        "own": None,
    },
]
CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}|{{ c.function.arguments | tojson }}>{% endfor %}"


def conversation(arguments: Any, result: Any = "done") -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [said("user", "Hi"), asked, {**said("tool", result), "tool_call_id": "a"}]


def test_tools_are_those_of_the_client_byte_for_byte():
    text = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + each("{{ m.content }}")
    messages = [said("user", "Hi")]
    [expected], _ = render_jinja_template([messages], tools=SENT, chat_template=text)
    assert checked(text).render(messages, tools=SENT) == expected
    assert json.dumps(SENT[1]) in expected


def test_fields_without_which_a_template_fails_are_filled_in():
    shown = "{{ t.function.name + ': ' + t.function.description }}{{ t.function.parameters.properties | tojson }}"
    template = checked("{% for t in tools or [] %}" + shown + "{% endfor %}" + each("{{ m.content }}"))
    bare = [{"type": "function", "function": {"name": "f"}}]
    assert template.render([said("user", "Hi")], tools=bare) == "f: {}[user]Hi"


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "São"}'),
        ("{{ c.function.arguments }}", '{"city": "São"}'),
        ("{{ '' + c.function.arguments }}", '{"city": "São"}'),
        ("{% for name, value in c.function.arguments | items %}{{ name }}={{ value }}{% endfor %}", "city=São"),
    ],
)
@pytest.mark.parametrize("arguments", ['{"city": "São"}', {"city": "São"}])
def test_arguments_of_calls_have_the_form_that_the_template_shows(shown, expected, arguments):
    calls = "{% for c in m.tool_calls or [] %}" + shown + "|{{ c.function.name }}{% endfor %}"
    assert expected in checked(each("{{ m.content or '' }}" + calls)).render(conversation(arguments))


def test_a_call_without_text_has_no_none_in_the_prompt():
    assert checked(each("{{ m.content }}" + CALLS)).render(conversation("{}")) == "[user]Hi[assistant]<f|{}>[tool]done"
    null = "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"
    assert checked(each(null)).render(conversation("{}")) == "[user]Hi[assistant]<f|{}>[tool]done"


def test_tools_are_listed_in_a_system_message_where_the_template_has_no_place():
    template = checked(each("{{ m.content }}"))
    assert not template.facts.takes_tools and not template.facts.takes_calls
    text = template.render([said("system", "Be brief."), *conversation('{"a": 1}')], tools=SENT)
    assert text.startswith("[system]Be brief.\n\n") and json.dumps(SENT[1]) in text
    assert '[assistant]<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' in text
    assert text.endswith("[tool]done")


@pytest.mark.parametrize(
    "shown",
    [
        "{{ tools[0] | tojson }}",
        "{% for t in tools %}{{ t.function.name }} {% endfor %}",
        "{% for t in tools %}{{ t.function.name }}: {{ t.function.description }} {% endfor %}",
        "{% for t in tools %}{{ t.function.name }}{{ t.function.parameters | tojson }}{% endfor %}",
        "{% for t in tools %}{{ t.function.description }}{{ t.function.parameters | tojson }}{% endfor %}",
        "{{ tools[1:] | tojson }}",
        "{{ tools | length }} tools",
    ],
)
@pytest.mark.parametrize("with_tools", [False, True])
def test_a_template_that_shows_a_part_of_the_tools_has_no_place_for_them(shown, with_tools):
    """They are listed once, and the template gets none."""
    text = "{% if tools %}TOOLS " + shown + "{% endif %}" + each("{{ m.content }}")
    template = ChatTemplate.checked(text, {}, with_tools=with_tools)
    assert not template.facts.takes_tools
    rendered = template.render([said("user", "Hi")], tools=SENT)
    assert rendered.startswith("[system]You can call functions.") and "TOOLS" not in rendered
    assert all(rendered.count(json.dumps(tool)) == 1 for tool in SENT)
    assert template.render([said("user", "Hi")]) == "[user]Hi"


@pytest.mark.parametrize(
    "shown",
    [
        "{{ tools | tojson }}",
        "{{ tools }}",
        "{% for t in tools %}{{ t.function.name | upper }}{{ t.function.description }}"
        "{% for name in t.function.parameters.properties %}{{ name }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_shows_all_of_the_tools_has_a_place_for_them(shown):
    assert checked("{% if tools %}" + shown + "{% endif %}" + each("{{ m.content }}")).facts.takes_tools


@pytest.mark.parametrize("shown", ["{{ documents[0].text }}", "{{ documents[0] }}", "{{ documents | length }}"])
def test_a_template_that_shows_a_part_of_the_documents_has_no_place_for_them(shown):
    template = checked("{% if documents %}" + shown + "{% endif %}" + each("{{ m.content }}"))
    documents = [{"title": "T", "text": "x"}, {"title": "U", "text": "y"}]
    with pytest.raises(AiakqError, match="no place for documents"):
        template.render([said("user", "Hi")], documents=documents)


#: Shows tools beside the first message, if that is of the user or the system.
FIRST = (
    "{% for m in messages %}{% if loop.first and m.role in ('system', 'user') and tools %}{{ tools | tojson }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def test_tools_are_shown_to_a_conversation_that_begins_with_an_answer():
    template = ChatTemplate.checked(FIRST, {}, with_tools=True)
    rest = [said("assistant", "Welcome."), said("user", "Hi")]
    shown = json.dumps(SENT)
    assert template.facts.takes_tools and template.render(rest[1:], tools=SENT) == f"{shown}[user]Hi"
    assert template.render(rest, tools=SENT) == f"{shown}[system][assistant]Welcome.[user]Hi"
    assert template.render(rest) == "[assistant]Welcome.[user]Hi"


def test_tools_that_a_template_leaves_out_of_a_conversation_are_refused():
    text = "{% if messages | length < 3 %}{{ tools | tojson }}{% endif %}" + each("{{ m.content }}")
    template = ChatTemplate.checked(text, {}, with_tools=True)
    turns = [said("user", "Hi"), said("assistant", "Yes?"), said("user", "Well")]
    assert json.dumps(SENT) in template.render(turns[:1], tools=SENT)
    with pytest.raises(AiakqError, match="no place for tools in this conversation") as caught:
        template.render(turns, tools=SENT)
    assert caught.value.id == "template_loses" and caught.value.param == "tools"


def test_results_go_to_the_user_where_the_template_has_no_place():
    refuses = "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no role') }}{% endif %}"
    template = checked(each(refuses + "{{ m.content }}"))
    text = template.render([*conversation("{}"), said("user", "Well?")], tools=SENT)
    assert text.startswith("[user]You can call functions.") and "\n\nHi[assistant]<tool_call>" in text
    assert text.endswith("[user]<tool_response>\ndone\n</tool_response>\n\nWell?")
    assert text.count("[user]") == 2, "users and assistants alternate"


def test_half_a_character_becomes_a_replacement_character():
    template = checked(each("{{ m.content or '' }}" + CALLS))
    text = template.render(conversation('{"text": "party \\ud83c"}', "cut \udf89 \ud83c\udf89"))
    assert text == '[user]Hi[assistant]<f|{"text": "party \ufffd"}>[tool]cut \ufffd \U0001f389'


@pytest.mark.parametrize(
    ("content", "shows"),
    [
        ("{{ m.content }}", False),
        ("{{ m.name }}: {{ m.content }}", True),
        ("{{ m.get('name', '') }}{{ m.content }}", True),
    ],
)
def test_whether_names_are_shown_is_found_by_rendering(content, shows):
    assert checked(each(content)).facts.shows_names is shows
