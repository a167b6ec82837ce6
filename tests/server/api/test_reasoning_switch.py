"""Reasoning settings of requests reach the chat template."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from aiakq.errors import AiakqError
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.messages.request import CountTokensRequest, MessagesRequest
from aiakq.server.api.reasoning_switch import reasoning_arguments, template_names
from aiakq.server.api.request_model import parse_body
from aiakq.server.api.responses.request import ResponsesRequest
from aiakq.server.api.tokenization import TokenizeChatRequest
from aiakq.server.api.unknown_fields import IgnoredFields, UnknownFields, ignored_fields

SWITCH = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
LEVEL = "{{ reasoning_effort|default('medium') }}"


def test_names_of_templates_are_those_in_their_code():
    template = "enable_thinking {% if a.thinking == 'reasoning_effort' %}{{- \"thinking\" }}{% endif %}{{ b }}"
    assert template_names(template) >= {"a", "b", "if"}
    assert not template_names(template) & {"enable_thinking", "reasoning_effort", "thinking"}


@pytest.mark.parametrize(
    ("template", "effort", "thinks", "expected"),
    [
        (LEVEL, "low", None, {"reasoning_effort": "low"}),
        (SWITCH, "low", None, {"enable_thinking": True}),
        (SWITCH, "none", None, {"enable_thinking": False}),
        (SWITCH + LEVEL, "high", False, {"enable_thinking": False, "reasoning_effort": "high"}),
        ("{% if thinking %}x{% endif %}", None, True, {"thinking": True}),
        (SWITCH, None, None, {}),
        ("{{ messages }}", "high", True, {}),
    ],
)
def test_a_template_gets_the_arguments_that_it_has_switches_for(template, effort, thinks, expected):
    assert reasoning_arguments(template, effort, thinks) == expected


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json={**body, "max_tokens": 1}, trust_env=False, timeout=60)


def prompt(url: str, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    tokens = httpx.post(f"{url}/tokenize", json=body, trust_env=False).json()["tokens"]
    return httpx.post(f"{url}/detokenize", json={"tokens": tokens}, trust_env=False).json()["prompt"]


def test_an_effort_of_chat_reaches_the_template(start_server):
    with start_server(chat_template=LEVEL + " {{ messages[0].content }}", num_gpu_blocks_override=65) as server:
        assert prompt(server.url) == "medium Hi" and prompt(server.url, reasoning_effort="high") == "high Hi"
        own = {"chat_template_kwargs": {"reasoning_effort": "low"}}
        assert prompt(server.url, reasoning_effort="high", **own) == "low Hi"
        assert ask(server.url, reasoning_effort="high").status_code == 200
        failure = ask(server.url, reasoning_effort="huge").json()["error"]
        assert (failure["code"], failure["param"]) == ("invalid_type", "reasoning_effort")
        body = {"input": "Hi", "reasoning": {"effort": "high", "summary": "auto"}, "max_output_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/responses", json=body, trust_env=False, timeout=60).json()
        assert answer["reasoning"] == {"effort": "high", "summary": None}
        assert answer["usage"]["input_tokens"] == len(
            ask(server.url, reasoning_effort="high", return_token_ids=True).json()["prompt_token_ids"]
        )


def test_an_effort_without_a_template_argument_is_ignored_by_name(http, server):
    for field in ({"reasoning_effort": "high"}, {"enable_thinking": False}, {"think": True}):
        answer = ask(server.url, **field)
        assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == next(iter(field))
    assert "x-ignored-fields" not in ask(server.url, reasoning_effort=None).headers
    body = {"input": "Hi", "reasoning": {"effort": "high"}, "max_output_tokens": 1}
    answer = http.post("/v1/responses", json=body).json()
    assert answer["reasoning"] == {"effort": None, "summary": None}, "it took no effect, and the response says so"
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "thinking": {"type": "disabled"}}
    assert http.post("/v1/messages", json=body).headers["x-ignored-fields"] == "thinking"


def test_an_effort_without_a_template_argument_can_be_refused():
    request = ChatCompletionRequest(messages=[{"role": "user"}], reasoning_effort="high")
    with pytest.raises(AiakqError) as caught:
        request.template_kwargs("{{ messages }}")
    assert (caught.value.id, caught.value.param) == ("unsupported_parameter", "reasoning_effort")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"think": False}, {"enable_thinking": False}),
        ({"think": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"reasoning": {"effort": "high"}}, {"enable_thinking": True, "reasoning_effort": "high"}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ],
)
def test_switches_of_other_servers_reach_the_template(fields, expected):
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    request = parse_body(ChatCompletionRequest, json.dumps(body).encode(), UnknownFields("ignore"))
    found = request.template_kwargs(SWITCH + LEVEL, UnknownFields("ignore"))
    assert found == {"add_generation_prompt": True, **expected}


HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    ChatCompletionRequest: {"messages": HI},
    ResponsesRequest: {"input": "Hi"},
    MessagesRequest: {"messages": HI, "max_tokens": 8},
    CountTokensRequest: {"messages": HI},
    TokenizeChatRequest: {"messages": HI},
}


def parsed(model: Any, template: str, fields: dict[str, Any], mode: str = "ignore") -> tuple[dict[str, Any], list[str]]:
    """Return the template arguments of a request, and its ignored fields."""
    unknown, token = UnknownFields(mode), ignored_fields.set(IgnoredFields())
    try:
        request = parse_body(model, json.dumps(BODIES[model] | fields).encode(), unknown)
        if hasattr(request, "chat_fields"):
            request.check_combinations()
            renderer: Any = SimpleNamespace(chat_template=template, unknown_fields=unknown)
            request.switch_reasoning(renderer)
            arguments = request.chat.template_kwargs(template, unknown)
        else:
            arguments = request.template_kwargs(template, unknown)
        ignored = ignored_fields.get()
        assert ignored is not None
        return {name: arguments[name] for name in arguments if name != "add_generation_prompt"}, list(ignored.names)
    finally:
        ignored_fields.reset(token)


OWN = {
    ChatCompletionRequest: ({"reasoning_effort": "high"}, "reasoning_effort"),
    TokenizeChatRequest: ({"reasoning_effort": "high"}, "reasoning_effort"),
    ResponsesRequest: ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    MessagesRequest: ({"output_config": {"effort": "high"}}, "output_config.effort"),
    CountTokensRequest: ({"output_config": {"effort": "high"}}, "output_config.effort"),
}
ANY = [({"think": "high"}, "think"), ({"reasoning_effort": "high"}, "reasoning_effort")]


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_an_effort_is_a_template_argument_or_an_ignored_field_in_every_api(model):
    for fields, name in (OWN[model], *ANY):
        assert parsed(model, LEVEL, fields) == ({"reasoning_effort": "high"}, [])
        assert parsed(model, SWITCH, fields) == ({"enable_thinking": True}, [])
        assert parsed(model, "{{ messages }}", fields) == ({}, [name])
        given = {"chat_template_kwargs": {"reasoning_effort": "low"}}
        if "chat_template_kwargs" in model.model_fields:
            assert parsed(model, LEVEL, fields | given) == ({"reasoning_effort": "low"}, [name])


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
@pytest.mark.parametrize(
    "fields", [{"enable_thinking": False}, {"think": False}, {"thinking": {"type": "disabled"}}], ids=str
)
def test_a_switch_is_a_template_argument_or_an_ignored_field_in_every_api(model, fields):
    assert parsed(model, SWITCH, fields) == ({"enable_thinking": False}, [])
    assert parsed(model, LEVEL, fields) == ({}, list(fields))
    if "chat_template_kwargs" in model.model_fields:
        given = {"chat_template_kwargs": {"enable_thinking": True}}
        assert parsed(model, SWITCH, fields | given) == ({"enable_thinking": True}, list(fields))


def test_only_the_part_without_effect_is_named():
    both = {"reasoning_effort": "high", "enable_thinking": False}
    assert parsed(ChatCompletionRequest, LEVEL, both) == ({"reasoning_effort": "high"}, ["enable_thinking"])
    assert parsed(ChatCompletionRequest, SWITCH, both) == ({"enable_thinking": False}, ["reasoning_effort"])
    none = {"reasoning_effort": "none"}
    assert parsed(ChatCompletionRequest, "{{ messages }}", none) == ({}, ["reasoning_effort"])
    assert parsed(ChatCompletionRequest, "{{ messages }}", none, "refuse")[0] == {}, "it is the default"
    reasoning = {"reasoning": {"effort": "low", "enabled": False}}
    assert parsed(ResponsesRequest, LEVEL, reasoning) == ({"reasoning_effort": "low"}, ["reasoning.enabled"])


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (ChatCompletionRequest, {"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking"),
        (MessagesRequest, {"enable_thinking": True, "thinking": {"type": "disabled"}}, "enable_thinking"),
        (ResponsesRequest, {"reasoning": {"effort": "low"}, "think": "high"}, "think"),
        (MessagesRequest, {"think": "loud"}, "think"),
        (ResponsesRequest, {"reasoning": {"exclude": True}}, "reasoning.exclude"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(model, fields, param):
    with pytest.raises(AiakqError) as caught:
        parsed(model, SWITCH, fields)
    assert caught.value.param == param
