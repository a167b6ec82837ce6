"""POST /v1/messages and count_tokens over a real server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from chat_scripts import SCRIPTS, TOOLS

from aiakq.server.background import RunningServer

#: The tools in the form of this API.
OWN = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", ""),
        "input_schema": tool["function"].get("parameters", {"type": "object", "properties": {}}),
    }
    for tool in TOOLS
]
#: The same in OpenAI's form.
AS_CHAT = [
    {
        "type": "function",
        "function": {"name": one["name"], "description": one["description"], "parameters": one["input_schema"]},
    }
    for one in OWN
]
NUMBERS = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def post(server: RunningServer, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    fields = {"temperature": 0, "max_tokens": 100} if path == "/v1/messages" else {}
    return httpx.post(f"{server.url}{path}", json=fields | body, trust_env=False, timeout=60)


def send(server: RunningServer, script: str, **fields: Any) -> dict[str, Any]:
    answer = post(server, messages=[user(f"<|{script}|>")], **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def count(server: RunningServer, **body: Any) -> int:
    answer = post(server, "/v1/messages/count_tokens", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


def chat_count(server: RunningServer, messages: list[dict[str, Any]], **fields: Any) -> int:
    """The tokens of a conversation of chat."""
    body = {"messages": messages, **fields}
    return httpx.post(f"{server.url}/tokenize", json=body, trust_env=False).json()["count"]


def refusal(server: RunningServer, path: str = "/v1/messages", **body: Any) -> dict[str, Any]:
    answer = post(server, path, **{"messages": [user("<|plain|>")], **body})
    assert answer.status_code == 400, answer.text
    failure = answer.json()
    assert set(failure) == {"type", "error"} and failure["type"] == "error"
    assert set(failure["error"]) == {"type", "message"} and failure["error"]["type"] == "invalid_request_error"
    return failure["error"]


def streamed(server: RunningServer, script: str, **fields: Any) -> list[dict[str, Any]]:
    answer = post(server, messages=[user(f"<|{script}|>")], stream=True, **fields)
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def no_thought(server: RunningServer) -> dict[str, int]:
    """Return a logit bias that forbids reasoning; without its script the model generates all tokens equally often."""
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "<<think>"}, trust_env=False).json()["tokens"]
    return {str(id): -100 for id in ids}


def test_content_is_thinking_text_and_calls(scripted):
    answer = send(scripted, "both", tools=OWN, system="Be brief.")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "scripted")
    thinking, text, weather, clock = answer["content"]
    assert thinking["type"] == "thinking" and thinking["thinking"] == "It asks for the weather."
    assert thinking["signature"] and text == {"type": "text", "text": "Let me look."}
    assert weather == {
        "type": "tool_use",
        "id": weather["id"],
        "name": "get_weather",
        "input": {"city": "Bergen", "days": [1, {}]},
    }
    assert (clock["name"], clock["input"]) == ("get_time", {}) and clock["id"] != weather["id"]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    usage = answer["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert total == count(scripted, messages=[user("<|both|>")], tools=OWN, system="Be brief.")
    assert usage["output_tokens"] == len(SCRIPTS["<|both|>"]) + 1


@pytest.mark.parametrize("script", ["both", "plain"])
def test_a_stream_adds_up_to_the_message(scripted, script):
    fields = {"tools": OWN, "request_id": "same"}
    whole = send(scripted, script, **fields)
    events = streamed(scripted, script, **fields)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["id"] == whole["id"]
    assert events[-2]["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    rest = events[2:-2]
    for index, block in enumerate(whole["content"]):
        size = next(at for at, event in enumerate(rest) if event["type"] == "content_block_stop") + 1
        own, rest = rest[:size], rest[size:]
        assert own[0]["type"] == "content_block_start" and {event["index"] for event in own} == {index}
        deltas = [event["delta"] for event in own[1:-1]]
        start = own[0]["content_block"]
        if block["type"] == "text":
            assert start == {"type": "text", "text": ""} and {delta["type"] for delta in deltas} == {"text_delta"}
            assert "".join(delta["text"] for delta in deltas) == block["text"]
        elif block["type"] == "tool_use":
            assert start == block | {"input": {}} and {delta["type"] for delta in deltas} == {"input_json_delta"}
            assert json.loads("".join(delta["partial_json"] for delta in deltas)) == block["input"]
        else:
            assert start == {"type": "thinking", "thinking": "", "signature": ""}
            assert "".join(delta["thinking"] for delta in deltas[:-1]) == block["thinking"]
            assert deltas[-1] == {"type": "signature_delta", "signature": block["signature"]}
    assert rest == []


def test_stop_reasons(scripted):
    assert send(scripted, "plain")["stop_reason"] == "end_turn"
    stopped = send(scripted, "plain", stop_sequences=["- a", "never"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "- a")
    assert stopped["content"] == [{"type": "text", "text": "Hello, world.\n\n"}]
    for limit in range(1, len(SCRIPTS["<|both|>"])):
        cut = send(scripted, "both", tools=OWN, max_tokens=limit, request_id="same")
        assert cut["stop_reason"] == "max_tokens" and cut["usage"]["output_tokens"] == limit
        events = streamed(scripted, "both", tools=OWN, max_tokens=limit, request_id="same")
        assert events[-2]["delta"]["stop_reason"] == "max_tokens"
        kinds = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        whole = [block["type"] for block in cut["content"]]  # in which a call that is cut off is text
        assert kinds in (whole, [*whole, "tool_use"]) or [*kinds[:-1], "text"] == whole
        assert sum(event["type"] == "content_block_stop" for event in events) == len(kinds)
    assert send(scripted, "plain", max_tokens=64_000)["stop_reason"] == "end_turn", "more than the context has"


@pytest.mark.parametrize("script", ["unclosed", "mention", "wrong"])
def test_calls_in_thoughts_are_read_as_in_chat(scripted, script):
    answer = send(scripted, script, tools=OWN)
    kinds, reason = [block["type"] for block in answer["content"]], answer["stop_reason"]
    expected = {"unclosed": ["thinking", "tool_use"], "mention": ["thinking", "text"], "wrong": ["thinking"]}
    assert (kinds, reason) == (expected[script], "tool_use" if script == "unclosed" else "end_turn")
    if script == "unclosed":
        assert answer["content"][0]["thinking"] == "I look it up." and answer["content"][1]["input"] == {"city": "Oslo"}
    starts = [
        each["content_block"]["type"] for each in streamed(scripted, script, tools=OWN) if "content_block" in each
    ]
    assert starts == kinds


def test_tools_are_chosen_in_every_way(scripted):
    def names(**choice: Any) -> list[str]:
        fields = {"tool_choice": choice} if choice else {}
        return [block.get("name", "-") for block in send(scripted, "both", tools=OWN, **fields)["content"]]

    assert names() == names(type="auto") == ["-", "-", "get_weather", "get_time"]
    assert names(type="auto", disable_parallel_tool_use=True) == ["-", "-", "get_weather"]
    assert names(type="none") == ["-", "-"]
    assert names(type="tool", name="get_time") == ["-", "get_time"]
    forced = {"tools": OWN[1:], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    answer = send(scripted, "plain", **forced, logit_bias=no_thought(scripted))
    assert [block["name"] for block in answer["content"]] == ["get_time"] and answer["stop_reason"] == "tool_use"


def test_the_format_of_the_text_is_enforced(scripted):
    format = {"type": "json_schema", "schema": NUMBERS}
    answer = send(scripted, "both", output_config={"format": format})
    assert set(json.loads(answer["content"][-1]["text"])) <= {1, 2}


def test_responses_can_be_sent_back_as_history(scripted):
    """The content of an answer is a message of the next request, and renders as the same chat conversation."""
    first = send(scripted, "both", tools=OWN)
    weather, clock = first["content"][2:]
    results = [
        {"type": "tool_result", "tool_use_id": weather["id"], "content": "Rain"},
        {
            "type": "tool_result",
            "tool_use_id": clock["id"],
            "content": [{"type": "text", "text": "Noon", "cache_control": {"type": "ephemeral"}}],
            "is_error": False,
        },
        {"type": "text", "text": "<|plain|>"},
    ]
    redacted = {"type": "redacted_thinking", "data": "abc"}
    messages = [user("<|both|>"), {"role": "assistant", "content": [redacted, *first["content"]]}, user(results)]
    answer = post(scripted, messages=messages, tools=OWN).json()
    assert answer["content"] == [{"type": "text", "text": "Hello, world.\n\n- a\n- b"}]
    calls = [
        {"id": one["id"], "function": {"name": one["name"], "arguments": one["input"]}} for one in (weather, clock)
    ]
    chat = [
        user("<|both|>"),
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning": "It asks for the weather.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": weather["id"], "content": "Rain"},
        {"role": "tool", "tool_call_id": clock["id"], "content": "Noon"},
        user("<|plain|>"),
    ]
    assert count(scripted, messages=messages, tools=OWN) == chat_count(scripted, chat, tools=AS_CHAT)


def test_the_beginning_of_an_answer_is_continued(scripted):
    messages = [user("Hi"), {"role": "assistant", "content": "<|plain|>"}]
    assert post(scripted, messages=messages).json()["content"][0]["text"].startswith("Hello")


def test_system_messages_keep_their_place(scripted):
    """Claude Code adds one to every turn; a part of its system prompt is another one in every request."""
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=fa690;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ]
    messages = [user("A"), {"role": "assistant", "content": "B"}, user("C"), {"role": "system", "content": "D"}]
    chat = [{"role": "system", "content": "You are an agent.\nBe brief."}, *messages]
    assert count(scripted, system=system, messages=messages) == chat_count(scripted, chat)
    text = system[0]["text"] + "\nYou are an agent.\nBe brief."
    assert count(scripted, system=text, messages=messages) == chat_count(scripted, chat)


def test_a_request_of_claude_code_is_answered(scripted):
    """With everything that it sends: betas, cache marks, a management of the context, an effort."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {
        "model": "scripted",
        "max_tokens": 32000,
        "stream": True,
        "system": [{"type": "text", "text": "You are Claude Code.", **cached}],
        "messages": [
            user(
                [{"type": "text", "text": "<system-reminder>Today</system-reminder>"}, {"type": "text", "text": "Hi"}]
            ),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {}}]},
            user([{"type": "tool_result", "tool_use_id": "toolu_1", "content": "Noon", "is_error": True, **cached}]),
            user([{"type": "text", "text": "<|both|>", **cached}]),
        ],
        "tools": [{**tool, "eager_input_streaming": True} for tool in OWN[:1]] + [{**OWN[1], **cached}],
        "metadata": {"user_id": "user_abc_account__session_def"},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 1,
    }
    headers = {
        "x-api-key": "sk-none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-app": "cli",
    }
    answer = httpx.post(
        f"{scripted.url}/v1/messages?beta=true", json=body, headers=headers, trust_env=False, timeout=60
    )
    assert answer.status_code == 200, answer.text
    assert '"stop_reason":"tool_use"' in answer.text and "event: message_stop" in answer.text
    counted = {name: body[name] for name in ("model", "system", "messages", "tools", "thinking")}
    assert count(scripted, **counted) > 20


@pytest.mark.parametrize(
    ("thinking", "closed"), [({"type": "enabled", "budget_tokens": 9}, False), ({"type": "disabled"}, True)], ids=str
)
def test_thinking_is_switched_by_the_template(start_server, thinking, closed):
    """The example has no such template; it is one of the operator."""
    template = "{% if enable_thinking is false %}off{% else %}on{% endif %}{{ messages[0].content }}"
    with start_server(chat_template=template) as server:
        shown = [user("Hi")]
        expected = {"chat_template_kwargs": {"enable_thinking": not closed}}
        assert count(server, messages=shown, thinking=thinking) == chat_count(server, shown, **expected)
        effort = {"output_config": {"effort": "low"}, "chat_template_kwargs": {"enable_thinking": False}}
        body = {"messages": shown, "max_tokens": 1, "thinking": {"type": "enabled"}, **effort}
        assert post(server, **body).json()["usage"]["input_tokens"] == count(
            server, messages=shown, thinking={"type": "disabled"}
        )


USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def assistant(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": list(blocks)}, user("Hi")]


REFUSED = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [1] * 50_000}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [user(None)]}, "messages[0].content"),
    ({"messages": [user(1)]}, "messages[0].content"),
    ({"messages": [user([1])]}, "messages[0].content[0]"),
    ({"messages": [user([{"txt": "a"}])]}, "messages[0].content[0].txt"),
    ({"messages": [user([{"words": "a"}])]}, "messages[0].content[0].type"),
    ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text"),
    ({"messages": [user([{"type": "image", "source": {}}])]}, "messages[0].content[0].type is not supported: image"),
    ({"messages": [user([{"type": "document", "source": {}}])]}, "messages[0].content[0].type"),
    ({"messages": [user([{"type": "tool_result"}])]}, "messages[0].content[0].tool_use_id"),
    (
        {"messages": [user([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}])]},
        "messages[0].content[0].content[0].type",
    ),
    ({"messages": assistant(USE | {"input": "{}"})}, "messages[0].content[0].input"),
    ({"messages": assistant(USE | {"name": 1})}, "messages[0].content[0].name"),
    ({"messages": assistant({"type": "thinking"})}, "messages[0].content[0].thinking"),
    ({"messages": assistant({"type": "server_tool_use"})}, "messages[0].content[0].type"),
    ({"messages": assistant(USE)[:1]}, "messages[0] is not supported"),
    ({"system": 1}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [*OWN, {"name": "", "input_schema": {}}]}, "tools[2].name"),
    ({"tools": [*OWN, OWN[0]]}, "tools[2].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tools": OWN, "tool_choice": "auto"}, "tool_choice"),
    ({"tools": OWN, "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": OWN, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": OWN, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tools"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"sytem": "a"}, "sytem"),
]


@pytest.mark.parametrize(("body", "named"), REFUSED, ids=lambda value: str(value)[:60])
def test_malformed_conversations_are_refused(scripted, body, named):
    assert named in refusal(scripted, **body)["message"]
    if 'type": "string' not in json.dumps(body):  # schemas of arguments matter to answers only
        assert named in refusal(scripted, "/v1/messages/count_tokens", **body)["message"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "1"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 10_000}, "stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_malformed_fields_are_refused(scripted, body, named):
    assert named in refusal(scripted, **body)["message"]


def test_errors_have_the_shape_of_the_api(scripted):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        wrong = post(scripted, path, messages=[user("Hi")], model="claude")
        assert wrong.status_code == 404 and wrong.json()["error"]["type"] == "not_found_error"
        assert "scripted" in wrong.json()["error"]["message"]
        method = httpx.get(f"{scripted.url}{path}/", trust_env=False)
        assert method.status_code == 405 and method.json()["type"] == "error"
        text = httpx.post(f"{scripted.url}{path}", content=b"{", trust_env=False)
        assert text.json()["error"]["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_refused_in_the_words_of_the_api(scripted):
    for long in ("a" * 4100, "a" * 100_000):
        assert refusal(scripted, messages=[user(long)])["message"].startswith("prompt is too long: ")
    assert count(scripted, messages=[user("a" * 4100)]) > 4100


def test_a_key_may_be_in_the_header_of_this_api(start_server):
    with start_server(api_key=["secret"], num_gpu_blocks_override=65) as server:
        body = {"messages": [user("Hi")], "max_tokens": 1}
        for headers, status in (
            ({"x-api-key": "secret"}, 200),
            ({"authorization": "Bearer secret"}, 200),
            ({"authorization": "Bearer wrong", "x-api-key": "secret"}, 200),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": ""}, 401),
            ({}, 401),
        ):
            answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers, trust_env=False, timeout=60)
            assert answer.status_code == status, headers
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"
        refused = httpx.post(f"{server.url}/v1/messages", headers={"origin": "http://elsewhere"}, trust_env=False)
        assert refused.status_code == 403 and refused.json()["error"]["type"] == "permission_error"


def test_a_stream_that_fails_ends_with_an_error(scripted):
    body = {"messages": [user("<|plain|>")], "max_tokens": 4000, "stream": True, "ignore_eos": True}
    events: list[dict[str, Any]] = []
    with (
        httpx.Client(base_url=scripted.url, trust_env=False, timeout=60) as http,
        http.stream("POST", "/v1/messages", json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
                if len(events) == 4:
                    ids = {"request_ids": [events[0]["message"]["id"]]}
                    assert http.post("/abort_requests", json=ids).json() == {"aborted": 1}
    assert events[-1]["type"] == "error" and events[-1]["error"]["message"]


def test_a_template_may_take_system_messages_only_at_the_beginning(start_server):
    template = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
    template += "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with start_server(chat_template=template, num_gpu_blocks_override=65) as server:
        messages = [user("A"), {"role": "assistant", "content": "B"}, user("C"), {"role": "system", "content": "D"}]
        folded = [{"role": "system", "content": "S"}, *messages[:2], user("C\n\nD")]
        assert count(server, system="S", messages=messages) == chat_count(server, folded)
