"""POST /v1/responses over a real server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from chat_scripts import SCRIPTS, TOOLS

from aiakq.server.background import RunningServer

#: The tools in the form of this API.
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
NUMBERS = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}


def post(server: RunningServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json={"temperature": 0, **body}, trust_env=False, timeout=60)


def respond(server: RunningServer, script: str, **fields: Any) -> dict[str, Any]:
    answer = post(server, input=f"<|{script}|>", **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: RunningServer, **body: Any) -> dict[str, Any]:
    answer = post(server, **{"input": "<|plain|>", **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def streamed(server: RunningServer, script: str, **fields: Any) -> list[dict[str, Any]]:
    answer = post(server, input=f"<|{script}|>", stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def no_thought(server: RunningServer) -> dict[str, int]:
    """Return a logit bias that forbids reasoning; without its script the model generates all tokens equally often."""
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "<<think>"}, trust_env=False).json()["tokens"]
    return {str(id): -100 for id in ids}


def test_items_are_reasoning_message_and_calls(scripted):
    answer = respond(scripted, "both", tools=FLAT, instructions="Be brief.", metadata={"a": "b"})
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "scripted")
    reasoning, message, weather, clock = answer["output"]
    assert reasoning["type"] == "reasoning" and reasoning["summary"] == [] and reasoning["encrypted_content"] is None
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "It asks for the weather."}]
    assert message["type"] == "message" and message["role"] == "assistant" and message["status"] == "completed"
    [text] = message["content"]
    assert (text["type"], text["text"], text["annotations"]) == ("output_text", "Let me look.", [])
    assert (weather["type"], weather["name"]) == ("function_call", "get_weather")
    assert json.loads(weather["arguments"]) == {"city": "Bergen", "days": [1, {}]}
    assert (clock["name"], clock["arguments"], clock["status"]) == ("get_time", "{}", "completed")
    assert weather["call_id"] != clock["call_id"] and len({item["id"] for item in answer["output"]}) == 4
    assert answer["instructions"] == "Be brief." and answer["metadata"] == {"a": "b"} and answer["store"] is False
    assert answer["tools"] == FLAT and answer["tool_choice"] == "auto" and answer["temperature"] == 0
    usage = answer["usage"]
    assert usage["output_tokens"] == len(SCRIPTS["<|both|>"]) + 1
    assert usage["output_tokens_details"] == {"reasoning_tokens": 4}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= 0


@pytest.mark.parametrize("script", ["both", "plain"])
def test_a_stream_adds_up_to_the_response(scripted, script):
    fields = {"tools": FLAT, "request_id": "same"}
    whole = respond(scripted, script, **fields)
    events = streamed(scripted, script, **fields)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    final = events[-1]["response"]
    for name in ("id", "output", "status", "tools", "model"):
        assert final[name] == whole[name], name
    for index, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == index]
        names = [event["type"].removeprefix("response.") for event in own]
        if item["type"] == "function_call":
            assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
            assert names[0] == "output_item.added" and own[0]["item"]["arguments"] == ""
            assert set(names[1:-2]) == {"function_call_arguments.delta"}
            assert "".join(event["delta"] for event in own[1:-2]) == item["arguments"]
            assert names[-2:] == ["function_call_arguments.done", "output_item.done"]
            assert own[-2]["arguments"] == item["arguments"] and own[-2]["name"] == item["name"]
        else:
            part = "output_text" if item["type"] == "message" else "reasoning_text"
            assert names[:2] == ["output_item.added", "content_part.added"]
            assert set(names[2:-3]) == {f"{part}.delta"}
            assert names[-3:] == [f"{part}.done", "content_part.done", "output_item.done"]
            text = item["content"][0]["text"]
            assert "".join(event["delta"] for event in own[2:-3]) == text == own[-3]["text"]
            assert own[-2]["part"] == item["content"][0] and own[0]["item"]["content"] == []
            assert {event["content_index"] for event in own[1:-1]} == {0}
        assert own[-1]["item"] == item and own[0]["item"]["id"] == item["id"]
    indexes = [event["output_index"] for event in events if "output_index" in event]
    assert indexes == sorted(indexes)


def test_a_limit_makes_a_response_incomplete(scripted):
    for limit in range(1, len(SCRIPTS["<|both|>"])):
        answer = respond(scripted, "both", tools=FLAT, max_output_tokens=limit, request_id="same")
        assert answer["status"] == "incomplete" and answer["max_output_tokens"] == limit
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["usage"]["output_tokens"] == limit
        final = streamed(scripted, "both", tools=FLAT, max_output_tokens=limit, request_id="same")[-1]
        items, last = final["response"]["output"], final["response"]["output"][-1:]
        assert final["type"] == "response.incomplete"
        if last and (last[0]["type"], last[0]["status"]) == ("function_call", "incomplete"):  # else it is text
            assert "<tool_call>" in answer["output"][-1]["content"][0]["text"]
        else:
            assert items == answer["output"]
    assert respond(scripted, "both", max_output_tokens=100_000)["status"] == "completed", "more than the context has"


@pytest.mark.parametrize("script", ["unclosed", "mention", "wrong"])
def test_calls_in_thoughts_are_read_as_in_chat(scripted, script):
    items = respond(scripted, script, tools=FLAT)["output"]
    expected = {"unclosed": ["reasoning", "function_call"], "mention": ["reasoning", "message"], "wrong": ["reasoning"]}
    assert [item["type"] for item in items] == expected[script]
    if script == "unclosed":
        assert items[0]["content"][0]["text"] == "I look it up." and items[1]["arguments"] == '{"city": "Oslo"}'
    final = streamed(scripted, script, tools=FLAT)[-1]["response"]
    assert [item["type"] for item in final["output"]] == expected[script] and final["status"] == "completed"


def test_tools_are_chosen_in_every_way(scripted):
    def names(**fields: Any) -> list[str]:
        return [item.get("name", "-") for item in respond(scripted, "both", tools=FLAT, **fields)["output"]]

    assert names() == names(tool_choice="auto") == ["-", "-", "get_weather", "get_time"]
    assert names(tool_choice="none") == ["-", "-"]
    assert names(tool_choice="auto", parallel_tool_calls=False) == ["-", "-", "get_weather"]
    time = {"type": "function", "name": "get_time"}
    assert names(tool_choice=time) == ["-", "get_time"]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [time]}
    assert names(tool_choice=allowed, parallel_tool_calls=False) == ["-", "get_time"]
    fields = {"tools": FLAT[1:], "tool_choice": "required", "parallel_tool_calls": False}
    assert [item["type"] for item in respond(scripted, "both", **fields)["output"]] == [
        "reasoning",
        "function_call",
    ]


def test_tools_of_a_namespace_are_called_by_both_names(scripted):
    space = {"type": "namespace", "name": "get", "description": "Clocks.", "tools": [{**FLAT[1], "name": "time"}]}
    fields = {"tools": [FLAT[0], space], "tool_choice": {"type": "function", "namespace": "get", "name": "time"}}
    *_, call = respond(scripted, "both", **fields)["output"]
    assert (call["namespace"], call["name"]) == ("get", "time")
    history = [{"type": "message", "role": "user", "content": "<|plain|>"}, call]
    assert post(scripted, input=history).status_code == 200


def test_tools_that_agents_offer_everywhere_are_left_out(scripted):
    answer = respond(scripted, "both", tools=[{"type": "web_search", "external_web_access": False}, *FLAT])
    assert answer["tools"] == FLAT and answer["output"][-1]["type"] == "function_call"


@pytest.mark.parametrize("strict", [True, None])
def test_the_format_of_the_text_is_enforced(scripted, strict):
    format = {"type": "json_schema", "name": "n", "schema": NUMBERS, "strict": strict}
    answer = respond(scripted, "both", text={"format": format}, max_output_tokens=80)
    assert set(json.loads(answer["output"][-1]["content"][0]["text"])) <= {1, 2}
    assert answer["text"]["format"]["schema"] == NUMBERS
    text = respond(scripted, "plain", text={"format": {"type": "text"}, "verbosity": "medium"})
    assert text["output"][0]["content"][0]["text"] == "Hello, world.\n\n- a\n- b"
    fields = {
        "text": {"format": {"type": "json_object"}},
        "max_output_tokens": 30,
        "logit_bias": no_thought(scripted),
    }
    assert respond(scripted, "plain", **fields)["output"][0]["content"][0]["text"].startswith("{")


def test_responses_can_be_sent_back_as_history(scripted):
    """The output of a response is the input of the next, and renders as the same chat conversation."""
    first = respond(scripted, "both", tools=FLAT, include=["reasoning.encrypted_content"])
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Rain"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    results[1]["output"] = [{"type": "input_text", "text": "Noon"}]
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "<|both|>"}]}]
    history = [*asked, *first["output"], *results, {"role": "user", "content": "<|plain|>"}]
    given = post(scripted, input=history, instructions="Be brief.").json()
    assert given["output"][0]["content"][0]["text"] == "Hello, world.\n\n- a\n- b"
    calls = [
        {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in first["output"][2:]
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<|both|>"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": calls,
            "reasoning": "It asks for the weather.",
        },
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "Rain"},
        {"role": "tool", "tool_call_id": calls[1]["id"], "content": "Noon"},
        {"role": "user", "content": "<|plain|>"},
    ]
    tokens = httpx.post(f"{scripted.url}/tokenize", json={"messages": messages}, trust_env=False).json()
    assert given["usage"]["input_tokens"] == tokens["count"]
    for item in history:  # what Codex sends back
        if item.get("type") == "reasoning":
            assert item.pop("content") and item["encrypted_content"]
    assert post(scripted, input=history, instructions="Be brief.").json()["usage"] == {
        **given["usage"],
        "input_tokens_details": {"cached_tokens": given["usage"]["input_tokens"] // 16 * 16},
    }


def test_reasoning_of_other_servers_is_left_out(scripted):
    user = {"role": "user", "content": "<|plain|>"}
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    count = post(scripted, input=[user]).json()["usage"]["input_tokens"]
    assert post(scripted, input=[foreign, user]).json()["usage"]["input_tokens"] == count
    ours = foreign | {"encrypted_content": "aiakq1.!"}
    assert refusal(scripted, input=[ours, user])["param"] == "input[0].encrypted_content"


def test_an_incomplete_message_is_continued(scripted):
    items = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<|plain|>", "status": "incomplete"}]
    assert post(scripted, input=items).json()["output"][0]["content"][0]["text"].startswith("Hello")


def test_instructions_at_the_beginning_are_one_message(scripted):
    items = [{"role": "developer", "content": "B"}, {"role": "user", "content": "Hi"}]
    count = post(scripted, input=items, instructions="A", max_output_tokens=1).json()["usage"]["input_tokens"]
    messages = [{"role": "system", "content": "A\n\nB"}, {"role": "user", "content": "Hi"}]
    tokens = httpx.post(f"{scripted.url}/tokenize", json={"messages": messages}, trust_env=False).json()
    assert count == tokens["count"]


CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": None}, "invalid_type", "input"),
        ({"input": []}, "value_out_of_range", "input"),
        ({"input": 1}, "invalid_type", "input"),
        ({"input": [1]}, "invalid_type", "input[0]"),
        ({"input": [1] * 50_000}, "invalid_type", "input[0]"),
        ({"input": [{"role": "user"}]}, "missing_field", "input[0].content"),
        ({"input": [{"content": "a"}]}, "missing_field", "input[0].role"),
        ({"input": [{"role": "robot", "content": "a"}]}, "value_out_of_range", "input[0].role"),
        ({"input": [{"role": "user", "content": 1}]}, "invalid_type", "input[0].content"),
        ({"input": [{"role": "user", "content": [1]}]}, "invalid_type", "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}]},
            "unsupported_parameter",
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": []}]}]},
            "invalid_type",
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"type": {}}]}, "invalid_type", "input[0].type"),
        ({"input": [CALL | {"arguments": {}}]}, "invalid_type", "input[0].arguments"),
        ({"input": [CALL | {"call_id": None}]}, "missing_field", "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "missing_field", "input[0].output"),
        ({"input": [{"type": "reasoning", "content": 1}]}, "invalid_type", "input[0].content"),
        ({"instructions": []}, "invalid_type", "instructions"),
        ({"max_output_tokens": -1}, "value_out_of_range", "max_output_tokens"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"top_p": 2}, "value_out_of_range", "top_p"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"include": ["everything"]}, "invalid_type", "include[0]"),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
        ({"truncation": "some"}, "invalid_type", "truncation"),
        ({"instruction": 1}, "unknown_field", "instruction"),
        ({"messages": []}, "unsupported_parameter", "messages"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"text": {"format": {"type": "json_schema"}}}, "missing_field", "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}}},
            "grammar_not_enforceable",
            "text.format",
        ),
        ({"text": {"formats": 1}}, "unknown_field", "text.formats"),
        ({"tools": {}}, "invalid_type", "tools"),
        ({"tools": [1]}, "invalid_type", "tools[0]"),
        ({"tools": [{"type": "mcp", "server_url": "http://a"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"type": "function", "name": {}}]}, "invalid_type", "tools[0].name"),
        ({"tools": [{"type": "web_search"}, *FLAT, FLAT[0]]}, "value_out_of_range", "tools[3].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "invalid_type", "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "invalid_type", "tools[0].tools"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "missing_field",
            "tools[0].tools[0].name",
        ),
        ({"tools": FLAT, "tool_choice": "any"}, "value_out_of_range", "tool_choice"),
        ({"tools": FLAT, "tool_choice": {"type": "web_search"}}, "unsupported_parameter", "tool_choice.type"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "name": "x"}}, "value_out_of_range", "tool_choice.name"),
        ({"tools": FLAT, "tool_choice": {"type": "allowed_tools"}}, "missing_field", "tool_choice.mode"),
        (
            {"tools": FLAT, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FLAT[0], CALL]}},
            "unsupported_parameter",
            "tool_choice.tools[1].type",
        ),
        ({"tool_choice": "required"}, "missing_field", "tools"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_malformed_requests_are_refused(scripted, body, code, param):
    failure = refusal(scripted, **body)
    assert (failure["code"], failure["param"]) == (code, param), failure


def test_a_stream_that_fails_ends_with_an_error(scripted):
    body = {"input": "<|plain|>", "stream": True, "ignore_eos": True}
    events = []
    with (
        httpx.Client(base_url=scripted.url, trust_env=False, timeout=60) as http,
        http.stream("POST", "/v1/responses", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if len(events) == 4:
                    ids = {"request_ids": [events[0]["response"]["id"]]}
                    assert http.post("/abort_requests", json=ids).json() == {"aborted": 1}
    final = events[-1]
    assert (final["type"], final["response"]["status"]) == ("response.failed", "failed")
    assert final["response"]["error"]["code"] == "aborted" and final["sequence_number"] == len(events) - 1


def test_a_request_of_codex_is_answered(scripted):
    """With everything that it sends to a provider whose model it does not know, in its second turn."""

    def item(role: str, text: str, kind: str = "input_text") -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    call = {"type": "function_call", "name": "get_time", "arguments": "{}", "call_id": "call_1"}
    body = {
        "model": "scripted",
        "instructions": "You are Codex.",
        "input": [
            item("developer", "<permissions instructions>"),
            item("user", "<environment_context>"),
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"},
            item("assistant", "On it.", "output_text") | {"phase": "commentary"},
            call,
            {"type": "function_call_output", "call_id": "call_1", "output": "Noon"},
            item("user", "<|both|>"),
        ],
        "tools": [
            *FLAT,
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "mcp__files__", "description": "", "tools": [{**FLAT[1], "name": "read"}]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "client_metadata": {"x-codex-installation-id": "a"},
    }
    answer = httpx.post(f"{scripted.url}/v1/responses", json={**body, "stream": True}, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    final = json.loads(answer.text.strip().rpartition("data: ")[2])
    assert final["type"] == "response.completed"
    reasoning, message, called = final["response"]["output"]
    assert reasoning["encrypted_content"] and message["content"][0]["text"] == "Let me look."
    assert called["name"] == "get_weather" and "namespace" not in called


def tokens_of(logprobs: list[dict[str, Any]]) -> str:
    return "".join(one["token"] for one in logprobs)


@pytest.mark.parametrize("script", ["both", "plain"])
def test_log_probabilities_are_those_of_the_answer_whole_and_streamed(scripted, script):
    fields = {"tools": FLAT, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = respond(scripted, script, **fields)
    events = streamed(scripted, script, **fields)
    assert answer["top_logprobs"] == 2
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert len(parts) == 1 and deltas
    assert tokens_of(parts[0]["logprobs"]).strip() == parts[0]["text"].strip()
    assert [one for event in deltas for one in event["logprobs"]] == parts[0]["logprobs"]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    final = next(
        event for event in events if event["type"] == "response.content_part.done" and "logprobs" in event["part"]
    )
    assert done["logprobs"] == final["part"]["logprobs"] == parts[0]["logprobs"]
    for one in parts[0]["logprobs"]:
        assert len(one["top_logprobs"]) == 2 and one["logprob"] <= one["top_logprobs"][0]["logprob"] <= 0
    assert (
        respond(scripted, script, tools=FLAT, top_logprobs=2)["output"][-1].get("content", [{}])[0].get("logprobs", [])
        == []
    )


def test_top_log_probabilities_are_bounded(scripted):
    failure = refusal(scripted, include=["message.output_text.logprobs"], top_logprobs=21)
    assert (failure["code"], failure["param"]) == ("value_out_of_range", "top_logprobs")
