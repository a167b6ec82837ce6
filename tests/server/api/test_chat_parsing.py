"""Calls of tools and reasoning in chat completions, of a model that writes them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from chat_scripts import ARGUMENTS, SCRIPTS, TOOLS
from openai import OpenAI

from aiakq.errors import AiakqError
from aiakq.server.background import RunningServer, start_in_background


def chat(server: RunningServer, script: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"<|{script}|>"}], "temperature": 0, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "<|plain|>"}], **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def streamed(server: RunningServer, script: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": f"<|{script}|>"}], "temperature": 0, "stream": True, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
    lines = [line[6:] for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]", answer.text
    return [json.loads(line) for line in lines[:-1]]


def added_up(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that a client makes of a stream."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"]) and call["type"] == "function"
                    function = {"name": call["function"]["name"], "arguments": ""}
                    message["tool_calls"].append({"id": call["id"], "type": "function", "function": function})
                assert "name" not in call["function"] or "id" in call
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"]
    return message


def test_tool_calls_and_reasoning_are_separated(scripted):
    answer = chat(scripted, "both", tools=TOOLS)
    [choice] = answer["choices"]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "It asks for the weather."
    assert message["content"] == "Let me look." and choice["finish_reason"] == "tool_calls"
    weather, clock = message["tool_calls"]
    assert weather["function"] == {"name": "get_weather", "arguments": '{"city": "Bergen", "days": [1, {}]}'}
    assert clock["function"] == {"name": "get_time", "arguments": "{}"}
    assert weather["type"] == "function" and weather["id"] != clock["id"]
    usage = answer["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 4
    assert usage["completion_tokens"] == len(SCRIPTS["<|both|>"]) + 1


def test_a_stream_adds_up_to_the_message(scripted):
    fields = {"tools": TOOLS, "request_id": "same"}
    message = chat(scripted, "both", **fields)["choices"][0]["message"]
    chunks = streamed(scripted, "both", **fields, stream_options={"include_usage": True})
    found = added_up(chunks[:-1])
    assert found["finish_reason"] == "tool_calls"
    for name in ("content", "reasoning", "reasoning_content", "tool_calls"):
        assert found[name] == message[name], name
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks[:-1]) == 1


def test_openais_client_reads_calls(scripted):
    with httpx.Client(trust_env=False) as plain:
        client = OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, http_client=plain)
        body: Any = {"model": "scripted", "messages": [{"role": "user", "content": "<|both|>"}], "tools": TOOLS}
        message = client.chat.completions.create(**body).choices[0].message
        assert [json.loads(call.function.arguments) for call in message.tool_calls][1] == {}
        with client.chat.completions.stream(**body) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert [call.function.name for call in final.message.tool_calls] == ["get_weather", "get_time"]


def test_reasoning_can_be_left_out(scripted, http):
    answer = chat(scripted, "both", tools=TOOLS, include_reasoning=False)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] is None and message["content"] == "Let me look."
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    assert added_up(streamed(scripted, "both", include_reasoning=False))["reasoning"] == ""
    body = {"messages": [{"role": "user", "content": "Hi"}], "include_reasoning": False}
    assert "--reasoning-parser" in http.post("/v1/chat/completions", json=body).json()["error"]["message"]


def test_every_choice_has_its_own_calls(scripted):
    choices = chat(scripted, "both", tools=TOOLS, n=3, temperature=1.0)["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [2, 2, 2]
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 6
    chunks = streamed(scripted, "both", tools=TOOLS, n=3)
    assert [len(added_up(chunks, index)["tool_calls"]) for index in range(3)] == [2, 2, 2]
    used = chat(scripted, "both", tools=TOOLS, n=3)["usage"]
    assert used["completion_tokens_details"]["reasoning_tokens"] == 12


def test_without_tools_or_with_none_text_is_content(scripted):
    for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto"}):
        [choice] = chat(scripted, "both", **fields)["choices"]
        message = choice["message"]
        assert "tool_calls" not in message and choice["finish_reason"] == "stop"
        assert message["reasoning"] == "It asks for the weather." and "get_weather" in message["content"]
    [choice] = chat(scripted, "plain", tools=TOOLS)["choices"]
    assert choice["message"]["content"] == "Hello, world.\n\n- a\n- b" and choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning"] is None
    assert added_up(streamed(scripted, "plain", tools=TOOLS))["content"] == choice["message"]["content"]


def test_special_tokens_are_in_the_text_on_request(scripted):
    [choice] = chat(scripted, "plain", tools=TOOLS, skip_special_tokens=False)["choices"]
    assert choice["message"]["content"] == "Hello, world.\n\n- a\n<|odd|>- b"
    [choice] = chat(scripted, "both", tools=TOOLS, skip_special_tokens=False)["choices"]
    assert len(choice["message"]["tool_calls"]) == 2 and choice["message"]["content"] == "Let me look."


def test_what_begins_like_a_call_becomes_one(scripted):
    """The model would go on with "so {it goes"."""
    for fields in ({}, {"n": 2, "temperature": 0.1}, {"parallel_tool_calls": False}):
        [choice, *_] = chat(scripted, "broken", tools=TOOLS[1:], **fields)["choices"]
        [call, *_] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {} and call["function"]["name"] == "get_time"
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"].startswith("Like")


@pytest.mark.parametrize("script", ["plain", "both", "broken"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=str)
def test_a_forced_call_is_one(scripted, script, choice):
    fields = {"tools": TOOLS[1:] if choice == "required" else TOOLS, "tool_choice": choice, "max_tokens": 100}
    fields["logit_bias"] = None if script == "both" else no_thought(scripted)
    [answer] = chat(scripted, script, **fields, parallel_tool_calls=False)["choices"]
    message = answer["message"]
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "get_time", "arguments": "{}"}]
    finish_reason = "tool_calls" if choice == "required" else "stop"  # OpenAI's table
    assert message["content"] is None and answer["finish_reason"] == finish_reason
    assert message["reasoning"] == ("It asks for the weather." if script == "both" else None)
    found = added_up(streamed(scripted, script, **fields, parallel_tool_calls=False))
    assert [call["function"] for call in found["tool_calls"]] == [call["function"] for call in message["tool_calls"]]
    assert found["finish_reason"] == finish_reason


def test_a_mark_that_a_thought_mentions_forces_no_call(scripted):
    for choice in ("auto", "none"):
        [answer] = chat(scripted, "mention", tools=TOOLS, tool_choice=choice)["choices"]
        message = answer["message"]
        assert message["reasoning"] == "I could write <tool_call>{ tags here, but no."
        assert (message["content"], answer["finish_reason"]) == ("Hello there.", "stop")
        found = added_up(streamed(scripted, "mention", tools=TOOLS, tool_choice=choice))
        assert (found["reasoning"], found["content"]) == (message["reasoning"], message["content"])


def test_a_call_ends_a_thought_that_is_not_closed(scripted):
    answer = chat(scripted, "unclosed", tools=TOOLS, n=2, temperature=0.1)
    for choice in answer["choices"]:
        message = choice["message"]
        assert (message["reasoning"], message["content"]) == ("I look it up.", None)
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
        assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    found = added_up(streamed(scripted, "unclosed", tools=TOOLS))
    assert (found["reasoning"], found["content"], found["finish_reason"]) == ("I look it up.", "", "tool_calls")
    assert found["tool_calls"] == [call | {"id": found["tool_calls"][0]["id"]}]
    [choice] = chat(scripted, "unclosed", tools=TOOLS, max_tokens=3)["choices"]
    assert choice["finish_reason"] == "length" and "get_weather" in choice["message"]["reasoning"]
    [choice] = chat(scripted, "wrong", tools=TOOLS)["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["reasoning"].startswith("No: <tool_call>{")
    [choice] = chat(scripted, "unclosed", tools=TOOLS, tool_choice="none")["choices"]
    assert choice["message"]["reasoning"].endswith("</tool_call>")


def test_a_format_is_enforced_from_the_start_after_a_thought_that_the_prompt_closed(scripted):
    fields = {"guided_json": NUMBERS, "chat_template_kwargs": {"closed_thought": True}, "max_tokens": 80}
    for seed in range(4):
        [answer] = chat(scripted, "plain", **fields, temperature=1.0, seed=seed)["choices"]
        assert answer["message"]["reasoning"] is None and set(json.loads(answer["message"]["content"])) <= {1, 2}
    [answer] = chat(scripted, "mention", chat_template_kwargs={"closed_thought": True})["choices"]
    assert (answer["message"]["reasoning"], answer["message"]["content"]) == (None, "Hello there.")


def test_forced_calls_in_plain_json_begin_after_the_reasoning(reciting_model):
    with start_in_background(
        {"model": reciting_model, **ARGUMENTS, "tool_call_parser": "glm45"}, timeout=240
    ) as server:
        [answer] = chat(server, "both", tools=TOOLS[1:], tool_choice="required", parallel_tool_calls=False)["choices"]
    [call] = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "get_time", "arguments": "{}"} and answer["message"]["content"] is None
    assert answer["message"]["reasoning"] == "It asks for the weather."


def test_calls_can_be_forced_without_a_parser(reciting_model):
    options = {"enable_auto_tool_choice": False, "enable_reasoning": False}
    with start_in_background({"model": reciting_model, **ARGUMENTS, **options}, timeout=240) as server:
        [answer] = chat(server, "plain", tools=TOOLS[1:], tool_choice="required", max_tokens=60)["choices"]
        assert answer["message"]["tool_calls"][0]["function"] == {"name": "get_time", "arguments": "{}"}
        assert "--enable-auto-tool-choice" in refusal(server, tools=TOOLS)["message"]


NUMBERS = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}


def test_a_schema_that_cannot_be_enforced_is_refused_if_it_is_strict(scripted):
    schema = {"type": "object", "properties": {"a": NUMBERS | {"uniqueItems": True}}}
    function = {"name": "f", "parameters": schema}
    failure = refusal(scripted, tools=[TOOLS[1], {"type": "function", "function": function | {"strict": True}}])
    assert failure["code"] == "grammar_not_enforceable" and failure["param"] == "tools[1].function.parameters"
    assert "uniqueItems" in failure["message"]
    [answer] = chat(scripted, "both", tools=[*TOOLS, {"type": "function", "function": function}])["choices"]
    assert len(answer["message"]["tool_calls"]) == 2


def no_thought(server: RunningServer) -> dict[str, int]:
    """Return a logit bias that forbids reasoning; without its script the model generates all tokens equally often."""
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "<<think>"}, trust_env=False).json()["tokens"]
    assert len(ids) == 2
    return {str(id): -100 for id in ids}


@pytest.mark.parametrize("script", ["both", "plain"])
def test_the_format_of_the_response_begins_after_the_reasoning(scripted, script):
    schema = {"type": "json_schema", "json_schema": {"schema": NUMBERS}}
    for fields in ({"response_format": schema}, {"guided_json": NUMBERS}):
        bias = no_thought(scripted) if script == "plain" else None
        [answer] = chat(scripted, script, **fields, max_tokens=80, logit_bias=bias)["choices"]
        assert set(json.loads(answer["message"]["content"])) <= {1, 2}
        assert answer["message"]["reasoning"] == ("It asks for the weather." if script == "both" else None)


def test_a_format_begins_after_reasoning_that_the_prompt_opened(scripted):
    fields = {"guided_json": NUMBERS, "chat_template_kwargs": {"open_thought": True}, "max_tokens": 80}
    [answer] = chat(scripted, "both", **fields)["choices"]
    assert answer["message"]["reasoning"] == "It asks for the weather."
    assert set(json.loads(answer["message"]["content"])) <= {1, 2}


def test_completions_have_no_reasoning(scripted):
    """Also on a server with a reasoning parser, text is returned as it is, and a grammar begins at once."""
    with httpx.Client(base_url=scripted.url, trust_env=False, timeout=60) as http:
        plain = http.post("/v1/completions", json={"prompt": "<|both|>", "temperature": 0}).json()["choices"][0]
        assert plain["text"].startswith("<think>It asks for the weather.</think>")
        body = {"prompt": "<|both|>", "guided_json": NUMBERS, "max_tokens": 40, "temperature": 0}
        assert set(json.loads(http.post("/v1/completions", json=body).json()["choices"][0]["text"])) <= {1, 2}


def test_an_answer_in_a_format_may_be_a_call_instead(scripted):
    fields = {"guided_json": NUMBERS, "tools": TOOLS, "max_tokens": 80, "logit_bias": no_thought(scripted)}
    [answer] = chat(scripted, "plain", **fields)["choices"]
    assert set(json.loads(answer["message"]["content"])) <= {1, 2} and "tool_calls" not in answer["message"]


def test_a_limit_ends_with_length(scripted):
    whole = chat(scripted, "both", tools=TOOLS)["choices"][0]["message"]
    for limit in range(1, len(SCRIPTS["<|both|>"])):
        [choice] = chat(scripted, "both", tools=TOOLS, max_tokens=limit)["choices"]
        assert choice["finish_reason"] == "length"
        message = choice["message"]
        assert not message["content"] or limit > 4
        for call, other in zip(message.get("tool_calls", []), whole["tool_calls"], strict=False):
            assert other["function"]["arguments"] == call["function"]["arguments"]
        found = added_up(streamed(scripted, "both", tools=TOOLS, max_tokens=limit))
        assert found["finish_reason"] == "length" and (message["content"] or "").startswith(found["content"])
        for call, other in zip(found["tool_calls"], whole["tool_calls"], strict=False):
            assert other["function"]["arguments"].startswith(call["function"]["arguments"])
        if len(found["tool_calls"]) > len(message.get("tool_calls", [])):  # the call that is cut off is content
            assert "<tool_call>" in message["content"]


def test_one_call_at_most_without_parallel_calls(scripted):
    message = chat(scripted, "both", tools=TOOLS, parallel_tool_calls=False)["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]


def test_log_probabilities_are_those_of_all_tokens(scripted):
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    [choice] = chat(scripted, "both", **fields)["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == len(SCRIPTS["<|both|>"]) + 1
    chunks = [chunk["choices"][0] for chunk in streamed(scripted, "both", **fields)]
    assert sum((chunk.get("token_ids", []) for chunk in chunks), []) == choice["token_ids"]
    tokens = [entry["token"] for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert tokens == [entry["token"] for entry in choice["logprobs"]["content"]]


def prompt(server: RunningServer, messages: list[dict[str, Any]], **fields: Any) -> str:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        ids = http.post("/tokenize", json={"messages": messages, **fields})
        assert ids.status_code == 200, ids.text
        return http.post("/detokenize", json={"tokens": ids.json()["tokens"]}).json()["prompt"]


def test_a_prompt_that_opens_the_thought_begins_with_reasoning(scripted):
    kwargs = {"chat_template_kwargs": {"open_thought": True}}
    answer = chat(scripted, "plain", **kwargs, tools=TOOLS)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == "It asks for the weather." and message["content"] == "Let me look."
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


def test_tools_are_in_the_prompt_unless_they_may_not_be_called(scripted):
    messages = [{"role": "user", "content": "Hi"}]
    text = prompt(scripted, messages, tools=TOOLS)
    assert text.startswith(f"<tools>{json.dumps(TOOLS)}</tools>"), "as the client sent them"
    assert "get_weather" not in prompt(scripted, messages, tools=TOOLS, tool_choice="none")


@pytest.mark.parametrize("arguments", ['{"city": "Bergen"}', {"city": "Bergen"}], ids=["text", "object"])
@pytest.mark.parametrize("content", [None, "", [{"type": "text", "text": ""}]], ids=str)
def test_past_calls_are_rendered(scripted, arguments, content):
    call = {"id": "abc", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content, "tool_calls": [call], "reasoning": "Hm."},
        {"role": "tool", "tool_call_id": "abc", "content": [{"type": "text", "text": "Rain"}]},
        {"role": "assistant", "content": "It rains.", "tool_calls": [], "reasoning_content": None},
        {"role": "user", "content": "Oh"},
    ]
    assert prompt(scripted, messages) == (
        "[user]Hi[assistant]<think>Hm.</think><tool_call>get_weather of abc city=Bergen</tool_call>"
        "[tool]Rain for abc[assistant]It rains.[user]Oh"
    )


def test_wrong_arguments_of_past_calls_do_not_end_a_conversation(scripted):
    for arguments, shown in (('{"city": ', ' arguments={"city": '), ("", ""), (None, ""), ("[1]", " arguments=[1]")):
        call = {"id": "a", "function": {"name": "f", "arguments": arguments}}
        text = prompt(scripted, [{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert text == f"[assistant]<tool_call>f of a{shown}</tool_call>"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": [{"type": "function"}]}, "missing_field", "tools[0].function"),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "invalid_type", "tools[0].function.name"),
        ({"tools": TOOLS, "tool_choice": "any"}, "value_out_of_range", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 1}, "invalid_type", "tool_choice"),
        ({"tool_choice": "required"}, "missing_field", "tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "value_out_of_range", "tools[2].function.name"),
        (
            {"tools": [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "value_out_of_range",
            "tools[1].function.parameters",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "value_out_of_range",
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "missing_field", "tool_choice.function.name"),
    ],
    ids=str,
)
def test_malformed_fields_are_refused(scripted, fields, code, param):
    failure = refusal(scripted, **fields)
    assert (failure["code"], failure["param"]) == (code, param)


def test_integers_beyond_64_bits_reach_the_template_and_cost_no_worker(scripted):
    """A limit that no grammar can enforce is left out of a tool's schema, unless the tool is strict."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 2**70 + 1}}, "required": ["a"]}
    function = {"name": "f", "parameters": parameters | {"additionalProperties": False}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 2**70}}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    for _ in range(5):  # there are fewer workers
        for fields in ({"tools": [{"type": "function", "function": function}]}, {"messages": messages}):
            assert chat(scripted, "both", **fields)["choices"]
        failure = refusal(scripted, tools=[{"type": "function", "function": function | {"strict": True}}])
        assert "maximum" in failure["message"]
    assert chat(scripted, "both")["choices"][0]["message"]["content"]


def test_without_the_flag_tools_are_refused(http):
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "max_tokens": 1}
    failure = http.post("/v1/chat/completions", json=body).json()["error"]
    assert failure["code"] == "unsupported_parameter" and "--enable-auto-tool-choice" in failure["message"]
    assert http.post("/v1/chat/completions", json=body | {"tool_choice": "none"}).status_code == 200
    assert http.post("/v1/completions", json={"prompt": "a", "tools": TOOLS}).status_code == 400


def test_tools_are_listed_in_the_prompt_where_the_template_has_no_place(reciting_model):
    options = {"chat_template": "{{ messages[0].content }}", "enable_reasoning": False}
    with start_in_background({"model": reciting_model, **ARGUMENTS, **options}, timeout=240) as server:
        answer = chat(server, "plain", tools=TOOLS, return_token_ids=True, max_tokens=3)
        body = {"tokens": answer["prompt_token_ids"]}
        prompt = httpx.post(f"{server.url}/detokenize", json=body, trust_env=False).json()["prompt"]
        assert all(json.dumps(tool) in prompt for tool in TOOLS) and prompt.endswith("<|plain|>")
        for choice in ("required", {"type": "function", "function": {"name": "get_time"}}):
            fields = {"tools": TOOLS[1:], "tool_choice": choice, "parallel_tool_calls": False}
            [call] = chat(server, "plain", **fields)["choices"][0]["message"]["tool_calls"]
            assert call["function"] == {"name": "get_time", "arguments": "{}"}
        calls = chat(server, "both", tools=TOOLS)["choices"][0]["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["get_weather", "get_time"]


def test_ambiguous_parsers_are_refused_at_the_start(example_model):
    template = "{{ tools | tojson }}{{ messages[0].content }}"
    options = {"enable_auto_tool_choice": True, "chat_template": template}
    with pytest.raises(AiakqError) as caught:
        start_in_background({"model": str(example_model), **options}, timeout=240)
    assert caught.value.id == "no_parser" and "hermes" in str(caught.value.remedy)
