"""Past calls of tools and later instructions, in the forms that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


class CallArguments(dict[str, Any]):
    """The arguments of a past call. A template that writes them as text gets their JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    __repr__ = __str__


def message_forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """``messages`` in the forms to try, one after another, until the template takes one.

    Most templates take the arguments of calls as an object, some as text. Beside calls, content is null for some and
    an empty text for others. Many take a system message only at the beginning: later ones become a part of what the
    user wrote, where they are, so that the same conversation has the same beginning after each turn. Absent fields are
    left out, as templates test for them.
    """
    given = [{name: value for name, value in message.items() if value is not None} for message in messages]
    yield from _call_forms(given)
    if any(message.get("role") == "system" for message in given[1:]):
        yield from _call_forms(_folded(given))


def _call_forms(given: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    if not any("tool_calls" in message for message in given):
        yield given
        return
    for content in (None, ""):
        for as_object in (True, False):
            yield [_with_calls(message, content, as_object) for message in given]


def _folded(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``given`` with system messages only at the beginning."""
    messages = given[:1]
    is_open = False  # the last message is one of the system, and the user may add to it
    for message in given[1:]:
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
    """One message; ``content`` where it has calls and no text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        converted = _as_object(arguments) if as_object else _as_text(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": converted}})
    return {**message, "content": message.get("content") or content, "tool_calls": calls}


def _as_object(arguments: Any) -> dict[str, Any]:
    """Arguments as an object. What the model wrote wrongly is the value of "arguments": it must not end a chat."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else {"arguments": arguments}
    return CallArguments(arguments or {})


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
