"""Messages of other APIs: parts under the names of every API are read in each of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.text.message_forms import as_object
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.messages import blocks
from aiakq.server.api.messages.request import MessagesRequest
from aiakq.server.api.request_model import parse_body
from aiakq.server.api.responses import items
from aiakq.server.api.responses.request import ResponsesRequest
from aiakq.server.api.unknown_fields import IgnoredFields, UnknownFields, ignored_fields

PARTS = [
    {"type": "text", "text": "A"},
    {"type": "input_text", "text": "A"},
    {"type": "output_text", "text": "A"},
    {"type": "refusal", "refusal": "A"},
    "A",
]
THOUGHTS = [
    {"type": "thinking", "thinking": "Hm."},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "reasoning_text", "text": "Hm."},
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_text_is_read_under_every_name(part, role):
    expected = [{"role": role, "content": "A\nB"}]
    given = [{"role": role, "content": [part, {"type": "text", "text": "B"}]}]
    assert blocks.messages_of(None, given) == expected
    assert items.messages_of(None, given) == expected


@pytest.mark.parametrize("thought", THOUGHTS)
def test_reasoning_among_the_parts_of_an_answer_is_reasoning(thought):
    expected = [{"role": "assistant", "reasoning_content": "Hm.", "content": "A"}]
    given = [{"role": "assistant", "content": [thought, {"type": "redacted_thinking", "data": "x"}, "A"]}]
    assert blocks.messages_of(None, given) == expected
    assert items.messages_of(None, given) == expected


@pytest.mark.parametrize("part", PARTS)
def test_results_may_be_parts(part):
    asked = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [part]}, "And?"]}
    found = blocks.messages_of(None, [asked, result])
    assert found[1:] == [
        {"role": "tool", "content": "A", "tool_call_id": "a"},
        {"role": "user", "content": "And?"},
    ]
    output = {"type": "function_call_output", "call_id": "a", "output": [part]}
    assert items.messages_of(None, [output]) == [{"role": "tool", "content": "A", "tool_call_id": "a"}]


def conversation(model: Any, messages: list[Any], **fields: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages that a request passes to the template, and its ignored fields."""
    name = "input" if model is ResponsesRequest else "messages"
    body = {name: messages} | ({"max_tokens": 5} if model is MessagesRequest else {}) | fields
    token = ignored_fields.set(IgnoredFields())
    try:
        request = parse_body(model, json.dumps(body).encode(), UnknownFields("ignore"))
        if not isinstance(request, ChatCompletionRequest):
            request.check_combinations()
            request = request.chat
        ignored = ignored_fields.get()
        assert ignored is not None
        return request.conversation(), list(ignored.names)
    finally:
        ignored_fields.reset(token)


MODELS = (ChatCompletionRequest, MessagesRequest, ResponsesRequest)
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "1"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("role", "part"),
    [
        *((role, part) for role in ("user", "system") for part in (*THOUGHTS, USE, {"type": "redacted_thinking"})),
        ("assistant", RESULT),
        ("system", RESULT),
        ("user", RESULT | {"content": [THOUGHTS[0]]}),
        ("user", RESULT | {"content": [RESULT]}),
    ],
)
def test_parts_that_messages_of_a_role_do_not_have_are_refused_by_name(model, role, part):
    messages = [{"role": role, "content": ["A", part]}, {"role": "user", "content": "And?"}]
    with pytest.raises(AiakqError, match=r"\[0\].content\[1\].*only messages of the role ") as caught:
        conversation(model, messages)
    assert caught.value.id == "unsupported_parameter"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "reasoning_content": "Hm."}, "reasoning_content"),
        ({"role": "system", "reasoning": "Hm."}, "reasoning"),
        ({"role": "tool", "thinking": "Hm.", "tool_call_id": "a"}, "reasoning_content"),
        ({"role": "user", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}, "tool_calls"),
        ({"role": "user", "function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_fields_that_messages_of_a_role_do_not_have_are_refused_by_name(message, param):
    with pytest.raises(AiakqError) as caught:
        conversation(ChatCompletionRequest, [{"content": "A", **message}])
    assert (caught.value.id, caught.value.param) == ("unsupported_parameter", f"messages[0].{param}")


def test_tool_messages_have_no_reasoning_among_their_parts():
    with pytest.raises(AiakqError, match=r"messages\[0\].content\[0\].type.*thinking"):
        conversation(ChatCompletionRequest, [{"role": "tool", "tool_call_id": "a", "content": [THOUGHTS[0]]}])
    output = {"type": "function_call_output", "call_id": "a", "output": [THOUGHTS[0]]}
    with pytest.raises(AiakqError, match=r"input\[0\].output\[0\].type.*thinking"):
        conversation(ResponsesRequest, [output])


@pytest.mark.parametrize("model", (MessagesRequest, ResponsesRequest))
def test_fields_of_chat_messages_are_refused_or_named_in_other_apis(model):
    for extra in ({"images": ["x"]}, {"prefix": True}, {"audio": {"id": "x"}}, {"tool_calls": [{"id": "a"}]}):
        with pytest.raises(AiakqError) as caught:
            conversation(model, [{"role": "assistant", "content": "A", **extra}, {"role": "user", "content": "B"}])
        assert caught.value.id == "unsupported_parameter" and next(iter(extra)) in str(caught.value.param)
    name = "input" if model is ResponsesRequest else "messages"
    for extra in ({"thinking": "Hm."}, {"reasoning_content": "Hm."}, {"name": "Ada"}, {"is_error": True}):
        _, ignored = conversation(model, [{"role": "user", "content": "A", **extra}])
        assert ignored == [f"{name}[].{next(iter(extra))}"]
    for extra in ({"annotations": []}, {"is_error": False}, {"images": []}, {"cache_control": {}}, {"thinking": None}):
        assert conversation(model, [{"role": "user", "content": "A", **extra}])[1] == []


@pytest.mark.parametrize("model", MODELS)
def test_the_error_of_a_result_is_named(model):
    for is_error, names in ((True, ["is_error"]), (False, [])):
        messages = [
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [RESULT | {"is_error": is_error}]},
        ]
        found, ignored = conversation(model, messages)
        assert [each["role"] for each in found] == ["assistant", "tool"] and found[0]["tool_calls"]
        assert [name.rpartition(".")[2] for name in ignored] == names


def test_a_refusal_with_an_answer_is_read():
    said = {"role": "assistant", "content": "A", "refusal": "B"}
    [message] = conversation(ChatCompletionRequest, [said])[0]
    assert message["content"] == "A\nB"
    assert conversation(ChatCompletionRequest, [said | {"refusal": "A"}])[0][0]["content"] == "A"


def test_reasoning_is_read_under_the_names_of_other_clients():
    thought = {"type": "reasoning.text", "text": "Hm."}
    for fields in (
        {"reasoning_details": [thought]},
        {"thinking_blocks": [THOUGHTS[0]]},
        {"reasoning": "Hm.", "reasoning_details": [thought]},
    ):
        [message] = conversation(ChatCompletionRequest, [{"role": "assistant", "content": "A", **fields}])[0]
        assert message["reasoning_content"] == "Hm."


HALF = chr(0xD83D)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("arguments", [{HALF: 1}, {"a": [{HALF: 1}]}])
def test_half_of_a_character_in_the_name_of_an_argument_is_refused_in_every_api(model, arguments):
    text = json.dumps(arguments)
    calls = {
        ChatCompletionRequest: [
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": text}}]},
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]},
            {"role": "assistant", "function_call": {"name": "f", "arguments": text}},
            {"role": "assistant", "content": [USE | {"input": arguments}]},
        ],
        MessagesRequest: [{"role": "assistant", "content": [USE | {"input": arguments}]}],
        ResponsesRequest: [
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": text},
            {"role": "assistant", "content": [USE | {"input": arguments}]},
        ],
    }
    for call in calls[model]:
        with pytest.raises(AiakqError) as caught:
            conversation(model, [call, {"role": "user", "content": "A"}])
        assert caught.value.id == "invalid_type" and "half of a character" in str(caught.value)


@pytest.mark.parametrize("model", MODELS)
def test_half_of_a_character_in_the_value_of_an_argument_is_replaced_in_every_api(model):
    call: dict[str, Any] = {"role": "assistant", "content": [USE | {"input": {"a": HALF}}]}
    if model is ResponsesRequest:
        call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": json.dumps({"a": HALF})}
    message = conversation(model, [call, {"role": "user", "content": "A"}])[0][0]
    assert HALF not in str(as_object(message["tool_calls"][0]["function"]["arguments"]))
