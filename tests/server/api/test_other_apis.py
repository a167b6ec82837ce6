"""Whatever is in a body of /v1/responses or /v1/messages, the answer is a response or a refusal that names a field."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

RESPONSES = {
    "model": "tinybooks",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "A"}],
        },
        {"role": "developer", "content": "B"},
    ],
    "instructions": "C",
    "max_output_tokens": 1,
    "tools": [
        {"type": "function", "name": "f", "description": "", "parameters": {"type": "object"}, "strict": False},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
    "parallel_tool_calls": False,
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "none", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "truncation": "auto",
    "metadata": {"a": "b"},
    "chat_template_kwargs": {"a": 1},
    "temperature": 0,
}
MESSAGES = {
    "model": "tinybooks",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"b": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "1"}]}],
        },
        {"role": "system", "content": "D"},
    ],
    "system": [{"type": "text", "text": "C"}],
    "max_tokens": 1,
    "tools": [{"name": "f", "description": "", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low"},
    "stop_sequences": ["z"],
    "chat_template_kwargs": {"a": 1},
    "temperature": 0,
}
HOSTILE: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**70, "", "a", "\ud800", "\x00", "a" * 5000, [], {}, [[]], [None], [{}], {"": None}),
    *(
        {"type": []},
        {"type": "text"},
        {"type": {}},
        [{"type": "text", "text": None}],
        ["a"] * 2000,
        {"a": {"b": {"c": []}}},
    ),
]


@pytest.fixture(scope="module")
def plain(start_server) -> Iterator[httpx.Client]:
    """A client of a server with a template for tools, whose model writes no calls."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content or m.tool_calls }}\n{% endfor %}{{ tools }}"
    with (
        start_server(chat_template=template, enable_auto_tool_choice=True, tool_call_parser="hermes") as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        yield client


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in ``value`` with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES), ("/v1/messages/count_tokens", MESSAGES)],
    ids=["responses", "messages", "count_tokens"],
)
def test_hostile_values_are_refused(plain, path, body):
    draw = random.Random(0)
    body = copy.deepcopy(body)
    if "count" in path:
        body = {
            name: value
            for name, value in body.items()
            if name not in ("temperature", "max_tokens", "stop_sequences", "chat_template_kwargs")
        }
    assert plain.post(path, json=body).status_code == 200
    found = set()
    for at in range(len(list(places(body)))):
        for hostile in draw.sample(HOSTILE, 6):
            changed = copy.deepcopy(body)
            container, key = list(places(changed))[at]
            container[key] = hostile
            answer = plain.post(path, content=json.dumps(changed), headers={"content-type": "application/json"})
            found.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (key, hostile, answer.text)
            if answer.status_code != 200:
                message = answer.json()["error"]["message"]
                assert "Traceback" not in message and "pydantic" not in message and len(message) < 1000
    assert {200, 400} <= found
