"""Requests of the Responses and the Messages API with wrong types, values and items."""

from __future__ import annotations

from typing import Any

from hostile_cases.fields import VALUES, model_name
from hostile_cases.requests import (
    COUNT_TOKENS,
    GOOD,
    MESSAGES,
    RESPONSES,
    Case,
    Draw,
    Expected,
    cut,
    post_json,
    refused,
    some_text,
)

_TAKES: dict[str, dict[str, tuple[str, ...]]] = {
    RESPONSES: {
        "input": ("str", "list"),
        "instructions": ("str",),
        "max_output_tokens": ("int",),
        "temperature": ("int", "float"),
        "top_p": ("int", "float"),
        "stream": ("bool",),
        "tools": ("list",),
        "parallel_tool_calls": ("bool",),
        "text": ("dict",),
        "reasoning": ("dict",),
        "include": ("list",),
        "metadata": ("dict",),
    },
    MESSAGES: {
        "messages": ("list",),
        "system": ("str", "list"),
        "max_tokens": ("int",),
        "temperature": ("int", "float"),
        "stop_sequences": ("list",),
        "stream": ("bool",),
        "tools": ("list",),
        "tool_choice": ("dict",),
        "thinking": ("dict",),
        "output_config": ("dict",),
    },
    COUNT_TOKENS: {"messages": ("list",), "system": ("str", "list"), "tools": ("list",)},
}


def agent_types(draw: Draw) -> Case:
    """Values of types that a field does not accept."""
    path = draw.choice(list(_TAKES))
    field = draw.choice(list(_TAKES[path]))
    value = draw.choice(VALUES[draw.choice([kind for kind in VALUES if kind not in _TAKES[path][field]])])
    return refused(draw, path, {field: value}, "invalid_type", field, f"{field}={value!r}")


def agent_values(draw: Draw) -> Case:
    """Invalid values of the right type, with the expected code and param."""
    out, message = "value_out_of_range", {"role": "user", "content": "Hi"}
    path, change, code, param = draw.choice(
        [
            (RESPONSES, {"input": []}, out, "input"),
            (RESPONSES, {"max_output_tokens": draw.randint(-(10**9), -1)}, out, "max_output_tokens"),
            (RESPONSES, {"input": "word " * draw.randint(1500, 19_000)}, "context_length_exceeded", None),
            (RESPONSES, {"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
            (RESPONSES, {"temperature": draw.choice([-0.1, 1e5])}, out, "temperature"),
            (RESPONSES, {"model": model_name(draw)}, "unknown_model", "model"),
            (MESSAGES, {"messages": []}, out, "messages"),
            (MESSAGES, {"messages": [message] * draw.randint(500, 1500)}, "context_length_exceeded", None),
            (MESSAGES, {"max_tokens": draw.randint(-(10**9), -1)}, out, "max_tokens"),
            (MESSAGES, {"model": model_name(draw)}, "unknown_model", "model"),
            (COUNT_TOKENS, {"messages": []}, out, "messages"),
            (COUNT_TOKENS, {"model": model_name(draw)}, "unknown_model", "model"),
        ]
    )
    status = 404 if code == "unknown_model" else 400
    sent = post_json(path, GOOD[path] | change)
    return Case(f"{path} {code} {param}", cut(draw, sent), (Expected(status, code, param),), closed=False)


def agent_items(draw: Draw) -> Case:
    """Conversations of unusual items: each is accepted or refused."""
    path = draw.choice(list(_TAKES))
    kinds = ["message", "function_call", "function_call_output", "reasoning", "item_reference", "text", "tool_use"]
    kinds += ["tool_result", "thinking", "redacted_thinking", "image", "document", "input_text", "output_text", "x", ""]

    def item(depth: int) -> Any:
        if draw.random() < 0.1:
            return draw.choice([value for values in VALUES.values() for value in values])
        found: dict[str, Any] = {"type": draw.choice(kinds), "role": draw.choice(["user", "assistant", "system", "x"])}
        for name in (
            "content",
            "text",
            "id",
            "call_id",
            "name",
            "arguments",
            "output",
            "input",
            "tool_use_id",
            "source",
        ):
            if draw.random() < 0.4:
                found[name] = draw.choice([some_text(draw), None, {"a": 1}, 5, [item(depth + 1)] if depth < 3 else []])
        return found

    items = [item(0) for _ in range(draw.randint(1, 4))]
    sent = post_json(path, GOOD[path] | {"input" if path == RESPONSES else "messages": items})
    return Case(f"{path} items", cut(draw, sent), (Expected(frozenset({200, 400})),), closed=None)
