"""Variants of a conversation's tool calls and system messages, for chat templates with different conventions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


class CallArguments(dict[str, Any]):
    """Arguments of a past tool call. Converted to text by a template, they become JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    __repr__ = __str__


def message_forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield variants of ``messages`` to try in order, until the template accepts one.

    Most templates expect the arguments of calls as an object, some as text. For messages with calls, some expect null
    content and others an empty text. Many accept a system message only at the beginning: later ones are merged into
    the user message at their position, so that the prefix of a conversation stays the same after each turn. Absent
    fields are omitted, because templates test for them.
    """
    compact = [{name: value for name, value in message.items() if value is not None} for message in messages]
    yield from _call_forms(compact)
    if any(message.get("role") == "system" for message in compact[1:]):
        yield from _call_forms(_folded(compact))


def _call_forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    if not any("tool_calls" in message for message in messages):
        yield messages
        return
    for content in (None, ""):
        for as_object in (True, False):
            yield [_with_calls(message, content, as_object) for message in messages]


def _folded(originals: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with system messages only at the beginning."""
    messages = originals[:1]
    is_open = False  # the last message came from a system message, and the next user message is appended to it
    for message in originals[1:]:
        role, last = message.get("role"), messages[-1]
        joins = last.get("role") in ("user", "tool") if role == "system" else is_open and role == "user"
        if joins:
            text = "\n\n".join(filter(None, (last.get("content"), message.get("content"))))
            messages[-1] = {**last, "content": text}
            is_open = is_open and role == "system"
        else:
            messages.append({**message, "role": "user"} if role == "system" else message)
            is_open = role == "system"
    return messages


def _with_calls(message: dict[str, Any], content: str | None, as_object: bool) -> dict[str, Any]:
    """Return one message; ``content`` is used if it has calls but no text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        converted = _as_object(arguments) if as_object else _as_text(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": converted}})
    return {**message, "content": message.get("content") or content, "tool_calls": calls}


def _as_object(arguments: Any) -> dict[str, Any]:
    """Return arguments as an object. Invalid JSON becomes the value of "arguments", so that it does not end a chat."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else {"arguments": arguments}
    return CallArguments(arguments or {})


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
