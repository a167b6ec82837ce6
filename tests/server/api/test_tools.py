"""Fields for tools of a chat request: which tools may be called, and errors that name the cause."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.messages.request import MessagesRequest
from aiakq.server.api.request_model import parse_body
from aiakq.server.api.responses.request import ResponsesRequest
from aiakq.server.api.tools import calls_tools, forced_tools
from aiakq.server.api.unknown_fields import UnknownFields

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("find", "read", "save")]
SENT = {"function": {"strict": None, "own": [1.0, 10**17], "name": "f"}, "type": "function", "x": {"b": 1, "a": 2}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse_body(ChatCompletionRequest, json.dumps({"messages": HI, **fields}).encode())


def arguments(**fields: Any) -> dict[str, Any]:
    return chat(**fields).template_kwargs("")


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_are_passed_on_as_they_were_sent():
    [tool] = arguments(tools=[SENT])["tools"]
    assert json.dumps(tool) == json.dumps(SENT)


def test_tools_of_other_apis_have_the_form_of_openai():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    own = {"name": "f", "input_schema": schema, "description": "d", "cache_control": {"type": "ephemeral"}}
    fields = {"messages": HI, "max_tokens": 5, "tools": [own]}
    request = parse_body(MessagesRequest, json.dumps(fields).encode())
    request.check_combinations()
    [tool] = request.chat.template_kwargs("")["tools"]
    expected = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    assert json.dumps(tool) == json.dumps(expected)
    flat = {"type": "function", "name": "f", "description": "d", "parameters": schema, "strict": None}
    answer = parse_body(ResponsesRequest, json.dumps({"input": "Hi", "tools": [flat]}).encode())
    answer.check_combinations()
    assert json.dumps(answer.chat.template_kwargs("")["tools"]) == json.dumps([expected])


def offered(api: str, tool: dict[str, Any], beside: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The tools of a chat request with a tool of these fields, after a request to an API of this name."""
    if api == "chat":
        return arguments(tools=[{"type": "function", "function": {"name": "f", **tool}, **(beside or {})}])["tools"]
    own, kind = ({"name": "f"}, MessagesRequest) if api == "messages" else ({"type": "function", "name": "f"}, None)
    fields = (
        {"tools": [own | tool], "messages": HI, "max_tokens": 5} if kind else {"tools": [own | tool], "input": "Hi"}
    )
    request = parse_body(kind or ResponsesRequest, json.dumps(fields).encode(), UnknownFields("ignore"))
    try:
        request.check_combinations()
        return request.chat.template_kwargs("")["tools"]
    except AiakqError as failure:
        raise request.rename_param(failure) from None


SCHEMA = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("name", ["input_schema", "inputSchema", "parameters", "parametersJsonSchema"])
def test_a_schema_may_have_the_name_of_another_api(api, name):
    [tool] = offered(api, {name: SCHEMA, "description": "d"})
    assert tool == {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "description": "d"}}
    if api == "chat":
        assert list(tool["function"]) == ["name", "parameters", "description"], "it stays at its place"
        [beside] = offered(api, {"parameters": None}, {name: SCHEMA, "strict": True})
        assert beside == {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
        assert offered(api, {"parameters": SCHEMA}, {name: SCHEMA}), "the same one twice"


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize(
    "tool",
    [
        {"params": SCHEMA},
        {"argsSchema": SCHEMA},
        {"own": SCHEMA},
        {"params": [{"name": "q", "type": "integer"}]},
        {"properties": SCHEMA["properties"]},
        {"parameters": {"type": "object"}, "params": SCHEMA},
        {"parameters": {"type": "object"}, "input_schema": SCHEMA},
        {"parameters": SCHEMA, "inputSchema": {"type": "object"}},
    ],
)
def test_a_schema_that_would_not_be_enforced_is_refused(api, tool):
    with pytest.raises(AiakqError) as caught:
        offered(api, tool)
    name = "input_schema" if caught.value.id == "missing_field" else list(tool)[-1]
    place = "tools[0].function." if api == "chat" else "tools[0]."
    params = {place + name, place + "parameters"} if api == "messages" else {place + name}
    assert caught.value.param in params and caught.value.http_status == 400
    if api == "chat" and "parameters" in tool:
        with pytest.raises(AiakqError, match=r"tools\[0\]\.") as caught:
            offered(api, {"parameters": tool["parameters"]}, {list(tool)[-1]: list(tool.values())[-1]})


def test_schemas_of_results_are_passed_on_and_strict_is_read_from_one_place():
    sent = {"parameters": {}, "response": SCHEMA, "outputSchema": SCHEMA}
    [tool] = offered("chat", sent)
    assert tool["function"] == {"name": "f", **sent}
    with pytest.raises(AiakqError, match=r"tools\[0\]\.strict is not supported"):
        offered("chat", {"strict": False}, {"strict": True})


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_offered(mode):
    request = chat(tools=TOOLS, tool_choice=allowed(mode, "save", "find"))
    assert request.template_kwargs("")["tools"] == [TOOLS[0], TOOLS[2]]
    assert [tool.number for tool in request.tools or ()] == [0, 2], "errors name the position in the request"
    assert request.may_call and request.forces_calls == (mode == "required")
    forced = forced_tools(request.tools, request.tool_choice)
    assert forced is None if mode == "auto" else [tool.function.name for tool in forced or ()] == ["find", "save"]
    assert calls_tools(request.tools, request.tool_choice)


@pytest.mark.parametrize(
    ("fields", "id", "param"),
    [
        ({"tools": [{"type": "web_search_preview"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [TOOLS[0], {"type": "custom", "custom": {}}]}, "unsupported_parameter", "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "missing_field", "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "missing_field", "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f"}}]}, "missing_field", "tools[0].type"),
        ({"tool_choice": {"type": "custom", "custom": {}}}, "unsupported_parameter", "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "unsupported_parameter", "tool_choice.type"),
        ({"tool_choice": {"type": 5}}, "invalid_type", "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "missing_field", "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "missing_field", "tool_choice.allowed_tools"),
        ({"tool_choice": allowed("none", "find")}, "value_out_of_range", "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto")}, "invalid_type", "tool_choice.allowed_tools.tools"),
        (
            {"tool_choice": allowed("auto", "find", "drop")},
            "value_out_of_range",
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
        ({"function_call": {"name": "f"}}, "unsupported_parameter", "function_call"),
    ],
)
def test_errors_name_the_cause(fields, id, param):
    with pytest.raises(AiakqError) as caught:
        arguments(**{"tools": TOOLS, **fields})
    assert (caught.value.id, caught.value.param) == (id, param)
    assert "only chat completions" not in caught.value.message


def test_template_arguments_may_be_any_json_but_keep_out_of_the_conversation():
    given = {"xml_tools": [{"name": "find"}], "controls": {"length": "short"}, "documents": [{"title": "T"}]}
    found = arguments(chat_template_kwargs=given)
    assert {name: found[name] for name in given} == given
    assert arguments(documents=given["documents"])["documents"] == given["documents"]
    for name in ("messages", "conversations", "tools", "add_generation_prompt", "chat_template", "bos_token", "a b"):
        with pytest.raises(AiakqError, match="the name is taken"):
            arguments(chat_template_kwargs={name: []})
    with pytest.raises(AiakqError, match="the field documents is given too"):
        arguments(chat_template_kwargs={"documents": [{}]}, documents=[{}])
    for documents in ("a", ["a"], {"a": 1}):
        with pytest.raises(AiakqError, match="documents"):
            arguments(chat_template_kwargs={"documents": documents})


def test_past_calls_are_passed_on_as_they_were_sent():
    function = {"arguments": "{}", "name": "f"}
    call = {"function": function, "id": "1", "type": "function", "index": 0}
    asked = {"role": "assistant", "content": None, "tool_calls": [call], "function_call": function, "own": 5}
    message = chat(messages=[*HI, asked]).conversation()[1]
    assert json.dumps(message["tool_calls"]) == json.dumps([call])
    assert message["own"] == 5 and "function_call" not in message
