"""OpenAI's and Anthropic's own clients: chat with strict schemas and tools, /v1/responses and /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from chat_scripts import TOOLS
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
OWN: Any = [
    {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {"type": "object"})}
    for tool in TOOLS
]


@pytest.fixture
def openai(scripted) -> Iterator[OpenAI]:
    with httpx.Client(trust_env=False) as plain:
        yield OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, http_client=plain)


@pytest.fixture
def anthropic(scripted, monkeypatch) -> Any:
    module = pytest.importorskip("anthropic")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return module.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)


class Answer(BaseModel):
    yes: bool


class Nothing(BaseModel):
    pass


class Weather(BaseModel):
    city: str
    days: list[int | Nothing]


#: The tools and the request of the model's script.
STRICT: Any = [pydantic_function_tool(Weather, name="get_weather"), pydantic_function_tool(Nothing, name="get_time")]
NAMED: Any = {"type": "function", "function": {"name": "get_time"}}
CHAT: Any = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "<|both|>"}],
    "max_tokens": 100,
    "temperature": 0,
}


def test_openais_client_parses_a_strict_schema_in_chat(openai):
    whole = openai.chat.completions.parse(**CHAT, response_format=Answer).choices[0]
    assert isinstance(whole.message.parsed, Answer) and whole.finish_reason == "stop"
    with openai.chat.completions.stream(**CHAT, response_format=Answer) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == whole.message.parsed
    assert "".join(deltas) == final.content


@pytest.mark.parametrize(
    ("choice", "names", "finish_reason"),
    [
        ("none", [], "stop"),
        ("auto", ["get_weather", "get_time"], "tool_calls"),
        ("required", ["get_time"], "tool_calls"),
        (NAMED, ["get_time"], "stop"),
    ],
    ids=["none", "auto", "required", "named"],
)
def test_openais_client_parses_strict_tools_in_every_choice(openai, choice, names, finish_reason):
    fields: Any = CHAT | {"tools": STRICT, "tool_choice": choice}
    if choice == "required":  # the grammar forces the call at once, so the model does not follow its script
        fields |= {"tools": STRICT[1:], "parallel_tool_calls": False}
    whole = openai.chat.completions.parse(**fields).choices[0]
    with openai.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    for each in (whole, streamed):
        calls = each.message.tool_calls or []
        assert [call.function.name for call in calls][: len(names)] == names
        assert each.finish_reason == finish_reason
        for call in calls:
            parsed = call.function.parsed_arguments
            assert isinstance(parsed, Weather if call.function.name == "get_weather" else Nothing)
        if choice == "none":
            assert calls == [] and "get_weather" in each.message.content


def test_openais_client_reads_responses(openai):
    response = openai.responses.create(model="scripted", input="<|both|>", tools=FLAT)
    assert response.output_text == "Let me look."
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    history: Any = [
        {"role": "user", "content": "<|both|>"},
        *(item.model_dump(exclude_none=True) for item in response.output),
        *(
            {"type": "function_call_output", "call_id": item.call_id, "output": "Rain"}
            for item in response.output
            if item.type == "function_call"
        ),
        {"role": "user", "content": "<|plain|>"},
    ]
    assert openai.responses.create(model="scripted", input=history).output_text.startswith("Hello")
    with pytest.raises(BadRequestError, match="not stored"):
        openai.responses.create(model="scripted", input="Hi", previous_response_id=response.id)


def test_openais_client_reads_streams_of_responses(openai):
    texts, arguments = [], []
    with openai.responses.stream(model="scripted", input="<|both|>", tools=FLAT) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
                assert event.snapshot == "".join(texts)
            elif event.type == "response.function_call_arguments.delta":
                arguments.append(event.delta)
        final = stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert final.output_text == "".join(texts) and final.status == "completed"
    assert "".join(call.arguments for call in calls) == "".join(arguments)
    assert json.loads(calls[0].arguments)["city"] == "Bergen"


def test_openais_client_parses_a_format(openai):
    parsed = openai.responses.parse(model="scripted", input="<|both|>", text_format=Answer, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Answer)


def test_anthropics_client_reads_messages(anthropic):
    asked: Any = [{"role": "user", "content": "<|both|>"}]
    body: Any = {"model": "scripted", "max_tokens": 100, "tools": OWN}
    message = anthropic.messages.create(messages=asked, **body)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use" and message.content[2].input["city"] == "Bergen"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "Rain"}
        for block in message.content
        if block.type == "tool_use"
    ]
    history = [*asked, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    again = anthropic.messages.create(messages=[*history, {"role": "user", "content": "<|plain|>"}], **body)
    assert again.content[0].text.startswith("Hello")
    counted = anthropic.messages.count_tokens(model="scripted", messages=asked, tools=OWN)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_anthropics_client_reads_streams_of_messages(anthropic):
    asked: Any = [{"role": "user", "content": "<|both|>"}]
    with anthropic.messages.stream(model="scripted", max_tokens=100, tools=OWN, messages=asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == final.content[1].text == "Let me look."
    assert final.content[0].thinking == "It asks for the weather." and final.content[0].signature
    assert [block.input for block in final.content[2:]] == [{"city": "Bergen", "days": [1, {}]}, {}]
    assert final.stop_reason == "tool_use" and final.usage.output_tokens > 10


def test_anthropics_client_knows_the_errors(anthropic):
    import anthropic as module

    asked: Any = [{"role": "user", "content": "Hi"}]
    with pytest.raises(module.NotFoundError) as missing:
        anthropic.messages.create(model="claude", max_tokens=1, messages=asked)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(module.BadRequestError, match="max_tokens"):
        anthropic.messages.create(model="scripted", max_tokens=-1, messages=asked)
    with (
        pytest.raises(module.BadRequestError, match="max_tokens"),
        anthropic.messages.stream(model="scripted", max_tokens=-1, messages=asked) as stream,
    ):
        list(stream)
