"""Past calls of tools, in the forms that chat templates take."""

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
    an empty text for others. Without calls there is one form. Absent fields are left out, as templates test for them.
    """
    given = [{name: value for name, value in message.items() if value is not None} for message in messages]
    if not any("tool_calls" in message for message in given):
        yield given
        return
    for content in (None, ""):
        for as_object in (True, False):
            yield [_with_calls(message, content, as_object) for message in given]


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
